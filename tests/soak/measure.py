"""Memory and file descriptors of long-lived processes over time, and the slope of each.

Invariant: samples of one process only are put on one line; a life too short for a line has none.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from tests.harness.processes import children, fds, rss_bytes

EVERY_S = 1.0
MIB = 1 << 20
WARM_UP_S = 240.0
"""Caches, pools and the allocator's arenas fill at first; what grows afterwards is a leak."""
SHORTEST_S = 480.0
"""Of samples after the warm-up: over less a slope is noise."""
RSS_LIMIT_MIB_PER_MIN = 0.75
"""45 MiB an hour, which a process of a few hundred MiB that is replaced once a day can afford; one group kept would be ten times that."""
FDS_LIMIT_PER_MIN = 0.2
"""12 an hour against the usual limit of 1024; a connection leaked at each cut would be several a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Least squares over one life. judged: long enough to be held against the limits."""

    seconds: float
    rss_mib: float
    """At the end."""
    rss_mib_per_min: float
    fds: int
    fds_per_min: float
    judged: bool

    @property
    def steep(self) -> bool:
        return self.judged and (self.rss_mib_per_min > RSS_LIMIT_MIB_PER_MIN or self.fds_per_min > FDS_LIMIT_PER_MIN)


@dataclass(slots=True)
class _Life:
    pid: int
    at_s: list[float] = field(default_factory=list)
    rss: list[float] = field(default_factory=list)
    fds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Measure:
    """`tick` with the pids that live, by name. A name with " tree" behind it is measured with its descendants."""

    lives: dict[str, list[_Life]] = field(default_factory=dict)
    _looked: float = 0.0

    def tick(self, pids: Mapping[str, int]) -> None:
        now = time.monotonic()
        if now < self._looked + EVERY_S:
            return
        self._looked = now
        for name, pid in pids.items():
            if pid:
                self._sample(name, pid, now)

    def slopes(self) -> dict[str, Slope]:
        """Of the longest life of each name."""
        found = {}
        for name, lives in self.lives.items():
            longest = max(lives, key=lambda life: life.at_s[-1] - life.at_s[0])
            if len(longest.at_s) > 2:
                found[name] = _slope(longest)
        return found

    def _sample(self, name: str, pid: int, now: float) -> None:
        members = [pid, *children(pid)] if name.endswith(" tree") else [pid]
        try:
            rss, open_files = sum(map(rss_bytes, members)), sum(map(fds, members))
        except OSError:
            return  # one of them ended while we looked
        lives = self.lives.setdefault(name, [])
        if not lives or lives[-1].pid != pid:
            lives.append(_Life(pid))
        lives[-1].at_s.append(now)
        lives[-1].rss.append(rss / MIB)
        lives[-1].fds.append(open_files)


def _slope(life: _Life) -> Slope:
    at_s = np.array(life.at_s) - life.at_s[0]
    warm = at_s >= min(WARM_UP_S, at_s[-1] / 2)
    minutes = at_s[warm] / 60
    rss, open_files = np.array(life.rss), np.array(life.fds)
    return Slope(
        seconds=round(float(at_s[-1]), 1),
        rss_mib=round(float(rss[-1]), 1),
        rss_mib_per_min=round(_line(minutes, rss[warm]), 3),
        fds=int(open_files[-1]),
        fds_per_min=round(_line(minutes, open_files[warm]), 3),
        judged=bool(minutes[-1] - minutes[0] >= SHORTEST_S / 60),
    )


def _line(x: np.ndarray, y: np.ndarray) -> float:
    """Slope of the least-squares line."""
    if len(x) < 2 or x[-1] == x[0]:
        return 0.0
    return float(np.polyfit(x, y, 1)[0])
