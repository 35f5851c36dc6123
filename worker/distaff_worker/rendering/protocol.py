"""What the worker asks of a tokenizer and its chat format.

Invariant: what `bridge` returns starts with the exact tokens of the turn before. Objects behind this protocol are used from one thread at a
time (fast tokenizers are not safe against concurrent use); the worker runs them on a thread of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from distaff.types import Message, Tool
from distaff_worker.steps import TokenStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A conversation up to an assistant message, rendered."""

    prompt_ids: list[int]
    """As `render` gives it for the messages before."""
    closed_ids: list[int]
    """As `render_closed` gives it, the assistant message included."""


class Renderer(Protocol):
    """Messages to tokens and back, for one model's chat format. Every method raises TokenizationError."""

    @property
    def name(self) -> str:
        """The tokenizer's folder or hub id."""
        ...

    @property
    def kind(self) -> str:
        """ "template", or "renderers:<name>" for a renderer of the `renderers` package."""
        ...

    @property
    def vocab_size(self) -> int:
        """Every token id is in [0, vocab_size)."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an assistant turn when they are sampled."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Token ids of the conversation, followed by what opens the next assistant turn."""
        ...

    def render_closed(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Token ids of a conversation that ends in an assistant message, as the training text of that turn; its reasoning is kept."""
        ...

    def prefixes(self, messages: Sequence[Message], tools: Sequence[Tool]) -> dict[int, Prefix]:
        """Place of an assistant message -> the conversation up to it, all from one rendering of a conversation that ends in one.

        Only for places at which this is proven to be what `render` and `render_closed` would give; the others are to be rendered.
        """
        ...

    def turns(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """(ids of the whole conversation, place of an assistant message -> [begin, end) of what the model writes of it, its stop token
        included where the template shows one). Earlier reasoning may be missing in it, as the template demands."""
        ...

    def bridge(
        self,
        previous: TokenStep,
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """The prompt of the next turn: `previous` prompt and completion ids as they are, then the new messages.

        previous_messages: the conversation up to and with the assistant message of `previous`. When the model did not sample a stop token (cut by
        length), the one the format has is put in. None when the format cannot be continued that way: render it anew.
        """
        ...

    def parse(
        self, completion_ids: Sequence[int], tools: Sequence[Tool], *, prompt_ids: Sequence[int] = (), turn: int = 0
    ) -> Message:
        """The assistant message of a completion: content (str), reasoning_content and tool_calls where there are any.

        Arguments of tool calls are JSON text as the model wrote it; a malformed call with a recognizable name is kept with its raw arguments, so
        that the environment answers it with an error; any other stays in the content. prompt_ids: what was sampled from (a prompt can
        open the reasoning). turn: number of the turn, for ids of tool calls that are unique in the conversation.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text, special tokens in it recognized, none added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text with all special tokens."""
        ...
