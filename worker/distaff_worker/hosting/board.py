"""A page of memory that worker and host process share: whose code runs on which of the host's loops at this moment.

Invariant: readable when the host answers nothing any more, and after its death. Holds numbers of groups, no data.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from typing import Literal

Slot = Literal[0, 1]
PLAY: Slot = 0
"""The loop on which rollouts are played."""
SCORE: Slot = 1
"""The loop on which groups are scored."""
_NATIVE_IDS, _IDENTS = 2, 4
"""Offsets of the ids of the loops' threads: the kernel's, and Python's."""


def anonymous_file(name: str) -> int:
    """Descriptor of an empty file that no folder has: in memory on Linux, so that no writable folder is needed."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


class Board:
    """fd: of a file of SIZE_BYTES; see `create`. Numbers of groups begin at 1; 0 is nobody."""

    SIZE_BYTES = mmap.PAGESIZE

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, self.SIZE_BYTES)
        self.cells = memoryview(self._page).cast("q")

    @classmethod
    def create(cls) -> tuple[Board, int]:
        """A new board, and the file descriptor to hand to the host (the caller closes it)."""
        fd = anonymous_file("distaff-board")
        os.truncate(fd, cls.SIZE_BYTES)
        return cls(fd), fd

    def running(self, slot: Slot) -> int:
        """The group whose code runs there now (or ran when the process died); 0: none."""
        return self.cells[slot]

    def enlist(self, slot: Slot) -> None:
        """The loop of `slot` runs on the calling thread."""
        self.cells[_NATIVE_IDS + slot] = threading.get_native_id()
        self.cells[_IDENTS + slot] = threading.get_ident()

    def only_mine(self) -> None:
        """Leave on the board what runs on the calling thread, if it is one of the loops', and take off the rest."""
        mine = threading.get_ident()
        if mine in (self.ident(PLAY), self.ident(SCORE)):
            self.cells[SCORE if self.ident(PLAY) == mine else PLAY] = 0

    def native_id(self, slot: Slot) -> int:
        """The kernel's id of the loop's thread; 0: not started."""
        return self.cells[_NATIVE_IDS + slot]

    def ident(self, slot: Slot) -> int:
        """Python's id of the loop's thread; 0: not started."""
        return self.cells[_IDENTS + slot]

    def close(self) -> None:
        """Give the memory and its descriptor back; what the board said last can still be read."""
        last = memoryview(bytes(self.cells)).cast("q")
        self.cells.release()
        self.cells = last
        self._page.close()
