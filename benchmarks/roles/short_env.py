"""The environment of the rollout benchmarks: one question, one answer, a reward that costs nothing."""

from __future__ import annotations

import verifiers.legacy as vf
from datasets import Dataset


def load_environment(rows: int = 64) -> vf.Environment:
    """A classic single-turn environment; the reward is a number from 0 to 1 that depends on the answer's length."""
    data = [{"question": f"Question {n}: what follows from this?", "answer": str(n)} for n in range(rows)]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(data), rubric=vf.Rubric(funcs=[length]))


def length(completion: vf.Messages) -> float:
    """Of the answer, modulo 7."""
    return len(str(completion[-1].content)) % 7 / 6
