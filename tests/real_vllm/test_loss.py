"""The example's loss, in torch: signs, offsets and rows."""

from __future__ import annotations

import json

import pytest

from tests.real_vllm.support import TOLERANCE, in_vllm_venv, model_folder

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_the_loss_makes_good_samples_likelier_and_bad_ones_less() -> None:
    """Its log-probabilities are those the tokens were sampled with, each one trained once; steps move each sample as its own advantage says."""
    found = json.loads(in_vllm_venv("tests.real_vllm.loss_check", str(model_folder())))
    assert found["difference"] < TOLERANCE
    assert found["trained"] == sum(row + 2 for row in range(6))
    assert all(change * advantage > 0 for change, advantage in zip(found["change"], found["advantages"], strict=True))
