"""What a run needs to be played, loaded once and kept warm: configuration, environment, engine, renderer.

Invariant: one load a run, however many of its items arrive at once; a run that was deleted and opened anew under the same name is
another run. What cannot be loaded is a FatalRun that says how to mend it; a Redis that is away is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis
import structlog
from pydantic import ValidationError

from distaff.config import RunConfig
from distaff.environments.load import environment_ref
from distaff.errors import DistaffError, FatalRun
from distaff.types import EnvironmentRef
from distaff_worker import collector
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.protocol import ChatEngine, EngineInfo, TokenEngine
from distaff_worker.hosting.environment import HostedEnvironment
from distaff_worker.rendering.loading import open_renderer
from distaff_worker.rendering.protocol import Renderer
from distaff_worker.shared import SharedCall

log = structlog.get_logger(__name__)
IDLE_RUNS = 3
"""Runs that are kept warm although none of their items is being played."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WarmRun:
    """Everything that playing an item of one run needs."""

    config: RunConfig
    environment: HostedEnvironment
    reference: EnvironmentRef
    renderer: Renderer | None
    """None in evaluation."""
    token_engine: TokenEngine | None
    """RL mode."""
    chat_engine: ChatEngine | None
    """SFT and evaluation."""
    info: EngineInfo
    checked: SharedCall[EngineInfo]
    """Asks the engine again what it is; see `engines.protocol`."""

    @property
    def engine(self) -> TokenEngine | ChatEngine:
        engine = self.token_engine or self.chat_engine
        if engine is None:
            raise FatalRun("the run has no engine")
        return engine

    async def close(self) -> None:
        await self.checked.close()
        await self.engine.close()
        await self.environment.close()


@dataclass(slots=True, eq=False)
class _Entry:
    load: asyncio.Task[WarmRun]
    users: int = 0
    used: float = 0.0
    """time.monotonic() of the last use's end."""


class WarmRuns:
    """The runs this worker plays, and the last few it has played. tokenizing: the one thread that touches tokenizers.
    open_environment: loads a run's environment in processes of its own."""

    def __init__(
        self,
        read_config: Callable[[str], str | None],
        *,
        tokenizing: Executor,
        open_environment: Callable[[RunConfig], Awaitable[HostedEnvironment]],
    ) -> None:
        self._read_config, self._open_environment = read_config, open_environment
        self._tokenizing = tokenizing
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def using(self, run: str, life: str) -> AsyncIterator[WarmRun]:
        """The run `run` that was opened at `life`, loaded. Raises FatalRun, redis.RedisError."""
        entry = self._entry(run, life)
        entry.users += 1
        try:
            try:
                warm = await asyncio.shield(entry.load)
            except redis.RedisError:
                self._entries.pop((run, life), None)
                raise
            yield warm
        finally:
            entry.users -= 1
            entry.used = time.monotonic()
            self._trim()

    def _entry(self, run: str, life: str) -> _Entry:
        entry = self._entries.get((run, life))
        if entry is None:
            load = asyncio.get_running_loop().create_task(self._load(run), name=f"load {run}")
            entry = self._entries[run, life] = _Entry(load)
        return entry

    def _trim(self) -> None:
        """Close the runs that nobody plays any more, but for the last few."""
        idle = [key for key, entry in self._entries.items() if not entry.users and _is_warm(entry.load)]
        for key in sorted(idle, key=lambda key: self._entries[key].used)[: max(0, len(idle) - IDLE_RUNS)]:
            closing = asyncio.get_running_loop().create_task(self._entries.pop(key).load.result().close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        loads = [entry.load for entry in self._entries.values()]
        self._entries.clear()
        for task in loads:
            task.cancel()
        for loaded in await asyncio.gather(*loads, *self._closing, return_exceptions=True):
            if isinstance(loaded, WarmRun):
                await loaded.close()

    async def _load(self, run: str) -> WarmRun:
        text = await asyncio.to_thread(self._read_config, run)
        if text is None:
            raise FatalRun(f"run {run!r} has no configuration in Redis; open it with `distaff produce`")
        try:
            config = RunConfig.model_validate_json(text)
        except ValidationError as error:
            raise FatalRun(
                f"run {run!r} was opened by another version of distaff: {_first(error)}. Upgrade the workers"
            ) from None
        try:
            return await self._open(config)
        except FatalRun:
            raise
        except DistaffError as error:
            raise FatalRun(f"run {run!r} cannot be played by this worker: {error}") from error

    async def _open(self, config: RunConfig) -> WarmRun:
        environment = await self._open_environment(config)
        try:
            return await self._around(environment, config)
        except BaseException:
            await environment.close()
            raise

    async def _around(self, environment: HostedEnvironment, config: RunConfig) -> WarmRun:
        loop = asyncio.get_running_loop()
        mode = config.run.mode
        renderer = None
        if mode != "eval":
            renderer = await loop.run_in_executor(
                self._tokenizing, lambda: open_renderer(config.tokenizer, config.engine.model, mode=mode)
            )
        engine: TokenEngine | ChatEngine
        token_engine: TokenEngine | None = None
        chat_engine: ChatEngine | None = None
        if mode == "rl" and renderer is not None:
            engine = token_engine = open_token_engine(
                config.engine, vocab_size=renderer.vocab_size, encode=renderer.encode
            )
        else:
            engine = chat_engine = open_chat_engine(config.engine)
        info = await _checked(engine)
        collector.settle()
        log.info("run.warmed", run=config.run.name, mode=mode, model=info.model, engine=info.kind, version=info.version)
        return WarmRun(
            config=config,
            environment=environment,
            reference=environment_ref(environment, config.environment, config.environment.split),
            renderer=renderer,
            token_engine=token_engine,
            chat_engine=chat_engine,
            info=info,
            checked=SharedCall(engine.check),
        )


def _is_warm(load: asyncio.Task[WarmRun]) -> bool:
    return load.done() and not load.cancelled() and load.exception() is None


async def _checked(engine: TokenEngine | ChatEngine) -> EngineInfo:
    """What the engine says of itself; closes it when it says no."""
    try:
        return await engine.check()
    except BaseException:
        await engine.close()
        raise


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
