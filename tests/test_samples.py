"""Steps become samples by the exact-prefix rule."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distaff.errors import AlignmentError
from distaff_worker.advantages import group_advantages
from distaff_worker.samples import steps_to_samples
from distaff_worker.steps import TokenStep


def step(prompt: list[int], completion: list[int], logprobs: list[float] | None = None) -> TokenStep:
    values = [-0.5 * token for token in completion] if logprobs is None else logprobs
    return TokenStep(prompt_ids=prompt, completion_ids=completion, logprobs=values, finish_reason="stop")


def test_a_conversation_that_extends_itself_is_one_sample() -> None:
    """Prompts that continue the tokens so far add untrained tokens, completions trained ones, logprobs at their own tokens."""
    (sample,) = steps_to_samples([step([1, 2], [3, 4]), step([1, 2, 3, 4, 5, 6], [7])])
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, False, True]
    assert sample.logprobs is not None
    assert sample.logprobs.tolist() == [0, 0, -1.5, -2, 0, 0, -3.5]
    arrays = (sample.token_ids, sample.loss_mask, sample.logprobs)
    assert [str(array.dtype) for array in arrays] == ["int32", "bool", "float32"]


def test_a_prompt_that_differs_in_one_early_token_opens_a_sample() -> None:
    """Equal last tokens do not make a prefix."""
    samples = steps_to_samples([step([1, 2], [3, 4]), step([9, 2, 3, 4, 5], [6])])
    assert [sample.token_ids.tolist() for sample in samples] == [[1, 2, 3, 4], [9, 2, 3, 4, 5, 6]]


def test_a_step_joins_the_longest_sample_that_fits() -> None:
    """Two samples are prefixes of the prompt; the longer one is continued, the shorter stays."""
    steps = [step([1], [2]), step([1], [2, 3]), step([1, 2, 3, 4], [5])]
    assert [sample.token_ids.tolist() for sample in steps_to_samples(steps)] == [[1, 2], [1, 2, 3, 4, 5]]


def test_interleaved_conversations_are_told_apart() -> None:
    """Agents that take turns give one sample each, whatever the order of their steps."""
    steps = [step([1], [2]), step([8], [9]), step([1, 2, 3], [4]), step([8, 9, 3], [5])]
    assert [sample.token_ids.tolist() for sample in steps_to_samples(steps)] == [[1, 2, 3, 4], [8, 9, 3, 5]]


def test_a_prompt_shorter_than_the_sample_does_not_join_it() -> None:
    """Going back in the conversation branches; the common part is trained in the first branch only."""
    first, second = steps_to_samples([step([1, 2], [3, 4, 5]), step([1, 2, 3], [6])])
    assert second.token_ids.tolist() == [1, 2, 3, 6]
    assert second.loss_mask.tolist() == [False, False, False, True]
    assert int(first.loss_mask.sum() + second.loss_mask.sum()) == 4


def test_steps_without_a_completion_leave_no_trace() -> None:
    """An aborted turn has nothing to train."""
    assert steps_to_samples([step([1, 2], [])]) == []


def test_sft_steps_have_no_logprobs() -> None:
    """None stays None."""
    (sample,) = steps_to_samples([TokenStep(prompt_ids=[1], completion_ids=[2], logprobs=None, finish_reason="stop")])
    assert sample.logprobs is None


def test_misaligned_logprobs_are_refused() -> None:
    """Too few logprobs, or logprobs on some turns only, are errors, not shifts."""
    with pytest.raises(AlignmentError, match="2 sampled tokens but 1"):
        steps_to_samples([step([1], [2, 3], [-1.0])])
    bare = TokenStep(prompt_ids=[1], completion_ids=[2], logprobs=None, finish_reason="stop")
    with pytest.raises(AlignmentError, match="some turns"):
        steps_to_samples([step([1], [2]), bare])


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_each_sampled_token_is_trained_exactly_once(data: st.DataObject) -> None:
    """Random trees of turns over a tiny alphabet (so that accidental prefixes are common): the trained tokens are
    the sampled ones, each with its logprob and behind exactly the tokens it was sampled behind."""
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    steps: list[TokenStep] = []
    for number in range(data.draw(st.integers(1, 8))):
        before = data.draw(st.sampled_from([None, *steps]))
        root = [] if before is None else before.prompt_ids + before.completion_ids
        completion = data.draw(tokens)
        logprobs = [-float(number) - n / 100 for n in range(len(completion))]
        steps.append(step(root + data.draw(tokens), completion, logprobs))
    samples = steps_to_samples(steps)
    found = []
    for sample in samples:
        ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        assert sample.logprobs is not None
        assert all(value == 0 for value, trained in zip(sample.logprobs.tolist(), mask, strict=True) if not trained)
        found += [(ids[:at], ids[at], float(sample.logprobs[at])) for at, trained in enumerate(mask) if trained]
    expected = [
        (one.prompt_ids + one.completion_ids[:n], one.completion_ids[n], float(np.float32((one.logprobs or [])[n])))
        for one in steps
        for n in range(len(one.completion_ids))
    ]
    assert sorted(found) == sorted(expected)


def test_forty_turns_of_long_prompts_are_joined_in_milliseconds() -> None:
    """Generous bound: 40 turns up to 80,000 tokens; copying the sample for each token or turn in Python would take seconds."""
    steps, ids = [], list(range(2000))
    for turn in range(40):
        completion = list(range(turn, turn + 1500))
        steps.append(step(ids, completion))
        ids = ids + completion + [7] * 500
    began = time.perf_counter()
    (sample,) = steps_to_samples(steps)
    assert time.perf_counter() - began < 2
    assert int(sample.loss_mask.sum()) == 40 * 1500


def test_advantages_are_centred_within_each_seat() -> None:
    """Rewards of one seat say nothing about another's, and a rollout without a reward counts nowhere."""
    found = group_advantages([1.0, 3.0, None, 10.0, 20.0], seats=["a", "a", "a", "b", "b"])
    assert found.tolist() == [-1.0, 1.0, 0.0, -5.0, 5.0]
    assert found.dtype == np.float32


def test_advantages_can_be_divided_by_the_standard_deviation() -> None:
    """GRPO's form: population standard deviation, epsilon in the denominator."""
    found = group_advantages([0.0, 0.0, 0.0, 4.0], divide_by_std=True, epsilon=1e-6)
    assert found.tolist() == pytest.approx([-1 / 3**0.5] * 3 + [3**0.5], abs=1e-5)


def test_equal_rewards_have_no_advantage() -> None:
    """Not even a rounding error that the division would blow up."""
    assert group_advantages([0.1] * 7, divide_by_std=True).tolist() == [0.0] * 7
    assert group_advantages([None, None]).tolist() == [0.0, 0.0]
    assert group_advantages([]).tolist() == []
