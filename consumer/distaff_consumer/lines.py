"""One record, one line.

Invariant: a line is ASCII JSON without a newline inside, whatever the texts hold (U+2028, U+0085, NUL, lone surrogates are
escaped), and it is strict JSON: a number that JSON does not have (NaN, an infinity) is written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from distaff.types import JSON


def encode_line(record: Mapping[str, JSON]) -> bytes:
    """`record` with its newline."""
    try:
        text = _dumps(record)
    except ValueError:
        text = _dumps(_finite(record))
    return text.encode("ascii") + b"\n"


def _dumps(record: JSON) -> str:
    return json.dumps(record, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _finite(value: JSON) -> JSON:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
