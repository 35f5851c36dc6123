"""Probes around the reward functions of classic rubrics, which verifiers itself lets fail in silence with a reward of 0.0.

Invariant: a reward function that raises, or returns no finite number, fails the rollouts it was scoring and no other; one with
weight 0 (a metric) only loses its own entry. Nothing a reward function raises reaches the event loop.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from distaff.environments.failures import attempt


@dataclass(slots=True)
class Findings:
    """What went wrong while one group was scored, by id() of the rollout's state."""

    errors: dict[int, str] = field(default_factory=dict)
    lost_metrics: dict[int, set[str]] = field(default_factory=dict)

    def note(self, states: Sequence[Any], name: str, problem: str, *, weighted: bool) -> None:
        for state in states:
            if weighted:
                self.errors.setdefault(id(state), f"reward function {name!r} {problem}")
            else:
                self.lost_metrics.setdefault(id(state), set()).add(name)


FINDINGS: ContextVar[Findings | None] = ContextVar("distaff_findings", default=None)
"""The findings of the group that is scored in this context; the tasks verifiers starts inherit it."""


class RewardProbe:
    """One reward function, watched. Has the signature verifiers inspects, plus **kwargs to be told the states."""

    def __init__(self, function: Callable[..., Any], weight: float) -> None:
        signature = inspect.signature(function)
        self.function = function
        self.weighted = weight != 0
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__
        self._accepted = None if _takes_any(signature) else set(signature.parameters)
        self.__signature__ = signature if self._accepted is None else _with_kwargs(signature)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("states")
        states = group if isinstance(group, list) else [kwargs.get("state")]
        given = kwargs if self._accepted is None else {k: v for k, v in kwargs.items() if k in self._accepted}
        outcome = await attempt(self._call(args, given))
        if outcome.error is not None:
            return self._lost(states, group, f"raised {type(outcome.error).__name__}: {outcome.error}")
        values = _as_list(outcome.value) if isinstance(group, list) else [outcome.value]
        if values is None:
            return self._lost(states, group, f"returned {outcome.value!r} for a group, which is not a list")
        numbers = [_number(value) for value in values]
        if len(numbers) != len(states):
            return self._lost(states, group, f"returned {len(numbers)} rewards for {len(states)} rollouts")
        for state, number, raw in zip(states, numbers, values, strict=True):
            if number is None:
                self._note([state], f"returned {raw!r}, which is not a finite number")
        finite = [0.0 if number is None else number for number in numbers]
        return finite if isinstance(group, list) else finite[0]

    async def _call(self, args: Any, kwargs: Any) -> Any:
        result = self.function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def _lost(self, states: Sequence[Any], group: Any, problem: str) -> Any:
        self._note(states, problem)
        return [0.0] * len(states) if isinstance(group, list) else 0.0

    def _note(self, states: Sequence[Any], problem: str) -> None:
        findings = FINDINGS.get()
        if findings is not None:
            findings.note(states, self.__name__, problem, weighted=self.weighted)


def watch(rubric: Any) -> None:
    """Put a probe around every reward function of `rubric` and the rubrics inside it that has none yet."""
    for leaf in leaves(rubric):
        for i, (function, weight) in enumerate(zip(leaf.funcs, leaf.weights, strict=False)):
            if isinstance(function, RewardProbe):
                function.weighted = weight != 0
            else:
                leaf.funcs[i] = RewardProbe(function, weight)


def leaves(rubric: Any) -> Iterator[Any]:
    """`rubric` and, through RubricGroup and EnvGroup, every rubric inside it."""
    yield rubric
    for inner in getattr(rubric, "rubrics", []):
        yield from leaves(inner)
    for environment in getattr(rubric, "env_map", {}).values():
        yield from leaves(environment.rubric)


def rebind_judges(rubric: Any) -> None:
    """Give JudgeRubrics a fresh HTTP pool: the old one belongs to an event loop that is gone."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    for leaf in leaves(rubric):
        judge = getattr(leaf, "judge_client", None)
        if isinstance(judge, AsyncOpenAI):
            leaf.judge_client = judge.copy(http_client=DefaultAsyncHttpxClient())
            leaf.class_objects["judge_client"] = leaf.judge_client


def _as_list(values: Any) -> list[Any] | None:
    try:
        return list(values)
    except TypeError:
        return None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _takes_any(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _with_kwargs(signature: inspect.Signature) -> inspect.Signature:
    extra = inspect.Parameter("_rest", inspect.Parameter.VAR_KEYWORD)
    return signature.replace(parameters=[*signature.parameters.values(), extra])
