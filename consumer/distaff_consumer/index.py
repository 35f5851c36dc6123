"""Which groups the finished files of an archive hold, so that opening a large archive reads only its newest file.

Invariant: an entry is used only for a file of exactly the size it was made for; a missing, stale or unreadable entry costs a
scan of that file, nothing else.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import structlog

from distaff_consumer.errors import ArchiveError
from distaff_consumer.files import replacing
from distaff_consumer.ids import GroupIds
from distaff_consumer.segments import Segment, chunks

NAME = "index.json"
_GROUP_ID = re.compile(rb'\{"group_id":"([^"\\]*)"')

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file as far as it is whole."""

    size_bytes: int
    ids: GroupIds


def scan(segment: Segment, *, newest: bool) -> Entry:
    """Read a file: where its last whole chunk ends, and the ids of its groups."""
    end, ids = 0, GroupIds()
    for chunk in chunks(segment, newest=newest):
        end = chunk.end
        for line in chunk.lines:
            ids.add(_group_id(line, segment.path))
    return Entry(end, ids)


def collect(directory: Path, finished: list[Segment]) -> dict[str, Entry]:
    """An entry for each finished file, by file name: the stored one where it fits, else by reading the file."""
    stored = _load(directory / NAME)
    return {file.path.name: _stored(stored, file) or scan(file, newest=False) for file in finished}


def _stored(stored: dict[str, Entry], file: Segment) -> Entry | None:
    entry = stored.get(file.path.name)
    return entry if entry and entry.size_bytes == file.path.stat().st_size else None


def _load(path: Path) -> dict[str, Entry]:
    try:
        stored = json.loads(path.read_text())
        return {name: Entry(value["bytes"], GroupIds.from_json(**value["ids"])) for name, value in stored.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("archive.index_ignored", path=str(path), reason=type(error).__name__)
        return {}


def save(directory: Path, entries: dict[str, Entry]) -> None:
    """Store the entries, whole or not at all. A disk that refuses them costs a scan at the next start."""
    content = {name: {"bytes": entry.size_bytes, "ids": entry.ids.to_json()} for name, entry in entries.items()}
    try:
        with replacing(directory / NAME) as file:
            file.write(json.dumps(content).encode())
    except OSError as error:
        log.warning("archive.index_unsaved", directory=str(directory), reason=error.strerror)


def _group_id(line: bytes, path: Path) -> str:
    """Without parsing the line where it is as our writer makes it."""
    match = _GROUP_ID.match(line)
    if match:
        return match[1].decode()
    try:
        return str(json.loads(line)["group_id"])
    except (ValueError, KeyError, TypeError):
        raise ArchiveError(f"{path} has a line without a group_id: it is not an archive of distaff") from None
