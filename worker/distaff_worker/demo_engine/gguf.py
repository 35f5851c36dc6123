"""Reads the metadata of a GGUF model file.

Invariant: reads the header only, never the weights. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from distaff.errors import ConfigurationError
from distaff.types import JSON

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, JSON]:
    """Key -> value of every entry. Raises ConfigurationError when the file is not GGUF or ends early."""
    try:
        with path.open("rb") as file:
            return _Reader(file).metadata()
    except (OSError, struct.error, ValueError, KeyError) as error:
        raise ConfigurationError(f"{path} is not a readable GGUF file ({error})") from None


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def metadata(self) -> dict[str, JSON]:
        magic, version, _tensors, entries = self._unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        return {self._string(): self._value(self._unpack("I")[0]) for _ in range(entries)}

    def _unpack(self, layout: str) -> tuple[JSON, ...]:
        layout = "<" + layout
        return struct.unpack(layout, self._file.read(struct.calcsize(layout)))

    def _string(self) -> str:
        (size,) = self._unpack("Q")
        return self._file.read(size).decode("utf-8", "replace")

    def _value(self, kind: int) -> JSON:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        item, count = self._unpack("IQ")
        if item in _SCALARS:
            return list(self._unpack(f"{count}{_SCALARS[item]}"))
        return [self._value(item) for _ in range(count)]
