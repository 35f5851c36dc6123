"""Turns steps into training sequences by the exact-prefix rule.

Invariant: each sampled token is trained in exactly one sequence, once, with the log-probability it was sampled with.
Never looks at text: what does not extend a sequence token for token opens a new one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distaff.errors import AlignmentError
from distaff_worker.steps import SampleTokens, TokenStep


class _Open:
    """A sequence under construction: the tokens so far and which spans of them were sampled."""

    __slots__ = ("ids", "logprobs", "spans")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.logprobs: list[list[float]] = []

    def is_prefix_of(self, prompt: Sequence[int]) -> bool:
        """Compares the last token first: a prompt that was rendered anew mostly differs there."""
        n = len(self.ids)
        return n <= len(prompt) and prompt[n - 1] == self.ids[-1] and prompt[:n] == self.ids

    def append(self, step: TokenStep) -> None:
        self.ids += step.prompt_ids[len(self.ids) :]
        start = len(self.ids)
        self.ids += step.completion_ids
        self.spans.append((start, len(self.ids)))
        if step.logprobs is not None:
            self.logprobs.append(step.logprobs)

    def finished(self, *, with_logprobs: bool) -> SampleTokens:
        mask = np.zeros(len(self.ids), np.bool_)
        logprobs = np.zeros(len(self.ids), np.float32) if with_logprobs else None
        for number, (start, end) in enumerate(self.spans):
            mask[start:end] = True
            if logprobs is not None:
                logprobs[start:end] = self.logprobs[number]
        return SampleTokens(token_ids=np.array(self.ids, np.int32), loss_mask=mask, logprobs=logprobs)


def steps_to_samples(steps: Sequence[TokenStep]) -> list[SampleTokens]:
    """The training sequences of one rollout (and seat), in the order in which they were opened.

    A step joins the longest sequence so far that is an exact token prefix of its prompt, else it opens a new one; what the
    prompt adds is not trained, the completion is. Steps without a completion are left out. Reads each prompt once, so
    the cost is linear in the size of the steps while turns extend each other.
    Rule: prime-rl's `interleave_rollout` (orchestrator/trajectories.py).
    Raises AlignmentError for log-probabilities of another length than the completion, or on some steps only.
    """
    steps = [step for step in steps if step.completion_ids]
    with_logprobs = _with_logprobs(steps)
    samples: list[_Open] = []
    for step in steps:
        fitting = (sample for sample in samples if sample.is_prefix_of(step.prompt_ids))
        sample = max(fitting, key=lambda one: len(one.ids), default=None)
        if sample is None:
            sample = _Open()
            samples.append(sample)
        sample.append(step)
    return [sample.finished(with_logprobs=with_logprobs) for sample in samples]


def _with_logprobs(steps: Sequence[TokenStep]) -> bool:
    for turn, step in enumerate(steps):
        if step.logprobs is not None and len(step.logprobs) != len(step.completion_ids):
            raise AlignmentError(
                f"turn {turn} has {len(step.completion_ids)} sampled tokens but {len(step.logprobs)} log-probabilities"
            )
    some = {step.logprobs is not None for step in steps}
    if len(some) > 1:
        raise AlignmentError("some turns of the rollout have log-probabilities and some have none")
    return some == {True}
