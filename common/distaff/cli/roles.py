"""The commands that are one role in this process: produce, work, archive, evaluate --attach.

Invariant: a role is imported by name when its command runs, never before: the others need not be installed.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from distaff.cli.screen import Screen, Standing, say
from distaff.cli.signals import StopSignal
from distaff.errors import ConfigurationError, DistaffError
from distaff.settings import Settings


class FailedLater(Exception):
    """Wraps an error that came after work had begun (exit code 1 instead of 2)."""

    def __init__(self, error: DistaffError) -> None:
        super().__init__(str(error))
        self.error = error


def role(module: str, *, command: str, extra: str) -> Any:
    """A role's module. Raises ConfigurationError naming the extra when it, or something it needs, is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.startswith("distaff") and name != module.partition(".")[0]:
            raise
        missing = "" if name.startswith("distaff") else f" ({name} is not installed)"
        raise ConfigurationError(
            f'distaff {command} needs the extra "{extra}"{missing}: pip install "distaff[{extra}]"'
        ) from error


def produce(settings: Settings, *, quiet: bool) -> int:
    """Admit the run's items until all are in."""
    module = role("distaff_producer.command", command="produce", extra="producer")

    def work(progress: Callable[[Any], None], stop: threading.Event) -> Any:
        return module.run(
            settings.run_config(),
            redis_url=settings.redis_url,
            allow_unprotected=settings.allow_unprotected,
            progress=progress,
            stop=stop,
        )

    return _run_role(settings, work, _produced, _production, quiet=quiet)


def archive(settings: Settings, *, quiet: bool) -> int:
    """Write the run's groups to JSONL until the run has ended."""
    module = role("distaff_consumer.archive_command", command="archive", extra="consumer")

    def work(progress: Callable[[Any], None], stop: threading.Event) -> Any:
        return module.run(
            settings.run.name,
            redis_url=settings.redis_url,
            archive=settings.archive,
            progress=progress,
            stop=stop,
            allow_unprotected=settings.allow_unprotected,
        )

    return _run_role(settings, work, _advanced, _own_words, quiet=quiet)


def report(settings: Settings, *, quiet: bool) -> int:
    """Collect a run in mode eval that others produce and play, and write its report."""
    module = role("distaff_consumer.evaluate_command", command="evaluate", extra="consumer")

    def work(progress: Callable[[Any], None], stop: threading.Event) -> Any:
        return module.run(
            settings.run.name,
            redis_url=settings.redis_url,
            evaluate=settings.evaluate,
            progress=progress,
            stop=stop,
            allow_unprotected=settings.allow_unprotected,
        )

    return _run_role(settings, work, _advanced, _own_words, quiet=quiet, always_say=True)


def work(settings: Settings) -> int:
    """One worker process, until it is told to stop. It handles signals itself."""
    module = role("distaff_worker.command", command="work", extra="worker")
    with Screen(settings.log, quiet=True):
        return int(module.run(settings))


def _run_role(
    settings: Settings,
    work: Callable[[Callable[[Any], None], threading.Event], Any],
    standing: Callable[[Any], Standing],
    words: Callable[[Any], str],
    *,
    quiet: bool,
    always_say: bool = False,
) -> int:
    begun = threading.Event()

    with Screen(settings.log, quiet=quiet) as screen, StopSignal() as stop:

        def show(progress: Any) -> None:
            begun.set()
            screen.show(standing(progress))

        try:
            result = work(show, stop.event)
        except DistaffError as error:
            if begun.is_set():
                raise FailedLater(error) from error
            raise
    if always_say or not quiet:
        say(words(result))
    return stop.exit_code if stop.event.is_set() else 0


def _own_words(report: Any) -> str:
    return str(report.summary())


def _production(report: Any) -> str:
    """A ProduceReport in words."""
    state = "closed" if report.closed else "stopped; run the same command again to go on"
    others = f", {report.elsewhere} by another producer" if report.elsewhere else ""
    return (
        f"run {report.run}: {report.admitted} items admitted in {report.seconds:.1f} s{others}; "
        f"{report.already_there} were there already, {report.total} in all; {state}"
    )


def _produced(progress: Any) -> Standing:
    note = f"{progress.phase}, {progress.emitted} groups" + (f", {progress.dead} dead" if progress.dead else "")
    return Standing(f"produce {progress.run}", progress.admitted, progress.target, note)


def _advanced(progress: Any) -> Standing:
    return Standing(progress.label, progress.done, progress.total, progress.note)
