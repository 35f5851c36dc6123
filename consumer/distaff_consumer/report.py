"""The table an evaluation ends with.

Invariant: shows only what is in metrics.json; a number that is not known is a dash.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from distaff.types import JSON


def table(metrics: Mapping[str, JSON]) -> Group:
    """metrics: the content of metrics.json."""
    parts: list[Table | Text] = [Text(_headline(metrics)), _scores(metrics), _counts(metrics)]
    if metrics["dead_letters"]["kinds"]:
        parts.insert(2, Text(_dead(metrics), style="bold red"))
    return Group(*parts)


def render_metrics(metrics: Mapping[str, JSON], *, width: int = 100) -> str:
    """The table as plain text."""
    out = StringIO()
    Console(file=out, width=width, no_color=True, highlight=False).print(table(metrics))
    return out.getvalue()


def _headline(metrics: Mapping[str, JSON]) -> str:
    names = ", ".join(f"{e['id']} {e['version']} ({e['split']})" for e in metrics["environments"]) or "no group"
    rollouts, times, tokens = metrics["rollouts"], metrics["times"], metrics["tokens"]
    return (
        f"{metrics['model'] or 'model'} on {names}, temperature {metrics['sampling'].get('temperature', '-')}:\n"
        f"{metrics['items']['played']} items x {rollouts['per_item']} rollouts, {rollouts['scored']} scored, {rollouts['failed']} failed, "
        f"{tokens['completion']} tokens sampled, {times['seconds']:.1f} s"
    )


def _dead(metrics: Mapping[str, JSON]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in metrics["dead_letters"]["kinds"].items())
    return (
        f"{metrics['items']['dead']} items have no result: {kinds}. Mean reward with failures as 0: "
        f"{_number(metrics['reward_mean_failures_as_zero'])}"
    )


def _scores(metrics: Mapping[str, JSON]) -> Table:
    rows = Table("score", "mean", "standard error", "std", "min", "max", "items", "rollouts")
    for column in rows.columns[1:]:
        column.justify = "right"
    _row(rows, "reward", metrics["reward"])
    for k, value in metrics["pass"]["at"].items():
        rows.add_row(f"pass@{k} (reward >= {metrics['pass']['reward']:g})", _number(value))
    for name, value in metrics["metrics"].items():
        _row(rows, name, value)
    if len(metrics["tasks"]) > 1:
        rows.add_section()
        for name, task in metrics["tasks"].items():
            _row(rows, f"reward of {name}", task["reward"])
    return rows


def _row(rows: Table, name: str, value: Mapping[str, JSON]) -> None:
    numbers = (_number(value[key]) for key in ("mean", "standard_error", "std", "min", "max"))
    rows.add_row(name, *numbers, str(value["items"]), str(value["values"]))


def _counts(metrics: Mapping[str, JSON]) -> Table:
    rows = Table("count of", "", "rollouts")
    for name in ("stop_conditions", "finish_reasons", "verdicts", "errors"):
        for word, count in metrics["counts"][name].items():
            rows.add_row(name.replace("_", " "), word, str(count))
        rows.add_section()
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
