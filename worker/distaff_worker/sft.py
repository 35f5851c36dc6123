"""Tokenizes turns that came from a chat API, with the training tokenizer.

Invariant: each turn is trained in the context it was generated in: the ids of its prompt as the template renders it, then the answer's up to and with its
stop token. What the template adds behind (a newline) is not trained, nor the stop token of a turn that was cut by length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distaff.errors import TokenizationError
from distaff.types import Message
from distaff_worker.rendering.protocol import Renderer
from distaff_worker.steps import ChatStep, TokenStep


def tokenize_chat(steps: Sequence[ChatStep], renderer: Renderer) -> list[TokenStep]:
    """The turns of one rollout in tokens, without log-probabilities.

    prompt_ids is the common token prefix of the rendered prompt and of the rendered conversation with the answer (all of the prompt in most
    formats; less where the template opens a turn to be generated otherwise than a given one). The renderer encodes each stretch of
    text once, so the cost is linear in the conversation, the template's own and copying apart. Raises TokenizationError.
    """
    return [_tokenize(step, renderer) for step in steps]


def _tokenize(step: ChatStep, renderer: Renderer) -> TokenStep:
    prompt = renderer.render(step.prompt, step.tools)
    closed = renderer.render_closed([*step.prompt, _answer(step.completion)], step.tools)
    start = common_prefix(prompt, closed)
    end = _end_of_turn(closed, start, renderer.stop_ids, cut=step.finish_reason == "length")
    if step.finish_reason == "length" and _is_all_reasoning(step.completion):
        end = max(start, min(end, _end_of_reasoning(step, closed, renderer)))
    return TokenStep(
        prompt_ids=closed[:start], completion_ids=closed[start:end], logprobs=None, finish_reason=step.finish_reason
    )


def _answer(message: Message) -> Message:
    if message.get("role") != "assistant":
        raise TokenizationError(f"the answer of a chat API has the role {message.get('role')!r} instead of 'assistant'")
    return message


def _end_of_turn(ids: Sequence[int], start: int, stop_ids: frozenset[int], *, cut: bool) -> int:
    """Behind the last stop token (before it when the turn was cut by length), the very end when there is none."""
    for at in range(len(ids) - 1, start - 1, -1):
        if ids[at] in stop_ids:
            return at if cut else at + 1
    return len(ids)


def _is_all_reasoning(message: Message) -> bool:
    return bool(message.get("reasoning_content")) and not message.get("content") and not message.get("tool_calls")


def _end_of_reasoning(step: ChatStep, closed: list[int], renderer: Renderer) -> int:
    """Where reasoning that was cut ends and the template's closing of it begins: where a mark behind the reasoning makes a difference."""
    mark = renderer.decode([min(renderer.stop_ids)]) if renderer.stop_ids else "\n"
    longer = {**step.completion, "reasoning_content": f"{step.completion['reasoning_content']}{mark}"}
    return common_prefix(closed, renderer.render_closed([*step.prompt, longer], step.tools))


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return int(np.argmax(np.array(a[:shorter]) != np.array(b[:shorter])))
