"""Which run a directory belongs to.

Invariant: groups of one run only, and of one life of it: a run that was deleted and opened again under its old name has the same
group ids, and its groups would be taken for duplicates of the old ones.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from distaff.errors import ConfigurationError
from distaff.types import JSON
from distaff_consumer.files import replacing

NAME = "run.json"


class Ownership:
    """The claim of a run on a directory, kept in `run.json`. Made with the directory's lock held.

    `empty`: no group is in the directory. Then it is anyone's: a run that failed before its first group does not stand in the way of
    the next attempt. Raises ConfigurationError when the directory is another run's.
    """

    def __init__(self, directory: Path, run: str, *, empty: bool) -> None:
        self._path = directory / NAME
        stored = self._read()
        if stored is not None and empty:
            stored = {**stored, "opened": None} if stored["run"] == run else None
        if stored is not None and stored["run"] != run:
            raise ConfigurationError(
                f"{directory} holds groups of run {stored['run']!r}, not of {run!r}: give another directory (--directory)"
            )
        self._run = run
        self._opened: float | None = None if stored is None else stored["opened"]
        self.consumer: str = f"archive-{secrets.token_hex(8)}" if stored is None else stored["consumer"]
        """Name in the consumer group, the same in every process that writes here: it gets back what the last one left."""
        if stored is None:
            self._write()

    def check(self, opened: float) -> None:
        """Compare with (or, the first time, note) when the run was opened, in Unix seconds."""
        if self._opened is None:
            self._opened = opened
            self._write()
        elif self._opened != opened:
            raise ConfigurationError(
                f"{self._path.parent} holds groups of the run {self._run!r} that was opened {_when(self._opened)}, and the run "
                f"of that name in Redis was opened {_when(opened)}: give another directory (--directory), or another run.name, or move the old one away"
            )

    def _read(self) -> Mapping[str, JSON] | None:
        try:
            stored = json.loads(self._path.read_text())
            return {key: stored[key] for key in ("run", "opened", "consumer")}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise ConfigurationError(
                f"{self._path} cannot be read: give another directory, or delete that file if the directory is this run's"
            ) from None

    def _write(self) -> None:
        content = {"run": self._run, "opened": self._opened, "consumer": self.consumer}
        with replacing(self._path) as file:
            file.write(json.dumps(content).encode())


def _when(opened: float) -> str:
    return datetime.fromtimestamp(opened, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
