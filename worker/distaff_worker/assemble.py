"""Builds the scored group of one item from what the stages before have made of it.

Invariant: sample i belongs to the rollout it is listed under, by construction; a rollout with an error has no samples. Same inputs
give the same group: the clock is an argument. Never drops a group: what is to be done with a verdict is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from distaff.config import RunConfig
from distaff.environments.protocol import Play, Score
from distaff.keys import job_id
from distaff.types import (
    EnvironmentRef,
    FinishReason,
    GroupStatistics,
    GroupVerdict,
    PolicySpan,
    Rollout,
    RolloutFailure,
    RolloutItem,
    RolloutVerdict,
    SampleArrays,
    ScoredGroup,
    TrainingSample,
    finite_metrics,
)
from distaff_worker.images import by_reference
from distaff_worker.steps import SampleTokens

MESSAGE_LIMIT = 2000
"""Characters of a failure's message."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlayedRollout:
    """One play of the item (of one seat), scored and tokenized."""

    play: Play
    score: Score | None
    """None when the play was not scored because it has an error."""
    samples: Sequence[SampleTokens]
    """Empty in evaluation."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds, added to those of the play: "engine", "tokenize", "score", "total"."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Added to the rubric's."""
    error: RolloutFailure | None = None
    """A failure found outside the play: tokenization, deadline."""

    @property
    def failure(self) -> RolloutFailure | None:
        """The first failure on the way, None for a usable rollout."""
        found = self.play.error or self.error or (self.score.error if self.score else None)
        if found is not None:
            return replace(found, message=found.message[:MESSAGE_LIMIT])
        if self.score is None or self.score.reward is None or not math.isfinite(self.score.reward):
            value = None if self.score is None else self.score.reward
            return RolloutFailure(
                kind="scoring_error",
                boundary="reward",
                message=f"the environment's rubric gave no finite reward ({value})",
            )
        return None

    @property
    def reward(self) -> float | None:
        """None exactly when there is a failure."""
        return self.score.reward if self.failure is None and self.score is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """Everything about a group that is not a rollout."""

    item: RolloutItem
    config: RunConfig
    schema: tuple[int, int]
    environment: EnvironmentRef
    model: str
    tokenizer: str
    vocab_size: int
    policy: PolicySpan
    execution: str
    worker: str
    attempt: int
    seconds: float
    """Wall time from dispatch to completion."""
    created: float
    """Unix seconds."""
    temperature: float | None = None
    """What was sampled with, where the engine has not taken the run's."""


def assemble_group(
    context: GroupContext, rollouts: Sequence[PlayedRollout], *, advantages: Sequence[float]
) -> ScoredGroup:
    """The group, rollout i being `rollouts[i]` with `advantages[i]` (ignored outside RL)."""
    if len(advantages) != len(rollouts):
        raise ValueError(f"{len(rollouts)} rollouts but {len(advantages)} advantages")
    config, item = context.config, context.item
    mode, keep = config.run.mode, config.wire.messages
    records = [_record(index, played, keep_messages=keep) for index, played in enumerate(rollouts)]
    weights = [float(advantage) if mode == "rl" else 0.0 for advantage in advantages]
    samples = SampleArrays.concatenate(_samples(rollouts, weights), with_logprobs=mode == "rl")
    return ScoredGroup(
        schema=context.schema,
        run=item.run,
        seq=item.seq,
        group_id=job_id(item.run, item.seq),
        key=item.key,
        environment=context.environment,
        mode=mode,
        model=context.model,
        tokenizer=context.tokenizer,
        vocab_size=context.vocab_size,
        temperature=config.sampling.temperature if context.temperature is None else context.temperature,
        policy=context.policy,
        epoch=item.epoch,
        seed=item.seed,
        task=by_reference(item.task) if keep else {},
        verdict=group_verdict(rollouts) if mode == "rl" else "kept",
        rollouts=records,
        samples=samples,
        statistics=_statistics(records, samples, seconds=context.seconds),
        execution=context.execution,
        worker=context.worker,
        attempt=context.attempt,
        created=context.created,
    )


def group_verdict(rollouts: Sequence[PlayedRollout]) -> GroupVerdict:
    """ "zero_variance" when in every seat all rewards are equal, so that no rollout has an advantage over another."""
    rewards: dict[str, set[float]] = {}
    for played in rollouts:
        if played.reward is not None:
            rewards.setdefault(played.play.seat, set()).add(played.reward)
    return "zero_variance" if all(len(values) == 1 for values in rewards.values()) else "kept"


def _record(index: int, played: PlayedRollout, *, keep_messages: bool) -> Rollout:
    play, score, failure = played.play, played.score, played.failure
    return Rollout(
        index=index,
        verdict=_verdict(play, failure),
        reward=played.reward,
        metrics=finite_metrics({**(score.metrics if score else {}), **played.metrics}),
        turns=play.turns,
        finish_reason=played.finish_reason,
        stop_condition=play.stop_condition,
        truncated=play.truncated,
        error=failure,
        timings=finite_metrics({**play.timings, **played.timings}),
        prompt_tokens=played.prompt_tokens,
        completion_tokens=played.completion_tokens,
        messages=by_reference(play.messages) if keep_messages else [],
        tools=play.tools if keep_messages else [],
        answer=score.answer if score else None,
        seat=play.seat,
    )


def _verdict(play: Play, failure: RolloutFailure | None) -> RolloutVerdict:
    if failure is not None:
        return failure.kind
    return "truncated" if play.truncated else "ok"


def _samples(rollouts: Sequence[PlayedRollout], advantages: Sequence[float]) -> list[TrainingSample]:
    return [
        TrainingSample(
            token_ids=tokens.token_ids,
            loss_mask=tokens.loss_mask,
            logprobs=tokens.logprobs,
            advantage=advantages[index],
            rollout=index,
            branch=branch,
        )
        for index, played in enumerate(rollouts)
        if played.failure is None
        for branch, tokens in enumerate(played.samples)
    ]


def _statistics(rollouts: Sequence[Rollout], samples: SampleArrays, *, seconds: float) -> GroupStatistics:
    rewards = np.array([rollout.reward for rollout in rollouts if rollout.reward is not None], np.float64)
    scored = len(rewards) > 0
    return GroupStatistics(
        rollouts=len(rollouts),
        scored=len(rewards),
        reward_mean=float(rewards.mean()) if scored else 0.0,
        reward_std=float(rewards.std()) if scored else 0.0,
        reward_min=float(rewards.min()) if scored else 0.0,
        reward_max=float(rewards.max()) if scored else 0.0,
        tokens=len(samples.token_ids),
        trained_tokens=int(np.count_nonzero(samples.loss_mask)),
        seconds=seconds,
    )
