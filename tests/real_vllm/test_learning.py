"""The example learns, in short: the whole chain from the real vLLM to a torch trainer and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from examples.grpo_cpu.__main__ import start_model
from examples.grpo_cpu.curve import rewards
from examples.grpo_cpu.farm import Plan, play

from tests.real_vllm.support import TOLERANCE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
STEPS = 24
RISE = 0.1
"""Of the mean reward from the first quarter of the steps to the last; it was 0.25 and 0.4 with two seeds."""


def test_the_mean_reward_rises_and_trainer_and_engine_agree(tmp_path: Path) -> None:
    """Twenty-four steps of the example: what the trainer computes for a sampled token is what the engine sampled it with."""
    plan = Plan(folder=tmp_path, model=start_model(0), steps=STEPS, seed=0)
    play(plan)
    records = [json.loads(line) for line in plan.log.read_text().splitlines()]
    values = rewards(plan.log)
    first, last = sum(values[:6]) / 6, sum(values[-6:]) / 6
    print(f"mean reward {first:.3f} -> {last:.3f}")
    assert len(records) == STEPS
    compared = [record["difference_max"] for record in records if record["difference_max"] is not None]
    assert len(compared) > STEPS / 2
    assert max(compared) < TOLERANCE
    assert last > first + RISE
