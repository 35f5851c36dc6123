"""What the matrix plays, and how.

Invariant: a script depends on the row and the turn alone, so that two runs of the matrix give the same table.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distaff.environments.releases import has_classic
from distaff.types import JSON, Message

Script = Callable[[str, int, Sequence[Message]], str]
"""(seat, turn, messages) -> the answer."""


_OFFER = re.compile(r"(?:vailable|alid) (?:moves|actions)\W", re.IGNORECASE)
_MOVE = re.compile(r"\[[^\[\]]+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One environment, and the scripts to play one of its items with."""

    source: str
    name: str
    id: str
    args: dict[str, JSON] = field(default_factory=dict)
    scripts: Callable[[Mapping[str, JSON]], dict[str, Script]]
    """The row -> scripts by what they are called in the table."""


NONSENSE = ("no idea at all", "", "[1, 2", '{"a": 1}', "-1", "1/0", "9" * 5000, "x" * 200, "\x00", "1 1", "None")
ONE_PLAYER: dict[str, str] = {
    "2048-v0": "[up] [left] [down] [right]",
    "Bandit-v0": "[red] [blue]",
    "Blackjack-v0": "[hit] [stand]",
    "Crosswords-v0": "[0 0 A] [1 1 B]",
    "Cryptarithm-v0": "[S 9] [E 5] [N 6] [D 7] [M 1] [O 0] [R 8] [Y 2]",
    "FifteenPuzzle-v0": "[up] [left] [down] [right]",
    "FrozenLake-v0": "[right] [down]",
    "GuessTheNumber-v0": "[1] [2] [3] [4] [5] [6] [7]",
    "LightsOut-v0": "[0,0] [1,1] [2,2]",
    "LogicPuzzle-v0": "[A B X] [A B O]",
    "Mastermind-v0": "[1 2 3 4] [4 3 2 1]",
    "Minesweeper-v0": "[0 0] [3 4] [7 7]",
    "PegJump-v0": "[4 1] [6 4]",
    "RushHour-v0": "[A+] [X+] [B-]",
    "Secretary-v0": "[continue] [continue] [accept]",
    "Slitherlink-v0": "[h 0 0] [v 0 0]",
    "Sokoban-v0": "[up] [left] [down] [right]",
    "Sudoku-v0": "[1 1 5] [2 2 6]",
    "TowerOfHanoi-v0": "[A C] [A B] [C B]",
}
TWO_PLAYERS: dict[str, str] = {
    "ConnectFour-v0": "[col 0] [col 1]",
    "IteratedPrisonersDilemma-v0": "[Cooperate] [Defect]",
    "KuhnPoker-v0": "[check] [bet] [call]",
    "Nim-v0": "[0 1] [1 1] [2 1]",
    "Othello-v0": "[2, 3] [2, 2] [3, 2]",
    "PigDice-v0": "[roll] [hold]",
    "TicTacToe-v0": "[0] [4] [8] [1] [2] [3] [5] [6] [7]",
}


def entries() -> list[Entry]:
    """Those that the installed packages can play."""
    found: list[Entry] = []
    if has_classic() and importlib.util.find_spec("reasoning_gym"):
        found += reasoning_gym_entries()
    if importlib.util.find_spec("textarena") and importlib.util.find_spec("nltk"):
        found += [
            _game("textarena, one player (v1)", "tests.matrix.textarena_one", *each) for each in ONE_PLAYER.items()
        ]
        found += [
            _game("textarena, two players (v1)", "tests.matrix.textarena_two", *each) for each in TWO_PLAYERS.items()
        ]
    return found


def reasoning_gym_entries() -> list[Entry]:
    """Every generator of the package."""
    from reasoning_gym.factory import DATASETS

    return [
        Entry(
            source="reasoning-gym (classic)",
            name=name,
            id="reasoning-gym",
            args={"gym": name, "train_size": 2, "eval_size": 1, "seed": 1},
            scripts=_own_answer,
        )
        for name in sorted(DATASETS)
        if name != "composite"
    ]


def _own_answer(row: Mapping[str, JSON]) -> dict[str, Script]:
    return {
        "own answer": lambda seat, turn, messages: f"<answer>{row['answer']}</answer>",
        **{
            f"nonsense {n}": lambda seat, turn, messages, text=text: f"<answer>{text}</answer>"  # type: ignore[misc]
            for n, text in enumerate(NONSENSE)
        },
    }


def _game(source: str, module: str, game: str, moves: str) -> Entry:
    def scripts(row: Mapping[str, JSON]) -> dict[str, Script]:
        return {"some moves": lambda seat, turn, messages: _move(turn, str(messages[-1]["content"]), moves)}

    seats = ("player",) if module.endswith("one") else ("first", "second")
    limits: dict[str, Any] = {seat: {"max_turns": 30} for seat in seats}
    return Entry(source=source, name=game, id=module, args={"game": game, "env": limits}, scripts=scripts)


def _move(turn: int, observation: str, moves: str) -> str:
    """One of the moves the game offers, where it offers any, else one of ours."""
    offered = _MOVE.findall(_OFFER.split(observation)[-1]) if _OFFER.search(observation) else []
    known = offered or _MOVE.findall(moves)
    return str(known[turn * 7 % len(known)])


def sample(found: Sequence[Entry], *, each: int) -> list[Entry]:
    """The first `each` of every source."""
    by_source = itertools.groupby(found, key=lambda entry: entry.source)
    return [entry for _, group in by_source for entry in itertools.islice(group, each)]
