"""The real vLLM with the model of these tests, and what the tests ask it beside our own engine."""

from __future__ import annotations

import hashlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from examples.grpo_cpu import vllm_server
from examples.grpo_cpu.farm import ROOT, VLLM_PYTHON

from distaff.config import RunConfig
from distaff.types import BoolArray
from tests.farm_support import run_config
from tests.harness.processes import start

TOLERANCE = 1e-4
"""Between log-probabilities of the same ids: sampled one token at a time in a batch, and computed in one pass over the whole sequence."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    folder: Path
    """Of the model and its tokenizer."""

    @property
    def control(self) -> vllm_server.Control:
        return vllm_server.Control(self.url)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def running(self) -> float:
        return self.metric("vllm:num_requests_running")

    def rescore(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """vLLM's log-probabilities of given ids: position t of an answer is about token t + 1."""
        return [self._rescore(list(ids)) for ids in sequences]

    def _rescore(self, ids: list[int]) -> list[float]:
        sampling = {"max_tokens": 1, "prompt_logprobs": 0}
        body = {"model": vllm_server.MODEL_NAME, "token_ids": ids, "sampling_params": sampling}
        rows = self.control.post("/inference/v1/generate", body)["prompt_logprobs"][1:]
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows, ids[1:], strict=True)]


@contextmanager
def running_server() -> Iterator[Server]:
    folder = model_folder()
    port = vllm_server.free_port()
    command = vllm_server.command(VLLM_PYTHON, folder, port=port)
    with start(command, env=vllm_server.environment(), cwd=ROOT) as child:

        def check() -> None:
            if child.code is not None:
                raise RuntimeError(f"vLLM ended with exit code {child.code}:\n{child.log[-3000:]}")

        vllm_server.wait_until_ready(f"http://127.0.0.1:{port}", check=check)
        yield Server(f"http://127.0.0.1:{port}", folder)
        child.terminate()
        child.wait(30)


def model_folder() -> Path:
    """The model of these tests, made where it is not there yet."""
    sources = [ROOT / "examples/grpo_cpu/tiny_model.py", ROOT / "tests/real_vllm/make_model.py"]
    recipe = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:8]
    folder = ROOT / ".cache" / "real_vllm" / recipe
    if not folder.exists():
        in_vllm_venv("tests.real_vllm.make_model", str(folder))
    return folder


def torch_rescore(folder: Path, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """As `Server.rescore`, by torch and transformers alone."""
    answers: list[list[float]] = json.loads(
        in_vllm_venv(
            "tests.real_vllm.rescore", str(folder), text=json.dumps([list(map(int, ids)) for ids in sequences])
        )
    )
    return answers


def in_vllm_venv(module: str, *arguments: str, text: str = "") -> str:
    done = subprocess.run(
        [str(VLLM_PYTHON), "-m", module, *arguments], input=text, capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def vllm_run(url: str, folder: Path, **sections: dict[str, Any]) -> RunConfig:
    """A small RL run on the real vLLM; `sections` over it."""
    values: dict[str, dict[str, Any]] = {
        "engine": {"kind": "vllm", "start_timeout_s": 20},
        "tokenizer": {"name": str(folder)},
        "sampling": {"max_tokens": 80},
        "rollouts": {"group_size": 4, "timeout_s": 60, "group_timeout_s": 90},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    return run_config(url, name="run-1", **values)


def spans(mask: BoolArray) -> list[tuple[int, int]]:
    """[start, end) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
