"""One writer per directory.

Invariant: whoever holds a DirectoryLock is the only process that holds one on that directory; the kernel drops it with
the process, however it dies. Never removes the lock file: a removed name can be locked twice.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from distaff.errors import ConfigurationError

NAME = ".lock"


class DirectoryLock:
    """An exclusive flock on `<directory>/.lock`, which names its holder. Raises ConfigurationError when it is taken."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take(directory)
        except BaseException:
            os.close(self._file)
            raise

    def release(self) -> None:
        os.close(self._file)

    def _take(self, directory: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"{directory} is being written by {_holder(os.read(self._file, 4096))}: stop that process or give another directory"
            ) from None
        self._sign()

    def _sign(self) -> None:
        """Name the holder; a full disk only costs the name."""
        name = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, name, 0)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


def _holder(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
