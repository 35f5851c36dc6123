"""What `distaff doctor` asks of the environment: load, give a row, play it once, score it, make samples of it.

Invariant: the environment's code runs in a host process, as in a worker, and what it does there is bounded by deadlines. What is played is
the worker's own path (`GroupRoller`, `model_samples`), with nothing of Redis in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from distaff.config import RunConfig
from distaff.environments.load import environment_ref
from distaff.errors import (
    ConfigurationError,
    EnvironmentFailure,
    EnvironmentLoadError,
    ScoringError,
    TokenizationError,
)
from distaff.types import JSON, RolloutFailure, RolloutItem, Tool
from distaff_worker.attempt import Attempt, model_samples
from distaff_worker.doctor_checks import Examiner, Found, Skip
from distaff_worker.doctor_engine import Opened
from distaff_worker.doctor_tokens import QUESTION
from distaff_worker.engines.protocol import EngineInfo
from distaff_worker.hosting.environment import HostedEnvironment, Place
from distaff_worker.hosting.opening import Hosting
from distaff_worker.leases import Lease
from distaff_worker.metrics import Metrics
from distaff_worker.rendering.protocol import Renderer
from distaff_worker.rollouts import GroupRoller
from distaff_worker.shared import SharedCall
from distaff_worker.steps import SampleTokens
from distaff_worker.warm import WarmRun

T = TypeVar("T")
RESERVE_S = 1.0
"""Of the time there is, kept for ending what was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the environment is played with. info: None when no run can use the engine."""

    config: RunConfig
    opened: Opened
    info: EngineInfo | None
    renderer: Renderer | None
    tokenizing: Executor


async def load_environment(examiner: Examiner, hosting: Hosting, config: RunConfig) -> HostedEnvironment | None:
    """The environment, loaded in a host process."""
    limit_s = min(config.environment.load_timeout_s, max(1.0, examiner.left_s - RESERVE_S))
    section = config.environment.model_copy(update={"load_timeout_s": limit_s})
    mend = "raise environment.load_timeout_s, or have it load less"
    if limit_s < config.environment.load_timeout_s:
        mend = f"run it again with more time (--within); a worker waits {config.environment.load_timeout_s:g} s"

    async def look() -> Found[HostedEnvironment]:
        begun = time.monotonic()
        try:
            hosted = await hosting.open(config.model_copy(update={"environment": section}))
        except EnvironmentLoadError as error:
            if "longer than" in str(error):
                raise EnvironmentLoadError(f"it was not loaded within {limit_s:.0f} s. {mend}") from None
            raise
        fact = f"{hosted.id} {hosted.version}, {hosted.api} API, loaded in {time.monotonic() - begun:.1f} s"
        return Found(value=hosted, fact=fact)

    return await examiner.check("environment.loads", look, limit_s=limit_s + RESERVE_S)


async def examine_environment(examiner: Examiner, hosted: HostedEnvironment | None, around: Surroundings) -> None:
    """Every further finding about the environment."""
    async with AsyncExitStack() as stack:
        playing = _Playing(hosted, around, stack)
        check, rollouts = examiner.check, around.config.rollouts
        await check("environment.rows", playing.row, needs=("environment.loads",))
        needs = ("environment.rows", "engine.tokens" if around.config.run.mode == "rl" else "engine.chat")
        await check("environment.plays", playing.play, needs=needs, limit_s=rollouts.timeout_s + RESERVE_S)
        played = ("environment.plays",)
        await check("environment.scores", playing.score, needs=played, limit_s=rollouts.score_timeout_s + 3 * RESERVE_S)
        await check("environment.tools", playing.tools, needs=played)
        if around.config.run.mode != "eval":
            await check("environment.samples", playing.samples, needs=played)


class _Playing:
    """One row on its way through the stages."""

    def __init__(self, hosted: HostedEnvironment | None, around: Surroundings, stack: AsyncExitStack) -> None:
        self._hosted, self._around, self._stack = hosted, around, stack
        self._place: Place | None = None
        self._task: dict[str, JSON] = {}
        self._attempt: Attempt | None = None

    async def row(self) -> Found[None]:
        if self._hosted is None:
            raise Skip("the environment is not loaded")
        self._place = await self._stack.enter_async_context(self._hosted.place())
        split = self._around.config.environment.split
        size, row = await self._place.row(split, 0)
        if row is None:
            raise ConfigurationError(
                f"the {split} split has no rows. Choose the other split (environment.split), or check the arguments that "
                "select its data (environment.args)"
            )
        self._task = row
        rows = "no end of rows" if size is None else f"{size} rows"
        return Found(value=None, fact=f"{rows} in the {split} split; columns {', '.join(row)}")

    async def play(self) -> Found[None]:
        around, place = self._around, self._place
        if place is None:
            raise Skip("there is no row")
        roller = GroupRoller(tokenizing=around.tokenizing, metrics=Metrics())
        attempts = await roller.play(self._run(), place, _lease(), self._item())
        attempt = self._attempt = attempts[0]
        if place.loss is not None:
            raise _failure(place.loss.failure)
        if attempt.broken is not None:
            raise _failure(attempt.broken)
        turns = sum(play.turns for play in attempt.episode.plays)
        tokens = sum(model.completion_tokens for model in attempt.models.values())
        seats = f", {len(attempt.episode.plays)} seats" if len(attempt.episode.plays) > 1 else ""
        fact = f"row 0: {turns} turns{seats}, {tokens} tokens sampled in {attempt.seconds:.1f} s"
        return Found(value=None, fact=fact)

    async def score(self) -> Found[None]:
        place, attempt = self._place, self._attempt
        if place is None or attempt is None:
            raise Skip("nothing was played")
        timeout_s = self._around.config.rollouts.score_timeout_s
        try:
            attempt.scores = (await place.score([attempt.episode], timeout_s=timeout_s))[0]
        except EnvironmentFailure as error:
            if place.loss is not None:
                raise _failure(place.loss.failure) from error
            raise
        if attempt.broken is not None:
            raise _failure(attempt.broken)
        rewards = ", ".join(f"{score.reward:g}" for score in attempt.scores if score.reward is not None)
        names = sorted({name for score in attempt.scores for name in score.metrics})
        return Found(value=None, fact=f"reward {rewards}" + (f"; metrics {', '.join(names)}" if names else ""))

    async def tools(self) -> Found[None]:
        if self._attempt is None:
            raise Skip("nothing was played")
        tools = [tool for play in self._attempt.episode.plays for tool in play.tools]
        if not tools:
            return Found(value=None, fact="the environment has no tools")
        names = [str(tool["function"]["name"]) for tool in tools]
        renderer = self._around.renderer
        if renderer is None or self._around.config.run.mode != "rl":
            return Found(value=None, fact=f"{', '.join(names)}: the chat API is told of them")
        missing = await self._tokenizing_thread(lambda: _unseen(renderer, tools, names))
        if missing:
            raise TokenizationError(
                f"the chat format does not show the model its tools ({', '.join(missing)}): it can never call them. Give a "
                "template with tools (tokenizer.chat_template, @FILE), or the tokenizer of a model that knows tools"
            )
        return Found(value=None, fact=f"{', '.join(names)}: in the prompt")

    async def samples(self) -> Found[None]:
        attempt, renderer = self._attempt, self._around.renderer
        if attempt is None:
            raise Skip("nothing was played")
        models, mask = list(attempt.models.values()), self._around.config.sft.loss_mask
        made = await self._tokenizing_thread(
            lambda: [one for model in models for one in model_samples(model, renderer, loss_mask=mask)]
        )
        tokens, trained = sum(len(one.token_ids) for one in made), sum(_trained(one) for one in made)
        fact = f"{len(made)} sample{'s' if len(made) != 1 else ''}, {tokens} tokens, {trained} of them trained"
        if trained:
            return Found(value=None, fact=fact)
        mend = "look at a group of a small run (docs/tokens.md): nothing the model said would be learned"
        return Found(value=None, fact=fact, status="warning", mend=mend)

    def _run(self) -> WarmRun:
        around, hosted, info = self._around, self._hosted, self._around.info
        engine = around.opened.engine
        if hosted is None or info is None or engine is None:
            raise Skip("there is no engine to play with")
        return WarmRun(
            config=around.config,
            environment=hosted,
            reference=environment_ref(hosted, around.config.environment, around.config.environment.split),
            renderer=around.renderer,
            token_engine=around.opened.tokens,
            chat_engine=around.opened.chat,
            info=info,
            checked=SharedCall(engine.check),
        )

    def _item(self) -> RolloutItem:
        config = self._around.config
        split = config.environment.split
        return RolloutItem(run=config.run.name, seq=0, key="doctor", epoch=0, split=split, task=self._task, seed=0)

    async def _tokenizing_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._around.tokenizing, call)


def _lease() -> Lease:
    """What a rollout is told of a claim that was never made."""
    return Lease(
        job_id="doctor",
        execution_id="doctor",
        payload=b"",
        attempts=0,
        lost=0,
        first=0.0,
        policy_version=0,
        claimed=time.monotonic(),
        at=0.0,
    )


def _failure(failure: RolloutFailure) -> EnvironmentFailure | ScoringError | TokenizationError:
    """A failure of the one rollout, with what can be done about it."""
    text = f"{failure.kind} in {failure.boundary}: {failure.message}"
    if failure.kind == "tokenization_error":
        return TokenizationError(text)
    text = text.rstrip(".")
    if failure.kind == "scoring_error" or failure.boundary == "reward":
        return ScoringError(f"{text}. Mend the environment's reward functions: every group would be lost this way")
    if failure.kind == "engine_error":
        return EnvironmentFailure(f"{text}. Look into the engine's log")
    if failure.kind == "timeout":
        return EnvironmentFailure(f"{text}. Give it more time (--within), or see what the environment waits for")
    return EnvironmentFailure(f"{text}. Mend the environment, or its arguments (environment.args)")


def _unseen(renderer: Renderer, tools: list[Tool], names: list[str]) -> list[str]:
    text = renderer.decode(renderer.render(QUESTION, tools))
    return [name for name in names if name not in text]


def _trained(sample: SampleTokens) -> int:
    return int(sample.loss_mask.sum())
