"""What the settlement machine is made of: how a step is declared, a worker's real parts, a member of a consumer group."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import redis
from hypothesis import strategies as st

from distaff.config import RunConfig
from distaff.consumer import GroupConsumer
from distaff.consuming_steps import Delivery
from distaff.types import DeadLetter
from distaff_worker.beat import Beater
from distaff_worker.canceled import CanceledItems
from distaff_worker.claim import Claimer
from distaff_worker.leases import Counts, Lease
from distaff_worker.rq_schema import PoolKeys
from distaff_worker.settle import Settler
from distaff_worker.sweep import Sweeper
from tests.settlement_model import WINDOW
from tests.worker_support import make_item

POOL = "p"
KEYS = PoolKeys.of(POOL)
CANCELED = f"rq:canceled:{POOL}"
RUNS = ("a", "a-000000001")
"""The second name begins like a job id of the first."""
WORKERS, GROUPS, MEMBERS = ("w0", "w1", "w2"), ("trainer", "archive"), ("m0", "m1")
COUNTS = Counts(rollouts=2, samples=3, tokens=10, trained_tokens=4, reward_sum=0.5, reward_count=2)
LEASE_S = 3600.0
T = TypeVar("T")

some_run, some_worker = st.sampled_from(RUNS), st.sampled_from(WORKERS)
some_group, some_member = st.sampled_from(GROUPS), st.sampled_from(MEMBERS)
nth = st.integers(0, 30)
of_them = st.integers(0, 1000)


def config(run: str) -> RunConfig:
    sections: Any = {"run": {"name": run, "pool": POOL}, "producer": {"window": WINDOW}}
    return RunConfig(**sections)


def pick(values: list[T], n: int) -> T:
    return values[n % len(values)]


@dataclass(frozen=True)
class Step:
    """A method of the machine: how often it is taken, with what, and when it can be."""

    name: str
    weight: int
    arguments: st.SearchStrategy[dict[str, Any]]
    when: Callable[[Any], Any]


STEPS: list[Step] = []


def step(*, weight: int = 1, when: Callable[[Any], Any] = lambda self: True, **arguments: Any) -> Callable[[T], T]:
    """Not one of hypothesis' own rules: those are switched off half at a time, and most of the twenty-five are of use only together."""

    def register(method: T) -> T:
        name: str = method.__name__  # type: ignore[attr-defined]
        STEPS.append(Step(name, weight, st.fixed_dictionaries(arguments), when))
        return method

    return register


@dataclass
class Worker:
    """One worker's parts, and the leases it believes to have."""

    name: str
    claimer: Claimer
    settler: Settler
    sweeper: Sweeper
    canceled: CanceledItems
    beater: Beater = field(init=False)
    hands: dict[str, Lease] = field(default_factory=dict)
    heard: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, client: redis.Redis, name: str) -> Worker:
        names: Any = {"pool": POOL, "worker": name, "worker_key": f"rq:worker:{name}"}
        worker = cls(
            name,
            claimer=Claimer(client, **names, lease_s=LEASE_S),
            settler=Settler(client, **names, give_up=lambda: True),
            sweeper=Sweeper(client, pool=POOL),
            canceled=CanceledItems(client, pool=POOL, worker=name),
        )
        worker.beater = Beater(
            client,
            pool=POOL,
            worker=name,
            lease_s=LEASE_S,
            beat_s=1.0,
            leases=lambda: list(worker.hands.values()),
            on_lost=lambda lease: worker.heard.append(lease.execution_id),
            on_end=lambda: None,
            announce=lambda: None,
            tick=lambda: 0.0,
        )
        return worker


@dataclass
class Member:
    """A member of a consumer group, and what it has not acknowledged."""

    consumer: GroupConsumer
    holds: dict[str, Delivery] = field(default_factory=dict)


def letter_of(lease: Lease, kind: str) -> str:
    run, seq = lease.place
    values: Any = {"item": make_item(run, seq), "kind": kind, "boundary": "reward", "message": "why"}
    return json.dumps(asdict(DeadLetter(**values, attempts=1, first=lease.first, last=lease.first, worker="w")))
