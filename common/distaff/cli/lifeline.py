"""Makes sure that what a process tree started does not outlive it, even when the tree's root is killed with SIGKILL.

Invariant: run by its path in an isolated interpreter, so it needs the standard library only and starts in milliseconds.
It ends no process it was not told about.

    lifeline.py exec PARENT COMMAND...   become COMMAND, to be killed by the kernel when PARENT dies (Linux)
    lifeline.py guard                    read "+ PGID", "- PGID", "rm FOLDER" lines; at the end of the input kill the groups
                                         that are left and remove the folders
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys

_PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Replace this process by `command`."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606


def guard() -> None:
    """Wait for the end of the input, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "rm":
            folders.append(rest)
        elif word == "+":
            groups.add(int(rest))
        else:
            groups.discard(int(rest))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        guard()
    else:
        become(int(sys.argv[2]), sys.argv[3:])
