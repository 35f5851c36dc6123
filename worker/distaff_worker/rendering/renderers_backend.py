"""Renders with the `renderers` package where it knows the model's chat format exactly.

Invariant: thinking is retained in a bridge across user turns too, so that a rollout stays one token sequence. The one place that knows
that package; never lets it guess a format (its default renderer drops tools and cannot bridge).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import renderers
from renderers.base import MODEL_RENDERER_MAP

from distaff.errors import ConfigurationError, TokenizationError
from distaff.types import JSON, Message, Tool
from distaff_worker.rendering.completions import assistant_message, read_call, read_json_call, tool_call
from distaff_worker.rendering.messages import prepare
from distaff_worker.rendering.protocol import Prefix
from distaff_worker.rendering.template_backend import end_tokens, until_stop
from distaff_worker.steps import TokenStep

_JSON_CALLS = {"llama-3"}
_NEED_DOWNLOADS = {"gpt-oss"}
"""Formats whose renderer fetches a vocabulary of its own; taken only when they are asked for by name."""
_FAILURES = (ValueError, TypeError, LookupError, AttributeError, AssertionError, NotImplementedError, RuntimeError)


class PackageRenderer:
    """A renderer of the `renderers` package, as a Renderer."""

    def __init__(
        self, tokenizer: Any, *, format_name: str, name: str, vocab_size: int, stop_ids: Sequence[int] = ()
    ) -> None:
        """format_name: as the package names it ("qwen3", "llama-3", ...). Raises ConfigurationError."""
        self._tokenizer = tokenizer
        self.name = name
        self.kind = f"renderers:{format_name}"
        self.vocab_size = vocab_size
        self._json_calls = format_name in _JSON_CALLS
        try:
            plain = renderers.config_from_name(format_name)
            self._renderer = renderers.create_renderer(tokenizer, type(plain)(thinking_retention="all"))
            own_ends = self._renderer.get_stop_token_ids()
        except (*_FAILURES, ImportError, OSError) as error:  # gpt-oss's needs a package and a download of its own
            raise ConfigurationError(
                f"the renderer {format_name!r} does not fit the tokenizer {name} ({_short(error)}): "
                'set tokenizer.renderer = "template", or another renderer'
            ) from None
        self.stop_ids = end_tokens(tokenizer, also=[*own_ends, *stop_ids])

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        return self._render(messages, tools, generation_prompt=True)

    def render_closed(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        ids = self._render(messages, tools, generation_prompt=False)
        reasoning = str(messages[-1].get("reasoning_content") or "").strip()
        if reasoning and reasoning not in self.decode(ids):
            raise TokenizationError(
                f'the renderer of {self.name} ({self.kind}) drops reasoning: set tokenizer.renderer = "template"'
            )
        return ids

    def prefixes(self, messages: Sequence[Message], tools: Sequence[Tool]) -> dict[int, Prefix]:
        return {}

    def turns(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[int], dict[int, tuple[int, int]]]:
        raise TokenizationError(
            f'{self.kind} renders no conversation in one piece: set tokenizer.renderer = "template", or sft.loss_mask to '
            '"each_turn" or "last_turn"'
        )

    def bridge(
        self,
        previous: TokenStep,
        previous_messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        if not previous.completion_ids:
            return None
        named = prepare([*previous_messages, *new_messages])[len(previous_messages) :]
        try:
            bridged = self._renderer.bridge_to_next_turn(
                previous.prompt_ids, previous.completion_ids, named, tools=list(tools) or None
            )
        except _FAILURES as error:
            raise self._refusal(error) from None
        if bridged is None:
            return None
        before = previous.prompt_ids + previous.completion_ids
        ids = list(bridged.token_ids)
        return ids if ids[: len(before)] == before else None

    def parse(
        self, completion_ids: Sequence[int], tools: Sequence[Tool], *, prompt_ids: Sequence[int] = (), turn: int = 0
    ) -> Message:
        ids = list(until_stop(completion_ids, self.stop_ids))
        try:
            parsed = self._renderer.parse_response(ids, tools=list(tools) or None, prompt_ids=list(prompt_ids))
        except (*_FAILURES, RecursionError) as error:
            raise self._refusal(error) from None
        reasoning = (parsed.reasoning_content or "").strip("\n") or None
        if not parsed.tool_calls:
            content: str = parsed.content or ""
            calls: list[JSON] = []
            if self._json_calls:  # the package takes a call that is not JSON for mere text
                closed = not self.stop_ids.isdisjoint(completion_ids)
                content, calls = read_json_call(content, turn=turn, tools=tools, closed=closed)
            return assistant_message(content, reasoning, calls)
        if not tools:
            return assistant_message(self._text_after_reasoning(ids), reasoning, [])
        calls, rest = _calls(parsed.tool_calls, turn=turn)
        return assistant_message("\n".join([*filter(None, [parsed.content.rstrip("\n")]), *rest]), reasoning, calls)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> list[int]:
        try:
            ids = self._renderer.render_ids(
                prepare(messages), tools=list(tools) or None, add_generation_prompt=generation_prompt
            )
        except _FAILURES as error:
            raise self._refusal(error) from None
        return list(ids)

    def _refusal(self, error: BaseException) -> TokenizationError:
        return TokenizationError(
            f"the renderer of {self.name} ({self.kind}) refuses the conversation ({_short(error)}): change the "
            'environment\'s messages or set tokenizer.renderer = "template"'
        )

    def _text_after_reasoning(self, ids: Sequence[int]) -> str:
        return self.decode(ids).rpartition("</think>")[2].lstrip("\n")


def known_formats(*names: str) -> list[str]:
    """The package's formats for `names` that need no network: hub ids it lists, then hub ids whose last part is the last part of a name (a folder)."""
    exact = [MODEL_RENDERER_MAP[name] for name in names if name in MODEL_RENDERER_MAP]
    endings = {name.rstrip("/").rpartition("/")[2] for name in names} - {""}
    alike = [style for full, style in MODEL_RENDERER_MAP.items() if full.rpartition("/")[2] in endings]
    return [style for style in dict.fromkeys(map(str, (*exact, *alike))) if style not in _NEED_DOWNLOADS]


def formats() -> list[str]:
    """Names of all formats of the package."""
    return sorted(set(MODEL_RENDERER_MAP.values()))


def _calls(attempts: Sequence[Any], *, turn: int) -> tuple[list[JSON], list[str]]:
    """(tool calls, texts of blocks in which no function can be made out)."""
    calls: list[JSON] = []
    rest: list[str] = []
    for attempt in attempts:
        call = _call(attempt, number=len(calls), turn=turn)
        if call is None:
            rest.append(str(attempt.raw))
        else:
            calls.append(call)
    return calls, rest


def _call(attempt: Any, *, number: int, turn: int) -> JSON | None:
    if attempt.status in ("ok", "unknown_tool") and attempt.name:
        arguments = attempt.arguments if attempt.arguments is not None else {}
        return tool_call(str(attempt.name), arguments, number=number, turn=turn)
    return read_call(str(attempt.raw), number=number, turn=turn, closed=attempt.status != "unclosed_block")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
