"""One item from lease to outcome: roll out, score, tokenize, assemble, encode. The one file that wires the stages.

Invariant: what belongs to rollout i (its models, steps, score, samples) is held by rollout i's own objects from beginning to end;
nothing is matched by position across stages that ran concurrently, or by text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import structlog

from distaff.config import RunConfig
from distaff.errors import (
    DeadlineExceeded,
    DistaffError,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    EnvironmentFailure,
    FatalRun,
    GroupTooLarge,
    RedisUnavailable,
    WireError,
)
from distaff.types import PolicySpan, RolloutFailure, RolloutItem, ScoredGroup
from distaff.wire import SCHEMA, encode_group
from distaff_worker.advantages import group_advantages
from distaff_worker.assemble import GroupContext, PlayedRollout, assemble_group
from distaff_worker.attempt import FLOORED, Attempt, model_samples, played_rollouts
from distaff_worker.chat_models import TokenChatModel
from distaff_worker.hosting.environment import Place
from distaff_worker.leases import Counts, Lease
from distaff_worker.letters import Letters, too_few
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Emit, Outcome
from distaff_worker.prefix_watch import PrefixWatch
from distaff_worker.rollouts import GroupRoller
from distaff_worker.warm import WarmRun, WarmRuns

log = structlog.get_logger(__name__)


class GroupPlayer:
    """Plays items; the worker's Player. read_policy: run -> the published policy version (called on a thread)."""

    def __init__(
        self,
        runs: Callable[[ThreadPoolExecutor], WarmRuns],
        *,
        worker: str,
        metrics: Metrics,
        read_policy: Callable[[str], int],
    ) -> None:
        self._worker, self._metrics, self._read_policy = worker, metrics, read_policy
        self._tokenizing = ThreadPoolExecutor(1, "distaff-tokenize")
        self._packing = ThreadPoolExecutor(2, "distaff-pack")
        self._runs = runs(self._tokenizing)
        self._roller = GroupRoller(tokenizing=self._tokenizing, metrics=metrics)
        self._letters = Letters(worker)
        self._prefixes = PrefixWatch()

    async def open(self) -> None: ...

    async def close(self) -> None:
        await self._runs.close()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self._packing.shutdown(wait=False, cancel_futures=True)

    async def play(self, lease: Lease, item: RolloutItem) -> Outcome:
        """See `outcome.Player`."""
        async with self._runs.using(item.run, lease.life) as run:
            return await self._play(run, lease, item)

    async def _play(self, run: WarmRun, lease: Lease, item: RolloutItem) -> Outcome:
        limits = run.config.rollouts
        if lease.lost > limits.max_lost:
            message = f"lost with its worker {lease.lost} times"
            return self._letters.bury(lease, item, kind="lost", boundary="worker", message=message)
        try:
            async with asyncio.timeout(limits.group_timeout_s):
                attempts, blamed = await self._attempts(run, lease, item)
                await self._tokenize(run, attempts)
        except TimeoutError:
            message = f"the group took longer than {limits.group_timeout_s:g} s"
            failure = RolloutFailure(kind="timeout", boundary="deadline", message=message)
            await self._check_engine(run, [failure])
            return self._letters.failed(limits, lease, item, failure)
        if blamed:
            return self._letters.failed(limits, lease, item, blamed)
        return await self._conclude(run, lease, item, attempts)

    # -- roll out and score ------------------------------------------------------------------------------------------

    async def _attempts(
        self, run: WarmRun, lease: Lease, item: RolloutItem
    ) -> tuple[list[Attempt], RolloutFailure | None]:
        """The rollouts, scored; or why there are none. From the start again when another group's code ended the process they were in."""
        most = run.config.rollouts.max_lost
        for _ in range(most):
            async with run.environment.place() as place:
                attempts = await self._roller.play(run, place, lease, item)
                if any(attempt.broken and attempt.broken.kind == "timeout" for attempt in attempts):
                    await place.verdict()
                try:
                    if place.loss is None:
                        await self._score(run, place, attempts)
                        return attempts, None
                except EnvironmentFailure as error:
                    if place.loss is None:
                        return [], RolloutFailure(kind="scoring_error", boundary="reward", message=str(error))
            if place.blamed and place.loss:
                return [], place.loss.failure
            self._metrics.replayed.inc()
            log.warning("group.replayed", reason="another group ended the process of the environment")
        message = f"the process of its environment ended {most} times while it was played"
        return [], RolloutFailure(kind="environment_error", boundary="process", message=message)

    async def _score(self, run: WarmRun, place: Place, attempts: Sequence[Attempt]) -> None:
        playable = [attempt for attempt in attempts if attempt.broken is None]
        if not playable:
            return
        started = time.monotonic()
        try:
            scores = await place.score(
                [attempt.episode for attempt in playable], timeout_s=run.config.rollouts.score_timeout_s
            )
        except DeadlineExceeded as error:
            for attempt in playable:
                attempt.failure = RolloutFailure(kind="timeout", boundary="reward", message=str(error))
            return
        for attempt, scored in zip(playable, scores, strict=True):
            attempt.scores = scored
            attempt.score_s = time.monotonic() - started

    # -- tokenize ----------------------------------------------------------------------------------------------------

    async def _tokenize(self, run: WarmRun, attempts: Sequence[Attempt]) -> None:
        if run.renderer is None:
            return
        loop = asyncio.get_running_loop()
        for attempt in attempts:
            if attempt.broken is None:
                await loop.run_in_executor(self._tokenizing, self._tokenize_one, run, attempt)

    @staticmethod
    def _tokenize_one(run: WarmRun, attempt: Attempt) -> None:
        started = time.monotonic()
        try:
            for play in attempt.episode.plays:
                attempt.samples[play.seat] = model_samples(
                    attempt.models[play.seat], run.renderer, loss_mask=run.config.sft.loss_mask
                )
        except DistaffError as error:
            attempt.failure = RolloutFailure(
                kind="tokenization_error", boundary="tokenization", message=str(error), retryable=False
            )
        attempt.tokenize_s = time.monotonic() - started

    # -- conclude ----------------------------------------------------------------------------------------------------

    async def _conclude(self, run: WarmRun, lease: Lease, item: RolloutItem, attempts: Sequence[Attempt]) -> Outcome:
        parts = [played_rollouts(attempt) for attempt in attempts]
        played = [part for seats in parts for part in seats]
        usable = sum(all(part.failure is None for part in seats) for seats in parts)
        required = run.config.rollouts.required(run.config.run.mode)
        if usable < required:
            failures = [part.failure for part in played if part.failure]
            await self._check_engine(run, failures)
            failure = too_few(failures, usable=usable, size=len(attempts), required=required)
            return self._letters.failed(run.config.rollouts, lease, item, failure)
        policy = PolicySpan(start=lease.policy_version, end=await self._policy_now(item.run))
        loop = asyncio.get_running_loop()
        group = await loop.run_in_executor(self._packing, self._assemble, run, lease, item, played, policy)
        self._count(run.config, attempts, group)
        if group.verdict == "zero_variance" and run.config.rollouts.zero_variance == "drop":
            message = "every rollout has the same reward"
            return self._letters.bury(lease, item, kind="dropped", boundary="filter", message=message)
        return await loop.run_in_executor(self._packing, self._encode, run, lease, item, group)

    async def _policy_now(self, run: str) -> int:
        """The published version; waits for a Redis that is away, as long as the lease lasts."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await loop.run_in_executor(self._packing, self._read_policy, run)
            except RedisUnavailable as error:
                log.warning("policy.unknown", reason=str(error))
                await asyncio.sleep(1.0)

    async def _check_engine(self, run: WarmRun, failures: Sequence[RolloutFailure]) -> None:
        """When the engine answered nothing, ask it whether it is there and takes us: an engine that is away or has revoked our key
        must not use up the items. Waits for it as long as at the start."""
        if failures and all(failure.kind in ("engine_error", "timeout") for failure in failures):
            try:
                await run.checked()
            except (EngineRefused, EngineUnavailable) as error:
                raise FatalRun(f"run {run.config.run.name!r} cannot be played on: {error}") from error
            except EngineError as error:
                log.warning("engine.check_failed", reason=str(error))

    def _assemble(
        self, run: WarmRun, lease: Lease, item: RolloutItem, played: Sequence[PlayedRollout], policy: PolicySpan
    ) -> ScoredGroup:
        config = run.config
        context = GroupContext(
            item=item,
            config=config,
            schema=SCHEMA,
            environment=replace(run.reference, split=item.split),
            model=run.info.model,
            tokenizer=run.renderer.name if run.renderer else "",
            vocab_size=run.renderer.vocab_size if run.renderer else 0,
            policy=policy,
            execution=lease.execution_id,
            worker=self._worker,
            attempt=lease.attempts + lease.lost + 1,
            seconds=time.monotonic() - lease.claimed,
            created=lease.server_time,
            temperature=run.chat_engine.temperature(config.sampling.temperature) if run.chat_engine else None,
        )
        advantages = group_advantages(
            [part.reward for part in played],
            seats=[part.play.seat for part in played],
            divide_by_std=config.advantage.divide_by_std,
            epsilon=config.advantage.epsilon,
        )
        return assemble_group(context, played, advantages=[float(value) for value in advantages])

    def _encode(self, run: WarmRun, lease: Lease, item: RolloutItem, group: ScoredGroup) -> Outcome:
        wire = run.config.wire
        try:
            fields = encode_group(group, compression=wire.compression, max_bytes=wire.max_group_bytes)
        except GroupTooLarge as error:
            return self._letters.bury(lease, item, kind="too_large", boundary="wire", message=str(error))
        except WireError as error:
            return self._letters.bury(lease, item, kind="tokenization_error", boundary="wire", message=str(error))
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        counts = Counts(
            rollouts=len(group.rollouts),
            samples=len(group.samples),
            tokens=group.statistics.tokens,
            trained_tokens=group.statistics.trained_tokens,
            reward_sum=float(sum(rewards)),
            reward_count=len(rewards),
        )
        size_bytes = len(cast(bytes, fields["group"]))
        return Emit(fields=fields, counts=counts, size_bytes=size_bytes, reward_mean=group.statistics.reward_mean)

    def _count(self, config: RunConfig, attempts: Sequence[Attempt], group: ScoredGroup) -> None:
        for rollout in group.rollouts:
            for stage, seconds in rollout.timings.items():
                self._metrics.stage.labels(stage).inc(seconds)
            self._metrics.floored.inc(rollout.metrics.get(FLOORED, 0.0))
        for attempt in attempts:
            for model in attempt.models.values():
                if isinstance(model, TokenChatModel):
                    self._metrics.count_turns(
                        turns=len(model.steps), bridged=model.bridged_turns, breaks=model.prefix_breaks
                    )
                    self._prefixes.observe(
                        group.run,
                        bridged=model.bridged_turns,
                        breaks=model.prefix_breaks,
                        least=config.rollouts.min_prefix_share,
                    )
                else:
                    self._metrics.count_turns(turns=len(model.steps), bridged=0)


def play(item: dict[str, object]) -> None:
    """The name that jobs carry. Only `distaff work` plays them; a stock `rq worker` that gets one fails it with this."""
    raise RuntimeError(
        f"item {item.get('seq')} of run {item.get('run')!r} must be played by `distaff work`, not `rq worker`"
    )
