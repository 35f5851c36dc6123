"""Checks that a dataset row is JSON, exactly: what a worker reads is what the dataset holds.

Invariant: nothing is converted. A value that JSON would change or refuse is an error that names the column.
"""

from __future__ import annotations

from distaff.errors import ConfigurationError
from distaff.plain import find_unplain
from distaff.types import JSON


def check_row(row: dict[str, JSON], *, place: str) -> None:
    """Raise ConfigurationError naming `place` and the column unless every value of the row is JSON."""
    for column, value in row.items():
        if not isinstance(column, str):
            raise ConfigurationError(
                f"{place}: the column name {column!r} is not a string. Rename it in the environment"
            )
        found = find_unplain(column, ascii(column)) or find_unplain(value, column)
        if found:
            raise ConfigurationError(
                f"{place}: column {found.path!r} {found.problem}. Convert or remove the column in the environment's dataset"
            )
