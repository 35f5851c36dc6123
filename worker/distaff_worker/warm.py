"""What a run needs to be played, loaded once and kept warm: configuration, environment, engine, renderer.

Invariant: one load a run, however many of its items arrive at once. What cannot be loaded is a FatalRun that says how to mend it;
a Redis that is away is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import redis
import structlog
from pydantic import ValidationError

from distaff.config import RunConfig
from distaff.environments.load import environment_ref, load
from distaff.environments.protocol import Environment
from distaff.errors import DistaffError, FatalRun
from distaff.types import EnvironmentRef
from distaff_worker import collector
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.protocol import ChatEngine, EngineInfo, TokenEngine
from distaff_worker.rendering.loading import open_renderer
from distaff_worker.rendering.protocol import Renderer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WarmRun:
    """Everything that playing an item of one run needs."""

    config: RunConfig
    environment: Environment
    reference: EnvironmentRef
    renderer: Renderer | None
    """None in evaluation."""
    token_engine: TokenEngine | None
    """RL mode."""
    chat_engine: ChatEngine | None
    """SFT and evaluation."""
    info: EngineInfo

    @property
    def engine(self) -> TokenEngine | ChatEngine:
        engine = self.token_engine or self.chat_engine
        if engine is None:
            raise FatalRun("the run has no engine")
        return engine

    async def close(self) -> None:
        await self.engine.close()
        await self.environment.close()


class WarmRuns:
    """The runs this worker has played lately. tokenizing: the one thread that touches tokenizers."""

    def __init__(self, read_config: Callable[[str], str | None], *, tokenizing: Executor) -> None:
        self._read_config = read_config
        self._tokenizing = tokenizing
        self._runs: dict[str, asyncio.Task[WarmRun]] = {}

    async def get(self, run: str) -> WarmRun:
        """Raises FatalRun, redis.RedisError."""
        task = self._runs.get(run)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load(run), name=f"load {run}")
            self._runs[run] = task
        try:
            return await asyncio.shield(task)
        except redis.RedisError:
            self._runs.pop(run, None)
            raise

    async def close(self) -> None:
        for task in self._runs.values():
            task.cancel()
        for loaded in await asyncio.gather(*self._runs.values(), return_exceptions=True):
            if isinstance(loaded, WarmRun):
                await loaded.close()
        self._runs.clear()

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
        loop = asyncio.get_running_loop()
        mode = config.run.mode
        environment = load(config.environment)
        renderer = None
        if mode != "eval":
            renderer = await loop.run_in_executor(
                self._tokenizing, lambda: open_renderer(config.tokenizer, config.engine.model, mode=mode)
            )
        token_engine: TokenEngine | None = None
        chat_engine: ChatEngine | None = None
        if mode == "rl" and renderer is not None:
            token_engine = open_token_engine(config.engine, vocab_size=renderer.vocab_size, encode=renderer.encode)
            info = await _checked(token_engine, environment)
        else:
            chat_engine = open_chat_engine(config.engine)
            info = await _checked(chat_engine, environment)
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
        )


async def _checked(engine: TokenEngine | ChatEngine, environment: Environment) -> EngineInfo:
    """What the engine says of itself; closes what was opened when it says no."""
    try:
        return await engine.check()
    except BaseException:
        await engine.close()
        await environment.close()
        raise


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
