"""The files of an archive: names, order, and where the last whole line or frame of a file ends.

Invariant: what follows the end of a file's last whole chunk is either a torn write (only in the newest file, cut when a
writer opens it, skipped by readers) or damage (ArchiveError). Never repairs damage and never guesses past it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

from distaff.errors import ConfigurationError
from distaff_consumer.errors import ArchiveError

Compression: TypeAlias = Literal["none", "zstd"]

_NAME = re.compile(r"groups-(\d{6,})\.jsonl(\.zst)?")
_MAGIC = b"\x28\xb5\x2f\xfd"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One file of an archive."""

    number: int
    path: Path

    @property
    def compressed(self) -> bool:
        return self.path.suffix == ".zst"

    @property
    def compression(self) -> Compression:
        return "zstd" if self.compressed else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What was written and checked as a unit: a line, or a zstd frame of lines."""

    start: int
    """Offset in the file."""
    end: int
    lines: list[bytes]
    """Without their newlines."""


def segment(directory: Path, number: int, compression: Compression) -> Segment:
    return Segment(number, directory / f"groups-{number:06d}.jsonl{'.zst' if compression == 'zstd' else ''}")


def segments(directory: Path) -> list[Segment]:
    """The files of an archive in the order they were written."""
    matches = ((path, _NAME.fullmatch(path.name)) for path in directory.iterdir())
    return sorted(Segment(int(match[1]), path) for path, match in matches if match)


def chunks(source: Segment, *, newest: bool) -> Iterator[Chunk]:
    """The whole chunks of a file, in order. Ends before a torn one if the file is the newest, else raises ArchiveError."""
    end = 0
    with source.path.open("rb") as file:
        for chunk in _frames(file) if source.compressed else _lines(file):
            yield chunk
            end = chunk.end
        file.seek(end)
        rest = file.read(1) if not newest else file.read()
    if rest and (not newest or not _torn(rest, compressed=source.compressed)):
        raise ArchiveError(
            f"{source.path} is damaged at byte {end}: the bytes there are not a record of an archive, and it is not the "
            "unfinished end of a write. Restore the file from a copy, or move it out of the directory: its groups are then missing"
        )


def _torn(rest: bytes, *, compressed: bool) -> bool:
    """No whole chunk follows the broken one that `rest` begins with."""
    if compressed:
        return _MAGIC not in rest[1:]
    return not any(_whole(line) for line in rest.split(b"\n")[1:-1])


def _lines(file: IO[bytes]) -> Iterator[Chunk]:
    end = 0
    for line in file:
        if not line.endswith(b"\n") or not _whole(line[:-1]):
            return
        yield Chunk(start=end, end=end + len(line), lines=[line[:-1]])
        end += len(line)


def _whole(line: bytes) -> bool:
    """Records are ASCII without control characters; blocks that a power cut left unwritten are zeros."""
    return line.startswith(b"{") and line.endswith(b"}") and line.isascii() and b"\0" not in line


def _frames(file: IO[bytes]) -> Iterator[Chunk]:
    zstd = zstandard()
    start, ahead = 0, b""
    while True:
        frame, parts, size = zstd.ZstdDecompressor().decompressobj(), [], 0
        while not frame.eof:
            piece = ahead or file.read(_READ_BYTES)
            if not piece:
                return
            try:
                parts.append(frame.decompress(piece))
            except zstd.ZstdError:
                return
            ahead = frame.unused_data
            size += len(piece) - len(ahead)
        yield Chunk(start=start, end=start + size, lines=b"".join(parts).split(b"\n")[:-1])
        start += size


def zstandard() -> Any:
    """The zstandard module; ConfigurationError when it is not installed."""
    try:
        import zstandard as module
    except ImportError:
        raise ConfigurationError(
            "the archive is compressed and the zstandard package is missing: pip install 'distaff[zstd]'"
        ) from None
    return module
