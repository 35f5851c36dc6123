"""Run in the archiver's image when a run has ended: was every admitted item settled once, and is the archive complete? Prints figures.

python3 - RUN POOL < compose_oracle.py     (Redis by DISTAFF_REDIS_URL, archive in runs/RUN)
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import redis

from distaff.keys import RunKeys, parse_job_id
from distaff.runs import read_state
from distaff_consumer.reading import read_archive
from distaff_consumer.records import record_to_group


def main(run: str, pool: str) -> None:
    client = redis.Redis.from_url(os.environ["DISTAFF_REDIS_URL"])
    keys = RunKeys(run)
    state = read_state(client, run)
    if state is None:
        sys.exit(f"there is no run {run}")
    groups = [record_to_group(record) for record in read_archive(Path("runs") / run)]
    seqs = [group.seq for group in groups]
    dead = [int(seq) for seq in client.hkeys(keys.dead)]
    waiting = {name: client.zcard(f"rq:{name}:{pool}") for name in ("wip", "scheduled", "deferred")}
    checks = {
        "admitted == emitted + dead": state.admitted == state.emitted + state.dead,
        "settled bits == admitted": client.bitcount(keys.settled) == state.admitted,
        "no group twice in the archive": len(seqs) == len(set(seqs)),
        "the archive has what was emitted": len(seqs) == state.emitted,
        "no item both emitted and dead": not set(seqs) & set(dead),
        "together they are what was admitted": sorted([*seqs, *dead]) == list(range(state.admitted)),
        "group ids are the items'": all(parse_job_id(group.group_id) == (run, group.seq) for group in groups),
        "nothing queued or leased": client.llen(f"rq:queue:{pool}") == 0 and not any(waiting.values()),
        "acknowledged groups are freed": client.xlen(keys.groups) == 0,
    }
    print(
        json.dumps(
            {
                "admitted": state.admitted,
                "emitted": state.emitted,
                "dead": state.dead,
                "dead_by_kind": Counter(json.loads(letter)["kind"] for letter in client.hvals(keys.dead)),
                "lost": state.lost,
                "handed_back": state.handed_back,
                "retried": state.retried,
                "rollouts": state.rollouts,
                "samples": state.samples,
                "tokens": state.tokens,
                "trained_tokens": state.trained_tokens,
                "mean_reward": round(state.reward_sum / max(state.reward_count, 1), 4),
                "workers_that_played": len({group.worker for group in groups}),
                "played_again": sum(group.attempt > 1 for group in groups),
                "seconds": round(max((group.created for group in groups), default=state.opened) - state.opened, 1),
            }
        )
    )
    if failed := [name for name, holds in checks.items() if not holds]:
        sys.exit(f"not true: {'; '.join(failed)}")


main(*sys.argv[1:])
