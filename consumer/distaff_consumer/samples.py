"""samples.jsonl of an evaluation: one line for each rollout, ordered by item and rollout.

Invariant: the same groups give the same bytes; the file is there whole or not at all. Holds one group in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from distaff.types import JSON, ScoredGroup
from distaff_consumer.files import replacing
from distaff_consumer.lines import encode_line
from distaff_consumer.rows import gold_answer, question, task_name


def write_samples(path: Path, groups: Iterable[ScoredGroup]) -> int:
    """Write the rollouts of `groups` in their order; returns how many."""
    count = 0
    with replacing(path) as file:
        for group in groups:
            for sample in samples_of(group):
                file.write(encode_line(sample))
                count += 1
    return count


def samples_of(group: ScoredGroup) -> Iterator[dict[str, JSON]]:
    """One JSON object for each rollout of a group."""
    for rollout in group.rollouts:
        yield {
            "run": group.run,
            "seq": group.seq,
            "rollout": rollout.index,
            "key": group.key,
            "task": task_name(group.task, default=group.environment.id),
            "question": question(group.task, rollout.messages),
            "answer": gold_answer(group.task),
            "parsed_answer": rollout.answer,
            "reward": rollout.reward,
            "metrics": rollout.metrics,
            "verdict": rollout.verdict,
            "error": None if rollout.error is None else f"{rollout.error.boundary}: {rollout.error.message}",
            "stop_condition": rollout.stop_condition,
            "finish_reason": rollout.finish_reason,
            "truncated": rollout.truncated,
            "turns": rollout.turns,
            "prompt_tokens": rollout.prompt_tokens,
            "completion_tokens": rollout.completion_tokens,
            "seat": rollout.seat,
            "messages": rollout.messages,
        }
