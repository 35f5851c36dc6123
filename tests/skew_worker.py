"""A worker as a process of its own whose items take a moment: python -m tests.skew_worker URL NAME SECONDS_AN_ITEM LEASE_S SLOTS.

Buries every tenth item, ends when every item of the run is settled, and prints its clock first.
"""

from __future__ import annotations

import asyncio
import sys
import time

from distaff.clients import connect
from distaff.config import RolloutSection
from distaff.runs import read_state
from distaff.types import RolloutFailure, RolloutItem
from distaff_worker.leases import Lease
from distaff_worker.letters import Letters
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Outcome
from distaff_worker.service import Service
from distaff_worker.service_options import ServiceOptions
from tests.worker_support import POOL, ScriptedPlayer, emit_of

RUN = "run-1"


def main(url: str, name: str, *, seconds: float, lease_s: float, slots: int) -> None:
    print("clock", time.time(), flush=True)
    letters = Letters(name)

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        await asyncio.sleep(seconds)
        if item.seq % 10 == 9:
            failure = RolloutFailure(kind="timeout", boundary="rollout", message="on purpose", retryable=True)
            return letters.failed(RolloutSection(max_attempts=2), lease, item, failure)
        return emit_of(item, worker=name)

    with connect(url) as client, connect(url) as beats:
        options = ServiceOptions(pool=POOL, name=name, slots=slots, lease_s=lease_s, beat_s=lease_s / 6)
        player = ScriptedPlayer(play)

        def done() -> bool:
            state = read_state(client, RUN)
            return state is not None and state.ended

        service = Service(client, options=options, player=player, metrics=Metrics(), beats=beats, done=done)
        asyncio.run(service.run())


if __name__ == "__main__":
    main(*sys.argv[1:3], seconds=float(sys.argv[3]), lease_s=float(sys.argv[4]), slots=int(sys.argv[5]))
