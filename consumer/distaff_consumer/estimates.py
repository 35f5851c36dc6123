"""Numbers an evaluation reports, from the rewards of its rollouts. Pure functions.

Invariant: items weigh equally, however many of their rollouts were scored, and sums are exact (`math.fsum`), so the numbers do not
depend on the order in which groups arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of one quantity over `values` rollouts of `items` items; None where there is too little to say."""

    mean: float | None
    """Mean over the items of the item's mean."""
    standard_error: float | None
    """Of `mean`; None with fewer than two items."""
    std: float | None
    """Population standard deviation over all rollouts, as in GroupStatistics."""
    min: float | None
    max: float | None
    items: int
    values: int


def estimate(items: Iterable[Sequence[float]]) -> Estimate:
    """Of items, each with the values of its rollouts; items without values are left out."""
    known = [values for values in items if values]
    flat = [value for values in known for value in values]
    means = [mean(values) for values in known]
    return Estimate(
        mean=mean(means) if means else None,
        standard_error=standard_error(means),
        std=deviation(flat) if flat else None,
        min=min(flat, default=None),
        max=max(flat, default=None),
        items=len(known),
        values=len(flat),
    )


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Population standard deviation."""
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


def standard_error(item_means: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1) of the items' means over the root of their number.

    Rollouts of one item are not independent: the item is the unit. With one rollout an item this is the usual central-limit
    formula; with equally many each it is the clustered one of E. Miller, "Adding Error Bars to Evals" (2024), times
    sqrt(n / (n - 1)).
    """
    n = len(item_means)
    if n < 2:
        return None
    middle = mean(item_means)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in item_means) / (n - 1) / n)


def pass_at(k: int, *, played: int, passed: int) -> float:
    """Chance that at least one of k rollouts drawn from `played` is among the `passed`: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (2021). Needs k <= played.
    """
    return 1.0 - math.comb(played - passed, k) / math.comb(played, k)
