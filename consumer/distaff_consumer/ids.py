"""The set of group ids an archive holds, small enough to keep for millions of groups.

Invariant: exact membership. Ids made by `job_id` are kept as ranges of seqs, so a run archived in about its own order
costs a few integers; any other text is kept as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TypeAlias

from distaff.keys import job_id, parse_job_id

Ranges: TypeAlias = list[list[int]]
"""Sorted, disjoint [first, last] pairs, both ends included."""


class SeqRanges:
    """A set of integers kept as ranges."""

    def __init__(self, ranges: Iterable[Iterable[int]] = ()) -> None:
        pairs = [tuple(pair) for pair in ranges]
        self._first = [first for first, _ in pairs]
        self._last = [last for _, last in pairs]

    def __contains__(self, seq: int) -> bool:
        i = bisect_right(self._first, seq) - 1
        return i >= 0 and seq <= self._last[i]

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in zip(self._first, self._last, strict=True))

    def add(self, seq: int) -> None:
        self.add_range(seq, seq)

    def add_range(self, first: int, last: int) -> None:
        """Join [first, last] with every range it overlaps or touches."""
        low = bisect_right(self._first, first)
        if low and self._last[low - 1] >= first - 1:
            low -= 1
        high = bisect_right(self._first, last + 1)
        if low < high:
            first, last = min(first, self._first[low]), max(last, self._last[high - 1])
        self._first[low:high] = [first]
        self._last[low:high] = [last]

    def ranges(self) -> Ranges:
        return [list(pair) for pair in zip(self._first, self._last, strict=True)]


class GroupIds:
    """A set of group ids."""

    def __init__(self) -> None:
        self._runs: dict[str, SeqRanges] = {}
        self._others: set[str] = set()

    def __contains__(self, group_id: str) -> bool:
        parsed = _canonical(group_id)
        if parsed is None:
            return group_id in self._others
        run, seq = parsed
        return run in self._runs and seq in self._runs[run]

    def __len__(self) -> int:
        return sum(map(len, self._runs.values())) + len(self._others)

    def add(self, group_id: str) -> None:
        parsed = _canonical(group_id)
        if parsed is None:
            self._others.add(group_id)
        else:
            self._runs.setdefault(parsed[0], SeqRanges()).add(parsed[1])

    def update(self, other: GroupIds) -> None:
        for run, seqs in other._runs.items():
            mine = self._runs.setdefault(run, SeqRanges())
            for first, last in seqs.ranges():
                mine.add_range(first, last)
        self._others |= other._others

    def to_json(self) -> dict[str, object]:
        return {
            "runs": {run: seqs.ranges() for run, seqs in sorted(self._runs.items())},
            "others": sorted(self._others),
        }

    @classmethod
    def from_json(cls, runs: dict[str, Ranges], others: list[str]) -> GroupIds:
        ids = cls()
        ids._runs = {run: SeqRanges(ranges) for run, ranges in runs.items()}
        ids._others = set(others)
        return ids


def _canonical(group_id: str) -> tuple[str, int] | None:
    parsed = parse_job_id(group_id)
    return parsed if parsed and job_id(*parsed) == group_id else None
