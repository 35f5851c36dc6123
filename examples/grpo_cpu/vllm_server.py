"""How vLLM is started on a CPU, and how it is given new weights.

Invariant: weights are exchanged while generation is paused; a request in flight goes on with the new ones, and the answer says where
they changed. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MODEL_NAME = "tiny"
CONTEXT_TOKENS = 512
START_S = 300.0
_REQUEST_S = 120.0


def command(python: Path, model: Path, *, port: int, seed: int = 0) -> list[str]:
    """The server's command line: float32, no compilation, the token route, and tool calls in the model's own format."""
    options = ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), "--seed", str(seed)]
    options += ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "256", "--dtype", "float32"]
    options += ["--enforce-eager", "--enable-scale-out", "--disable-uvicorn-access-log"]
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]


def environment() -> dict[str, str]:
    """This process's environment with what vLLM wants of it on a CPU; VLLM_SERVER_DEV_MODE opens the control routes."""
    return {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_ready(url: str, *, check: Callable[[], None]) -> None:
    """Return when the server answers. `check` raises when it has ended. Raises TimeoutError after START_S."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            check()
        time.sleep(0.2)
    raise TimeoutError(f"vLLM at {url} did not answer within {START_S:g} s")


class Control:
    """The control routes of one server. Every method raises OSError when the server does not do what it is told."""

    def __init__(self, url: str) -> None:
        self._url = url

    @contextmanager
    def new_weights(self, folder: Path, *, version: int) -> Iterator[None]:
        """Generation stands still, the weights of `folder` are in the engine and called `version`; it goes on when the block ends."""
        self.post("/pause?mode=keep")
        try:
            self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            self.post("/update_weight_version", {"new_version": str(version)})
            self.post("/reset_prefix_cache")  # what it holds was computed with the old weights
            yield
        finally:
            self.post("/resume")

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer's JSON, None for an empty one."""
        request = urllib.request.Request(
            self._url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_REQUEST_S) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            raise OSError(f"{path}: {error.code} {error.read()[:500]!r}") from None
        return json.loads(answer) if answer.strip() else None
