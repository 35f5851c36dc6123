"""The numbers of an evaluation, from its groups and its dead letters.

Invariant: the same groups give the same bytes in whatever order they came and however often the evaluation was interrupted;
everything that depends on the clock is under the one key `times`. No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from distaff.types import JSON, EnvironmentRef, Rollout, ScoredGroup
from distaff_consumer.estimates import Estimate, estimate, mean, pass_at
from distaff_consumer.rows import task_name

PASS_REWARD = 1.0
"""A rollout with at least this reward counts as passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """What the numbers need of one group; conversations are left behind."""

    seq: int
    key: str
    task: str
    model: str
    temperature: float
    """What was sampled with: an API with a fixed one has not taken the run's."""
    environment: EnvironmentRef
    created: float
    rollouts: list[Rollout]

    @classmethod
    def of(cls, group: ScoredGroup) -> ItemResult:
        return cls(
            seq=group.seq,
            key=group.key,
            task=task_name(group.task, default=group.environment.id),
            model=group.model,
            temperature=group.temperature,
            environment=group.environment,
            created=group.created,
            rollouts=[replace(rollout, messages=[], tools=[]) for rollout in group.rollouts],
        )

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]


def metrics(
    items: Iterable[ItemResult],
    *,
    run: str,
    config: Mapping[str, JSON],
    dead_letters: Sequence[Mapping[str, JSON]],
    opened: float,
) -> dict[str, JSON]:
    """The content of metrics.json; `docs/evaluation.md` describes it.

    config: the run's configuration as stored. dead_letters: as stored. opened: Unix seconds when the run began.
    """
    results = sorted(items, key=lambda item: item.seq)
    rollouts = [rollout for item in results for rollout in item.rollouts]
    dead = _dead_letters(dead_letters)
    per_item = config.get("rollouts", {}).get("group_size", 1)
    return {
        "run": run,
        **_what(results, config),
        "items": {"settled": len(results) + len(dead), "played": len(results), "dead": len(dead)},
        "rollouts": {
            "per_item": per_item,
            "played": len(rollouts),
            "scored": sum(rollout.reward is not None for rollout in rollouts),
            "failed": sum(rollout.reward is None for rollout in rollouts),
        },
        **_scores(results),
        "reward_mean_failures_as_zero": _failures_as_zero(results, dead=len(dead)),
        "tasks": {name: _task(group) for name, group in _by_task(results).items()},
        "counts": _counts(rollouts),
        "dead_letters": {"kinds": _tally(letter["kind"] for letter in dead), "letters": dead},
        "tokens": {
            "prompt": sum(rollout.prompt_tokens for rollout in rollouts),
            "completion": sum(rollout.completion_tokens for rollout in rollouts),
        },
        "per_item": [_item(item) for item in results],
        "times": _times(results, rollouts, opened),
    }


def _what(results: Sequence[ItemResult], config: Mapping[str, JSON]) -> dict[str, JSON]:
    """What was evaluated: from the groups where they say it, else from the configuration."""
    models = sorted({item.model for item in results}) or [config.get("engine", {}).get("model", "")]
    environments = {item.environment for item in results}
    return {
        "mode": config.get("run", {}).get("mode", ""),
        "model": ", ".join(models),
        "environments": [
            asdict(environment) for environment in sorted(environments, key=lambda e: (e.id, e.version, e.args_hash))
        ],
        "environment_args": config.get("environment", {}).get("args", {}),
        "sampling": {**config.get("sampling", {}), **_temperature(results)},
        "max_turns": config.get("rollouts", {}).get("max_turns", 0),
    }


def _temperature(results: Sequence[ItemResult]) -> dict[str, JSON]:
    """The one that all groups were sampled with; the highest, should an API have begun to refuse it in the middle."""
    return {"temperature": max(item.temperature for item in results)} if results else {}


def _scores(results: Sequence[ItemResult]) -> dict[str, JSON]:
    return {
        "reward": asdict(estimate(item.rewards for item in results)),
        "pass": {"reward": PASS_REWARD, "at": _passes(results)},
        "metrics": {name: asdict(value) for name, value in _metric_estimates(results).items()},
    }


def _task(results: Sequence[ItemResult]) -> dict[str, JSON]:
    return {"items": len(results), "rollouts": sum(len(item.rollouts) for item in results), **_scores(results)}


def _by_task(results: Sequence[ItemResult]) -> dict[str, list[ItemResult]]:
    names = sorted({item.task for item in results})
    return {name: [item for item in results if item.task == name] for name in names}


def _metric_estimates(results: Sequence[ItemResult]) -> dict[str, Estimate]:
    names = sorted({name for item in results for rollout in item.rollouts for name in rollout.metrics})
    return {
        name: estimate([r.metrics[name] for r in item.rollouts if name in r.metrics] for item in results)
        for name in names
    }


def _passes(results: Sequence[ItemResult]) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... up to the scored rollouts of the item that has most; over the items that have k."""
    scored = [(len(item.rewards), sum(reward >= PASS_REWARD for reward in item.rewards)) for item in results]
    most = max((played for played, _ in scored), default=0)
    sizes = sorted({1 << i for i in range(most.bit_length())} | {most}) if most else []
    return {
        str(k): mean([pass_at(k, played=played, passed=passed) for played, passed in scored if played >= k])
        for k in sizes
    }


def _failures_as_zero(results: Sequence[ItemResult], *, dead: int) -> float | None:
    """Mean over all settled items, with 0 for each rollout without a reward and for each dead letter."""
    means = [mean([rollout.reward or 0.0 for rollout in item.rollouts]) for item in results if item.rollouts]
    items = len(results) + dead
    return mean(means + [0.0] * (items - len(means))) if items else None


def _counts(rollouts: Sequence[Rollout]) -> dict[str, JSON]:
    by: dict[str, Callable[[Rollout], str]] = {
        "stop_conditions": lambda rollout: rollout.stop_condition or "none",
        "finish_reasons": lambda rollout: rollout.finish_reason,
        "verdicts": lambda rollout: rollout.verdict,
    }
    errors = [rollout.error for rollout in rollouts if rollout.error]
    return {
        **{name: _tally(map(word, rollouts)) for name, word in by.items()},
        "errors": _tally(f"{error.kind} at {error.boundary}" for error in errors),
        "truncated": sum(rollout.truncated for rollout in rollouts),
    }


def _tally(words: Iterable[str]) -> dict[str, int]:
    """Most frequent first, equals in alphabetical order."""
    return dict(sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0])))


def _dead_letters(stored: Sequence[Mapping[str, JSON]]) -> list[dict[str, JSON]]:
    letters = [
        {
            "seq": letter["item"]["seq"],
            "key": letter["item"]["key"],
            **{name: letter[name] for name in ("kind", "boundary", "message")},
        }
        for letter in stored
    ]
    return sorted(letters, key=lambda letter: letter["seq"])


def _item(item: ItemResult) -> dict[str, JSON]:
    rewards = item.rewards
    return {
        "seq": item.seq,
        "key": item.key,
        "task": item.task,
        "reward": mean(rewards) if rewards else None,
        "rewards": [rollout.reward for rollout in item.rollouts],
    }


def _times(results: Sequence[ItemResult], rollouts: Sequence[Rollout], opened: float) -> dict[str, Any]:
    """Seconds; `stages` are sums over the rollouts, which ran at the same time."""
    ended = max((item.created for item in results), default=opened)
    stages = sorted({stage for rollout in rollouts for stage in rollout.timings})
    return {
        "opened": opened,
        "last_group": ended,
        "seconds": round(max(0.0, ended - opened), 3),
        "stages": {stage: round(sum(r.timings.get(stage, 0.0) for r in rollouts), 3) for stage in stages},
    }
