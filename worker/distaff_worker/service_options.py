"""How one worker works: plain values, read from the settings by the command."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How one worker works; see WorkerSection in `distaff.settings`."""

    pool: str
    name: str
    slots: int = 64
    lease_s: float = 30.0
    beat_s: float = 5.0
    drain_s: float = 30.0
    burst: bool = False
    """End when the queue is empty and nothing runs."""
    max_groups: int = 0
    """End, gracefully, after so many settled items; 0: never."""
    max_rss_bytes: int = 0
    """End, gracefully, when the process has grown to so much; 0: never."""
