"""Starts llama.cpp's server inside this process.

Invariant: the server answers when `start` returns. It ends with the process and not before: the package cannot stop it while
requests run.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

from distaff.errors import ConfigurationError
from distaff_worker.demo_engine import INSTALL_SERVER, MODEL_NAME, model_path

HTTP_THREADS = 256
"""Every open request holds one, the waiting ones included; with too few the server stops answering its health check."""
QUIET = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    host: str
    port: int
    threads: int
    parallel: int
    context_tokens: int
    """Of one request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningServer:
    url: str
    handle: Any
    """Keeps the server alive."""


def start(options: Options) -> RunningServer:
    """Load the model and serve it. Raises ConfigurationError: not installed, or the port is taken."""
    path = model_path()
    _check_port(options)
    # llama.cpp's threads spin at their barriers: on shared cores that makes it ten times slower. Read when the library loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import xllamacpp
    except ImportError as error:
        raise ConfigurationError(f"the demo engine cannot be loaded ({error}); {_mend(error)}") from None
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.model_alias = {MODEL_NAME}
    parameters.hostnames = [options.host]
    parameters.port = options.port
    parameters.n_ctx = options.context_tokens * options.parallel
    parameters.n_parallel = options.parallel
    parameters.n_threads_http = HTTP_THREADS
    parameters.cpuparams.n_threads = options.threads
    parameters.cpuparams_batch.n_threads = options.threads
    parameters.endpoint_slots = True
    parameters.endpoint_props = True
    parameters.endpoint_metrics = True
    parameters.use_jinja = True
    parameters.verbosity = QUIET
    server = xllamacpp.Server(parameters)
    return RunningServer(url=server.listening_address, handle=server)


def _mend(error: ImportError) -> str:
    """The wheel brings everything but the OpenMP runtime, which slim systems lack."""
    if "libgomp" in str(error):
        return "install the system library: apt-get install libgomp1 (Fedora: dnf install libgomp)"
    return f"install it with: {INSTALL_SERVER}"


def _check_port(options: Options) -> None:
    """The server itself would only log that it cannot listen."""
    try:
        with socket.create_server((options.host, options.port)):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {options.host}:{options.port} ({os.strerror(error.errno or 0)}); choose another --port, or 0 for a free one"
        ) from None
