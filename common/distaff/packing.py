"""Redis commands with a large argument, sent without copying it.

Invariant: the bytes on the wire are those of redis-py's own packers. hiredis renders a command into one string in one call, which for a
group of a hundred megabytes holds the interpreter for half a second; small commands go to it all the same, for its speed.
"""

from __future__ import annotations

from typing import Any

from redis._parsers import Encoder
from redis.connection import HiredisRespSerializer, PythonRespSerializer
from redis.utils import HIREDIS_AVAILABLE

LARGE_BYTES = 256 << 10


class Packer:
    """A `command_packer` of redis-py's connections. Holds no state."""

    def __init__(self) -> None:
        self._large = PythonRespSerializer(LARGE_BYTES, Encoder("utf-8", "strict", False).encode)  # type: ignore[no-untyped-call]
        self._small: Any = HiredisRespSerializer() if HIREDIS_AVAILABLE else self._large

    def pack(self, *args: Any) -> list[bytes]:
        """The command in pieces, large arguments as they are."""
        large = any(type(arg) is bytes and len(arg) > LARGE_BYTES for arg in args)
        packed: list[bytes] = (self._large if large else self._small).pack(*args)
        return packed
