"""Parses an answer of megabytes in many short calls instead of one long one, which would hold the interpreter all the while.

Invariant: gives what one call of the parser would give for the whole answer, or fails as that does. An answer of a hundred thousand tokens
takes a third of a second; parsed here, on a thread, it holds up the event loop for some milliseconds at a time. Never guesses:
a slice of the long list counts only if it is strict JSON by itself, and the list is put back only where it was taken out.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import pydantic_core

from distaff.types import JSON

LARGE_BYTES = 256 << 10
"""Below this the whole takes less than ten milliseconds."""
SLICE_BYTES = 16 << 10
TRIES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LongList:
    """Where the long list of an answer is, a list of objects or of lists."""

    holder: Callable[[JSON], dict[str, JSON]]
    """Of the document, the object whose member `name` it is; may raise LookupError and TypeError."""
    name: str = "content"
    brackets: str = "{}"
    """Around each element."""

    @property
    def begin(self) -> re.Pattern[bytes]:
        """Up to the first element."""
        return re.compile(rf'"{self.name}"\s*:\s*\[\s*(?={re.escape(self.brackets[0])})'.encode())

    @property
    def between(self) -> tuple[bytes, bytes]:
        closing, opening = self.brackets[1], self.brackets[0]
        return f"{closing},{opening}".encode(), f"{closing}, {opening}".encode()

    @property
    def end(self) -> re.Pattern[bytes]:
        """The end of the last element."""
        return re.compile(rf"{re.escape(self.brackets[1])}(?=\s*\])".encode())


class _Unsliceable(Exception):
    """The list cannot be cut up with certainty."""


def parse_gently(body: bytes, long: LongList) -> JSON:
    """The document of `body`, parsed in slices if `long` is where it is expected to be, else at once. Raises ValueError."""
    found = long.begin.search(body)
    if found is None:
        return _whole(body)
    mark = secrets.token_hex(16)
    try:
        elements, end = _elements(body, found.end(), long)
        document = _whole(body[: found.end()] + b'"' + mark.encode() + b'"' + body[end:])
        holder = long.holder(document)
        right = holder[long.name] == [mark]
    except (_Unsliceable, LookupError, TypeError):
        right = False
    if not right:
        return _whole(body)
    holder[long.name] = elements
    return document


def _elements(body: bytes, start: int, long: LongList) -> tuple[list[JSON], int]:
    """The elements of the list whose first begins at `start`, and where its last ends."""
    elements: list[JSON] = []
    between = long.between
    while (cut := _cut(body, start, elements, between)) is not None:
        start = cut
    for tried, found in enumerate(long.end.finditer(body, start)):
        if tried < TRIES and _take(body[start : found.end()], elements):
            return elements, found.end()
    raise _Unsliceable


def _cut(body: bytes, start: int, elements: list[JSON], separators: tuple[bytes, bytes]) -> int | None:
    """Take whole elements of about SLICE_BYTES; where the next one begins. None when what is left is less than that."""
    stop = start + SLICE_BYTES
    for _ in range(TRIES):
        if stop >= len(body):
            return None
        at, between = max((body.rfind(between, start, stop), between) for between in separators)
        if at < 0:
            return None
        if _take(body[start : at + 1], elements):
            return at + len(between) - 1
        stop = at + 1
    raise _Unsliceable


def _take(slice_: bytes, elements: list[JSON]) -> bool:
    """Add the elements that `slice_` is; False when it begins or ends in the middle of something."""
    try:
        elements += _whole(b"[" + slice_ + b"]")
    except ValueError:
        return False
    return True


def _whole(body: bytes) -> JSON:
    return pydantic_core.from_json(body, allow_inf_nan=False)
