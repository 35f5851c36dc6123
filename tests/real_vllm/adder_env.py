"""A classic environment with one tool: the sum of two digits, for the model of `make_model`, which knows the format and guesses the rest."""

from __future__ import annotations

from typing import Any

import verifiers.legacy as vf
from datasets import Dataset


def load_environment(rows: int = 8, max_turns: int = 3) -> vf.Environment:
    data = [{"question": f"{n}+{(3 * n) % 10}", "answer": str(n + (3 * n) % 10)} for n in range(rows)]
    rubric = vf.Rubric(funcs=[right, calls], weights=[1.0, 0.1])
    return vf.ToolEnv(dataset=Dataset.from_list(data), tools=[add], max_turns=max_turns, rubric=rubric)


def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)


def calls(completion: Any) -> float:
    return float(sum(message.role == "tool" for message in completion))
