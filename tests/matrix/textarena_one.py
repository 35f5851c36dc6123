"""Any single-player TextArena game: verifiers' own taskset, without its list of games and its download. Loaded by the id
tests.matrix.textarena_one; needs `pip install textarena nltk`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import textarena
import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena import TextArenaData, TextArenaEnv, TextArenaTask, TextArenaTaskset

__all__ = ["AnyGame", "TextArenaEnv"]


class AnyGameConfig(vf.TasksetConfig):  # type: ignore[misc]
    game: str
    size: int = 2


class AnyGame(TextArenaTaskset, vf.Taskset[TextArenaTask, AnyGameConfig]):  # type: ignore[misc]
    """The first boards of a game."""

    INFINITE = False

    def load(self) -> Iterator[TextArenaTask]:
        for seed in range(self.config.size):
            random.seed(seed)
            game = textarena.make(env_id=self.config.game)
            game.reset(num_players=1)
            data = TextArenaData(
                idx=seed, prompt=str(game.get_observation()[1]), info={"game": self.config.game, "seed": seed}
            )
            yield TextArenaTask(data, self.config.task)
