"""The checks of `distaff doctor` on tokenizer, engine and environment of one run, in the order a run needs them.

Invariant: the environment loads while the engine is looked at; what was opened is closed. Importing this takes seconds.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from distaff.config import RunConfig
from distaff.settings import Settings
from distaff_worker.doctor_checks import Examiner, Found, OneThread
from distaff_worker.doctor_engine import examine_engine, open_engine
from distaff_worker.doctor_environment import Surroundings, examine_environment, load_environment
from distaff_worker.hosting.environment import HostedEnvironment
from distaff_worker.hosting.launcher import Launcher
from distaff_worker.hosting.opening import Hosting
from distaff_worker.rendering.loading import open_renderer
from distaff_worker.rendering.protocol import Renderer

ANSWER_S, START_S, BLOCK_S, SCORE_S = 10.0, 3.0, 3.0, 8.0
MOST_TOKENS, MOST_TURNS = 32, 3


def hurried(config: RunConfig, *, left_s: float) -> RunConfig:
    """The run with one short rollout a group, and short waits."""
    rollouts = config.rollouts
    turns = min(rollouts.max_turns or MOST_TURNS, MOST_TURNS)
    return config.model_copy(
        update={
            "engine": config.engine.model_copy(
                update={
                    "request_timeout_s": min(ANSWER_S, config.engine.request_timeout_s),
                    "connect_timeout_s": min(START_S, config.engine.connect_timeout_s),
                    "start_timeout_s": min(START_S, config.engine.start_timeout_s),
                    "retry_budget_s": min(START_S, config.engine.retry_budget_s),
                    "max_retries": min(1, config.engine.max_retries),
                }
            ),
            "sampling": config.sampling.model_copy(update={"max_tokens": min(MOST_TOKENS, config.sampling.max_tokens)}),
            "rollouts": rollouts.model_copy(
                update={
                    "group_size": 1,
                    "min_rollouts": 0,
                    "rollout_retries": 0,
                    "max_turns": turns,
                    "timeout_s": min(left_s, rollouts.timeout_s),
                    "block_timeout_s": min(BLOCK_S, rollouts.block_timeout_s),
                    "score_timeout_s": min(SCORE_S, rollouts.score_timeout_s),
                }
            ),
        }
    )


async def diagnose(examiner: Examiner, settings: Settings, launcher: Launcher) -> None:
    config = hurried(settings.run_config(), left_s=examiner.left_s)
    hosting = Hosting(launcher=launcher, worker=settings.worker, log=settings.log)
    tokenizing = OneThread("distaff-tokenize")
    hosted: HostedEnvironment | None = None
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(load_environment(examiner, hosting, config))
        renderer = await _renderer(examiner, config, tokenizing)
        opened = await open_engine(examiner, config, renderer)
        info = await examine_engine(
            examiner, config, opened, renderer, tokenizing, max_tokens=settings.sampling.max_tokens
        )
        hosted = await loading
    around = Surroundings(config=config, opened=opened, info=info, renderer=renderer, tokenizing=tokenizing)
    try:
        await examine_environment(examiner, hosted, around)
    finally:
        await opened.close()
        if hosted is not None:
            await hosted.close()


async def _renderer(examiner: Examiner, config: RunConfig, tokenizing: Executor) -> Renderer | None:
    """The training tokenizer; an evaluation has none."""
    mode = config.run.mode
    if mode == "eval":
        return None

    async def look() -> Found[Renderer]:
        def load() -> Renderer:
            return open_renderer(config.tokenizer, config.engine.model, mode=mode)

        renderer = await asyncio.get_running_loop().run_in_executor(tokenizing, load)
        fact = f"{renderer.name}: {renderer.vocab_size} ids, chat format by {renderer.kind}"
        return Found(value=renderer, fact=fact)

    return await examiner.check("tokenizer.loads", look, limit_s=2 * ANSWER_S)
