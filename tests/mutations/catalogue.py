"""The mechanisms behind the promises, and how each is switched off, read from catalogue.toml.

Invariant: data only; `tests/test_mutations.py` holds it against the code.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`old`, which occurs once in `file`, becomes `new`; then `test` (arguments of pytest) has to fail."""

    promise: str
    what: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(**entry) for entry in tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text())["mutation"]
]
