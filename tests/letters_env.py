"""A classic environment for the learning test: each of four questions has one right letter, and the reply must be that letter alone."""

from __future__ import annotations

from typing import Any

import verifiers.legacy as vf
from datasets import Dataset

ANSWERS = {"1": "c", "2": "a", "3": "d", "4": "b"}


def load_environment() -> vf.Environment:
    rows = [{"question": question, "answer": answer} for question, answer in ANSWERS.items()]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))


def right(completion: Any, answer: str) -> float:
    return float(completion[-1].content == answer)
