"""Play one item of every environment of the matrix and print the table; with --write put it into docs/environments.md.

python -m tests.matrix [--write docs/environments.md] [--only WORD]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.matrix.entries import entries
from tests.matrix.play import play
from tests.matrix.table import replace, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix")
    parser.add_argument("--write", type=Path, help="a Markdown file with the two marks of the table")
    parser.add_argument("--only", default="", help="environments whose name or source has this word in it")
    options = parser.parse_args()
    chosen = [entry for entry in entries() if options.only in f"{entry.source} {entry.name}"]
    if not chosen:
        print("nothing to play: pip install 'distaff[reasoning-gym]' textarena nltk", file=sys.stderr)
        return 2
    results = [asyncio.run(play(entry)) for entry in chosen]
    text = table(results)
    print(text)
    if options.write is not None:
        options.write.write_text(replace(options.write.read_text("utf-8"), text), "utf-8")
    failed = [result for result in results if result.problem]
    for result in failed:
        print(f"{result.entry.source} {result.entry.name}: {result.problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
