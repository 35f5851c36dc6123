"""Which fault strikes whom, when, and for how long: made from a seed before anything starts.

Invariant: the same seed and shape give the same schedule. It begins with a worker's death and with lost replies; every kind of fault comes once in each round of
the deck; nothing strikes a target that a fault has in its grip; after every second kill of a worker the rest of the farm is left alone for `quiet_s`, so that the time to
recovery means something.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

REDIS, ENGINE, EVERYBODY = "redis", "engine", "everybody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. lasts_s: until it is taken back, 0 for one that strikes once. quiet: nothing else happens meanwhile."""

    at_s: float
    kind: str
    target: str
    lasts_s: float = 0.0
    amount: float = 0.0
    """Seconds of delay, bytes a second, or the share of commands that fail, whatever `kind` needs."""
    seed: int = 0
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What there is to strike. spared: long-lived processes that are never killed or restarted, so that leaks show."""

    workers: Sequence[str]
    roles: Sequence[str]
    """Everything else that speaks to Redis: producer, archivers, trainers."""
    spared: Sequence[str] = ()

    @property
    def killable(self) -> list[str]:
        return [name for name in (*self.workers, *self.roles) if name not in self.spared]


@dataclass(frozen=True, slots=True)
class _Card:
    kind: str
    whom: str
    """"worker" | "role" | "any" (workers and roles) | "redis" | "engine" | "everybody"."""
    lasts_s: tuple[float, float] = (0.0, 0.0)
    amount: tuple[float, float] = (0.0, 0.0)
    times: int = 1


DECK = (
    _Card("kill", "worker", times=4),
    _Card("kill", "role", times=3),
    _Card("drain", "worker", times=1),
    _Card("drain", "role", times=1),
    _Card("freeze", "worker", (0.5, 8.0), times=2),
    _Card("freeze", "role", (0.5, 8.0), times=2),
    _Card("cut", "any", times=3),
    _Card("commands", "worker", (3.0, 8.0), (0.05, 0.3), times=2),
    _Card("commands", "any", (3.0, 8.0), (0.05, 0.3), times=3),
    _Card("black_hole", "any", (1.0, 7.0), times=3),
    _Card("delay", "any", (2.0, 6.0), (0.05, 0.3), times=2),
    _Card("dribble", "any", (2.0, 6.0), (1_000, 20_000), times=2),
    _Card("pause", REDIS, (0.5, 6.0), times=2),
    _Card("kill", REDIS, (0.1, 2.0), times=2),
    _Card("full", REDIS, (1.0, 6.0), times=2),
    _Card("kill", ENGINE, (0.1, 2.0)),
    _Card("reset", ENGINE, times=2),
    _Card("black_hole", ENGINE, (0.5, 4.0)),
    _Card("half_open", ENGINE, (0.5, 4.0)),
    _Card("delay", ENGINE, (1.0, 4.0), (0.1, 0.3)),
    _Card("dribble", ENGINE, (1.0, 4.0), (1_000, 20_000)),
    _Card("script_flush", EVERYBODY, times=2),
    _Card("client_kill", EVERYBODY, times=2),
    _Card("rq_info", EVERYBODY, times=1),
)


def schedule(seed: int, *, seconds: float, shape: Shape, gap_s: float, quiet_s: float) -> list[Fault]:
    """The faults of `seconds` seconds, about one in `gap_s`, each of them over by then."""
    dealer = _Dealer(random.Random(seed), shape, quiet_s)
    faults: list[Fault] = []
    at_s = 0.0
    for card in dealer.cards():
        at_s = max(at_s + dealer.random.expovariate(1 / gap_s), dealer.quiet_until_s)
        if at_s >= seconds:
            return faults
        fault = dealer.deal(card, at_s)
        if fault is not None and fault.at_s + fault.lasts_s <= seconds:
            faults.append(fault)
            at_s = fault.at_s
    raise AssertionError("the deck has no end")


@dataclass(slots=True)
class _Dealer:
    random: random.Random
    shape: Shape
    quiet_s: float
    quiet_until_s: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    kills: int = 0

    def cards(self) -> Iterator[_Card]:
        for kind in ("kill", "commands"):
            yield next(card for card in DECK if (card.kind, card.whom) == (kind, "worker"))
        while True:
            deck = [card for card in DECK for _ in range(card.times)]
            self.random.shuffle(deck)
            yield from deck

    def deal(self, card: _Card, at_s: float) -> Fault | None:
        """The fault, None when everybody it could strike is in another's grip."""
        free = [name for name in self._targets(card) if self.busy.get(name, 0.0) <= at_s]
        if not free:
            return None
        target = self.random.choice(free)
        lasts_s = round(self.random.uniform(*card.lasts_s), 3)
        quiet = False
        if card.kind == "kill" and card.whom == "worker":
            quiet = self.kills % 2 == 0
            self.kills += 1
        if quiet:
            at_s = max(at_s, *self.busy.values(), 0.0)
            self.quiet_until_s = at_s + self.quiet_s
        self.busy[target] = at_s + lasts_s
        return Fault(
            at_s=round(at_s, 3),
            kind=card.kind,
            target=target,
            lasts_s=lasts_s,
            amount=round(self.random.uniform(*card.amount), 3),
            seed=self.random.randrange(1 << 32),
            quiet=quiet,
        )

    def _targets(self, card: _Card) -> Sequence[str]:
        mortal = card.kind in ("kill", "drain")
        workers, roles = (
            [name for name in names if not (mortal and name in self.shape.spared)]
            for names in (self.shape.workers, self.shape.roles)
        )
        return {"worker": workers, "role": roles, "any": [*workers, *roles]}.get(card.whom, [card.whom])
