"""Single-digit sums (classic verifiers environment).

Invariant: all (largest + 1)^2 sums are there, once; a reply is right when it is the number and nothing else.
"""

from __future__ import annotations

from typing import Any

import verifiers.legacy as vf
from datasets import Dataset


def load_environment(largest: int = 9) -> vf.Environment:
    """The sums a + b with a and b in [0, largest]."""
    numbers = range(largest + 1)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[correct]))


def correct(completion: Any, answer: str) -> float:
    """1 for exactly the number, else 0."""
    return float(completion[-1].content == answer)
