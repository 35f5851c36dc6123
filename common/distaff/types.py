"""The values that travel between producer, workers and consumers. Data only: no I/O, no behaviour.

Invariant: everything here is frozen; what is inside an item is JSON (it goes through the queue), what is inside a
sample is a numpy array (it goes through the stream as raw little-endian buffers).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

JSON: TypeAlias = Any  # None | bool | int | float | str | list[JSON] | dict[str, JSON]
Message: TypeAlias = dict[str, JSON]
"""One chat message in the OpenAI shape: role, content, and where they apply reasoning_content, tool_calls
(`{"id", "type": "function", "function": {"name", "arguments": <JSON string>}}`), tool_call_id, name."""
Tool: TypeAlias = dict[str, JSON]
"""One tool definition in the OpenAI shape: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

IntArray: TypeAlias = NDArray[np.int32]
OffsetArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]

Mode = Literal["rl", "sft", "eval"]
Split = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "none"]
RolloutVerdict = Literal[
    "ok", "truncated", "environment_error", "engine_error", "scoring_error", "tokenization_error", "timeout"
]
GroupVerdict = Literal["kept", "zero_variance"]
DeadKind = Literal[
    "environment_error",
    "engine_error",
    "scoring_error",
    "tokenization_error",
    "timeout",
    "too_large",
    "too_few_rollouts",
    "dropped",
    "stopped",
    "lost",
    "rejected",
]


MAX_ITEM_BYTES = 16 << 20
"""Of an item as JSON; producer.max_item_bytes may be less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutItem:
    """One dataset row to be played, as it waits on the queue (JSON)."""

    run: str
    seq: int
    """Number of the item in its run, 0, 1, 2, ... in the order of admission."""
    key: str
    """Names the row across runs: environment, version, hash of its arguments, split, row."""
    epoch: int
    split: Split
    task: dict[str, JSON]
    """The row; every column of the dataset is kept."""
    seed: int
    priority: int = 0
    trace: dict[str, str] = field(default_factory=dict)
    """W3C trace context (`traceparent`, `tracestate`) or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailure:
    """Why a rollout has no usable reward."""

    kind: RolloutVerdict
    boundary: str
    """The place: "setup", "step", "tool:<name>", "reward", "engine", "tokenization", "deadline", ..."""
    message: str
    """Redacted; at most 2,000 characters."""
    retryable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One play of an item, scored. Its token sequences are the samples whose `rollout` is this `index`."""

    index: int
    """0 <= index < len(group.rollouts)."""
    verdict: RolloutVerdict
    reward: float | None
    """Sum of weight * reward over the rubric; None when the rollout has an error."""
    metrics: dict[str, float]
    """Raw (unweighted) value of every reward function and metric of the rubric; names that begin with "distaff/" are the worker's own."""
    turns: int
    finish_reason: FinishReason
    """Of the last model turn."""
    stop_condition: str
    """The environment's own word for why the rollout ended, "" if it has none."""
    truncated: bool
    error: RolloutFailure | None
    timings: dict[str, float]
    """Seconds by stage: "setup", "engine", "environment", "score", "tokenize", "total"."""
    prompt_tokens: int
    """Prompt tokens the engine was sent, summed over the turns."""
    completion_tokens: int
    """Tokens the model sampled, summed over the turns."""
    messages: list[Message]
    """The whole conversation, final environment messages included; empty when the run does not keep messages."""
    tools: list[Tool]
    answer: str | None = None
    """What the environment's parser took for the answer, where it has a parser."""
    seat: str = ""
    """Name of the agent in a multi-agent environment, else ""."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainingSample:
    """One token sequence for a trainer, L tokens long."""

    token_ids: IntArray
    """int32 (L,)."""
    loss_mask: BoolArray
    """bool (L,): True exactly on the tokens the policy sampled (RL) or is to learn (SFT)."""
    logprobs: FloatArray | None
    """float32 (L,), natural log, under the policy that sampled; 0.0 where the mask is False. None in SFT."""
    advantage: float
    """Of the rollout, the same for each of its samples; 0.0 in SFT."""
    rollout: int
    """Index into `ScoredGroup.rollouts`."""
    branch: int
    """0, 1, ... among the samples of one rollout."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampleArrays:
    """The N samples of a group, concatenated to T tokens: the shape variable-length attention wants."""

    token_ids: IntArray
    """int32 (T,)."""
    offsets: OffsetArray
    """int64 (N + 1,): sample i is [offsets[i], offsets[i + 1])."""
    loss_mask: BoolArray
    """bool (T,)."""
    logprobs: FloatArray | None
    """float32 (T,) or None (SFT)."""
    advantages: FloatArray
    """float32 (N,)."""
    rollouts: IntArray
    """int32 (N,): index into `ScoredGroup.rollouts`."""
    branches: IntArray
    """int32 (N,)."""

    def __len__(self) -> int:
        return len(self.advantages)

    def __getitem__(self, i: int) -> TrainingSample:
        """Sample i as views of the arrays; raises IndexError outside [0, N)."""
        if not 0 <= i < len(self):
            raise IndexError(i)
        span = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return TrainingSample(
            token_ids=self.token_ids[span],
            loss_mask=self.loss_mask[span],
            logprobs=None if self.logprobs is None else self.logprobs[span],
            advantage=float(self.advantages[i]),
            rollout=int(self.rollouts[i]),
            branch=int(self.branches[i]),
        )

    def __iter__(self) -> Iterator[TrainingSample]:
        return (self[i] for i in range(len(self)))

    @classmethod
    def concatenate(cls, samples: Sequence[TrainingSample], *, with_logprobs: bool) -> SampleArrays:
        """Lay samples end to end. `with_logprobs` decides for an empty group whether it is an RL one."""
        lengths = [len(sample.token_ids) for sample in samples]
        return cls(
            token_ids=_join([sample.token_ids for sample in samples], np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            loss_mask=_join([sample.loss_mask for sample in samples], np.bool_),
            logprobs=_join([_required(sample.logprobs) for sample in samples], np.float32) if with_logprobs else None,
            advantages=np.array([sample.advantage for sample in samples], np.float32),
            rollouts=np.array([sample.rollout for sample in samples], np.int32),
            branches=np.array([sample.branch for sample in samples], np.int32),
        )


def _join(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def _required(logprobs: FloatArray | None) -> FloatArray:
    if logprobs is None:
        raise ValueError("an RL sample without log-probabilities")
    return logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRef:
    """Which environment made the group, down to what tells two builds of it apart."""

    id: str
    version: str
    api: Literal["classic", "v1"]
    split: Split
    args_hash: str
    """First 16 hex digits of the SHA-256 of the arguments' canonical JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpan:
    """Policy versions a group was played under: read when it was dispatched and again when it was complete."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Over the rollouts of the group that have a reward. NaN-free: all 0.0 when there is none."""

    rollouts: int
    scored: int
    reward_mean: float
    reward_std: float
    """Population standard deviation."""
    reward_min: float
    reward_max: float
    tokens: int
    trained_tokens: int
    seconds: float
    """Wall time from dispatch to completion."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoredGroup:
    """All rollouts of one item, scored and tokenized: one entry of the group stream."""

    schema: tuple[int, int]
    """(major, minor) of the wire format."""
    run: str
    seq: int
    group_id: str
    """"<run>-<seq>"; the same whoever played it and however often: consumers deduplicate by it."""
    key: str
    environment: EnvironmentRef
    mode: Mode
    model: str
    tokenizer: str
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    temperature: float
    """The sampling temperature of the run, which log-probabilities have to be read with."""
    policy: PolicySpan
    epoch: int
    seed: int
    task: dict[str, JSON]
    """The item's row, or empty when the run does not keep messages."""
    verdict: GroupVerdict
    rollouts: list[Rollout]
    samples: SampleArrays
    statistics: GroupStatistics
    execution: str
    worker: str
    attempt: int
    """1 for the first play of the item, 2 after one failed or lost attempt, ..."""
    created: float
    """Unix time in seconds when the group was complete, on the worker's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An item that was given up, whole, with the reason."""

    item: RolloutItem
    kind: DeadKind
    boundary: str
    message: str
    """Redacted; at most 2,000 characters."""
    attempts: int
    first: float
    """Unix time in seconds of the first attempt."""
    last: float
    worker: str


REWARD_LIMIT = 1e30
"""Sums, variances and float32 advantages of rewards up to here are finite."""


def reward_problem(reward: Any) -> str | None:
    """What keeps `reward` from being one, None when nothing does."""
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        return f"the reward is {reward!r}, which is not a finite number"
    return None if abs(number) <= REWARD_LIMIT else f"the reward is {reward!r}, which is beyond {REWARD_LIMIT:g}"


def finite_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries of `values` that are finite numbers, as floats."""
    numbers = {
        k: float(v) for k, v in values.items() if isinstance(v, (int, float, np.number)) and not isinstance(v, bool)
    }
    return {k: v for k, v in numbers.items() if np.isfinite(v)}
