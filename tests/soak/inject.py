"""Strikes the farm with the faults of a schedule, and takes them back when their time is over.

Invariant: what lasts is taken back, at its time or by `heal`; after `heal` nothing is frozen, cut off, slow, full or down.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis

from tests.harness import canaries, processes
from tests.harness.byte_proxy import ByteProxy
from tests.harness.processes import Child
from tests.harness.resp_proxy import RespProxy
from tests.soak.farm import Farm
from tests.soak.recovery import Recovery
from tests.soak.schedule import ENGINE, EVERYBODY, REDIS, Fault

RQ = str(Path(sys.executable).parent / "rq")
RQ_S = 30.0
"""Longest life of an `rq info`."""
Undo = Callable[[], None]


@dataclass(slots=True)
class _Standing:
    until_s: float
    undo: Undo


@dataclass(slots=True)
class Injector:
    """`tick` with the seconds since the faults began, often; `heal` at the end."""

    farm: Farm
    recovery: Recovery
    faults: Sequence[Fault]
    struck: Counter[str] = field(default_factory=Counter)
    """By kind and whom."""
    log: list[str] = field(default_factory=list)
    operators: list[tuple[float, Child]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    _coming: deque[Fault] = field(default_factory=deque)
    _standing: list[_Standing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._coming.extend(self.faults)

    @property
    def over(self) -> bool:
        return not self._coming and not self._standing

    def tick(self, now_s: float) -> None:
        for standing in [standing for standing in self._standing if standing.until_s <= now_s]:
            self._standing.remove(standing)
            standing.undo()
        while self._coming and self._coming[0].at_s <= now_s:
            fault = self._coming.popleft()
            self.log.append(f"{now_s:.2f} {fault}")
            undo = self._strike(fault)
            self.struck[f"{fault.kind} {fault.target.partition('-')[0]}"] += 1
            if undo is not None:
                self._standing.append(_Standing(now_s + fault.lasts_s, undo))
        self._reap()

    def heal(self) -> None:
        """Everything back as it was; what has not struck yet never does."""
        self._coming.clear()
        for standing in self._standing:
            standing.undo()
        self._standing.clear()
        self._reap(everybody=True)

    def _strike(self, fault: Fault) -> Undo | None:
        """How it is taken back, None when it needs not be."""
        strike = {REDIS: self._strike_redis, ENGINE: self._strike_engine, EVERYBODY: self._strike_everybody}
        try:
            return strike.get(fault.target, self._strike_role)(fault)
        except redis.RedisError as error:
            self.log.append(f"  Redis did not take it: {type(error).__name__}")
            return None

    def _strike_role(self, fault: Fault) -> Undo | None:
        role, proxy = self.farm.roles[fault.target], self.farm.proxies[fault.target]
        match fault.kind:
            case "kill":
                with self.recovery.watching(role, quiet=fault.quiet):
                    role.kill()
            case "drain":
                role.drain()
            case "freeze":
                role.freeze()
                return role.thaw
            case "cut":
                proxy.cut_all()
            case "commands":
                proxy.faults(fault.seed, rate=fault.amount)
                return proxy.heal
            case _:
                return _weather(proxy, fault)
        return None

    def _strike_redis(self, fault: Fault) -> Undo:
        server = self.farm.server
        match fault.kind:
            case "pause":
                server.pause()
                return server.resume
            case "kill":
                server.kill()
                return server.start
            case "full":
                used = int(self.farm.client.info("memory")["used_memory"])
                self.farm.client.config_set("maxmemory", max(1_000_000, used - 50_000))
                return self._make_room
        raise ValueError(fault)

    def _make_room(self) -> None:
        for _ in range(50):
            try:
                self.farm.client.config_set("maxmemory", 0)
                return
            except redis.RedisError:
                time.sleep(0.1)
        raise RuntimeError("Redis did not take the limit back")

    def _strike_engine(self, fault: Fault) -> Undo | None:
        match fault.kind:
            case "kill":
                self.farm.kill_engine()
                return self.farm.start_engine
            case "reset":
                self.farm.engine_proxy.reset()
                return None
            case "half_open":
                self.farm.engine_proxy.half_open()
                return self.farm.engine_proxy.heal
        return _weather(self.farm.engine_proxy, fault)

    def _strike_everybody(self, fault: Fault) -> Undo | None:
        client = self.farm.client
        match fault.kind:
            case "script_flush":
                client.script_flush()
            case "client_kill":
                client.client_kill_filter(_type="normal", skipme=True)
                client.client_kill_filter(_type="pubsub")
            case "rq_info":
                env = canaries.environment({}, RQ_REDIS_URL=self.farm.server.url)
                until = time.monotonic() + RQ_S
                self.operators += [(until, processes.start([RQ, "info"], env=env)) for _ in range(2)]
            case _:
                raise ValueError(fault)
        return None

    def _reap(self, *, everybody: bool = False) -> None:
        for entry in list(self.operators):
            until, child = entry
            if child.code is not None or everybody or time.monotonic() > until:
                child.kill()
                self.said.append(child.log)
                self.operators.remove(entry)


def _weather(proxy: RespProxy | ByteProxy, fault: Fault) -> Undo:
    match fault.kind:
        case "black_hole":
            proxy.black_hole()
        case "delay":
            proxy.delay(fault.amount)
        case "dribble":
            proxy.dribble(fault.amount)
        case _:
            raise ValueError(fault)
    return proxy.heal
