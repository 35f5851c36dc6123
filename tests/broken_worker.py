"""A program: `distaff work` in which one part fails with an unexpected exception once items are in play.

python -m tests.broken_worker PART ARGUMENTS-OF-DISTAFF...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from distaff.cli.main import main
from distaff_worker.beat import Beater
from distaff_worker.claim import Claimer
from distaff_worker.job import GroupPlayer
from distaff_worker.service import Service
from distaff_worker.sweep import Sweeper


def stand_still(self: Any, *args: Any) -> NoReturn:
    while True:
        time.sleep(600)


PARTS: dict[str, tuple[type[Any], str]] = {
    "beat": (Beater, "beat"),
    "claim": (Claimer, "claim"),
    "sweep": (Sweeper, "sweep"),
}


class Cursed(Exception):
    """Nobody expects this one."""


def breaking(method: Callable[..., Any], in_play: Callable[[], bool]) -> Callable[..., Any]:
    """`method`, until `in_play` says so; from then on it raises."""

    def broken(self: Any, *args: Any, **options: Any) -> Any:
        if in_play():
            _curse()
        return method(self, *args, **options)

    return broken


def _curse() -> NoReturn:
    raise Cursed("cursed")


def break_part(part: str) -> None:
    """Break `part` of every worker of this process as soon as one of them plays something."""
    services: list[Service] = []
    begin = Service.__init__

    def remember(self: Service, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        services.append(self)

    Service.__init__ = remember  # type: ignore[method-assign]
    owner, name = PARTS[part]
    in_play = lambda: any(service._executions.leases() for service in services)  # noqa: E731
    setattr(owner, name, breaking(getattr(owner, name), in_play))


if __name__ == "__main__":
    if sys.argv[1] == "loop":
        GroupPlayer._count = stand_still  # type: ignore[method-assign, assignment]
    else:
        break_part(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
