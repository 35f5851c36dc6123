"""What producer and worker ask of an environment, and what an environment asks of the model.

Invariant: one ChatModel object per rollout and seat. Tokens are paired with a rollout by that object's identity,
never by position or text. Episodes are data: a failed rollout is an Episode with `error`, not an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from distaff.types import JSON, FinishReason, Message, RolloutFailure, Split, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One answer of the model."""

    message: Message
    """role "assistant"; content is a string or None; reasoning_content and tool_calls where there are any."""
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


class ChatModel(Protocol):
    """The policy as one rollout (and seat) sees it; it remembers every turn it gave."""

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampling: Mapping[str, JSON]
    ) -> ChatTurn:
        """Sample the next assistant message.

        messages: the whole conversation so far, in the OpenAI shape. sampling: what the environment sets for itself
        (`env.sampling_args`); the run's settings win where both name a parameter.
        Raises ContextOverflow (the prompt does not fit: end the rollout as truncated), other EngineErrors,
        TokenizationError.
        """
        ...


ModelFactory = Callable[[str], ChatModel]
"""Seat name ("" in single-agent environments) -> that seat's own ChatModel; called once per rollout and seat."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Play:
    """One trainable seat's part of an episode, before scoring."""

    seat: str
    messages: list[Message]
    """The whole conversation, with what the environment added last."""
    tools: list[Tool]
    turns: int
    stop_condition: str
    truncated: bool
    error: RolloutFailure | None
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds: "setup", "environment" (tools, user simulation), where the API tells."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Episode:
    """One play of a task: a Play per trainable seat (exactly one, seat "", in single-agent environments)."""

    plays: list[Play]
    handle: Any = None
    """The adapter's own state, for `score`."""


def failed_episode(failure: RolloutFailure) -> Episode:
    """An episode that has nothing but its failure."""
    play = Play(seat="", messages=[], tools=[], turns=0, stop_condition="", truncated=False, error=failure, timings={})
    return Episode(plays=[play])


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    reward: float | None
    """None exactly when `error` is set."""
    metrics: dict[str, float]
    answer: str | None = None
    """The parser's answer where there is a parser."""
    error: RolloutFailure | None = None


class Environment(Protocol):
    """A loaded environment. `play` may run for many tasks at once on one loop; `score` runs on a loop of its own."""

    @property
    def id(self) -> str: ...
    @property
    def version(self) -> str:
        """Version of the distribution that holds the module, or "0" where it has none."""
        ...

    @property
    def api(self) -> Literal["classic", "v1"]: ...

    def size(self, split: Split) -> int | None:
        """Rows of the split (of the only split, where there is one); None when infinite."""
        ...

    def row(self, split: Split, index: int) -> dict[str, JSON]:
        """Row `index`, every column, JSON. Finite sets only."""
        ...

    def rows(self, split: Split, start: int) -> Iterator[dict[str, JSON]]:
        """Rows from `start` on in the set's own order; the only way through an infinite set."""
        ...

    async def play(self, task: Mapping[str, JSON], model_for: ModelFactory) -> Episode:
        """Play `task` once. Never raises but CancelledError; cleans up after itself either way."""
        ...

    async def score(self, episodes: Sequence[Episode]) -> list[list[Score]]:
        """Score a group: the episodes of one task, those with `error` left out by the caller.

        Returns scores[e][p] for episodes[e].plays[p]. Never raises but CancelledError: what the rubric raises is a
        Score with `error`.
        """
        ...

    async def close(self) -> None: ...
