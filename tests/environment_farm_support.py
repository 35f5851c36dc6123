"""Several environments at once on one worker against a scripted engine, and what must hold for every number that comes out.

Each answer of the engine carries a log-probability of its own, so that a sample tells which requests it was made of.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from distaff.clients import connect
from distaff.settings import WorkerSection
from distaff.types import ScoredGroup, TrainingSample
from tests import farm_support, tokens_support
from tests.farm_support import groups_of, make_worker, produce, run_config, settled
from tests.scripted_engine import Answer, Ask, ScriptedEngine
from tests.worker_support import check_oracle, until

Mode = Literal["rl", "sft"]
STEP = 1 / 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a policy sees of a request."""

    text: str
    tools: bool
    """Whether it offers any."""
    tool_results: int
    number: int
    """Of the request, counted over all environments that play at once."""


Call = Mapping[str, Any]
"""{"name", "arguments"}."""
Policy = Callable[[Prompt], str | Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One environment to play, and what to expect of it."""

    name: str
    id: str
    policy: Policy
    args: dict[str, Any] = field(default_factory=dict)
    seats: Sequence[str] = ("",)
    """The trained ones."""
    samples: int = 1
    """Of each rollout."""
    items: int = 2
    style: str = "smollm2"
    """The chat format of the run's tokenizer: one with tool calls where the environment has tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came out of one case."""

    case: Case
    groups: list[ScoredGroup]
    engine: ScriptedEngine


@cache
def tokenizer_folder(style: str) -> str:
    """A folder with the tokenizer of a chat format, made once a process."""
    if style == "smollm2":
        return farm_support.tokenizer_dir()
    folder = Path(tempfile.mkdtemp(prefix=f"distaff-{style}-"))
    tokens_support.tokenizer(style).save_pretrained(folder)
    return str(folder)


def _prompt(ask: Ask, style: str) -> Prompt:
    if ask.messages:
        text = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in ask.messages)
        results = sum(message["role"] == "tool" for message in ask.messages)
        return Prompt(text=text, tools=bool(ask.body.get("tools")), tool_results=results, number=ask.number)
    text = str(tokens_support.tokenizer(style).decode(ask.prompt_ids))
    return Prompt(text=text, tools="# Tools" in text, tool_results=text.count("<tool_response>\n"), number=ask.number)


def answering(case: Case) -> Callable[[Ask], Any]:
    """The engine's script: what the case's policy says, under the log-probability of the request's number, after a moment of its own."""

    async def script(ask: Ask) -> Answer:
        await asyncio.sleep(ask.number * 7 % 5 / 100)
        if ask.sampling.get("max_tokens") == 1:  # the worker's probe
            return Answer(token_ids=[tokens_support.tokenizer(case.style).eos_token_id], text="")
        said = case.policy(_prompt(ask, case.style))
        call = None if isinstance(said, str) else dict(said)
        text = said if isinstance(said, str) else f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        tokens = tokens_support.tokenizer(case.style)
        ids = [*tokens(text, add_special_tokens=False).input_ids, tokens.eos_token_id]
        function = None if call is None else {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        calls = None if function is None else [{"id": f"call_{ask.number}", "type": "function", "function": function}]
        return Answer(
            token_ids=ids,
            text=text if call is None else None,
            tool_calls=calls,
            finish_reason="stop" if ask.path != "/v1/chat/completions" or call is None else "tool_calls",
            logprobs=[-(ask.number + 1) * STEP] * len(ids),
        )

    return script


async def play_all(
    redis_url: str, cases: Sequence[Case], mode: Mode, *, seconds: float = 100, hosts: WorkerSection | None = None
) -> list[Played]:
    """Every case as a run of its own with an engine of its own, all at once on one worker."""
    engines = [ScriptedEngine(script=answering(case)) for case in cases]
    for engine in engines:
        await engine.start()
    try:
        configs = [_config(case, engine, mode) for case, engine in zip(cases, engines, strict=True)]
        for config in configs:
            await produce(redis_url, config)
        service, _ = make_worker(redis_url, hosts=hosts)
        task = asyncio.create_task(service.run())
        with connect(redis_url) as client:
            try:
                names = [config.run.name for config in configs]
                await until(lambda: task.done() or all(settled(client, name) for name in names), seconds=seconds)
            finally:
                service._stop("test")
                await asyncio.wait_for(task, 30)
            for name in names:
                check_oracle(client, name)
            return [
                Played(case=case, groups=groups_of(client, name), engine=engine)
                for case, name, engine in zip(cases, names, engines, strict=True)
            ]
    finally:
        for engine in engines:
            await engine.stop()


def _config(case: Case, engine: ScriptedEngine, mode: Mode) -> Any:
    return run_config(
        engine.url,
        name=f"{case.name}-{mode}",
        run={"mode": mode},
        environment={"id": case.id, "args": case.args},
        engine={"kind": "vllm" if mode == "rl" else "openai"},
        tokenizer={"name": tokenizer_folder(case.style)},
        producer={"limit": case.items},
        rollouts={"score_timeout_s": 60, "timeout_s": 90, "group_timeout_s": 100, "group_size": 3},
    )


def check(played: Played, mode: Mode) -> None:
    """What must hold for every environment: whole groups, seat by seat; each sample made of the requests whose numbers it carries."""
    case = played.case
    assert [group.seq for group in played.groups] == list(range(case.items)), case.name
    used: list[int] = []
    for group in played.groups:
        assert group.environment.id == case.id
        assert sorted(rollout.seat for rollout in group.rollouts) == sorted([*case.seats] * 3), case.name
        for rollout in group.rollouts:
            assert rollout.error is None, (case.name, rollout.error)
            assert rollout.reward is not None
            assert math.isfinite(rollout.reward)
            samples = [sample for sample in group.samples if sample.rollout == rollout.index]
            # A template that shows an answer otherwise in the next prompt opens a sample; only sampled tokens always extend.
            assert case.samples <= len(samples) <= (case.samples if mode == "rl" else rollout.turns), (
                case.name,
                len(samples),
            )
            if mode == "rl":
                used += [number for sample in samples for number in _requests(sample, played)]
            else:
                _check_text(samples, rollout.messages, case.style)
    if mode == "rl":
        assert len(used) == len(set(used)), f"{case.name}: a turn was trained twice"


def _spans(sample: TrainingSample) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _requests(sample: TrainingSample, played: Played) -> list[int]:
    """Numbers of the requests the sample was made of: the prompts and the answers are the engine's own, token for token."""
    assert sample.logprobs is not None
    numbers = []
    for start, end in _spans(sample):
        (logprob,) = set(sample.logprobs[start:end].tolist())
        numbers.append(round(-logprob / STEP) - 1)
        record = played.engine.records[numbers[-1]]
        assert isinstance(record.reply, Answer)
        assert sample.token_ids[:start].tolist() == record.ask.prompt_ids, played.case.name
        assert sample.token_ids[start:end].tolist() == record.reply.token_ids, played.case.name
    assert numbers
    return numbers


def _check_text(samples: Sequence[TrainingSample], messages: Sequence[Any], style: str) -> None:
    trained = "".join(
        str(tokens_support.tokenizer(style).decode(sample.token_ids[sample.loss_mask])) for sample in samples
    )
    for message in messages:
        if message["role"] == "assistant":
            assert (message.get("content") or "") in trained
            for call in message.get("tool_calls") or []:
                assert call["function"]["name"] in trained
