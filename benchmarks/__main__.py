"""Runs the benchmarks that were named, or all, prints their tables, and writes them into the document on request."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence

from benchmarks import in_flight, jobs, results, rollouts, sft_tokens, transport
from benchmarks.results import Figure
from distaff.logs import configure_logging
from distaff.settings import LogSection

BENCHMARKS: dict[str, Callable[[], Sequence[Figure]]] = {
    "transport": transport.run,
    "jobs": jobs.run,
    "rollouts": rollouts.run,
    "in-flight": in_flight.run,
    "sft-tokens": sft_tokens.run,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all unless given")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    configure_logging(LogSection(level="warning"))
    for name in arguments.names or BENCHMARKS:
        started = time.monotonic()
        load = os.getloadavg()[0]
        figures = BENCHMARKS[name]()
        print(
            f"\n{name} ({time.monotonic() - started:.0f} s, load before it {load:.1f})\n{results.plain(figures)}",
            flush=True,
        )
        if arguments.write:
            results.write(name, figures)


if __name__ == "__main__":
    main()
