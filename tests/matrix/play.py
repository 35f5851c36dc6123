"""One item of one environment through the adapter, with scripted answers.

Invariant: an environment that cannot be loaded or fails is a result with a `problem`, not an exception.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distaff.config import EnvironmentSection
from distaff.environments.load import load
from distaff.environments.protocol import Environment, Episode
from distaff.errors import DistaffError
from tests.environments_support import ScriptedModel
from tests.matrix.entries import Entry, Script


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One seat of one play."""

    script: str
    seat: str
    reward: float
    turns: int
    stop: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    entry: Entry
    outcomes: list[Outcome] = field(default_factory=list)
    problem: str = ""


async def play(entry: Entry) -> Result:
    """The first row of `entry`, once with each of its scripts."""
    try:
        env = load(EnvironmentSection(id=entry.id, args=entry.args))
        row = next(env.rows("train", 0))
    except DistaffError as error:
        return Result(entry=entry, problem=str(error))
    outcomes: list[Outcome] = []
    problem = ""
    for name, script in entry.scripts(row).items():
        episode = await env.play(row, lambda seat, script=script: _model(seat, script))  # type: ignore[misc]
        failed = next((seat.error for seat in episode.plays if seat.error is not None), None)
        if failed is not None:
            problem = problem or f"{failed.kind} at {failed.boundary}: {failed.message}"
            continue
        found, wrong = await _scored(env, episode, name)
        outcomes += found
        problem = problem or wrong
    await env.close()
    return Result(entry=entry, outcomes=outcomes, problem=problem)


def _model(seat: str, script: Script) -> ScriptedModel:
    return ScriptedModel(lambda turn, messages: script(seat, turn, messages))


async def _scored(env: Environment, episode: Episode, script: str) -> tuple[list[Outcome], str]:
    (scores,) = await env.score([episode])
    outcomes = [
        Outcome(script=script, seat=seat.seat, reward=score.reward, turns=seat.turns, stop=seat.stop_condition)
        for seat, score in zip(episode.plays, scores, strict=True)
        if score.reward is not None
    ]
    wrong = next((score.error for score in scores if score.error is not None), None)
    return outcomes, "" if wrong is None else f"{wrong.kind}: {wrong.message}"
