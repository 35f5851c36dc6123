"""`python -m distaff.cli.reference FILE`: writes the tables of all keys into the documentation.

Invariant: changes nothing outside the two marks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from distaff.cli.showing import reference

BEGIN, END = "<!-- keys: begin (generated) -->", "<!-- keys: end -->"


def write(path: Path) -> None:
    """Replace what is between the marks. Raises ValueError when the file has none."""
    before, begin, rest = path.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: put the lines {BEGIN!r} and {END!r} where the tables belong")
    path.write_text(f"{before}{BEGIN}\n\n{reference()}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
