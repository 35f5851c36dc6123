"""Any TextArena game for two: each player a seat, the game engine between them. Loaded by the id tests.matrix.textarena_two; needs
`pip install textarena`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import textarena
import verifiers.v1 as vf

__all__ = ["Duel", "DuelEnv"]


class DuelData(vf.TaskData):  # type: ignore[misc]
    game: str
    seed: int


class DuelTask(vf.Task[DuelData]):  # type: ignore[misc]
    """Scored by the game, in the environment."""


class DuelConfig(vf.TasksetConfig):  # type: ignore[misc]
    game: str
    size: int = 2


class Duel(vf.Taskset[DuelTask, DuelConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[DuelTask]:
        for seed in range(self.config.size):
            yield DuelTask(DuelData(idx=seed, game=self.config.game, seed=seed), self.config.task)


class DuelEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    max_concurrent_agents: int | None = 2


class DuelEnv(vf.Env[DuelEnvConfig]):  # type: ignore[misc]
    async def run(self, task: DuelTask, agents: Any) -> None:
        random.seed(task.data.seed)
        game = textarena.make(env_id=task.data.game)
        game.reset(num_players=2)
        async with AsyncExitStack() as stack:
            seats = [
                await stack.enter_async_context(agent.interaction(task)) for agent in (agents.first, agents.second)
            ]
            while not game.state.done:
                player, observation = game.get_observation()
                segment = await seats[player].turn(str(observation))
                if segment.terminated:
                    break
                game.step(segment.last_reply)
        for player, seat in enumerate(seats):
            seat.trace.record_reward("game", float((game.state.rewards or {}).get(player, 0.0)), 1.0)
