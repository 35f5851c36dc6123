"""Roll out a group: its rollouts at once, each within its deadline, each with models of its own.

Invariant: the models of a rollout are made for it, handed to its environment call, and kept on its Attempt: nothing pairs them again later.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor

import structlog

from distaff.environments.protocol import ChatModel, ModelFactory
from distaff.errors import FatalRun
from distaff.redaction import redact
from distaff.types import RolloutItem
from distaff_worker.attempt import Attempt, Model
from distaff_worker.chat_models import ApiChatModel, TokenChatModel
from distaff_worker.leases import Lease
from distaff_worker.metrics import Metrics
from distaff_worker.rollout import Playable, Roller
from distaff_worker.sampling import Limits, derive_seed
from distaff_worker.turns import Turnstile
from distaff_worker.warm import WarmRun

log = structlog.get_logger(__name__)
STARTS_AT_ONCE = 2
"""Rollouts that begin in one turn of the loop; environments take a good part of a millisecond to set one up."""


class GroupRoller:
    """Plays the rollouts of groups on the worker's loop. tokenizing: the one thread that touches tokenizers."""

    def __init__(self, *, tokenizing: Executor, metrics: Metrics) -> None:
        self._tokenizing, self._metrics = tokenizing, metrics
        self._roller = Roller()
        self._turnstile = Turnstile(STARTS_AT_ONCE)

    @property
    def strays(self) -> int:
        """Rollouts that ignored their cancellation and still run."""
        return self._roller.strays

    async def play(self, run: WarmRun, place: Playable, lease: Lease, item: RolloutItem) -> list[Attempt]:
        """All rollouts of the item, at once. Raises only CancelledError, after every rollout has cleaned up."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._rollout(run, place, lease, item, index))
                for index in range(run.config.rollouts.group_size)
            ]
        return [task.result() for task in tasks]

    async def _rollout(self, run: WarmRun, place: Playable, lease: Lease, item: RolloutItem, index: int) -> Attempt:
        """Rollout `index`, played again while its failure may pass and its deadline allows."""
        await self._turnstile.turn()
        limits = run.config.rollouts
        started = time.monotonic()
        for retry in range(limits.rollout_retries + 1):
            models: dict[str, Model] = {}
            left_s = limits.timeout_s - (time.monotonic() - started)
            model_for = self._model_factory(run, models, item, index, f"{lease.execution_id}.{index}.{retry}", retry)
            episode = await self._roller.play(place, item.task, model_for, timeout_s=max(left_s, 0.001))
            attempt = Attempt(index, episode, models, time.monotonic() - started)
            failure = attempt.broken
            if failure is None:
                break
            self._metrics.rollout_errors.labels(failure.kind).inc()
            log.warning("rollout.failed", rollout=index, retry=retry, kind=failure.kind, reason=redact(failure.message))
            if not failure.retryable or failure.kind == "timeout":
                break
        return attempt

    def _model_factory(
        self, run: WarmRun, models: dict[str, Model], item: RolloutItem, index: int, session: str, retry: int
    ) -> ModelFactory:
        base = run.config.sampling.seed

        def model_for(seat: str) -> ChatModel:
            if seat in models:
                raise ValueError(f"a second model was asked for seat {seat!r} of one rollout")
            seed = None if base is None else derive_seed(base, item.seq, index, retry, seat)
            models[seat] = self._model(run, f"{session}.{seat}" if seat else session, seed)
            return models[seat]

        return model_for

    def _model(self, run: WarmRun, session: str, seed: int | None) -> Model:
        limits = Limits.of(run.config.rollouts, engine_context_tokens=run.info.max_context_tokens)
        sampling, executor = run.config.sampling, self._tokenizing
        if run.token_engine is not None and run.renderer is not None:
            return TokenChatModel(
                run.token_engine,
                run.renderer,
                sampling=sampling,
                rollout_seed=seed,
                session=session,
                limits=limits,
                executor=executor,
            )
        if run.chat_engine is None:
            raise FatalRun(f"run {run.config.run.name!r} has no engine for mode {run.config.run.mode!r}")
        return ApiChatModel(
            run.chat_engine,
            run.renderer,
            sampling=sampling,
            rollout_seed=seed,
            session=session,
            limits=limits,
            executor=executor,
        )
