"""SGLang's /generate: what is sent, and what its documented answers mean. Against a stub made from that format, never a running server."""

from __future__ import annotations

from typing import Any

import pytest

from distaff.errors import ContextOverflow, EngineRefused
from distaff_worker.engines import open_token_engine
from tests.engines_support import ask_tokens, section
from tests.engines_support import short_backoff as short_backoff
from tests.scripted_engine import Answer, Fault, Reply, ScriptedEngine, status

pytestmark = pytest.mark.usefixtures("short_backoff")

ROUTE = "/generate"


async def generate(reply: Reply, **sampling: Any) -> tuple[Any, dict[str, Any]]:
    """The Generation of one request, and the body that was sent."""
    async with ScriptedEngine(script=lambda ask: reply) as server:
        engine = open_token_engine(section(server, kind="sglang"), vocab_size=100)
        try:
            return await ask_tokens(engine, **sampling), server.records[0].ask.body
        finally:
            await engine.close()


async def test_ids_go_in_and_one_logprob_for_each_sampled_token_comes_back() -> None:
    """Prompt ids, not text; log-probabilities of the output only; nothing trimmed; no other sampler than the run's."""
    answer = Answer(token_ids=[9, 2], logprobs=[-0.5, -1.25])
    got, body = await generate(answer, temperature=0.7, seed=11, stop_token_ids=[2], stop=["x"], regex="a+")
    assert (got.token_ids, got.logprobs, got.finish_reason) == ([9, 2], [-0.5, -1.25], "stop")
    assert body["input_ids"] == [1, 2, 3]
    assert (body["return_logprob"], body["logprob_start_len"], body["stream"]) == (True, -1, False)
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "sampling_seed": 11,
        "stop_token_ids": [2],
        "stop": ["x"],
        "regex": "a+",
        "max_new_tokens": 8,
        "n": 1,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
async def test_each_kind_of_finish_reason_is_understood(reason: str) -> None:
    """They are objects with a type."""
    got, _ = await generate(Answer(finish_reason=reason))
    assert got.finish_reason == reason


async def test_an_aborted_answer_may_be_empty() -> None:
    """A request that was aborted before its first token."""
    got, _ = await generate(Answer(token_ids=[], finish_reason="abort"))
    assert (got.token_ids, got.finish_reason) == ([], "abort")


def _without_spans(body: dict[str, Any]) -> dict[str, Any]:
    body["meta_info"].pop("weight_versions")
    return body


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        (Answer(policy_version="step-7"), "step-7"),
        (Answer(policy_version="step-7>step-8"), "step-7>step-8"),
        (Answer(policy_version="step-9", mangle=_without_spans), "step-9"),
    ],
    ids=["one", "changed under way", "older server"],
)
async def test_weight_versions_are_kept(answer: Answer, version: str) -> None:
    """The spans where the server has them, else the one version it names."""
    got, _ = await generate(answer)
    assert got.policy_version == version


@pytest.mark.parametrize(
    "message",
    [
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "Input length (5000 tokens) exceeds the maximum allowed length (4090 tokens). Use a shorter input or enable --allow-auto-truncate.",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
    ],
)
async def test_an_overlong_prompt_is_an_overflow(message: str) -> None:
    """Whatever part of the server notices it."""
    body = b'{"error": {"message": "%s"}}' % message.encode()
    with pytest.raises(ContextOverflow):
        await generate(Fault(status=400, body=body))


@pytest.mark.parametrize("names", [("/model_info", "/server_info"), ("/get_model_info", "/get_server_info")])
async def test_check_says_version_model_and_context(names: tuple[str, str]) -> None:
    """By the new names of the routes and by the old ones."""
    async with ScriptedEngine(model="m", max_model_len=777) as server:
        server.refused = {"/model_info": 404, "/server_info": 404}
        for name, document in zip(names, ({"is_generation": True}, {"version": "0.5.23"}), strict=True):
            server.refused.pop(name, None)
            server.documents[name] = document
        engine = open_token_engine(section(server, kind="sglang"), vocab_size=100)
        info = await engine.check()
        await engine.close()
    assert (info.kind, info.model, info.version, info.max_context_tokens) == ("sglang", "m", "0.5.23", 777)
    assert (info.route, info.returns_versions) == (ROUTE, True)


async def test_check_refuses_a_model_that_does_not_generate() -> None:
    """An embedding or reward model answers /v1/models like any other."""
    async with ScriptedEngine() as server:
        server.documents["/model_info"] = {"is_generation": False}
        engine = open_token_engine(section(server, kind="sglang"), vocab_size=100)
        with pytest.raises(EngineRefused, match="does not generate"):
            await engine.check()
        await engine.close()


async def test_check_of_a_server_that_tells_nothing_of_itself_passes() -> None:
    """A router in front of it may have /v1/models and /generate only."""
    async with ScriptedEngine(refused={"/model_info": 404, "/server_info": 403}) as server:
        engine = open_token_engine(section(server, kind="sglang"), vocab_size=100)
        assert (await engine.check()).version == ""
        await engine.close()


async def test_a_server_that_is_busy_is_asked_again() -> None:
    """503 of a server whose queue is full."""
    replies: list[Reply] = [status(503, "The request queue is full."), Answer(token_ids=[9, 2])]
    async with ScriptedEngine(script=lambda ask: replies[min(ask.number, 1)]) as server:
        engine = open_token_engine(section(server, kind="sglang"), vocab_size=100)
        assert (await ask_tokens(engine)).token_ids == [9, 2]
        await engine.close()
