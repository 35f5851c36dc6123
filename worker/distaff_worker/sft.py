"""Tokenizes turns that came from a chat API, with the training tokenizer.

Invariant: a trained token was written by the model, up to and with its stop token. What the template adds (a newline behind the turn, an empty <think>
block before it) is not trained, nor the stop token of a turn that was cut by length. `each_turn` trains each turn in the context it was
generated in: the ids of its prompt as the template renders it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from distaff.config import LossMask
from distaff.errors import TokenizationError
from distaff.types import JSON, Message
from distaff_worker.prefixes import common_prefix
from distaff_worker.rendering.protocol import Prefix, Renderer
from distaff_worker.steps import ChatStep, TokenStep

_LONGEST_OPENING = 64
"""Tokens a template may open a turn with that a given turn does not begin with."""
_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>")


def tokenize_chat(
    steps: Sequence[ChatStep], renderer: Renderer, *, loss_mask: LossMask = "each_turn"
) -> list[TokenStep]:
    """The turns of one rollout that are trained, in tokens, without log-probabilities.

    prompt_ids is the common token prefix of the rendered prompt and of the rendered conversation with the answer (all of the prompt in most
    formats; less where the template opens a turn to be generated otherwise than a given one). Turns that continue each other are taken from one
    rendering where that is proven to be the same (`Renderer.prefixes`), others are rendered each. Raises TokenizationError.
    """
    if loss_mask == "last_turn":
        return [_tokenize(step, renderer, None) for step in steps[-1:]]
    by_turn = _all_turns if loss_mask == "all_turns" else _each_turn
    found = {place: step for chain in _chains(steps) for place, step in by_turn(chain, steps, renderer).items()}
    return [found[place] for place in range(len(steps))]


def _each_turn(chain: list[int], steps: Sequence[ChatStep], renderer: Renderer) -> dict[int, TokenStep]:
    last = steps[chain[-1]]
    known = renderer.prefixes([*last.prompt, _answer(last.completion)], last.tools) if len(chain) > 1 else {}
    return {place: _tokenize(steps[place], renderer, known.get(len(steps[place].prompt))) for place in chain}


def _all_turns(chain: list[int], steps: Sequence[ChatStep], renderer: Renderer) -> dict[int, TokenStep]:
    """Every turn as the rendering of the whole conversation shows it; each extends the one before."""
    last = steps[chain[-1]]
    ids, spans = renderer.turns([*last.prompt, _answer(last.completion)], last.tools)
    if not steps[chain[0]].prompt:
        raise TokenizationError("a turn answers nothing: the environment sent an empty conversation")
    found = {}
    for place in chain:
        begin, end = spans[len(steps[place].prompt)]
        cut = steps[place].finish_reason == "length"
        end = _end_of_turn(ids[:end], begin, renderer.stop_ids, cut=cut)
        if cut and _is_all_reasoning(steps[place].completion):
            end = begin
        found[place] = TokenStep(
            prompt_ids=ids[:begin],
            completion_ids=ids[begin:end],
            logprobs=None,
            finish_reason=steps[place].finish_reason,
        )
    return found


def _chains(steps: Sequence[ChatStep]) -> list[list[int]]:
    """Places of steps whose prompts continue one another."""
    chains: list[list[int]] = []
    seen: list[list[JSON]] = []
    for place, step in enumerate(steps):
        prompt = [step.tools, *map(_shown, step.prompt)]
        fitting = [n for n, before in enumerate(seen) if prompt[: len(before)] == before]
        at = max(fitting, key=lambda n: len(seen[n]), default=None)
        if at is None:
            at = len(chains)
            chains.append([])
            seen.append([])
        chains[at].append(place)
        seen[at] = [*prompt, _shown(step.completion)]
    return chains


def _shown(message: Message) -> Message:
    """What a template can see of a message."""
    shown = {key: value for key, value in message.items() if value is not None and (key != "tool_calls" or value)}
    return {**shown, "content": message.get("content") or ""}


def _tokenize(step: ChatStep, renderer: Renderer, known: Prefix | None) -> TokenStep:
    prompt = known.prompt_ids if known else renderer.render(step.prompt, step.tools)
    closed = known.closed_ids if known else renderer.render_closed([*step.prompt, _answer(step.completion)], step.tools)
    start = common_prefix(prompt, closed)
    if start < len(prompt) - _LONGEST_OPENING:
        raise TokenizationError(
            f"the chat template of {renderer.name} writes the conversation otherwise when it ends in an answer: "
            "give tokenizer.chat_template"
        )
    start = _behind_empty_thinking(step, closed, start, renderer)
    end = _end_of_turn(closed, start, renderer.stop_ids, cut=step.finish_reason == "length")
    if step.finish_reason == "length" and _is_all_reasoning(step.completion):
        end = max(start, min(end, _end_of_reasoning(step, closed, renderer)))
    return TokenStep(
        prompt_ids=closed[:start], completion_ids=closed[start:end], logprobs=None, finish_reason=step.finish_reason
    )


def _behind_empty_thinking(step: ChatStep, closed: list[int], start: int, renderer: Renderer) -> int:
    """Where the answer begins when the template puts a <think> block that the model did not write before it: where another answer differs."""
    message = step.completion
    if message.get("reasoning_content") or "</think>" in str(message.get("content")):
        return start
    if not _EMPTY_THINKING.match(renderer.decode(closed[start : start + 24])):
        return start
    other = {**message, "content": f"{_unlike(renderer)}{message.get('content') or ''}"}
    return max(start, common_prefix(closed, renderer.render_closed([*step.prompt, other], step.tools)))


def _unlike(renderer: Renderer) -> str:
    """A text whose first token no answer begins with."""
    return renderer.decode([min(renderer.stop_ids)]) if renderer.stop_ids else "\n"


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
    longer = {**step.completion, "reasoning_content": f"{step.completion['reasoning_content']}{_unlike(renderer)}"}
    return common_prefix(closed, renderer.render_closed([*step.prompt, longer], step.tools))
