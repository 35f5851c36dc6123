"""A number-guessing game over several turns (classic API): chat only, graded reward.

Invariant: the row holds the whole game, so a rollout needs nothing but its row; the same (arguments, seed) give the same rows.
"""

from __future__ import annotations

import random
import re
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset

_NUMBER = re.compile(r"-?\d+")


def load_environment(
    train_size: int = 512, eval_size: int = 64, low: int = 1, high: int = 20, max_turns: int = 3, seed: int = 0
) -> vf.Environment:
    """Games with a secret in [low, high] and `max_turns` guesses."""
    if low >= high or max_turns < 1:
        raise ValueError(f"low ({low}) must be below high ({high}) and max_turns ({max_turns}) at least 1")
    rubric = vf.Rubric(funcs=[closeness, solved], weights=[0.8, 0.2])
    return GuessNumber(
        dataset=lambda: _games(train_size, low=low, high=high, turns=max_turns, seed=seed),
        eval_dataset=lambda: _games(eval_size, low=low, high=high, turns=max_turns, seed=seed + 1_000_003),
        rubric=rubric,
        max_turns=max_turns,
    )


def _games(size: int, *, low: int, high: int, turns: int, seed: int) -> Dataset:
    rng = random.Random(seed)  # noqa: S311 - a game
    secrets = [rng.randint(low, high) for _ in range(size)]
    question = (
        f"I am thinking of a whole number from {low} to {high}. You have {turns} guesses, and after each one I say "
        '"higher" or "lower". Reply with one number only.'
    )
    return Dataset.from_list(
        [{"question": question, "answer": str(secret), "info": {"low": low, "high": high}} for secret in secrets]
    )


def first_number(text: Any) -> int | None:
    """The first whole number of a reply."""
    found = _NUMBER.search(text) if isinstance(text, str) else None
    return int(found[0]) if found else None


class GuessNumber(vf.MultiTurnEnv):  # type: ignore[misc]
    """The game: a guess, a hint, a guess, ..."""

    async def setup_state(self, state: vf.State) -> None:
        state["guesses"] = []

    async def add_trajectory_step(self, state: vf.State, trajectory_step: Any) -> None:
        await super().add_trajectory_step(state, trajectory_step)
        state["guesses"].append(first_number(trajectory_step["completion"][-1].content))

    @vf.stop  # type: ignore[untyped-decorator]
    async def guessed(self, state: vf.State) -> bool:
        return bool(state["guesses"]) and state["guesses"][-1] == int(state["answer"])

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [vf.UserMessage(content=self._hint(state["guesses"][-1], int(state["answer"])))]

    @staticmethod
    def _hint(guess: int | None, secret: int) -> str:
        if guess is None:
            return "I saw no number. Reply with one number only."
        return f"{'Higher' if guess < secret else 'Lower'}. Guess again."


def closeness(state: vf.State, answer: str, info: dict[str, int]) -> float:
    """1 for the secret itself, falling to 0 with the distance of the best guess; 0 without a number in range."""
    low, high = info["low"], info["high"]
    distances = [abs(guess - int(answer)) for guess in state["guesses"] if guess is not None and low <= guess <= high]
    return 1.0 - min(distances) / (high - low) if distances else 0.0


def solved(state: vf.State, answer: str) -> float:
    """1 when the secret was guessed."""
    return float(int(answer) in state["guesses"])
