"""The processes of the example: Redis, vLLM, producer, worker, trainer, as one tree that ends as a whole.

Invariant: the parts know each other by documented interfaces only: `distaff produce` and `distaff work` with a settings file, vLLM's
routes, the stream. Nothing that was started is left.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distaff.cli.embedded import start_redis
from distaff.cli.tree import Child, Tree
from distaff.clients import connect
from distaff.runs import read_state
from examples.grpo_cpu import vllm_server

ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SUMS = 100
MAX_TOKENS = 4
"""Two digits, the stop token, and one to be wrong with."""
OPEN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the example."""

    folder: Path
    """Where what it writes goes."""
    model: Path
    """The model to begin with."""
    steps: int
    groups: int = 24
    """Items of one optimizer step."""
    group_size: int = 8
    ahead: int = 12
    """Groups that may be played while the trainer holds those of a step: they are sampled with older weights."""
    learning_rate: float = 5e-4
    seed: int = 0
    redis_url: str = ""
    """A server to use; one of its own is started when empty."""

    @property
    def run(self) -> str:
        return f"grpo-{self.seed}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.run}.jsonl"


class PartEnded(Exception):
    """A process ended that should not have; the message holds what it said last."""


def play(plan: Plan) -> None:
    """Run it to its end. Raises PartEnded, and what the start of Redis raises."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    plan.log.unlink(missing_ok=True)
    with Tree(_show) as tree:
        redis_url = plan.redis_url or start_redis(tree)[1]
        engine, engine_url = _start_engine(tree, plan)
        environment = {
            **os.environ,
            "DISTAFF_REDIS_URL": redis_url,
            "DISTAFF_LOG__LEVEL": "warning",
            "PYTHONPATH": str(ROOT),
        }
        file = tree.folder / "run.json"
        file.write_text(json.dumps(settings_of(plan, engine_url)))
        worker = tree.start("worker", _distaff("work", file), env=environment)
        producer = tree.start("producer", _distaff("produce", file), env=environment)
        _wait_for_run(plan.run, redis_url, [engine, worker, producer])
        command = trainer_command(plan, engine_url, tree.folder / "weights")
        trainer = tree.start("trainer", command, env={**torch_environment(), **environment})
        while trainer.code is None:
            _check([engine, worker, producer])
            time.sleep(0.1)
        _check([trainer])
        tree.stop([worker], grace_s=5)


def settings_of(plan: Plan, engine_url: str) -> dict[str, Any]:
    """What `distaff produce` and `distaff work` are told: docs/configuration.md."""
    items = plan.steps * plan.groups
    return {
        "run": {"name": plan.run, "pool": plan.run, "mode": "rl"},
        "environment": {"id": "examples.grpo_cpu.sums"},
        "engine": {"kind": "vllm", "base_urls": [engine_url], "model": vllm_server.MODEL_NAME},
        "tokenizer": {"name": str(plan.model.absolute())},
        "sampling": {"temperature": 1.0, "max_tokens": MAX_TOKENS},
        "rollouts": {"group_size": plan.group_size},
        "producer": {
            "seed": plan.seed,
            "limit": items,
            "epochs": -(-items // SUMS),
            "window": plan.groups + plan.ahead,
        },
        "wire": {"messages": False},
    }


def trainer_command(plan: Plan, engine_url: str, weights: Path) -> list[str]:
    command = [str(VLLM_PYTHON), "-m", "examples.grpo_cpu.trainer", "--run", plan.run, "--engine", engine_url]
    command += ["--model", str(plan.model.absolute()), "--weights", str(weights), "--log", str(plan.log.absolute())]
    command += ["--groups", str(plan.groups), "--learning-rate", str(plan.learning_rate), "--seed", str(plan.seed)]
    return command


def torch_environment() -> dict[str, str]:
    """Threads that wait give the core to somebody else: with vLLM and the farm beside it, spinning costs more than it saves."""
    return {**os.environ, "OMP_WAIT_POLICY": "passive"}


def _start_engine(tree: Tree, plan: Plan) -> tuple[Child, str]:
    port = vllm_server.free_port()
    command = vllm_server.command(VLLM_PYTHON, plan.model.absolute(), port=port, seed=plan.seed)
    engine = tree.start("engine", command, env=vllm_server.environment())
    url = f"http://127.0.0.1:{port}"
    vllm_server.wait_until_ready(url, check=lambda: _check([engine]))
    return engine, url


def _wait_for_run(run: str, redis_url: str, parts: Sequence[Child]) -> None:
    end = time.monotonic() + OPEN_S
    with connect(redis_url) as client:
        while read_state(client, run) is None:
            _check(parts)
            if time.monotonic() > end:
                raise PartEnded(f"the producer has not opened the run within {OPEN_S:g} s")
            time.sleep(0.05)


def _check(parts: Sequence[Child]) -> None:
    """A part may end when it is done (exit code 0), and not otherwise."""
    for child in parts:
        if child.code:
            child.drained()
            raise PartEnded(f"{child.name} ended with exit code {child.code}:\n" + "\n".join(child.tail))


def _distaff(role: str, file: Path) -> list[str]:
    return [sys.executable, "-m", "distaff", role, *(["--quiet"] if role == "produce" else []), str(file)]


def _show(name: str, line: str) -> None:
    if name == "trainer":
        print(line, flush=True)
    elif name != "engine":
        print(f"{name} | {line}", flush=True)
