"""The result of a soak for people (a Markdown table) and for machines (one JSON object)."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.soak.drive import Result


def doubles_and_losses(result: Result) -> tuple[int, int]:
    """By the counters; the oracle's own words are among the violations."""
    settled = result.state.get("emitted", 0) + result.state.get("dead", 0)
    admitted = result.state.get("admitted", 0)
    return max(0, settled - admitted), max(0, admitted - settled)


def as_json(result: Result) -> dict[str, Any]:
    recovery = result.recovery
    doubles, losses = doubles_and_losses(result)
    return {
        **{
            field.name: getattr(result, field.name)
            for field in dataclasses.fields(result)
            if field.name not in ("recovery", "slopes", "log")
        },
        "slopes": {name: dataclasses.asdict(slope) for name, slope in result.slopes.items()},
        "doubles": doubles,
        "losses": losses,
        "recovery_s": {
            "items": len(recovery.quiet_s) + len(recovery.busy_s) + len(recovery.suspect_s),
            "slowest_to_the_queue": _slowest(recovery.queued_s),
            "slowest": _slowest(recovery.quiet_s),
            "slowest_among_other_faults": _slowest(recovery.busy_s),
            "slowest_suspect": _slowest(recovery.suspect_s),
        },
    }


def as_table(result: Result) -> str:
    values = as_json(result)
    recovery = values["recovery_s"]
    state = result.state
    rows = [
        ("seed", result.seed),
        ("under faults, then drained in", f"{result.seconds:.0f} s, {result.drained_s:.0f} s"),
        ("faults injected", f"{sum(result.faults.values())}: {_counts(result.faults)}"),
        ("bad answers of the engine", f"{sum(result.engine_faults.values())}: {_counts(result.engine_faults)}"),
        ("processes started", _counts(result.lives)),
        ("items admitted, emitted, dead", f"{state.get('admitted')}, {state.get('emitted')}, {state.get('dead')}"),
        ("dead letters", _counts(result.dead)),
        ("rollouts, tokens", f"{result.rollouts}, {result.tokens}"),
        (
            "leases lost, attempts retried, handed back",
            f"{state.get('lost')}, {state.get('retried')}, {state.get('handed_back')}",
        ),
        ("doubles, losses", f"{values['doubles']}, {values['losses']}"),
        (
            "slowest recovery",
            f"{recovery['slowest']} s of {len(result.recovery.quiet_s)} (among other faults {recovery['slowest_among_other_faults']} s)",
        ),
    ]
    rows += [
        (
            f"{name}: memory, descriptors",
            f"{slope.rss_mib:.0f} MiB {slope.rss_mib_per_min:+.2f}/min, {slope.fds} {slope.fds_per_min:+.2f}/min"
            f" over {slope.seconds:.0f} s" + ("" if slope.judged else " (too short to judge)"),
        )
        for name, slope in result.slopes.items()
    ]
    rows.append(("violations", len(result.violations)))
    return "\n".join(["| | |", "|---|---|", *[f"| {name} | {value} |" for name, value in rows]])


def _slowest(seconds: list[float]) -> float | None:
    return round(max(seconds), 2) if seconds else None


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
