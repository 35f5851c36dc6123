"""Group-relative advantages from rewards.

Invariant: a rollout without a reward neither gets an advantage nor moves anyone else's. Never reads what an environment
says about advantages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distaff.types import FloatArray


def group_advantages(
    rewards: Sequence[float | None],
    *,
    seats: Sequence[str] | None = None,
    divide_by_std: bool = False,
    epsilon: float = 1e-6,
) -> FloatArray:
    """Advantage of each rollout of one item, float32 (len(rewards),).

    `reward - mean` over the rollouts of the same seat that have a reward (Dr. GRPO, arXiv 2503.20783), with `divide_by_std`
    divided by (population standard deviation + epsilon) (GRPO, arXiv 2402.03300, section 4.1.2). 0.0 where the reward is None.
    seats: the seat of each rollout; all the same seat when not given.
    """
    names = list(seats) if seats is not None else [""] * len(rewards)
    if len(names) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards but {len(names)} seats")
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    advantages = np.zeros(len(values), np.float64)
    for seat in dict.fromkeys(names):
        chosen = np.array([name == seat for name in names], np.bool_) & np.isfinite(values)
        if chosen.any():
            advantages[chosen] = _relative(values[chosen], divide_by_std=divide_by_std, epsilon=epsilon)
    return advantages.astype(np.float32)


def _relative(values: NDArray[np.float64], *, divide_by_std: bool, epsilon: float) -> NDArray[np.float64]:
    if np.ptp(values) == 0.0:
        return np.zeros_like(values)
    centred: NDArray[np.float64] = values - values.mean()
    return centred / (values.std() + epsilon) if divide_by_std else centred
