"""The table and the coloured sample at the end of the demo, from the JSONL files of its archives.

Invariant: reads files and nothing else; a figure that is not in them is not shown.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distaff.cli.screen import results
from distaff.types import JSON

STAGES = ("setup", "engine", "environment", "score", "tokenize", "total")
TRAINED = "bold black on green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One archive in figures."""

    folder: Path
    groups: int
    rollouts: int
    samples: int
    tokens: int
    trained_tokens: int
    mean_reward: float | None
    seconds: float
    """From the dispatch of the first group to the completion of the last."""
    stage_seconds: dict[str, float]
    """Mean over the rollouts."""
    best: dict[str, JSON] | None
    """The sample to show, as in the archive, with its rollout's reward and turns added."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def read_groups(folder: Path) -> Iterator[dict[str, JSON]]:
    """The records of an archive in order."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text("utf-8").split("\n"):
            if line:
                yield json.loads(line)


def summarize(records: Iterable[Mapping[str, JSON]], folder: Path) -> Summary:
    """Count what is in the records."""
    groups = list(records)
    rollouts = [rollout for group in groups for rollout in group["rollouts"]]
    samples = [sample for group in groups for sample in group["samples"]]
    rewards = [rollout["reward"] for rollout in rollouts if rollout["reward"] is not None]
    stages: Counter[str] = Counter()
    for rollout in rollouts:
        stages.update({name: float(seconds) for name, seconds in rollout["timings"].items()})
    starts = [group["created"] - group["statistics"]["seconds"] for group in groups]
    return Summary(
        folder=folder,
        groups=len(groups),
        rollouts=len(rollouts),
        samples=len(samples),
        tokens=sum(len(sample["token_ids"]) for sample in samples),
        trained_tokens=sum(end - start for sample in samples for start, end in sample["trained"]),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        seconds=max((group["created"] for group in groups), default=0.0) - min(starts, default=0.0),
        stage_seconds={name: total / max(len(rollouts), 1) for name, total in stages.items()},
        best=_best(groups),
    )


def _best(groups: list[Mapping[str, JSON]]) -> dict[str, JSON] | None:
    """Of the rollouts with more than one turn the one with the highest reward."""
    candidates = [
        {**sample, "turns": rollout["turns"], "reward": rollout["reward"], "group_id": group["group_id"]}
        for group in groups
        for sample in group["samples"]
        for rollout in [group["rollouts"][sample["rollout"]]]
        if rollout["reward"] is not None
    ]
    return max(candidates, key=lambda sample: (sample["turns"] > 1, sample["reward"], sample["turns"]), default=None)


def print_report(summaries: Mapping[Any, Summary], tokenizer: Path) -> None:
    """The table, one sample with its trained tokens marked, and where the files are."""
    console = results()
    console.print(table(summaries))
    shown = next((summary.best for summary in summaries.values() if summary.best), None)
    if shown is not None:
        _print_sample(console, shown, tokenizer)
    for mode, summary in summaries.items():
        for path in sorted(summary.folder.glob("*.jsonl")):
            console.print(f"{mode}: {path}", soft_wrap=True)


def table(summaries: Mapping[Any, Summary]) -> Table:
    """A column for each mode."""
    result = Table(
        "", *(str(mode).upper() for mode in summaries), title="What is in the archives", title_justify="left"
    )
    for column in result.columns[1:]:
        column.justify = "right"
    every = list(summaries.values())
    for name in ("groups", "rollouts", "samples", "tokens", "trained_tokens"):
        result.add_row(name.replace("_", " "), *(f"{getattr(summary, name):,}" for summary in every))
    result.add_row("mean reward", *("-" if s.mean_reward is None else f"{s.mean_reward:.3f}" for s in every))
    result.add_row("seconds", *(f"{summary.seconds:.1f}" for summary in every))
    result.add_row("tokens/s", *(f"{summary.tokens_per_s:,.0f}" for summary in every))
    for stage in _stages(every):
        cells = (f"{s.stage_seconds[stage]:.3f} s" if stage in s.stage_seconds else "-" for s in every)
        result.add_row(f"{stage}, per rollout", *cells)
    return result


def _stages(summaries: list[Summary]) -> list[str]:
    found = {stage for summary in summaries for stage in summary.stage_seconds}
    return [stage for stage in STAGES if stage in found] + sorted(found - set(STAGES))


def _print_sample(console: Console, sample: Mapping[str, JSON], tokenizer: Path) -> None:
    marks = "coloured" if console.is_terminal else "between [[ and ]]"
    head = f"A sample of {sample['group_id']}: {sample['turns']} turns, reward {sample['reward']:.3f}; trained tokens {marks}"
    console.print(f"\n{head}\n")
    console.print(marked(pieces(sample, tokenizer), colours=console.is_terminal), soft_wrap=True)
    console.print()


def pieces(sample: Mapping[str, JSON], tokenizer: Path) -> list[tuple[str, bool]]:
    """The sample's text in parts, each with whether it is trained. Decoded with the tokenizer the run trained with."""
    decoder = importlib.import_module("tokenizers").Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = sample["token_ids"]
    parts: list[tuple[str, bool]] = []
    at = 0
    for start, end in [*sample["trained"], (len(ids), len(ids))]:
        for first, last, trained in ((at, start, False), (start, end, True)):
            if last > first:
                parts.append((decoder.decode(ids[first:last], skip_special_tokens=False), trained))
        at = end
    return parts


def marked(parts: list[tuple[str, bool]], *, colours: bool) -> Text:
    """The parts as one text."""
    text = Text()
    for part, trained in parts:
        text.append(part if colours or not trained else f"[[{part}]]", style=TRAINED if trained else "")
    return text
