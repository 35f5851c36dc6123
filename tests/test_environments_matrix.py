"""Environments nobody here wrote, through the adapter; the whole matrix is exhaustive (`make test-environments`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix.entries import Entry, entries, sample
from tests.matrix.play import play
from tests.matrix.table import BEGIN, END, replace, table

FOUND = entries()


def named(found: list[Entry]) -> list[object]:
    return [pytest.param(entry, id=entry.name) for entry in found]


async def plays(entry: Entry) -> None:
    """Loaded, played with every script, scored: a reward for each trained seat."""
    result = await play(entry)
    assert result.problem == ""
    assert result.outcomes
    assert {outcome.script for outcome in result.outcomes} == set(entry.scripts({"answer": ""}))
    assert all(outcome.turns >= 1 for outcome in result.outcomes if outcome.seat in ("", "first"))


@pytest.mark.parametrize("entry", named(sample(FOUND, each=3)))
async def test_some_environments_nobody_here_wrote_are_played_and_scored(entry: Entry) -> None:
    """The first few of each source that is installed."""
    await plays(entry)


@pytest.mark.exhaustive
@pytest.mark.parametrize("entry", named(FOUND))
async def test_every_environment_nobody_here_wrote_is_played_and_scored(entry: Entry) -> None:
    """All of the matrix."""
    await plays(entry)


async def test_the_table_says_what_became_of_each(tmp_path: Path) -> None:
    """A result is a line with its reward; one that failed has its reason there."""
    if not FOUND:
        pytest.skip("neither reasoning-gym nor textarena is installed")
    good = await play(FOUND[0])
    broken = await play(Entry(source="textarena", name="none", id="no-such-environment", scripts=lambda row: {}))
    assert "there is no module" in broken.problem
    text = table([good, broken])
    assert "there is no module" in text
    assert "is paid 1" in text or "`" in text
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert replace(document, text) == f"before\n{BEGIN}\n{text}\n{END}\nafter\n"
    with pytest.raises(ValueError, match="lacks the marks"):
        replace("no marks", text)
