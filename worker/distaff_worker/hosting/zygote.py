"""A process that has imported what environments need, and forks a host from it in milliseconds: python -m distaff_worker.hosting.zygote FD

Invariant: has one thread (numpy's BLAS ends its own before a fork) and loads no environment, so that forking it is safe. Dies with the worker, and its hosts with it (Linux: by the
kernel, even when they are blocked).

The worker asks over a socket, one request at a time: {"op": "fork"} with the descriptors of a host's socket, board and stack file gives
{"pid"}; {"op": "status", "pid"} gives {"status"}: what waitpid said, null while it runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from distaff.environments import releases
from distaff.environments.load import distributions
from distaff_worker.hosting import host

_PR_SET_PDEATHSIG = 1
FORK_DESCRIPTORS = 3
REQUEST_BYTES = 4096


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends. Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what environments print is no result of the command
    sys.path[:] = json.loads(control.recv(1 << 20))
    preload()
    control.send(b"{}")
    ended: dict[int, int] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES, FORK_DESCRIPTORS)
        if not data:
            return
        control.send(json.dumps(_answer(json.loads(data), descriptors, control, ended)).encode())


def preload() -> None:
    """Import what takes seconds, and nothing that starts a thread."""
    # transformers advises installing torch, which a worker has no use for.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    releases.preload()
    distributions()


def _answer(
    request: dict[str, Any], descriptors: list[int], control: socket.socket, ended: dict[int, int]
) -> dict[str, int | None]:
    if request["op"] == "fork":
        return {"pid": _fork(descriptors, control)}
    _reap(ended)
    return {"status": ended.pop(request["pid"], None)}


def _reap(ended: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        ended[pid] = status


def _fork(descriptors: list[int], control: socket.socket) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_host(parent, descriptors, control)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _become_host(parent: int, descriptors: list[int], control: socket.socket) -> NoReturn:
    code = 1
    try:
        os.setsid()
        die_with(parent)
        control.close()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        worker, board, stacks = descriptors
        host.run(socket.socket(fileno=worker), board, os.fdopen(stacks, "w"))
        code = 0
    except Exception:  # noqa: BLE001 - the end of a process: nobody is left to raise to
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
