"""Opens a run, admits batches and closes it: the three scripts that change a run from the producer's side.

Invariant: each is atomic, guarded by the run's cursor, and may be sent again without harm when its reply was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import redis
from pydantic import ValidationError

from distaff import scripts
from distaff.config import RunConfig
from distaff.errors import ConfigurationError
from distaff.keys import RUNS, RunKeys
from distaff.types import JSON
from distaff_producer.rq_jobs import QUEUES_KEY, QueuedJob, queue_key

AdmitStatus = Literal["admitted", "full", "moved", "closed", "missing"]
CloseStatus = Literal["closed", "moved", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Outcome of one batch. `cursor` is where the run stands now, `room` what the window has left (may be negative)."""

    status: AdmitStatus
    cursor: int
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Where the run stood when it was opened."""

    created: bool
    cursor: int
    closed: bool


class Admission:
    """The write side of one run. No retries: errors of redis-py go to the caller, who may call again."""

    def __init__(self, client: redis.Redis, config: RunConfig) -> None:
        self._config = config
        self._keys = RunKeys(config.run.name)
        self._open = scripts.register(client, "open_run")
        self._admit = scripts.register(client, "admit")
        self._close = scripts.register(client, "close_run")

    def open(self, *, target: int | None) -> Opened:
        """Create the run or join it. Raises ConfigurationError when it exists with another configuration."""
        status, stored, cursor, state = cast(
            "tuple[bytes, bytes, int, bytes]",
            self._open(
                keys=[self._keys.config, self._keys.state, RUNS],
                args=[self._config.model_dump_json(), self._config.run.name, _or_empty(target)],
            ),
        )
        check_same(self._config, stored.decode())
        return Opened(created=status == b"opened", cursor=cursor, closed=state == b"closed")

    def admit(self, jobs: Sequence[QueuedJob], *, expected: int, target: int | None) -> Admitted:
        """Admit the jobs of items `expected`, `expected` + 1, ..., as many as the window has room for."""
        args: list[Any] = [expected, self._config.producer.window, _or_empty(target)]
        for job in jobs:
            args += [job.id, int(job.at_front), len(job.fields), *job.fields]
        status, cursor, room = cast(
            "tuple[bytes, int, int]",
            self._admit(
                keys=[
                    self._keys.state,
                    self._keys.groups,
                    queue_key(self._config.run.pool),
                    QUEUES_KEY,
                    *[job.key for job in jobs],
                ],
                args=args,
            ),
        )
        return Admitted(status=cast("AdmitStatus", status.decode()), cursor=cursor, room=room)

    def close(self, *, expected: int) -> CloseStatus:
        """Close the run if `expected` is still its cursor."""
        status, _ = cast("tuple[bytes, int]", self._close(keys=[self._keys.state], args=[expected]))
        return cast("CloseStatus", status.decode())


def check_same(config: RunConfig, stored: str) -> None:
    """Raise ConfigurationError naming the settings in which `stored`, a RunConfig as JSON, differs from `config`."""
    try:
        other = RunConfig.model_validate_json(stored).model_dump(mode="json")
    except ValidationError as error:
        raise ConfigurationError(
            f"run {config.run.name!r} exists with a configuration this version cannot read ({error.error_count()} settings). "
            "Choose another run.name, delete the run, or continue it with the version that opened it"
        ) from None
    differing = _differences(config.model_dump(mode="json"), other)
    if differing:
        listed = "\n".join(f"  {name}: {theirs!r} in the run, {ours!r} now" for name, ours, theirs in differing)
        raise ConfigurationError(
            f"run {config.run.name!r} exists with another configuration; choose another run.name or delete it. What differs:\n"
            f"{listed}"
        )


def _differences(ours: JSON, theirs: JSON, path: str = "") -> list[tuple[str, JSON, JSON]]:
    if ours == theirs:
        return []
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [(path, ours, theirs)]
    names = sorted(ours.keys() | theirs.keys())
    return [
        difference
        for name in names
        for difference in _differences(ours.get(name), theirs.get(name), f"{path}.{name}".lstrip("."))
    ]


def _or_empty(number: int | None) -> int | str:
    return "" if number is None else number
