"""What a consumer is asked for (options), gives (deliveries), and wants done (steps). Values only.

Invariant: a step says what to do, never how: the synchronous consumer blocks, the asyncio one awaits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict, TypeVar

from distaff.types import ScoredGroup

MAX_BLOCK_S = 5.0
"""Bound on one blocking read, so that the end of the run and dead consumers are noticed."""


class ConsumerOptions(TypedDict, total=False):
    """Keyword arguments of GroupConsumer and AsyncGroupConsumer."""

    group: str
    """Name of the consumer group ("trainer"). Members of one group share the entries; each group gets all of them."""
    consumer: str | None
    """Name of this member; host, pid and a random part unless given. A fixed name gets its unacknowledged deliveries back at once
    after a crash; never give one name to two live processes."""
    batch: int
    """Entries fetched in one read (8)."""
    claim_idle_s: float
    """Deliveries of another member are taken over when it has not acknowledged them for so long (300): set it above the longest
    time between reading a group and acknowledging it."""
    block_s: float
    """How long one read waits for new entries (1.0, at most MAX_BLOCK_S)."""
    max_deliveries: int
    """A group delivered so often and never acknowledged is parked (5)."""
    start: str
    """Where a consumer group that does not exist yet begins: "0", the oldest entry there is, or "$", what comes from now on."""
    reconnect_s: float
    """How long Redis may be away before RedisUnavailable is raised (300)."""
    max_bytes: int
    """Limit on one decoded group (64 MiB)."""
    messages: bool
    """False: leave conversations, tools and the item's row undecoded (True)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Delivery:
    """A scored group in the hands of this consumer until it is acknowledged."""

    group: ScoredGroup
    entry_id: str
    deliveries: int
    """1 the first time, more when it was delivered before and not acknowledged."""


@dataclass(frozen=True, slots=True)
class Call:
    """Call `client.<method>(*args, **options)`."""

    method: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunScript:
    """Run `distaff/lua/<name>.lua`."""

    name: str
    keys: Sequence[str]
    args: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """Sleep."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Run `function()`, off the event loop when it handles many bytes."""

    function: Callable[[], Any]
    size_bytes: int


Step: TypeAlias = Call | RunScript | Pause | Work
T = TypeVar("T")
Steps: TypeAlias = Generator[Step, Any, T]
SCRIPTS = ("free", "park")
