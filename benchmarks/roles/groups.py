"""The groups that the transport benchmark sends: tokens, masks, log-probabilities, rewards; no conversations."""

from __future__ import annotations

from dataclasses import replace

from tests.group_support import make_group

from distaff.keys import job_id
from distaff.types import ScoredGroup

RUN = "run"
_DISTINCT = 32


def numbered_groups(count: int, *, tokens: int) -> list[ScoredGroup]:
    """`count` groups of 8 samples of `tokens` tokens; the arrays of 32 of them, again and again."""
    distinct = [make_group(run=RUN, seq=seq, tokens=tokens, messages=False) for seq in range(min(count, _DISTINCT))]
    return [replace(distinct[seq % len(distinct)], seq=seq, group_id=job_id(RUN, seq)) for seq in range(count)]
