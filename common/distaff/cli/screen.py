"""What commands show while they work: live bars on a terminal, a plain line now and then in a pipe.

Invariant: results go to standard output, everything else to standard error; in a pipe nobody waits for the reader.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from distaff.logpipe import LogPipe
from distaff.logs import configure_logging
from distaff.redaction import redact
from distaff.settings import LogSection

PLAIN_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Standing:
    """One thing that advances."""

    label: str
    done: int
    total: int | None
    """None while unknown."""
    note: str = ""


class _ConsoleStream:
    """The stream logs are written to while a bar is live: above the bar."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
        return len(text)

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        """Nothing is held back."""


class Screen:
    """Context manager: sets up logging and shows progress. `quiet` shows logs only."""

    def __init__(self, log: LogSection, *, quiet: bool = False) -> None:
        self._log = log
        self.live = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, tuple[float, Standing]] = {}

    def __enter__(self) -> Screen:
        stream: TextIO | None = None
        self._progress: Progress | None = None
        if self.live:
            console = Console(stderr=True)
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
                refresh_per_second=4,
            )
            self._progress.start()
            stream = _ConsoleStream(console)  # type: ignore[assignment]
        self._pipe: LogPipe = configure_logging(self._log, stream=stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.flush()
        if self._progress is not None:
            self._progress.stop()
            configure_logging(self._log)

    def show(self, standing: Standing) -> None:
        """Bring the display up to date."""
        if self._progress is not None:
            self._show_bar(self._progress, standing)
        elif not self._quiet:
            self._show_line(standing)

    def line(self, text: str) -> None:
        """A line of somebody else's output, redacted, beside the progress."""
        self._pipe.put(redact(text))

    def _show_bar(self, progress: Progress, standing: Standing) -> None:
        if standing.label not in self._tasks:
            self._tasks[standing.label] = progress.add_task(standing.label, total=None, note="")
        progress.update(
            self._tasks[standing.label],
            completed=standing.done,
            total=standing.total,
            note=standing.note,
        )

    def _show_line(self, standing: Standing) -> None:
        now = time.monotonic()
        when, last = self._shown.get(standing.label, (-PLAIN_EVERY_S, None))
        finished = standing.total is not None and standing.done >= standing.total
        due = now - when >= PLAIN_EVERY_S or finished
        if standing == last or not due or (last is not None and finished and last.done == standing.done):
            return
        self._shown[standing.label] = (now, standing)
        of = "" if standing.total is None else f"/{standing.total}"
        self._pipe.put(f"{standing.label} {standing.done}{of}" + (f"  {standing.note}" if standing.note else ""))


def results() -> Console:
    """Where results are printed: standard output, in colours on a terminal only, never wrapped in a pipe."""
    terminal = sys.stdout.isatty()
    return Console(width=None if terminal else 200, highlight=False, no_color="NO_COLOR" in os.environ or None)


def say(text: str) -> None:
    """One line (or a few) of result on standard output."""
    print(text, flush=True)


def complain(text: str) -> None:
    """A message for the person at the terminal, redacted, on standard error."""
    print(redact(text), file=sys.stderr, flush=True)
