"""SFT tokenization of a long chat against rendering and tokenizing every prefix of it: the same ids and masks, in one run.

Invariant: both sides start cold for each chat, and a difference in one token ends the benchmark.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import Figure
from distaff.types import Message
from distaff_worker.demo_engine.gguf_tokenizer import demo_tokenizer_dir
from distaff_worker.prefixes import common_prefix
from distaff_worker.rendering.loading import load_tokenizer
from distaff_worker.rendering.template_backend import TemplateRenderer
from distaff_worker.samples import steps_to_samples
from distaff_worker.sft import tokenize_chat
from distaff_worker.steps import ChatStep, TokenStep

TURNS = (10, 20, 40, 80)
WORDS = 40
"""Of each message."""
ROUNDS = 5
GOAL = 10.0


def run() -> Sequence[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(str(demo_tokenizer_dir(Path(folder))))
    renderer = TemplateRenderer(tokenizer, name="smollm2", vocab_size=len(tokenizer))
    figures = [_figure(tokenizer, renderer, turns) for turns in TURNS]
    # A template that looks ahead is never proven: every turn is rendered, and only the tokenizer's work is saved.
    tokenizer.chat_template += "{% if messages[-1].content == '' %} {% endif %}"
    renderer = TemplateRenderer(tokenizer, name="looks ahead", vocab_size=len(tokenizer))
    return [*figures, _figure(tokenizer, renderer, TURNS[2], what="of a template that is rendered for each")]


def _figure(tokenizer: Any, renderer: TemplateRenderer, turns: int, *, what: str = "") -> Figure:
    steps = _chat(turns)
    end = tokenizer.eos_token_id
    ours, theirs = [], []
    for number in range(ROUNDS):
        renderer.forget()
        mine, seconds = _timed(lambda: tokenize_chat(steps, renderer))
        ours.append(seconds)
        if number < 2:
            other, seconds = _timed(lambda: [_every_prefix(tokenizer, step, end) for step in steps])
            theirs.append(seconds)
            _compare(mine, other)
    goal = turns == 40 and not what
    ratio = statistics.median(theirs) / statistics.median(ours)
    return Figure(
        what=f"{turns} turns{what and ' ' + what}, {len(mine[-1].prompt_ids) + len(mine[-1].completion_ids):,} tokens: every prefix : ours",
        goal=f">= {GOAL:g}" if goal else "",
        result=f"{ratio:.0f} ({1000 * statistics.median(theirs):.0f} ms : {1000 * statistics.median(ours):.1f} ms)",
        met=ratio >= GOAL if goal else None,
    )


def _chat(turns: int) -> list[ChatStep]:
    messages: list[Message] = []
    steps = []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": _text("asks", turn)}]
        answer: Message = {"role": "assistant", "content": _text("answers", turn)}
        steps.append(
            ChatStep(
                prompt=messages, tools=[], completion=answer, finish_reason="stop", prompt_tokens=0, completion_tokens=0
            )
        )
        messages = [*messages, answer]
    return steps


def _text(word: str, turn: int) -> str:
    return " ".join(f"{word}{turn}-{n}" if n % 7 == 0 else "and then" for n in range(WORDS // 2))


def _every_prefix(tokenizer: Any, step: ChatStep, end: int) -> TokenStep:
    """The turn as the common prefix of two renderings of everything up to it."""
    prompt = _ids(tokenizer, step.prompt, generation_prompt=True)
    closed = _ids(tokenizer, [*step.prompt, step.completion], generation_prompt=False)
    start = common_prefix(prompt, closed)
    stop = len(closed) - closed[::-1].index(end)
    return TokenStep(
        prompt_ids=closed[:start], completion_ids=closed[start:stop], logprobs=None, finish_reason=step.finish_reason
    )


def _ids(tokenizer: Any, messages: list[Message], *, generation_prompt: bool) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt, return_dict=False))


def _compare(mine: list[TokenStep], other: list[TokenStep]) -> None:
    for one, two in zip(steps_to_samples(mine), steps_to_samples(other), strict=True):
        if one.token_ids.tolist() != two.token_ids.tolist() or one.loss_mask.tolist() != two.loss_mask.tolist():
            raise RuntimeError("the two ways gave other ids or masks")


def _timed(call: Callable[[], list[TokenStep]]) -> tuple[list[TokenStep], float]:
    began = time.perf_counter()
    return call(), time.perf_counter() - began
