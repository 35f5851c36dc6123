"""The matrix as Markdown, between two marks of a document.

Invariant: the same results give the same text; the versions it was made with are part of it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from tests.matrix.play import Result

BEGIN, END = "<!-- matrix: made by `make test-environments` -->", "<!-- end of the matrix -->"
PACKAGES = ("verifiers", "reasoning-gym", "textarena")


def table(results: Sequence[Result]) -> str:
    """One line for each game, one for each kind of outcome of the generators."""
    generators = [result for result in results if result.entry.source.startswith("reasoning-gym")]
    games = [result for result in results if result not in generators]
    return "\n".join([*_versions(), *_generators(generators), *_games(games)])


def replace(document: str, text: str) -> str:
    """`document` with `text` between the marks. Raises ValueError without them."""
    before, after = document.split(BEGIN)[0], document.split(END)[-1]
    if BEGIN not in document or END not in document:
        raise ValueError(f"the document lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _versions() -> list[str]:
    found = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    played = [f"{name} {found[name]}" for name in PACKAGES if name in found]
    return [f"One item of each, with {', '.join(played)}:", ""]


def _generators(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    kinds: dict[str, list[str]] = {}
    for result in results:
        kinds.setdefault(_kind(result), []).append(result.entry.name)
    ordered = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    lines = [
        f"| {kind} | {len(names)} | {', '.join(names) if len(names) < 30 else 'all others'} |"
        for kind, names in ordered
    ]
    return [f"| reasoning-gym: {len(results)} generators | how many | which |", "|---|---|---|", *lines, ""]


def _kind(result: Result) -> str:
    if result.problem:
        return result.problem
    own, *nonsense = (outcome.reward for outcome in result.outcomes)
    if own < 1.0:
        return "its own scorer does not pay its own answer in full (that is so in the package)"
    return f"its own answer is paid 1, {len(nonsense)} kinds of nonsense {'less' if max(nonsense) < own else 'up to as much'}"


def _games(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    lines = [f"| {result.entry.name} | {result.entry.source} | {_outcomes(result)} |" for result in results]
    return ["| game | source | what became of it: turns, stop condition, reward |", "|---|---|---|", *lines]


def _outcomes(result: Result) -> str:
    seats = [f"{f'{o.seat}: ' if o.seat else ''}{o.turns}, `{o.stop}`, {o.reward:g}" for o in result.outcomes]
    return result.problem or "; ".join(seats)
