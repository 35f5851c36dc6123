"""Reading an archive, also while it is being written.

Invariant: records come in the order they were written. An unfinished end of the newest file is left out; damage anywhere else is an
ArchiveError. Never writes and takes no lock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distaff.errors import ConfigurationError
from distaff.types import JSON
from distaff_consumer.errors import ArchiveError
from distaff_consumer.segments import Segment, chunks, segments, zstandard


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record is, so that it can be read again by itself."""

    source: Segment
    start: int
    """First byte of the chunk that holds it."""
    end: int
    line: int
    """Number of the record in its chunk."""


def read_archive(directory: Path) -> Iterator[dict[str, JSON]]:
    """The records of an archive, over all its files, plain and compressed.

    Raises ArchiveError where a file is damaged, ConfigurationError when there is no such directory.
    """
    return (record for _, record in read_placed(directory))


def read_placed(directory: Path) -> Iterator[tuple[Place, dict[str, JSON]]]:
    """As `read_archive`, each record with its place."""
    if not directory.is_dir():
        raise ConfigurationError(f"{directory} is not a directory: give the directory of an archive")
    files = segments(directory)
    for source in files:
        for chunk in chunks(source, newest=source is files[-1]):
            for number, line in enumerate(chunk.lines):
                place = Place(source=source, start=chunk.start, end=chunk.end, line=number)
                yield place, _parse(line, place)


def read_at(place: Place) -> dict[str, JSON]:
    """The record at a place that `read_placed` gave."""
    with place.source.path.open("rb") as file:
        file.seek(place.start)
        content = file.read(place.end - place.start)
    if place.source.compressed:
        content = zstandard().ZstdDecompressor().decompressobj().decompress(content)
    return _parse(content.split(b"\n")[place.line], place)


def _parse(line: bytes, place: Place) -> dict[str, JSON]:
    try:
        record: dict[str, JSON] = json.loads(line)
    except ValueError:
        raise ArchiveError(
            f"{place.source.path} is damaged between bytes {place.start} and {place.end}: a line there is not JSON"
        ) from None
    return record
