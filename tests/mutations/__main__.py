"""Run mutations: python -m tests.mutations [P1 P2 ...] [--jobs N]. Prints a Markdown table; exit code 1 when a test passed that had to fail.

Each runs in a copy of the tree with an interpreter of its own, so that processes the tests start are mutated too. Nothing here changes the tree.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.catalogue import MUTATIONS, Mutation
from tests.process_support import leftovers

ROOT = Path(__file__).parent.parent.parent
SOURCES = ("common", "producer", "worker", "consumer", "tests", "benchmarks", "deploy", "docs", "examples")
FILES = (
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "Makefile",
    "docker-compose.yml",
)
ROLES = ("common", "producer", "worker", "consumer")
TIMEOUT_S = 400
FAILED = 1
"""pytest's exit code when tests ran and one failed; anything else is no proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    mutation: Mutation
    code: int
    seconds: float
    last: str

    @property
    def seen(self) -> bool:
        """The test failed, as it had to."""
        return self.code == FAILED


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """A copy with its own interpreter, which finds the copy before the installed project."""
    with tempfile.TemporaryDirectory(prefix="dm") as name:
        folder = Path(name) / "t"
        folder.mkdir()
        for source in SOURCES:
            if (ROOT / source).exists():
                shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("__pycache__"))
        for file in FILES:
            shutil.copy(ROOT / file, folder / file)
        venv.create(folder / ".venv", symlinks=True)
        [packages] = (folder / ".venv").glob("lib/python*/site-packages")
        installed = next(path for path in sys.path if path.endswith("site-packages"))
        lines = [*(str(folder / role) for role in ROLES), f"import site; site.addsitedir({installed!r})"]
        (packages / "mutated.pth").write_text("\n".join(lines) + "\n")
        yield folder


def mutate(folder: Path, mutation: Mutation) -> None:
    """Raises ValueError unless the text to replace is there exactly once."""
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.file}: {text.count(mutation.old)} times {mutation.old!r}")
    path.write_text(text.replace(mutation.old, mutation.new))


def run(mutation: Mutation) -> Result:
    """The test under the mutation."""
    with copy_of_the_tree() as folder:
        mutate(folder, mutation)
        command = [
            str(folder / ".venv" / "bin" / "python"),
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            "",
        ]
        started, mark = time.monotonic(), f"MUTATION_{folder.parent.name}"
        try:
            done = subprocess.run(
                [*command, *mutation.test.split()],
                cwd=folder,
                env={**os.environ, "MUTATION_MARK": mark},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            code, output = -1, "took too long"
        finally:
            for pid in leftovers(mark):  # what a mutation keeps from ending
                os.kill(pid, signal.SIGKILL)
        last = next((line for line in reversed(output.splitlines()) if line.startswith("E ")), output[-200:])
        return Result(mutation=mutation, code=code, seconds=time.monotonic() - started, last=last.strip())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("promises", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    wanted = [m for m in MUTATIONS if not arguments.promises or m.promise in arguments.promises]
    sys.stdout.write("| promise | switched off | test | fails |\n|---|---|---|---|\n")
    missed = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for result in pool.map(run, wanted):
            missed += not result.seen
            name = result.mutation.test.split("::")[-1]
            verdict = "yes" if result.seen else f"NO (exit code {result.code}): {result.last}"
            sys.stdout.write(f"| {result.mutation.promise} | {result.mutation.what} | `{name}` | {verdict} |\n")
            sys.stdout.flush()
    sys.stdout.write(f"\n{len(wanted) - missed} of {len(wanted)} mutations were seen by their test.\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
