"""python -m tests.soak --minutes 30 --seed 7: one JSON object and a table on stdout, exit code 1 on any violation."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path

from tests.soak.drive import Soak, run
from tests.soak.farm import FarmOptions
from tests.soak.report import as_json, as_table

RATE = 6.5
"""Groups a second: 11,700 in 30 minutes."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="of an earlier run, to have its schedule of faults again")
    parser.add_argument("--rate", type=float, default=RATE, help="groups a second the trainer takes")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--gap-s", type=float, default=0.0, help="mean time between two faults")
    parser.add_argument("--keep", type=Path, help="a folder for logs and archives, kept")
    parser.add_argument("--show-schedule", action="store_true", help="print the faults that would strike, and end")
    arguments = parser.parse_args()
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    seconds = arguments.minutes * 60
    soak = Soak(
        farm=FarmOptions(
            seed=seed, items=round(seconds * arguments.rate), workers=arguments.workers, rate=arguments.rate
        ),
        seconds=seconds,
        gap_s=arguments.gap_s or min(4.0, max(2.0, seconds / 60)),
    )
    if arguments.show_schedule:
        print(*soak.schedule(), sep="\n")
        return 0
    _say(f"replay with: python -m tests.soak --minutes {arguments.minutes:g} --seed {seed}")
    with tempfile.TemporaryDirectory(prefix="soak") as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            parser.error(f"--keep {folder}: is not empty; name a new folder")
        result = run(soak, folder, say=_say)
        if arguments.keep:
            (folder / "faults.log").write_text("\n".join(result.log))
    print(json.dumps(as_json(result)))
    print(as_table(result))
    for violation in result.violations:
        _say(f"VIOLATION {violation}")
    return 1 if result.violations else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
