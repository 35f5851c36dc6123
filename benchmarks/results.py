"""What a benchmark found, as a table on the terminal and in `docs/benchmarks.md`.

Invariant: a table in the document is written whole, between its markers, with the machine and the load it was measured under.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    what: str
    result: str
    goal: str = ""
    """Empty for a line that only informs."""
    met: bool | None = None


def markdown(figures: Sequence[Figure]) -> str:
    rows = [("what", "goal", "result", "met"), ("---",) * 4]
    rows += [(figure.what, figure.goal, figure.result, _verdict(figure.met)) for figure in figures]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plain(figures: Sequence[Figure]) -> str:
    width = max(len(figure.what) for figure in figures)
    return "\n".join(
        f"  {figure.what:<{width}}  {figure.result:<28} {figure.goal:<18} {_verdict(figure.met)}".rstrip()
        for figure in figures
    )


def write(name: str, figures: Sequence[Figure]) -> None:
    """Put the table of benchmark `name` between its markers. ValueError when the document has none."""
    text = DOCUMENT.read_text("utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{DOCUMENT} has no markers <!-- {name} --> and <!-- /{name} -->")
    block = f"\n{_circumstances()}\n\n{markdown(figures)}\n\n"
    DOCUMENT.write_text(pattern.sub(lambda match: match[1] + block + match[2], text), "utf-8")


def _circumstances() -> str:
    day = datetime.now(UTC).date().isoformat()
    python = platform.python_version()
    return f"{day}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {python}:"


def _verdict(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "no"
