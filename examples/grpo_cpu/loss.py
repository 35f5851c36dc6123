"""The policy-gradient loss on distaff's samples: clipped importance ratios against the log-probabilities they were sampled with.

Invariant: reads tokens, masks, log-probabilities and advantages of the stream and nothing else. Position t of a model's logits is
about token t + 1, so everything here is laid out for tokens 1 .. L - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distaff import TrainingSample

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
"""Ratios count up to here: PPO (arXiv 1707.06347) with the wider upper side of DAPO (arXiv 2503.14476)."""
ENTROPY_WEIGHT = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """N samples, padded to L tokens."""

    token_ids: torch.Tensor
    """int64 (N, L)."""
    attention: torch.Tensor
    """int64 (N, L): 1 on tokens, 0 on padding."""
    trained: torch.Tensor
    """bool (N, L - 1): whether token t + 1 was sampled by the policy."""
    sampled_with: torch.Tensor
    """float32 (N, L - 1): the log-probability token t + 1 was sampled with."""
    advantages: torch.Tensor
    """float32 (N, 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the model says of a batch."""

    logprobs: torch.Tensor
    """float32 (N, L - 1), of token t + 1, natural log at temperature 1."""
    entropies: torch.Tensor
    """float32 (N, L - 1), of the distribution token t + 1 was drawn from, in nats."""


def batch_of(samples: Sequence[TrainingSample]) -> Batch:
    """Pad; raises ValueError for samples without log-probabilities (SFT)."""
    length = max(len(sample.token_ids) for sample in samples)
    ids, attention = torch.zeros(2, len(samples), length, dtype=torch.int64)
    trained = torch.zeros(len(samples), length, dtype=torch.bool)
    sampled_with = torch.zeros(len(samples), length)
    for row, sample in enumerate(samples):
        if sample.logprobs is None:
            raise ValueError("a sample without log-probabilities: is the run of mode rl?")
        end = len(sample.token_ids)
        ids[row, :end] = torch.from_numpy(sample.token_ids.astype("int64"))
        attention[row, :end] = 1
        trained[row, :end] = torch.from_numpy(sample.loss_mask.copy())
        sampled_with[row, :end] = torch.from_numpy(sample.logprobs.copy())
    return Batch(
        token_ids=ids,
        attention=attention,
        trained=trained[:, 1:],
        sampled_with=sampled_with[:, 1:],
        advantages=torch.tensor([[sample.advantage] for sample in samples]),
    )


def score(model: Any, batch: Batch) -> Scores:
    """One forward pass."""
    logits = model(input_ids=batch.token_ids, attention_mask=batch.attention).logits[:, :-1].float()
    distribution = logits.log_softmax(-1)
    chosen = distribution.gather(-1, batch.token_ids[:, 1:, None]).squeeze(-1)
    return Scores(logprobs=chosen, entropies=-(distribution.exp() * distribution).sum(-1))


def policy_loss(scores: Scores, batch: Batch) -> torch.Tensor:
    """Mean over the trained tokens of -min(ratio * A, clip(ratio) * A) - ENTROPY_WEIGHT * entropy. Scalar."""
    ratio = (scores.logprobs - batch.sampled_with).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages) + ENTROPY_WEIGHT * scores.entropies
    return -gain[batch.trained].mean()
