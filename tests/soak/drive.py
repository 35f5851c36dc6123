"""The course of a soak: start the farm, strike it for so many seconds, stop, let it drain by itself, judge.

Invariant: what happened is in the result, good or bad; the farm is gone when it returns. The schedule of faults depends on the options
alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from distaff.keys import RunKeys
from tests.soak.engine import FAULTS
from tests.soak.farm import POOL, RUN, Farm, FarmOptions, farm
from tests.soak.inject import Injector
from tests.soak.judge import dead_letters, metrics_of, slow_recoveries, violations
from tests.soak.measure import Measure, Slope
from tests.soak.recovery import Recovery
from tests.soak.schedule import Fault, schedule
from tests.soak.witness import Witness

TICK_S = 0.05
START_S = 120.0
"""Until the first group: processes start, import, and load a tokenizer."""
DRAIN_S = 120.0
"""After the last fault, and what is left at the farm's own pace on top."""
HOPELESS = 20
"""Ends of one role that nobody caused."""
SLOWEST_RATE = 1.0
"""Groups a second that any machine drains at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What is run: the farm, and the faults on it."""

    farm: FarmOptions
    seconds: float
    gap_s: float
    """Mean time between two faults."""
    timed: bool = True
    """A slow recovery is a violation. False where the machine may be busy with other work."""

    def schedule(self) -> list[Fault]:
        return schedule(
            self.farm.seed,
            seconds=self.seconds,
            shape=self.farm.shape(),
            gap_s=self.gap_s,
            quiet_s=2 * self.farm.lease_s + 1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of it."""

    seed: int
    seconds: float
    """Under faults."""
    drained_s: float
    """From the last fault to everything settled, archived and trained on."""
    faults: dict[str, int]
    engine_faults: dict[str, int]
    state: dict[str, int]
    """Of the run: admitted, emitted, dead, lost, retried, handed_back."""
    dead: dict[str, int]
    rollouts: int
    tokens: int
    lives: dict[str, int]
    odd_ends: list[str]
    recovery: Recovery
    slopes: dict[str, Slope]
    violations: list[str]
    log: list[str]
    """The faults as they struck."""


def run(soak: Soak, folder: Path, *, say: Callable[[str], None] = print) -> Result:
    """Everything. Raises TimeoutError when the farm does not even start."""
    with farm(folder, soak.farm) as built, Witness(built.server.url, RUN) as witness:
        return _Course(soak, built, witness, say).run()


class _Course:
    def __init__(self, soak: Soak, built: Farm, witness: Witness, say: Callable[[str], None]) -> None:
        self._soak, self._farm, self._witness, self._say = soak, built, witness, say
        self._recovery = Recovery(built.client, POOL, workers=self._workers)
        self._injector = Injector(built, self._recovery, soak.schedule())
        self._measure = Measure()
        self._wrong: list[str] = []
        self._said_at = 0.0

    def run(self) -> Result:
        for role in self._farm.roles.values():
            role.start()
        try:
            self._turn_until(lambda: bool(self._witness.seqs), seconds=START_S, what="the first group")
        except TimeoutError as error:
            raise TimeoutError(self._stuck(error)) from None
        began = time.monotonic()
        while (now_s := time.monotonic() - began) < self._soak.seconds:
            self._injector.tick(now_s)
            self._turn()
        self._injector.heal()
        healed = time.monotonic()
        left = self._soak.farm.items - int(self._state().get("emitted", 0)) - int(self._state().get("dead", 0))
        try:
            self._turn_until(self._drained, seconds=DRAIN_S + left / SLOWEST_RATE, what="the farm to drain")
        except TimeoutError as error:
            self._wrong.append(self._stuck(error))
        drained_s = time.monotonic() - healed
        metrics_of(self._farm)
        self._wrong += violations(self._farm, self._injector, self._witness)
        if self._soak.timed:
            self._wrong += slow_recoveries(self._recovery, self._soak.farm.lease_s)
        return self._result(healed - began, drained_s)

    def _turn(self) -> None:
        for role in self._farm.roles.values():
            role.look_after()
        self._recovery.tick()
        self._measure.tick(self._pids())
        if time.monotonic() > self._said_at + 15:
            self._said_at = time.monotonic()
            self._say(
                f"{len(self._witness.seqs)} groups, {sum(self._injector.struck.values())} faults, {self._state()}"
            )
        time.sleep(TICK_S)

    def _turn_until(self, condition: Callable[[], bool], *, seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self._failing():
                raise TimeoutError(f"waited up to {seconds:.0f} s for {what}")
            self._turn()

    def _failing(self) -> bool:
        """Some role ends as soon as it is started, and always will."""
        return any(len(role.odd_ends) >= HOPELESS for role in self._farm.roles.values())

    def _drained(self) -> bool:
        """Producer, archivers and trainers have come to their ends; the witness has everything."""
        if not all(role.done for role in self._farm.roles.values() if role.ends):
            return False
        return len(set(self._witness.seqs.values())) >= int(self._state().get("emitted", 1))

    def _state(self) -> dict[str, int]:
        try:
            fields: Any = self._farm.client.hmget(RunKeys(RUN).state, NAMES)
        except redis.RedisError:
            return {}
        return {name: int(value or 0) for name, value in zip(NAMES, fields, strict=True)}

    def _pids(self) -> dict[str, int]:
        pids = {name: role.pid for name, role in self._farm.roles.items()}
        pids |= {f"{name} tree": pid for name, pid in pids.items() if name.startswith("worker")}
        if self._farm.engine is not None:
            pids["engine"] = self._farm.engine.pid
        return pids

    def _workers(self) -> list[int]:
        return [role.pid for role in self._farm.roles.values() if not role.ends]

    def _stuck(self, error: TimeoutError) -> str:
        """Who has not come to an end, and what they said last."""
        late = [role for role in self._farm.roles.values() if not role.done]
        said = "\n".join(f"--- {role.name}: {role.log[-1500:]}" for role in late)
        keys = {
            "queued": self._farm.client.llen(f"rq:queue:{POOL}"),
            "leased": self._farm.client.zcard(f"rq:wip:{POOL}"),
        }
        return f"{error}: {self._state()}, {keys}, {len(self._witness.seqs)} seen\n{said}"

    def _result(self, seconds: float, drained_s: float) -> Result:
        slopes = self._measure.slopes()
        self._wrong += [f"{name} grows: {slope}" for name, slope in slopes.items() if slope.steep]
        names = set(self._soak.farm.shape().spared)
        engine = Counter(line for line in self._farm.logs()["engine"].splitlines() if line in FAULTS)
        return Result(
            seed=self._soak.farm.seed,
            seconds=round(seconds, 1),
            drained_s=round(drained_s, 1),
            faults=dict(sorted(self._injector.struck.items())),
            engine_faults=dict(sorted(engine.items())),
            state=self._state(),
            dead=dict(dead_letters(self._farm.client)),
            rollouts=self._witness.rollouts,
            tokens=self._witness.tokens,
            lives={name: role.lives for name, role in self._farm.roles.items()},
            odd_ends=[end for role in self._farm.roles.values() for end in role.odd_ends],
            recovery=self._recovery,
            slopes={name: slope for name, slope in slopes.items() if name.removesuffix(" tree") in names},
            violations=self._wrong,
            log=self._injector.log,
        )


NAMES = ["admitted", "emitted", "dead", "lost", "retried", "handed_back"]
