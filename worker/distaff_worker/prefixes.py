"""What two sequences of tokens have in common. Never looks at text."""

from __future__ import annotations

import numpy as np


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return int(np.argmax(np.array(a[:shorter]) != np.array(b[:shorter])))
