"""The one definition of a well-formed scored group, checked where it is written and again where it is read.

Invariant: a group that passes has one loss-mask bit per token and, in RL, one log-probability per token: finite, at most 0
(within LOGPROB_SLACK) on sampled tokens and exactly 0 elsewhere; every id is inside the vocabulary and every sample belongs
to a rollout that is there. Never repairs anything.
"""

from __future__ import annotations

from math import isfinite
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from distaff.errors import AlignmentError
from distaff.keys import job_id
from distaff.types import SampleArrays, ScoredGroup

LOGPROB_SLACK = 1e-4
"""Engines round: a log-probability may be this much above 0."""
LOGPROB_FLOOR = -9999.0
"""Stands for the log-probability of a sampled token that the engine had none for, or minus infinity: exact in float32. An importance ratio
against it is meaningless: leave tokens with `logprobs <= LOGPROB_FLOOR` out of the loss."""

_DTYPES: dict[str, Any] = {
    "token_ids": np.dtype(np.int32),
    "offsets": np.dtype(np.int64),
    "loss_mask": np.dtype(np.bool_),
    "advantages": np.dtype(np.float32),
    "rollouts": np.dtype(np.int32),
    "branches": np.dtype(np.int32),
}
_VECTOR = 1


def check_group(group: ScoredGroup) -> None:
    """Raise AlignmentError, naming the group, the sample and the token, unless every array of `group` fits every other."""
    try:
        _check_identity(group)
        _check_shapes(group.samples)
        _check_mode(group)
        _check_samples(group)
        _check_tokens(group)
        _check_rollouts(group)
    except _Misfit as misfit:
        raise AlignmentError(f"group {group.group_id}: {misfit}; it must not be trained on") from None


class _Misfit(Exception):
    """What does not fit; becomes an AlignmentError that names the group."""


def _fail(text: str) -> NoReturn:
    raise _Misfit(text)


def _check_identity(group: ScoredGroup) -> None:
    if group.seq < 0 or group.group_id != job_id(group.run, group.seq):
        _fail(f"its id is not that of run {group.run!r}, item {group.seq}")
    if group.vocab_size < 1 and group.mode != "eval":
        _fail(f"vocab_size is {group.vocab_size}")
    if not isfinite(group.temperature):
        _fail(f"temperature is {group.temperature}")


def _check_shapes(samples: SampleArrays) -> None:
    for name, dtype in _DTYPES.items():
        _check_vector(name, getattr(samples, name), dtype)
    tokens, count = len(samples.token_ids), len(samples.advantages)
    if samples.logprobs is not None:
        _check_vector("logprobs", samples.logprobs, np.dtype(np.float32))
        if len(samples.logprobs) != tokens:
            _fail(f"{tokens} token ids but {len(samples.logprobs)} log-probabilities")
    if len(samples.loss_mask) != tokens:
        _fail(f"{tokens} token ids but a loss mask of {len(samples.loss_mask)}")
    if len(samples.offsets) != count + 1:
        _fail(f"{count} samples need {count + 1} offsets, there are {len(samples.offsets)}")
    if len(samples.rollouts) != count or len(samples.branches) != count:
        _fail(f"{count} samples but {len(samples.rollouts)} rollout and {len(samples.branches)} branch indices")


def _check_vector(name: str, array: NDArray[Any], dtype: Any) -> None:
    if array.dtype != dtype or array.ndim != _VECTOR:
        _fail(f"{name} is {array.dtype} of shape {array.shape}, not a vector of {dtype}")


def _check_mode(group: ScoredGroup) -> None:
    samples = group.samples
    if group.mode == "rl" and samples.logprobs is None:
        _fail("an RL group without log-probabilities")
    if group.mode != "rl" and samples.logprobs is not None:
        _fail(f"a group of mode {group.mode} with log-probabilities")
    if group.mode == "eval" and len(samples):
        _fail(f"an evaluation group with {len(samples)} samples")


def _check_samples(group: ScoredGroup) -> None:
    samples = group.samples
    offsets = samples.offsets.tolist()
    if offsets[0] != 0 or offsets[-1] != len(samples.token_ids):
        _fail(f"offsets run from {offsets[0]} to {offsets[-1]}, not from 0 to {len(samples.token_ids)}")
    if offsets != sorted(offsets):
        _fail("offsets go backwards")
    # These vectors are short: lists are faster than numpy's fixed cost.
    rollouts = samples.rollouts.tolist()
    if rollouts and not 0 <= min(rollouts) <= max(rollouts) < len(group.rollouts):
        _fail(f"a sample belongs to a rollout outside 0..{len(group.rollouts) - 1}")
    if min(samples.branches.tolist(), default=0) < 0:
        _fail("a branch index is negative")
    if not all(map(isfinite, samples.advantages.tolist())):
        _fail("an advantage is not finite")


def _check_tokens(group: ScoredGroup) -> None:
    samples = group.samples
    if not len(samples.token_ids):
        return
    # As unsigned numbers negative ids are huge, so that one pass finds both ends.
    if samples.token_ids.view(np.uint32).max() >= group.vocab_size:
        outside = (samples.token_ids < 0) | (samples.token_ids >= group.vocab_size)
        _fail(f"{_place(samples, outside)} has an id outside the vocabulary of {group.vocab_size}")
    if samples.logprobs is not None:
        _check_logprobs(samples, samples.logprobs)


def _check_logprobs(samples: SampleArrays, logprobs: NDArray[np.float32]) -> None:
    # NaN survives min and max and fails both comparisons.
    if not (logprobs.min() > -np.inf and logprobs.max() <= LOGPROB_SLACK):
        bad = ~(np.isfinite(logprobs) & (logprobs <= LOGPROB_SLACK))
        _fail(f"{_place(samples, bad)} has the log-probability {logprobs[bad.argmax()]}")
    stray = np.greater(logprobs != 0, samples.loss_mask)
    if stray.any():
        _fail(f"{_place(samples, stray)} has a log-probability but is outside the loss mask")


def _place(samples: SampleArrays, where: NDArray[np.bool_]) -> str:
    token = int(where.argmax())
    sample = int(np.searchsorted(samples.offsets, token, side="right")) - 1
    return f"token {token - int(samples.offsets[sample])} of sample {sample}"


def _check_rollouts(group: ScoredGroup) -> None:
    for place, rollout in enumerate(group.rollouts):
        if rollout.index != place:
            _fail(f"rollout {place} carries the index {rollout.index}")
        if rollout.reward is not None and not isfinite(rollout.reward):
            _fail(f"rollout {place} has the reward {rollout.reward}")
        if not all(map(isfinite, rollout.metrics.values())):
            _fail(f"rollout {place} has a metric that is not finite")
