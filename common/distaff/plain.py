"""Whether a value is JSON, exactly: what is written is what is read back, by any reader.

Invariant: nothing is converted, nothing is executed; the answer names the place. Recursion is bounded by MAX_DEPTH.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

MAX_DEPTH = 100
"""Lists and objects inside one another: far below what recursion in any reader can take."""
MAX_INTEGER_BITS = 3300
"""Python neither writes nor reads decimal numbers of more than a few thousand digits."""


class Unplain(NamedTuple):
    """What keeps a value from being JSON."""

    path: str
    problem: str


def find_unplain(value: Any, path: str, *, depth: int = 0) -> Unplain | None:
    """The first part of `value`, which is at `path`, that JSON would refuse or change; None when there is none."""
    if isinstance(value, list):
        if depth >= MAX_DEPTH:
            return Unplain(path.partition("[")[0].partition(".")[0], f"is nested more than {MAX_DEPTH} deep")
        parts = (find_unplain(item, f"{path}[{place}]", depth=depth + 1) for place, item in enumerate(value))
        return next(filter(None, parts), None)
    if isinstance(value, dict):
        if depth >= MAX_DEPTH:
            return Unplain(path.partition("[")[0].partition(".")[0], f"is nested more than {MAX_DEPTH} deep")
        parts = (_find_in_entry(key, item, path, depth + 1) for key, item in value.items())
        return next(filter(None, parts), None)
    problem = _scalar_problem(value)
    return Unplain(path, problem) if problem else None


def _find_in_entry(key: Any, value: Any, path: str, depth: int) -> Unplain | None:
    if not isinstance(key, str):
        return Unplain(path, f"holds an object with the key {key!r}, and keys of JSON objects are strings")
    problem = _text_problem(key)
    return Unplain(path, problem) if problem else find_unplain(value, f"{path}.{key}", depth=depth)


def _scalar_problem(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, str):
        return _text_problem(value)
    if isinstance(value, int):
        bits = value.bit_length()
        return (
            f"holds an integer of {bits} bits, and readers of JSON take {MAX_INTEGER_BITS}"
            if bits > MAX_INTEGER_BITS
            else ""
        )
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"holds {value!r}, which is not JSON (null is)"
    return f"holds a {type(value).__module__}.{type(value).__qualname__}, which is not JSON"


def _text_problem(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"holds text that is not Unicode (a lone surrogate at character {error.start})"
    return ""
