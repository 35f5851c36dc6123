"""`python -m distaff_worker.demo_engine`: serve the demo model until SIGTERM, SIGINT or the end of the parent process.

Invariant: prints exactly one line on stdout, JSON, when it answers requests; everything else goes to stderr. Leaves no process
behind: the server lives in this one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distaff.errors import ConfigurationError
from distaff_worker.demo_engine import MODEL_NAME
from distaff_worker.demo_engine.gguf_tokenizer import demo_tokenizer_dir
from distaff_worker.demo_engine.server import Options, start

_PARENT_POLL_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve. Returns 2 when it cannot start; otherwise ends the process with exit code 0."""
    parent = os.getppid()
    values = _arguments(arguments)
    cache = values.pop("tokenizer")
    options = Options(**values)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        made = {"tokenizer": str(demo_tokenizer_dir(cache))} if cache else {}
        server = start(options)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    ready = {"url": server.url, "model": MODEL_NAME, "context_tokens": options.context_tokens, "pid": os.getpid()}
    ready |= made
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    while not stop.wait(_PARENT_POLL_S) and os.getppid() == parent:
        pass
    # Without freeing the server: that waits for the completions in progress.
    os._exit(0)


def _arguments(arguments: Sequence[str] | None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m distaff_worker.demo_engine", description="SmolLM2-135M on llama.cpp's server, on the CPU"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0 takes a free one")
    parser.add_argument("--threads", type=int, default=1, help="more than one is slower where cores are shared")
    parser.add_argument("--parallel", type=int, default=8, help="requests decoded at once; more wait")
    parser.add_argument("--context-tokens", type=int, default=2048, help="prompt + completion of one request")
    parser.add_argument("--tokenizer", type=Path, help="make the model's tokenizer in this folder, and say where")
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
