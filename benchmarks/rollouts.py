"""Rollouts per second and core of one worker process, and its CPU by stage: short rollouts, and groups of 8 x 8,192 tokens.

The engine is scripted, without latency, and a process of its own. Counted between two moments with all slots busy: CPU
of the worker process, all threads. The environment's share (verifiers' rollout and rubric) is shown apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.redis_support import running_redis

from benchmarks.farm import admit, wait_until_emitted
from benchmarks.processes import role
from benchmarks.results import Figure
from distaff.clients import connect

GROUP = 8
SHORT_TOKENS, LONG_TOKENS = 64, 8192
SHORT_GROUPS, LONG_GROUPS = 1000, 60
RATE_GOAL, CPU_GOAL_MS = 125.0, 10.0
OWN = ("parse the tokens", "make samples", "assemble", "encode", "settle")
"""The worker's own work after the engine answered."""
STAGES = ("claim", "render", "turn", "ask the engine", "read the answer", *OWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What one run cost."""

    worker: Mapping[str, Any]
    engine_cpu_s: float

    @property
    def rollouts(self) -> int:
        return GROUP * int(self.worker["groups"])

    @property
    def environment_s(self) -> float:
        return float(self.worker["stages"].get("environment", 0.0))

    def stage_ms(self, *stages: str) -> float:
        """CPU milliseconds a group."""
        spent_s = sum(float(self.worker["stages"].get(stage, 0.0)) for stage in stages)
        return 1000 * spent_s / int(self.worker["groups"])

    @property
    def rest_ms(self) -> float:
        total = 1000 * float(self.worker["cpu_s"]) / int(self.worker["groups"])
        return total - self.stage_ms(*STAGES, "environment")


def run() -> Sequence[Figure]:
    short = _play(groups=SHORT_GROUPS, tokens=SHORT_TOKENS, slots=64)
    long = _play(groups=LONG_GROUPS, tokens=LONG_TOKENS, slots=8)
    rate = short.rollouts / float(short.worker["cpu_s"])
    own_ms = long.stage_ms(*OWN)
    return [
        Figure(
            what="short rollouts/s and core (worker process, environment included)",
            goal=f">= {RATE_GOAL:g}",
            result=f"{rate:.0f}",
            met=rate >= RATE_GOAL,
        ),
        Figure(
            what="the same without the environment's CPU",
            result=f"{short.rollouts / (float(short.worker['cpu_s']) - short.environment_s):.0f}",
        ),
        Figure(
            what="short rollouts/s of one worker process, wall clock",
            result=f"{short.rollouts / short.worker['wall_s']:.0f}",
        ),
        Figure(
            what=f"CPU ms a group of 8 x {LONG_TOKENS} tokens: {', '.join(OWN)}",
            goal=f"<= {CPU_GOAL_MS:g}",
            result=f"{own_ms:.1f}",
            met=own_ms <= CPU_GOAL_MS,
        ),
        *(
            Figure(
                what=f"CPU ms a group, {stage}: short / 8 x {LONG_TOKENS} tokens",
                result=f"{short.stage_ms(stage):.2f} / {long.stage_ms(stage):.2f}",
            )
            for stage in (*STAGES, "environment")
        ),
        Figure(
            what="CPU ms a group, event loop, sockets, threads, rest",
            result=f"{short.rest_ms:.2f} / {long.rest_ms:.2f}",
        ),
        Figure(
            what="CPU ms a group of the scripted engine's process",
            result=f"{1000 * short.engine_cpu_s / SHORT_GROUPS:.2f} / {1000 * long.engine_cpu_s / LONG_GROUPS:.2f}",
        ),
    ]


def _play(*, groups: int, tokens: int, slots: int) -> Played:
    first, last = max(slots, groups // 10), groups - slots
    with running_redis() as url, connect(url) as client, role("engine", "--tokens", tokens) as engine:
        admit(url, engine.read()["url"], groups=groups, max_tokens=tokens)
        before = engine.cpu_s
        flags = ("--slots", slots, "--first", first, "--last", last, "--accounts")
        with role("farm_worker", url, *flags) as worker:
            worker.read()
            wait_until_emitted(client, groups, seconds=240)
            engine_cpu_s = engine.cpu_s - before
            worker.stop()
            return Played(worker=worker.read(), engine_cpu_s=engine_cpu_s)
