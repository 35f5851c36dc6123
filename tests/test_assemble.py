"""Rollouts of one item become a scored group: nothing changes place, errors carry no samples, the same input gives the same bytes."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from distaff.config import RunConfig
from distaff.environments.protocol import Play, Score
from distaff.types import EnvironmentRef, Mode, PolicySpan, RolloutFailure, RolloutItem, ScoredGroup
from distaff.wire import SCHEMA, decode_group, encode_group
from distaff_worker.advantages import group_advantages
from distaff_worker.assemble import GroupContext, PlayedRollout, assemble_group, group_verdict
from distaff_worker.steps import SampleTokens

FAILURE = RolloutFailure(kind="environment_error", boundary="step", message="x" * 5000)


def context(mode: Mode = "rl", *, messages: bool = True) -> GroupContext:
    config = RunConfig.model_validate({"run": {"mode": mode}, "wire": {"messages": messages}})
    item = RolloutItem(run="run", seq=7, key="k", epoch=1, split="train", task={"question": "?"}, seed=11)
    return GroupContext(
        item=item,
        config=config,
        schema=SCHEMA,
        environment=EnvironmentRef(id="env", version="1", api="classic", split="train", args_hash="0" * 16),
        model="m",
        tokenizer="t",
        vocab_size=100_000,
        policy=PolicySpan(start=3, end=4),
        execution="run-000000007.1",
        worker="w",
        attempt=2,
        seconds=1.5,
        created=1000.0,
    )


def tokens(marker: int, *, length: int = 4, logprobs: bool = True) -> SampleTokens:
    """A sample whose ids and logprobs all carry the marker."""
    mask = np.arange(length) >= length // 2
    return SampleTokens(
        token_ids=np.full(length, marker, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -float(marker), 0).astype(np.float32) if logprobs else None,
    )


def played(
    marker: int,
    *,
    reward: float | None = None,
    samples: int = 1,
    error: RolloutFailure | None = None,
    logprobs: bool = True,
    **play: Any,
) -> PlayedRollout:
    fields: dict[str, Any] = {
        "seat": "",
        "messages": [{"role": "assistant", "content": str(marker)}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "turns": marker % 5 + 1,
        "stop_condition": "done",
        "truncated": False,
        "error": None,
        "timings": {"setup": 0.25},
    }
    return PlayedRollout(
        play=Play(**{**fields, **play}),
        score=None if error else Score(reward=float(marker) if reward is None else reward, metrics={"m": marker}),
        samples=[tokens(marker, length=4 + n, logprobs=logprobs) for n in range(samples)],
        finish_reason="stop",
        prompt_tokens=marker,
        completion_tokens=2 * marker,
        timings={"engine": 0.5},
        error=error,
    )


def assembled(rollouts: list[PlayedRollout], mode: Mode = "rl", *, messages: bool = True) -> ScoredGroup:
    advantages = group_advantages([one.reward for one in rollouts], seats=[one.play.seat for one in rollouts])
    return assemble_group(context(mode, messages=messages), rollouts, advantages=advantages.tolist())


def test_no_reward_mask_or_logprob_lands_on_another_rollout() -> None:
    """Sixteen rollouts with a marker each, in shuffled order, with one to three samples: everything of one carries its marker."""
    markers = random.Random(3).sample(range(10, 100), 16)
    group = decode_group(encode_group(assembled([played(m, samples=m % 3 + 1) for m in markers])))
    mean = sum(markers) / len(markers)
    seen = []
    for sample in group.samples:
        rollout = group.rollouts[sample.rollout]
        marker = markers[sample.rollout]
        seen.append((sample.rollout, sample.branch))
        assert set(sample.token_ids.tolist()) == {marker}
        assert sample.logprobs is not None
        assert set(sample.logprobs[sample.loss_mask].tolist()) == {-float(marker)}
        assert sample.advantage == pytest.approx(marker - mean, abs=1e-4)
        assert (rollout.reward, rollout.metrics, rollout.completion_tokens) == (marker, {"m": marker}, 2 * marker)
        assert rollout.messages[0]["content"] == str(marker)
        assert rollout.timings == {"setup": 0.25, "engine": 0.5}
    assert seen == [(r, b) for r, m in enumerate(markers) for b in range(m % 3 + 1)]


def test_a_rollout_with_an_error_has_no_samples_and_moves_no_advantage() -> None:
    """Its record stays, with the reason; the others' advantages are as if it were not there."""
    group = assembled([played(10), played(99, error=FAILURE), played(20)])
    assert group.samples.rollouts.tolist() == [0, 2]
    assert group.samples.advantages.tolist() == [-5.0, 5.0]
    broken = group.rollouts[1]
    assert (broken.verdict, broken.reward) == ("environment_error", None)
    assert broken.error is not None
    assert len(broken.error.message) == 2000
    assert (group.statistics.rollouts, group.statistics.scored) == (3, 2)
    assert (group.statistics.reward_mean, group.statistics.reward_std) == (15.0, 5.0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_is_a_scoring_error(reward: float | None) -> None:
    """It is never passed on, shifted or replaced."""
    one = dataclasses.replace(played(10), score=Score(reward=reward, metrics={}))
    group = assembled([one, played(20)])
    assert group.rollouts[0].verdict == "scoring_error"
    assert group.samples.rollouts.tolist() == [1]


def test_a_truncated_rollout_is_kept_and_says_so() -> None:
    """Truncation is an outcome, not an error."""
    group = assembled([played(10, truncated=True), played(20)])
    assert [rollout.verdict for rollout in group.rollouts] == ["truncated", "ok"]
    assert len(group.samples) == 2


def test_the_first_failure_on_the_way_is_the_one_recorded() -> None:
    """A play that failed was not scored for that reason, whatever its score says."""
    scored = Score(
        reward=None, metrics={}, error=RolloutFailure(kind="scoring_error", boundary="reward", message="late")
    )
    one = dataclasses.replace(played(1, error=FAILURE), score=scored)
    assert one.failure is not None
    assert one.failure.kind == "environment_error"


def test_equal_rewards_are_a_verdict_seat_by_seat() -> None:
    """Seats have rewards of their own; in SFT equal rewards mean nothing."""
    equal = [played(5), played(5, seat="b", reward=9.0), played(5), played(5, seat="b", reward=9.0)]
    assert group_verdict(equal) == "zero_variance"
    assert group_verdict([*equal, played(5, seat="b", reward=8.0)]) == "kept"
    assert assembled([played(5), played(5)]).verdict == "zero_variance"
    assert assembled([played(5, logprobs=False), played(5, logprobs=False)], "sft").verdict == "kept"


def test_sft_has_no_logprobs_and_no_advantage_and_evaluation_no_samples() -> None:
    """The shape of each mode."""
    sft = assembled([played(10, logprobs=False), played(20, logprobs=False)], "sft")
    assert sft.samples.logprobs is None
    assert sft.samples.advantages.tolist() == [0.0, 0.0]
    evaluated = assembled([played(10, samples=0), played(20, samples=0)], "eval")
    assert len(evaluated.samples) == 0
    assert evaluated.statistics.reward_mean == 15.0


def test_conversations_are_left_out_where_the_run_does_not_keep_them() -> None:
    """Messages, tools and the item's row go; what a trainer reads stays the same."""
    kept, bare = assembled([played(10), played(20)]), assembled([played(10), played(20)], messages=False)
    assert kept.task
    assert not bare.task
    assert not any(rollout.messages or rollout.tools for rollout in bare.rollouts)
    assert bare.samples.token_ids.tolist() == kept.samples.token_ids.tolist()


def test_the_same_input_gives_the_same_bytes() -> None:
    """P29: no clock, no randomness, no order of a set."""
    rollouts = [played(m, samples=2) for m in (10, 30, 20)]
    assert encode_group(assembled(rollouts)) == encode_group(assembled(list(rollouts)))


def test_advantages_of_another_number_of_rollouts_are_refused() -> None:
    """They would be paired by position with the wrong rollouts."""
    with pytest.raises(ValueError, match="2 rollouts but 1 advantages"):
        assemble_group(context(), [played(1), played(2)], advantages=[0.0])
