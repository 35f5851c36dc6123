"""The farm under test: Redis, the engine, and every role as a process of its own, each behind a proxy of its own.

Invariant: nothing of it outlives the `with`. Roles get Redis and engine through proxies, by environment and configuration as an operator
gives them, with canary secrets in all of it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from distaff.clients import connect
from tests.farm_support import says, tokenizer_dir
from tests.harness import canaries, processes
from tests.harness.byte_proxy import ByteProxy
from tests.harness.processes import Child
from tests.harness.resp_proxy import RespProxy
from tests.harness.servers import RedisServer
from tests.soak.roles import Role
from tests.soak.schedule import Shape

RUN = "soak"
POOL = "default"
PYTHON = sys.executable
LOOK_S = 1.0
"""How long our own looks into Redis wait for an answer: it may be paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmOptions:
    """items: rows admitted. rate: groups a second the pacing trainer takes, which the window makes the farm's pace; 0 for no pace.
    engine_faults: share of the engine's answers that are bad. spares: a second archiver and trainer, and a worker, that are never killed."""

    seed: int
    items: int
    workers: int = 3
    slots: int = 8
    lease_s: float = 4.0
    window: int = 64
    group_size: int = 2
    rate: float = 0.0
    engine_faults: float = 0.05
    spares: bool = True

    def shape(self) -> Shape:
        workers = [f"worker-{n}" for n in range(self.workers)]
        roles = ["producer", "archiver", "trainer"]
        spared = [workers[0], "archiver-spared", "trainer-spared"] if self.spares else []
        return Shape(workers=workers, roles=[*roles, *spared[1:]], spared=spared)


class Farm:
    """`roles` and `proxies` by name; `client` looks into Redis directly and gives up soon."""

    def __init__(self, folder: Path, options: FarmOptions, stack: ExitStack) -> None:
        self.folder, self.options = folder, options
        self._stack = stack
        password = {"requirepass": canaries.REDIS_PASSWORD, "appendfsync": "always"}
        self.server = stack.enter_context(RedisServer(folder / "redis", kind="redis7", aof=True, config=password))
        self.client: redis.Redis = stack.enter_context(connect(self.server.url, socket_timeout_s=LOOK_S))
        self.engine_logs: list[str] = []
        self._answers = folder / "answers.json"
        self._answers.write_text(json.dumps(_answers()))
        self._engine_port = 0
        self.engine: Child | None = None
        self.start_engine()
        self.engine_proxy = stack.enter_context(ByteProxy("127.0.0.1", self._engine_port))
        self.health_port = _free_port()
        self.proxies: dict[str, RespProxy] = {}
        self.roles: dict[str, Role] = {}
        shape = options.shape()
        for name in (*shape.workers, *shape.roles):
            self.proxies[name] = stack.enter_context(RespProxy(self.server.url))
            self.roles[name] = self._role(name)
            stack.callback(self.roles[name].end)

    def start_engine(self) -> None:
        """At the same port as before, with another sequence of faults."""
        command = [PYTHON, "-m", "tests.soak.engine", "--answers", str(self._answers)]
        command += ["--seed", str(self.options.seed + len(self.engine_logs)), "--rate", str(self.options.engine_faults)]
        command += ["--port", str(self._engine_port)]
        self.engine = processes.start(command, env=canaries.CANARY)
        self._stack.callback(self.engine.kill)
        self.engine.wait_for("http://")
        self._engine_port = int(self.engine.log.split()[0].rpartition(":")[2])

    def kill_engine(self) -> None:
        if self.engine is not None:
            self.engine.kill()
            self.engine_logs.append(self.engine.log)

    def archive_folder(self, name: str) -> Path:
        return self.folder / name

    def seen_file(self, name: str) -> Path:
        return self.folder / f"{name}.seen"

    def logs(self) -> dict[str, str]:
        """What everybody has said."""
        engine = "\n".join([*self.engine_logs, self.engine.log if self.engine else ""])
        return {name: role.log for name, role in self.roles.items()} | {"engine": engine, "redis": self.server.log}

    def _role(self, name: str) -> Role:
        env = canaries.environment({}, **self._variables(name))
        kind = name.partition("-")[0]
        if kind == "worker":
            spared = name in self.options.shape().spared
            return Role(name, [PYTHON, "-m", "distaff", "work", *self._work_flags(spared)], env, ends=False)
        if kind == "producer":
            config = self.folder / "run.toml"
            config.write_text(self._run_toml())
            return Role(name, [PYTHON, "-m", "distaff", "produce", str(config), "--quiet"], env, ends=True)
        if kind == "archiver":
            flags = ["--run", RUN, "--directory", str(self.archive_folder(name)), "--archive.group", name]
            flags += ["--archive.rotate-bytes", str(1 << 20), "--archive.batch", "16"]
            flags += ["--archive.compression", "none" if name.endswith("spared") else "zstd", "--quiet"]
            return Role(name, [PYTHON, "-m", "distaff", "archive", *flags], env, ends=True)
        rate = 0.0 if name.endswith("spared") else self.options.rate
        command = [PYTHON, "-m", "tests.soak.trainer", RUN, name, str(self.seen_file(name)), "--rate", str(rate)]
        return Role(name, command, env, ends=True)

    def _variables(self, name: str) -> dict[str, str]:
        return {
            "DISTAFF_REDIS_URL": self.proxies[name].url,
            "PYTHONPATH": f"{processes.ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
            "HF_HUB_OFFLINE": "1",
            "DISTAFF_LOG__FORMAT": "json",
        }

    def _work_flags(self, spared: bool) -> list[str]:
        flags = ["--worker.slots", str(self.options.slots), "--worker.lease-s", str(self.options.lease_s)]
        flags += ["--worker.drain-s", "2"]
        return [*flags, "--worker.health-port", str(self.health_port)] if spared else flags

    def _run_toml(self) -> str:
        options = self.options
        sections: dict[str, dict[str, object]] = {
            "run": {"name": RUN, "mode": "rl"},
            "environment": {"id": "tests.soak_env"},
            "environment.args": {"rows": options.items},
            "engine": {
                "kind": "vllm",
                "base_urls": [self.engine_proxy.url],
                "api_key_var": canaries.ENGINE_KEY_VAR,
                "request_timeout_s": 3,
                "max_retries": 3,
                "retry_budget_s": 6,
                "start_timeout_s": 10,
            },
            "tokenizer": {"name": tokenizer_dir()},
            "sampling": {"max_tokens": 64},
            "rollouts": {
                "group_size": options.group_size,
                "timeout_s": 12,
                "group_timeout_s": 20,
                "score_timeout_s": 2,
                "rollout_retries": 1,
                "max_attempts": 3,
            },
            "producer": {"window": options.window, "batch": 16},
        }
        lines = []
        for section, values in sections.items():
            lines.append(f"[{section}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        return "\n".join(lines) + "\n"


@contextmanager
def farm(folder: Path, options: FarmOptions) -> Iterator[Farm]:
    """The farm, its roles not yet started."""
    with ExitStack() as stack:
        yield Farm(folder, options, stack)


def _answers() -> list[dict[str, object]]:
    found = [says(f"number {n}", logprob=-(n + 1) / 64) for n in range(10)]
    return [{"token_ids": answer.token_ids, "logprobs": answer.logprobs, "text": answer.text} for answer in found]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
