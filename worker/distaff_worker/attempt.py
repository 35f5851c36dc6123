"""One rollout of a group on its way through the stages, and what a group's rollouts add up to.

Invariant: whatever a stage finds out about a rollout is kept on that rollout's own Attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from distaff.alignment import LOGPROB_FLOOR
from distaff.config import LossMask
from distaff.environments.protocol import Episode, Play, Score
from distaff.types import RolloutFailure
from distaff_worker.assemble import PlayedRollout
from distaff_worker.chat_models import ApiChatModel, TokenChatModel
from distaff_worker.images import count_images
from distaff_worker.rendering.protocol import Renderer
from distaff_worker.samples import steps_to_samples
from distaff_worker.sft import tokenize_chat
from distaff_worker.steps import SampleTokens

Model = TokenChatModel | ApiChatModel
PREFIX_SHARE = "distaff/prefix_share"
"""Metric of a rollout: of its model turns but the first, those whose prompt extends the exact tokens of one before (RL)."""
IMAGES = "distaff/images"
"""Metric of a rollout: images in its conversation; absent without any."""
FLOORED = "distaff/floored_logprobs"
"""Metric of a rollout: sampled tokens whose log-probability is `alignment.LOGPROB_FLOOR`; absent without any (RL)."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One rollout of the group on its way through the stages."""

    index: int
    episode: Episode
    models: dict[str, Model]
    seconds: float
    scores: list[Score] | None = None
    samples: dict[str, list[SampleTokens]] = field(default_factory=dict)
    failure: RolloutFailure | None = None
    tokenize_s: float = 0.0
    score_s: float = 0.0

    @property
    def broken(self) -> RolloutFailure | None:
        """The first failure on the way so far."""
        found = next((play.error for play in self.episode.plays if play.error), None) or self.failure
        return found or next((score.error for score in self.scores or [] if score.error), None)


def model_samples(model: Model, renderer: Renderer | None, *, loss_mask: LossMask = "each_turn") -> list[SampleTokens]:
    """The training sequences of a rollout that was scored; its model keeps no tokens."""
    if isinstance(model, TokenChatModel):
        samples = steps_to_samples(model.steps)
        model.forget_tokens()
        return samples
    if renderer is None:
        return []
    return steps_to_samples(tokenize_chat(model.steps, renderer, loss_mask=loss_mask))


def played_rollouts(attempt: Attempt) -> list[PlayedRollout]:
    """One PlayedRollout for each seat of the attempt."""
    return [_seat(attempt, position, seat_play) for position, seat_play in enumerate(attempt.episode.plays)]


def _seat(attempt: Attempt, position: int, seat_play: Play) -> PlayedRollout:
    model = attempt.models.get(seat_play.seat)
    return PlayedRollout(
        play=seat_play,
        score=attempt.scores[position] if attempt.scores else None,
        samples=attempt.samples.get(seat_play.seat, []),
        finish_reason=model.steps[-1].finish_reason if model and model.steps else "none",
        prompt_tokens=model.prompt_tokens if model else 0,
        completion_tokens=model.completion_tokens if model else 0,
        timings={
            "engine": model.engine_s if model else 0.0,
            "tokenize": attempt.tokenize_s,
            "score": attempt.score_s,
            "total": attempt.seconds,
        },
        error=attempt.failure,
        metrics=_token_metrics(model, seat_play, attempt.samples.get(seat_play.seat, [])),
    )


def _token_metrics(model: Model | None, seat_play: Play, samples: Sequence[SampleTokens]) -> dict[str, float]:
    """What distaff itself says of the rollout, beside the rubric's metrics."""
    share = model.prefix_share if isinstance(model, TokenChatModel) else None
    images = count_images(seat_play.messages)
    floored = sum(
        int(np.count_nonzero(sample.logprobs <= LOGPROB_FLOOR)) for sample in samples if sample.logprobs is not None
    )
    return {
        **({PREFIX_SHARE: share} if share is not None else {}),
        **({IMAGES: float(images)} if images else {}),
        **({FLOORED: float(floored)} if floored else {}),
    }
