"""Arithmetic with a calculator as tools (classic API, ToolEnv).

Invariant: the same (arguments, seed) give the same rows; the tools do nothing but arithmetic.
"""

from __future__ import annotations

import random
import re
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset

_NUMBER = re.compile(r"-?\d+")
_SYSTEM = "Use the tools for every calculation. When you have the result, answer with the number alone."


def load_environment(
    train_size: int = 512, eval_size: int = 64, digits: int = 2, max_turns: int = 4, seed: int = 0
) -> vf.Environment:
    """Tasks of the form a * b + c with numbers of up to `digits` digits."""
    return vf.ToolEnv(
        dataset=lambda: _sums(train_size, digits=digits, seed=seed),
        eval_dataset=lambda: _sums(eval_size, digits=digits, seed=seed + 1_000_003),
        system_prompt=_SYSTEM,
        tools=[add, multiply],
        max_turns=max_turns,
        rubric=vf.Rubric(funcs=[correct, used_tools], weights=[1.0, 0.2], parser=vf.Parser(extract_fn=result)),
        parser=vf.Parser(extract_fn=result),
    )


def _sums(size: int, *, digits: int, seed: int) -> Dataset:
    rng = random.Random(seed)  # noqa: S311 - exercises
    rows = []
    for _ in range(size):
        a, b, c = (rng.randint(2, 10**digits - 1) for _ in range(3))
        rows.append({"question": f"What is {a} * {b} + {c}?", "answer": str(a * b + c)})
    return Dataset.from_list(rows)


def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


def result(text: str) -> str | None:
    """The last whole number of a reply."""
    found = _NUMBER.findall(text.replace(",", ""))
    return found[-1] if found else None


def correct(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """1 when the final number is right."""
    return float(parser.parse_answer(completion) == answer)


def used_tools(completion: vf.Messages) -> float:
    """1 when both tools answered without an error."""
    return float(sum(_is_number(message.content) for message in completion if message.role == "tool") >= 2)


def _is_number(content: Any) -> bool:
    return isinstance(content, str) and _NUMBER.fullmatch(content) is not None
