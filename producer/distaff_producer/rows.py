"""Checks that a dataset row is JSON, exactly: what a worker reads is what the dataset holds.

Invariant: nothing is converted. A value that JSON would change or refuse is an error that names the column.
"""

from __future__ import annotations

import math
from typing import Any

from distaff.errors import ConfigurationError
from distaff.types import JSON


def check_row(row: dict[str, JSON], *, place: str) -> None:
    """Raise ConfigurationError naming `place` and the column unless every value of the row is JSON."""
    for column, value in row.items():
        if not isinstance(column, str):
            raise ConfigurationError(
                f"{place}: the column name {column!r} is not a string. Rename it in the environment"
            )
        problem = _problem(value, column)
        if problem:
            raise ConfigurationError(f"{place}: {problem}. Convert or remove the column in the environment's dataset")


def _problem(value: Any, path: str) -> str:
    """What is wrong with `value`, "" when nothing is."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, str):
        return _text_problem(value, path)
    if isinstance(value, int):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"column {path!r} holds {value!r}, which is not JSON (null is)"
    if isinstance(value, list):
        return next(filter(None, (_problem(item, f"{path}[{i}]") for i, item in enumerate(value))), "")
    if isinstance(value, dict):
        return next(filter(None, (_entry_problem(key, item, path) for key, item in value.items())), "")
    return f"column {path!r} holds a {type(value).__module__}.{type(value).__qualname__}, which is not JSON"


def _entry_problem(key: Any, value: Any, path: str) -> str:
    if not isinstance(key, str):
        return f"column {path!r} holds an object with the key {key!r}, and keys of JSON objects are strings"
    return _problem(value, f"{path}.{key}")


def _text_problem(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"column {path!r} holds text that is not Unicode (a lone surrogate at character {error.start})"
    return ""
