"""Parses an answer of megabytes in many short calls instead of one long one, which would hold the interpreter all the while.

Invariant: gives what one call of the parser would give for the whole answer, or fails as that does. An answer of a hundred thousand tokens
takes a third of a second; parsed here, on a thread, it holds up the event loop for some milliseconds at a time. Never guesses:
a slice of the long list counts only if it is strict JSON by itself, and the list is put back only where it was taken out.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable

import pydantic_core

from distaff.types import JSON

LARGE_BYTES = 256 << 10
"""Below this the whole takes less than ten milliseconds."""
SLICE_BYTES = 16 << 10
TRIES = 16
_LIST = re.compile(rb'"content"\s*:\s*\[\s*(?=\{)')
_BETWEEN = (b"},{", b"}, {")
_END = re.compile(rb"\}(?=\s*\])")


class _Unsliceable(Exception):
    """The list cannot be cut up with certainty."""


def parse_gently(body: bytes, place: Callable[[JSON], dict[str, JSON]]) -> JSON:
    """The document of `body`, parsed in slices if it is what it is expected to be, else at once. Raises ValueError.

    place: of the document, the object whose member `content` is the long list of objects; may raise LookupError and TypeError.
    """
    found = _LIST.search(body)
    if found is None:
        return _whole(body)
    mark = secrets.token_hex(16)
    try:
        elements, end = _elements(body, found.end())
        document = _whole(body[: found.end()] + b'"' + mark.encode() + b'"' + body[end:])
        holder = place(document)
        right = holder["content"] == [mark]
    except (_Unsliceable, LookupError, TypeError):
        right = False
    if not right:
        return _whole(body)
    holder["content"] = elements
    return document


def _elements(body: bytes, start: int) -> tuple[list[JSON], int]:
    """The elements of the list whose first begins at `start`, and where its last ends."""
    elements: list[JSON] = []
    while (cut := _cut(body, start, elements)) is not None:
        start = cut
    for tried, found in enumerate(_END.finditer(body, start)):
        if tried < TRIES and _take(body[start : found.end()], elements):
            return elements, found.end()
    raise _Unsliceable


def _cut(body: bytes, start: int, elements: list[JSON]) -> int | None:
    """Take whole elements of about SLICE_BYTES; where the next one begins. None when what is left is less than that."""
    stop = start + SLICE_BYTES
    for _ in range(TRIES):
        if stop >= len(body):
            return None
        at, between = max((body.rfind(between, start, stop), between) for between in _BETWEEN)
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
