"""P26, P12: bytes that somebody damaged or made up are a value or one of our errors: soon, within bounded memory, never in part."""

from __future__ import annotations

import asyncio
import json
import math
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import msgpack
import pytest
import zstandard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distaff.errors import EngineError, WireError
from distaff.types import Mode, RolloutItem
from distaff.wire import check_group, decode_group, encode_group
from distaff_worker.engines import open_chat_engine, open_token_engine
from distaff_worker.engines.http import check_density
from distaff_worker.engines.protocol import ChatReply, Generation
from distaff_worker.rq_schema import JOB_FUNCTION, MAX_PAYLOAD_BYTES, decode_job
from tests.engines_support import KINDS, ask_chat, ask_tokens, section
from tests.group_support import as_read, make_group
from tests.mutation_support import JUNK, NOT_JSON, damaged_bytes, damaged_value
from tests.scripted_answers import render, render_stream
from tests.scripted_engine import Answer, Fault, ScriptedEngine

MIB = 1 << 20
LOOSE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
QUICK = settings(max_examples=200, deadline=None, print_blob=True, suppress_health_check=LOOSE)
MANY = settings(max_examples=20_000, deadline=None, print_blob=True, suppress_health_check=LOOSE)
SLOWEST_S = 5.0
"""Of one decoding, in seconds of the processor: what hangs takes minutes."""


@contextmanager
def bounded(limit_bytes: int) -> Iterator[None]:
    """Fail when more memory than that is taken at once, or more than SLOWEST_S of the processor."""
    tracemalloc.start()
    began_s = time.process_time()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= limit_bytes, f"{peak / MIB:.0f} MiB"
    assert time.process_time() - began_s < SLOWEST_S


# -- jobs

ITEM = RolloutItem(
    run="run",
    seq=7,
    key="arithmetic/0.1.0/0123456789abcdef/train/7",
    epoch=1,
    split="train",
    task={"question": "2 + 2?", "answer": 4, "info": {"deep": [1, None, "é", -1.5]}},
    seed=-3,
    trace={"traceparent": "00-1-2-03"},
)
NAME = "run-000000007"
PAYLOAD: list[Any] = [JOB_FUNCTION, None, [], {"item": asdict(ITEM)}]


def packed(payload: Any) -> bytes:
    return zlib.compress(json.dumps(payload).encode())


JOBS = st.one_of(
    damaged_bytes(json.dumps(PAYLOAD).encode()),
    damaged_bytes(json.dumps(PAYLOAD).encode()).map(zlib.compress),
    damaged_bytes(packed(PAYLOAD)),
    damaged_value(PAYLOAD, JUNK + NOT_JSON).map(packed),
    st.binary(max_size=60),
)


def check_job(data: bytes) -> None:
    try:
        item = decode_job(data, job_id=NAME)
    except WireError:
        return
    assert (item.run, item.seq) == (ITEM.run, ITEM.seq)
    assert all(type(number) is int for number in (item.epoch, item.seed, item.priority))
    assert all(type(text) is str for text in (item.key, *item.trace, *item.trace.values()))
    assert item.split in ("train", "eval")
    assert type(item.task) is dict
    text = json.dumps(asdict(item), allow_nan=False)
    assert decode_job(packed([JOB_FUNCTION, None, [], {"item": json.loads(text)}]), job_id=NAME) == item


@QUICK
@given(data=JOBS)
@example(data=packed([JOB_FUNCTION, None, [], {"item": {**asdict(ITEM), "key": 5}}]))
@example(data=packed([JOB_FUNCTION, None, [], {"item": {**asdict(ITEM), "task": {"x": math.nan}}}]))
@example(data=packed([JOB_FUNCTION, None, [], {"item": asdict(ITEM), "more": 1}]))
@example(data=packed(PAYLOAD)[:-2])
def test_a_damaged_job_is_an_item_or_a_wire_error(data: bytes) -> None:
    """What passes is typed throughout, and can be put into a dead letter."""
    check_job(data)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@MANY
@given(data=JOBS)
def test_very_many_damaged_jobs_are_items_or_wire_errors(data: bytes) -> None:
    """As above."""
    check_job(data)


def enclosed(task: bytes) -> bytes:
    """A job of ours with that text for a task."""
    text = json.dumps([JOB_FUNCTION, None, [], {"item": {**asdict(ITEM), "task": "HERE"}}]).encode()
    return text.replace(b'"HERE"', task)


JOB_BOMBS: dict[str, bytes] = {
    "ten million lists": b'{"x":[' + b"[]," * 10**7 + b"[]]}",
    "ten million objects": b'{"x":[' + b"{}," * 10**7 + b"{}]}",
    "a million objects that hold something": b'{"x":[' + b'{"a":1},' * 10**6 + b"{}]}",
    "lists nested without end": b'{"x":' + b"[" * 10**6,
    "lists nested to a thousand": b'{"x":' + b"[" * 900 + b"]" * 900 + b"}",
    "objects nested to a thousand": b'{"x":' * 900 + b"1" + b"}" * 900,
    "a number of a million digits": b'{"x":' + b"9" * MIB + b"}",
    "a hundred million blanks": b" " * 10**8,
}


@pytest.mark.parametrize("name", JOB_BOMBS)
@pytest.mark.parametrize("compressed", [True, False])
def test_a_job_that_is_a_bomb_is_refused_within_bounded_memory(name: str, compressed: bool) -> None:
    """At most four times what a payload may have; a compressed one is given up when it has grown to that."""
    data = enclosed(JOB_BOMBS[name])
    data = zlib.compress(data, 1) if compressed else data
    with bounded(4 * MAX_PAYLOAD_BYTES), pytest.raises(WireError):
        decode_job(data, job_id=NAME)


# -- groups

GROUPS: dict[Mode, dict[bytes, bytes]] = {
    "rl": as_read(encode_group(make_group(rollouts=3, tokens=12, failed=1, branches=2))),
    "sft": as_read(encode_group(make_group(mode="sft", rollouts=2, tokens=12))),
    "eval": as_read(encode_group(make_group(mode="eval", rollouts=2, failed=1))),
}
BINARY: list[Any] = [b"", b"x", b"\x00" * 8, b"\xff" * 16, msgpack.Timestamp(1), msgpack.ExtType(5, b"x")]


def _opened(entry: dict[bytes, bytes]) -> dict[str, Any]:
    """The body with its parts decoded, so that damage reaches into them."""
    body = msgpack.unpackb(entry[b"group"])
    for name in ("task", "messages", "tools"):
        body[name] = json.loads(body[name] or b"null")
    return {**body, "head": msgpack.unpackb(body["head"])}


def _closed(body: Any) -> bytes:
    """Encoded again, whatever it is by now."""
    if isinstance(body, dict):
        body = dict(body)
        for name in ("task", "messages", "tools"):
            if name in body and not isinstance(body[name], (bytes, msgpack.ExtType, msgpack.Timestamp)):
                body[name] = json.dumps(body[name], default=str).encode()
        if isinstance(body.get("head"), (dict, list)):
            body["head"] = _packed(body["head"])
    return _packed(body)


def _packed(value: Any) -> bytes:
    try:
        return bytes(msgpack.packb(value))
    except (OverflowError, ValueError, TypeError):
        return bytes(msgpack.packb(json.loads(json.dumps(value, default=str), parse_int=float)))


def damaged_part(body: dict[str, Any], name: str) -> st.SearchStrategy[bytes]:
    junk = JUNK + NOT_JSON + (BINARY if name == "head" else [])
    return damaged_value(body[name], junk).map(lambda part: _closed({**body, name: part}))


def damaged_entries(mode: Mode) -> st.SearchStrategy[dict[bytes, bytes]]:
    entry = GROUPS[mode]
    bodies = st.one_of(
        damaged_bytes(entry[b"group"]),
        damaged_value(_opened(entry), JUNK + NOT_JSON + BINARY).map(_closed),
        *[damaged_part(_opened(entry), name) for name in ("head", "head", "messages", "task", "tools")],
    )
    zipped = st.one_of(
        bodies.map(zstandard.ZstdCompressor(level=1).compress),
        damaged_bytes(zstandard.ZstdCompressor(level=1).compress(entry[b"group"])),
    )
    labels = damaged_value(entry, [b"", b"1.0", b"2.0", b"run", b"0", b"\xff", b"msgpack"])
    return st.one_of(
        bodies.map(lambda body: {**entry, b"group": body}),
        zipped.map(lambda body: {**entry, b"group": body, b"encoding": b"msgpack+zstd"}),
        labels.filter(lambda value: isinstance(value, dict)),
    )


def check_entry(entry: dict[bytes, bytes]) -> None:
    try:
        group = decode_group(entry)
    except WireError:
        return
    check_group(group)
    again = encode_group(group)
    assert encode_group(decode_group(again)) == again
    assert len(group.samples) == len(list(group.samples))


def with_first_token(token: int) -> dict[bytes, bytes]:
    body = msgpack.unpackb(GROUPS["rl"][b"group"])
    ids = token.to_bytes(4, "little", signed=True) + body["token_ids"][4:]
    return {**GROUPS["rl"], b"group": msgpack.packb({**body, "token_ids": ids})}


@QUICK
@given(entry=st.one_of([damaged_entries(mode) for mode in GROUPS]))
@example(entry=with_first_token(-1))
@example(entry=with_first_token(32_000))
def test_a_damaged_group_is_a_whole_one_or_a_wire_error(entry: dict[bytes, bytes]) -> None:
    """What passes passes the alignment checks and can be written again."""
    check_entry(entry)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@MANY
@given(entry=st.one_of([damaged_entries(mode) for mode in GROUPS]))
def test_very_many_damaged_groups_are_whole_ones_or_wire_errors(entry: dict[bytes, bytes]) -> None:
    """As above."""
    check_entry(entry)


# -- engine answers

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
GOOD = Answer(token_ids=[5, 6, 2], tool_calls=[CALL], reasoning="r", policy_version="1")
ROUTES = {"vllm": "/inference/v1/generate", "sglang": "/generate", "openai": "/v1/chat/completions"}


def _answer(kind: str) -> bytes:
    return b"".join(render_stream(GOOD, "scripted")) if kind == "llamacpp" else render(GOOD, ROUTES[kind], "scripted")


def _events(body: bytes) -> list[Any]:
    return [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n") if line]


def _streamed(events: Any) -> bytes:
    listed = events if isinstance(events, list) else [events]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in listed)


def answers(kind: str) -> st.SearchStrategy[bytes]:
    valid = _answer(kind)
    if kind == "llamacpp":
        return st.one_of(damaged_bytes(valid), damaged_value(_events(valid), JUNK + NOT_JSON).map(_streamed))
    structured = damaged_value(json.loads(valid), JUNK + NOT_JSON).map(lambda value: json.dumps(value).encode())
    return st.one_of(damaged_bytes(valid), structured)


@contextmanager
def asking(kind: str) -> Iterator[Callable[[bytes], Generation | ChatReply | EngineError]]:
    """What an engine of that kind makes of a body, through its real HTTP client and a real server."""
    body = b""
    with asyncio.Runner() as runner, ScriptedEngine(script=lambda ask: Fault(body=body)) as server:
        config = section(server, kind=kind, model="scripted", request_timeout_s=30.0)
        chat, tokens = open_chat_engine(config), open_token_engine(config, vocab_size=100) if kind != "openai" else None

        def ask(answer: bytes) -> Generation | ChatReply | EngineError:
            nonlocal body
            body = answer
            try:
                return runner.run(_once())
            except EngineError as error:
                return error

        async def _once() -> Generation | ChatReply:
            return await (ask_tokens(tokens) if tokens else ask_chat(chat))

        try:
            yield ask
        finally:
            for engine in filter(None, (chat, tokens)):
                runner.run(engine.close())


def check_answer(outcome: Generation | ChatReply | EngineError) -> None:
    match outcome:
        case Generation():
            assert len(outcome.token_ids) == len(outcome.logprobs)
            assert all(type(token) is int and 0 <= token < 100 for token in outcome.token_ids)
            assert all(math.isfinite(value) and value <= 1e-4 for value in outcome.logprobs)
            assert outcome.finish_reason in ("stop", "length", "tool_calls", "abort", "none")
        case ChatReply():
            message = json.loads(json.dumps(outcome.message, ensure_ascii=False, allow_nan=False).encode())
            assert message["role"] == "assistant"
            assert isinstance(message["content"], str | None)
            for call in message.get("tool_calls", []):
                assert {type(call["id"]), type(call["function"]["name"]), type(call["function"]["arguments"])} == {str}
            assert min(outcome.prompt_tokens, outcome.completion_tokens) >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_answer_of_an_engine_is_whole_or_an_engine_error(kind: str) -> None:
    """P12: nothing in part, nothing of another type, no other exception."""
    with asking(kind) as ask:
        assert not isinstance(ask(_answer(kind)), EngineError)

        @settings(QUICK, max_examples=150)
        @given(body=answers(kind))
        def run(body: bytes) -> None:
            check_answer(ask(body))

        run()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_very_many_damaged_answers_are_whole_or_engine_errors(kind: str) -> None:
    """As above."""
    with asking(kind) as ask:

        @settings(MANY, max_examples=5000)
        @given(body=answers(kind))
        def run(body: bytes) -> None:
            check_answer(ask(body))

        run()


ANSWER_BOMBS: dict[str, bytes] = {
    "ten million lists": b"[" + b"[]," * 10**7 + b"[]]",
    "ten million objects": b"[" + b"{}," * 10**7 + b"{}]",
    "lists nested without end": b"[" * (20 * MIB),
    "a number without end": b"9" * (20 * MIB),
    "more than an answer may have": b" " * (70 * MIB),
}


@pytest.mark.parametrize("name", ANSWER_BOMBS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_a_bomb_is_refused_within_bounded_memory(kind: str, name: str) -> None:
    """Less than four times the body, which this process holds once more, as the server."""
    body = b"data: " * (kind == "llamacpp") + ANSWER_BOMBS[name] + b"\n"
    with asking(kind) as ask, bounded(5 * max(len(body), 20 * MIB)):
        assert isinstance(ask(body), EngineError)


def test_the_longest_answer_of_an_engine_is_no_bomb() -> None:
    """131,072 tokens with their log-probabilities, written as tightly as JSON can be."""
    answer = json.loads(render(Answer(token_ids=[5] * 131_072), ROUTES["vllm"], "scripted"))
    check_density(json.dumps(answer, separators=(",", ":")).encode(), where="here")
