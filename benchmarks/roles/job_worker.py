"""One worker process of ours whose player plays nothing, or sleeps, and emits a tiny encoded group."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from tests.group_support import make_group
from tests.worker_support import POOL, ScriptedPlayer

from benchmarks.roles.talk import say
from distaff.clients import connect
from distaff.keys import job_id
from distaff.logs import configure_logging
from distaff.settings import LogSection
from distaff.types import RolloutItem
from distaff.wire import encode_group
from distaff_worker.leases import Counts, Lease
from distaff_worker.metrics import Metrics
from distaff_worker.outcome import Emit, Outcome
from distaff_worker.service import Service
from distaff_worker.service_options import ServiceOptions

SLOTS = 64


async def work(url: str, nap_s: float) -> None:
    template = make_group(rollouts=1, tokens=16, messages=False)
    counts = Counts(rollouts=1, samples=1, tokens=16, trained_tokens=8, reward_sum=0.5, reward_count=1)

    async def play(lease: Lease, item: RolloutItem) -> Outcome:
        if nap_s:
            await asyncio.sleep(nap_s)
        group = replace(template, run=item.run, seq=item.seq, group_id=job_id(item.run, item.seq))
        return Emit(fields=encode_group(group), counts=counts, size_bytes=500, reward_mean=0.5)

    options = ServiceOptions(pool=POOL, name="bench", slots=SLOTS)
    say(ready=True)
    await Service(connect(url), options=options, player=ScriptedPlayer(play), metrics=Metrics()).run()


def main() -> None:
    configure_logging(LogSection(format="json"))
    asyncio.run(work(sys.argv[1], float(sys.argv[2])))


if __name__ == "__main__":
    main()
