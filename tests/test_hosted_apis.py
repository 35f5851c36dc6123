"""What hosted chat APIs do differently, each over a real socket: what they refuse, what they say, how they say that something is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs

from distaff.errors import EngineAnswerError, EngineError, EngineRefused, EngineUnavailable
from distaff_worker.engines import open_chat_engine
from distaff_worker.engines.openai import OpenAIEngine
from distaff_worker.engines.protocol import ChatReply
from tests.engines_support import replies, section
from tests.engines_support import short_backoff as short_backoff
from tests.farm_support import play_to_the_end, run_config, says
from tests.scripted_engine import Answer, Ask, Fault, Reply, ScriptedEngine

Body = dict[str, Any]
Opened = Callable[..., OpenAIEngine]
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine() as started:
        yield started


@pytest.fixture
async def opened(server: ScriptedEngine) -> AsyncIterator[Opened]:
    """opened(**settings) -> a chat engine on the server; closed at the end."""
    engines: list[OpenAIEngine] = []

    def make(**settings: Any) -> OpenAIEngine:
        engine = open_chat_engine(section(server, **{"kind": "openai", "model": "scripted", **settings}))
        assert isinstance(engine, OpenAIEngine)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.close()


async def ask(engine: OpenAIEngine, *messages: Body, tools: Any = (), **sampling: Any) -> ChatReply:
    return await engine.chat(messages or (USER,), tools=tools, max_tokens=64, sampling=sampling, session="s")


def refuse(document: Any, code: int = 400) -> Fault:
    return Fault(status=code, headers={"Content-Type": "application/json"}, body=json.dumps(document).encode())


def openai_error(message: str, **fields: Any) -> Fault:
    return refuse({"error": {"message": message, "type": "invalid_request_error", **fields}})


def refusing(parameter: str, refusal: Reply, *others: tuple[str, Reply]) -> Callable[[Ask], Reply]:
    """An API that does not take some parameters."""
    table = ((parameter, refusal), *others)

    def script(ask: Ask) -> Reply:
        return next((reply for name, reply in table if name in ask.body), Answer())

    return script


def message(**fields: Any) -> Answer:
    """An answer whose message has these fields and no other."""

    def mangle(body: Body) -> Body:
        body["choices"][0]["message"] = {"role": "assistant", **fields}
        return body

    return Answer(mangle=mangle)


# -- what is refused

TEMPERATURES = {
    "openai, a value": openai_error(
        "Unsupported value: 'temperature' does not support 0.7 with this model. Only the default (1) value is supported.",
        param="temperature",
        code="unsupported_value",
    ),
    "openai, the parameter": openai_error("Unsupported parameter: 'temperature' is not supported with this model."),
    "a beta model": openai_error(
        "this model has beta-limitations, temperature, top_p and n are fixed at 1, while presence_penalty is fixed at 0"
    ),
    "deprecated": openai_error("`temperature` is deprecated for this model."),
    "a validation error": refuse(
        {
            "detail": [
                {"type": "extra_forbidden", "loc": ["body", "temperature"], "msg": "Extra inputs are not permitted"}
            ]
        },
        422,
    ),
    "in a list": refuse(
        [
            {
                "error": {
                    "code": 400,
                    "message": 'Invalid JSON payload received. Unknown name "temperature": Cannot find field.',
                }
            }
        ]
    ),
    "a string": refuse({"code": "invalid-argument", "error": "Model m does not support parameter temperature."}),
    "through a router": refuse(
        {
            "error": {
                "message": "Provider returned error",
                "code": 400,
                "metadata": {"raw": '{"error":{"message":"Unsupported parameter: \'temperature\'"}}'},
            }
        }
    ),
}


@pytest.mark.parametrize("shape", TEMPERATURES)
async def test_a_fixed_temperature_is_left_out_said_and_recorded(
    shape: str, server: ScriptedEngine, opened: Opened
) -> None:
    """However the refusal is written: asked once, dropped for good, in the log, and no other temperature is claimed."""
    server.script = refusing("temperature", TEMPERATURES[shape])
    engine = opened()
    with capture_logs() as logs:
        for _ in range(3):
            await ask(engine, temperature=0.7, top_p=1.0)
    assert ["temperature" in record.ask.body for record in server.records] == [True, False, False, False]
    changed = [entry for entry in logs if entry["event"] == "request.changed"]
    assert [(entry["log_level"], entry["parameter"]) for entry in changed] == [("warning", "temperature")]
    assert engine.temperature(0.7) == 1.0


async def test_a_temperature_that_the_refusal_names_is_the_one_recorded(server: ScriptedEngine, opened: Opened) -> None:
    """Some models are fixed elsewhere than at 1."""
    server.script = refusing("temperature", openai_error("invalid temperature: only 0.6 is allowed for this model"))
    engine = opened()
    assert engine.temperature(1.0) == 1.0
    await ask(engine, temperature=1.0)
    assert engine.temperature(1.0) == 0.6
    assert "0.6" in engine.quirks.changes[0]


async def test_a_neutral_temperature_that_is_refused_changes_nothing(server: ScriptedEngine, opened: Opened) -> None:
    """1.0 was what the API samples with anyway: nothing to warn of."""
    server.script = refusing("temperature", TEMPERATURES["openai, the parameter"])
    engine = opened()
    await ask(engine, temperature=1.0)
    assert engine.quirks.changes == []
    assert engine.temperature(1.0) == 1.0


async def test_of_two_parameters_that_exclude_each_other_the_neutral_one_goes(
    server: ScriptedEngine, opened: Opened
) -> None:
    """temperature 0.7 stays when top_p is 1, and the other way round."""
    both = openai_error("`temperature` and `top_p` cannot both be specified for this model. Please use only one.")
    server.script = lambda ask: both if {"temperature", "top_p"} <= ask.body.keys() else Answer()
    first, second = opened(), opened()
    await ask(first, temperature=0.7, top_p=1.0)
    assert server.records[-1].ask.body["temperature"] == 0.7
    await ask(second, temperature=1.0, top_p=0.9)
    assert server.records[-1].ask.body["top_p"] == 0.9
    assert (first.quirks.changes, second.quirks.changes) == ([], [])


async def test_an_unknown_seed_is_left_out_and_said(server: ScriptedEngine, opened: Opened) -> None:
    """Reproducibility is lost and the log says so; several refused parameters are learned one after another."""
    extra = {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}
    server.script = refusing(
        "seed",
        refuse(extra, 422),
        ("top_k", openai_error("property 'top_k' is unsupported")),
        ("temperature", TEMPERATURES["deprecated"]),
    )
    engine = opened()
    await ask(engine, seed=7, top_k=0, temperature=0.5)
    assert not {"seed", "top_k", "temperature"} & server.records[-1].ask.body.keys()
    assert [change.split()[0] for change in engine.quirks.changes] == ["seed", "temperature"]
    assert server.count == 4


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"top_k": 40}, "property 'top_k' is unsupported"),
        ({"reasoning_effort": "high"}, "Model m does not support parameter reasoningEffort."),
        ({"stop": ["\n"]}, "Unsupported parameter: 'stop' is not supported with this model."),
    ],
)
async def test_what_the_run_asks_for_is_never_dropped(
    sampling: Body, text: str, server: ScriptedEngine, opened: Opened
) -> None:
    """A parameter that changes what is sampled and is not known to be fixed is an error that names it, with the mend."""
    server.script = refusing(next(iter(sampling)), openai_error(text))
    engine = opened()
    with pytest.raises(EngineRefused, match=rf"{next(iter(sampling))} = .*take it out of sampling\.extra"):
        await ask(engine, **sampling)
    assert server.count == 1


async def test_a_value_out_of_range_is_an_error_and_changes_nothing(server: ScriptedEngine, opened: Opened) -> None:
    """A limit that is too large, a temperature out of range: the same request later is sent as it is."""
    texts = ("max_tokens must be at most 8192", "temperature must be between 0 and 1")
    server.script = replies(*(openai_error(text) for text in texts), Answer())
    engine = opened()
    for _ in texts:
        with pytest.raises(EngineRefused, match="must be"):
            await ask(engine, temperature=1.7)
    await ask(engine, temperature=1.7)
    assert server.count == 3
    assert server.records[-1].ask.body["temperature"] == 1.7
    assert server.records[-1].ask.body["max_tokens"] == 64


async def test_an_api_without_max_completion_tokens_gets_max_tokens(server: ScriptedEngine, opened: Opened) -> None:
    """Each name is the other's mend."""
    refusals = {
        "max_tokens": "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "max_completion_tokens": "property 'max_completion_tokens' is unsupported",
    }
    wanted = ["max_completion_tokens"]
    server.script = lambda ask: next(
        (openai_error(text) for name, text in refusals.items() if name in ask.body and name not in wanted), Answer()
    )
    engine = opened()
    await ask(engine)
    wanted[:] = ["max_tokens"]
    await ask(engine)
    limits = [[name for name in refusals if name in record.ask.body] for record in server.records]
    assert limits == [["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"], ["max_tokens"]]


async def test_fifty_requests_at_once_learn_the_same(server: ScriptedEngine, opened: Opened) -> None:
    """All of them are refused before one has learned; all of them pass the second time, and the change is said once."""
    server.barrier = 50
    server.script = refusing("temperature", TEMPERATURES["openai, a value"])
    engine = opened()
    await asyncio.gather(*(ask(engine, temperature=0.7) for _ in range(50)))
    assert server.count == 100
    assert len(engine.quirks.changes) == 1


async def test_an_api_that_refuses_whatever_is_sent_is_given_up(server: ScriptedEngine, opened: Opened) -> None:
    """Nothing is asked for ever."""
    server.script = lambda ask: openai_error("Unsupported parameters: max_tokens, max_completion_tokens")
    engine = opened()
    with pytest.raises(EngineRefused):
        await ask(engine)
    assert server.count < 12


async def test_tool_settings_go_out_only_beside_tools(server: ScriptedEngine, opened: Opened) -> None:
    """ "tool_choice is only allowed when tools are specified" is never provoked; `n` is ours."""
    engine = opened()
    await ask(engine, tool_choice="required", parallel_tool_calls=False, n=3)
    await ask(engine, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    bare, full = (record.ask.body for record in server.records)
    assert not {"tool_choice", "parallel_tool_calls", "n", "tools"} & bare.keys()
    assert (full["tool_choice"], full["parallel_tool_calls"], full["tools"]) == ("required", False, [TOOL])


async def test_parallel_tool_calls_that_an_api_does_not_know_go_when_they_are_its_default(
    server: ScriptedEngine, opened: Opened
) -> None:
    """True is what it does anyway; false is what the run asks for."""
    server.script = refusing("parallel_tool_calls", openai_error("property 'parallel_tool_calls' is unsupported"))
    await ask(opened(), tools=[TOOL], parallel_tool_calls=True)
    with pytest.raises(EngineRefused, match="parallel_tool_calls = False"):
        await ask(opened(), tools=[TOOL], parallel_tool_calls=False)


@pytest.mark.parametrize(("taken", "sent"), [("developer", ["developer"]), ("user", ["developer", "user"])])
async def test_system_messages_reach_models_that_know_none(
    taken: str, sent: list[str], server: ScriptedEngine, opened: Opened
) -> None:
    """As the developer's, and where that is refused too, as the user's."""

    def script(ask: Ask) -> Reply:
        role = ask.messages[0]["role"]
        text = f"Unsupported value: 'messages[0].role' does not support '{role}' with this model."
        return Answer() if role == taken else openai_error(text)

    server.script = script
    engine = opened()
    for _ in range(2):
        await ask(engine, {"role": "system", "content": "Be brief."}, USER)
    assert [record.ask.messages[0]["role"] for record in server.records] == ["system", *sent, taken]
    assert server.records[-1].ask.messages[0]["content"] == "Be brief."


async def test_developer_messages_reach_apis_that_know_only_system(server: ScriptedEngine, opened: Opened) -> None:
    """The other direction."""
    server.script = lambda ask: (
        openai_error("Invalid role: 'developer'. Expected 'system', 'user', 'assistant' or 'tool'")
        if ask.messages[0]["role"] == "developer"
        else Answer()
    )
    await ask(opened(), {"role": "developer", "content": "Be brief."}, USER)
    assert server.records[-1].ask.messages[0]["role"] == "system"


# -- the model's thoughts

THOUGHTS: Mapping[str, tuple[Body, Body]] = {
    "reasoning_content": ({"content": "4", "reasoning_content": "2+2"}, {"content": "4", "reasoning_content": "2+2"}),
    "reasoning": ({"content": "4", "reasoning": "2+2"}, {"content": "4", "reasoning": "2+2"}),
    "reasoning_details": (
        {"content": "4", "reasoning_details": [{"type": "reasoning.text", "text": "2+2"}]},
        {"content": "4", "reasoning": "2+2"},
    ),
    "parts": (
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "2+2"}]},
                {"type": "text", "text": "4"},
            ]
        },
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "2+2"}]},
                {"type": "text", "text": "4"},
            ]
        },
    ),
    "a thinking string": (
        {"content": [{"type": "thinking", "thinking": "2+2"}, {"type": "text", "text": "4"}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "2+2"}]},
                {"type": "text", "text": "4"},
            ]
        },
    ),
}


@pytest.mark.parametrize("shape", THOUGHTS)
async def test_thoughts_are_kept_and_sent_back_the_way_they_came(
    shape: str, server: ScriptedEngine, opened: Opened
) -> None:
    """One field for us, the API's own on its wire."""
    given, returned = THOUGHTS[shape]
    server.script = replies(message(**given), Answer())
    engine = opened()
    reply = await ask(engine)
    assert reply.message == {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    await ask(engine, USER, reply.message, USER)
    assert server.records[-1].ask.messages[1] == {"role": "assistant", **returned}


@pytest.mark.parametrize(
    "refusal",
    [
        openai_error(
            "'messages.1' : for 'role:assistant' the following must be satisfied[('messages.1' : property 'reasoning_content' is unsupported)]"
        ),
        refuse(
            {
                "object": "error",
                "message": {
                    "detail": [
                        {"type": "extra_forbidden", "loc": ["body", "messages", 1, "assistant", "reasoning_content"]}
                    ]
                },
                "type": "invalid_request_error",
            },
            422,
        ),
        openai_error("Extra inputs are not permitted, field: 'messages[1].reasoning_content', value: '2+2'"),
    ],
)
async def test_thoughts_are_not_sent_back_where_they_are_refused(
    refusal: Reply, server: ScriptedEngine, opened: Opened
) -> None:
    """Learned once and said; what the model thought is still in our message."""
    server.script = lambda ask: refusal if any("reasoning_content" in m for m in ask.messages) else Answer()
    engine = opened()
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    for _ in range(2):
        await ask(engine, USER, thought, USER)
    assert server.count == 3
    assert server.records[-1].ask.messages[1] == {"role": "assistant", "content": "4"}
    assert thought["reasoning_content"] == "2+2"
    assert len(engine.quirks.changes) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Missing `reasoning_content` field in the assistant message at message index 1.",
        "The `reasoning_content` in the thinking mode must be passed back to the API.",
        "thinking is enabled but reasoning_content is missing in assistant tool call message at index 1",
    ],
)
async def test_thoughts_are_sent_on_every_answer_where_they_are_demanded(
    text: str, server: ScriptedEngine, opened: Opened
) -> None:
    """Also on the ones that have none, whether the environment dropped them or the model had none."""
    server.script = lambda ask: (
        openai_error(text)
        if any(m["role"] == "assistant" and "reasoning_content" not in m for m in ask.messages)
        else Answer()
    )
    engine = opened()
    await ask(engine, USER, {"role": "assistant", "content": "4"}, USER)
    assert server.records[-1].ask.messages[1] == {"role": "assistant", "content": "4", "reasoning_content": ""}


# -- what is said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tool_calls": [{"id": "a", "function": {"name": "add", "arguments": {"x": 1}}}]}, [("a", "add", '{"x": 1}')]),
        ({"tool_calls": [{"function": {"name": "add", "arguments": '{"x": 1}'}}]}, [("call00000", "add", '{"x": 1}')]),
        ({"tool_calls": [{"id": "", "function": {"name": "add"}}]}, [("call00000", "add", "{}")]),
        ({"function_call": {"name": "add", "arguments": "{}"}}, [("call00000", "add", "{}")]),
        (
            {"tool_calls": [{"id": "0", "function": {"name": "a"}}, {"id": "0", "function": {"name": "b"}}]},
            [("0", "a", "{}"), ("call00001", "b", "{}")],
        ),
        (
            {"tool_calls": [{"id": "a", "function": {"name": "", "arguments": "{x"}}]},
            [("a", "unnamed_function", "{x")],
        ),
        ({"tool_calls": [{"id": "a", "function": {"name": None}}]}, [("a", "unnamed_function", "{}")]),
    ],
    ids=["object", "no id", "empty id", "legacy", "one id twice", "empty name", "null name"],
)
async def test_tool_calls_are_read_in_every_shape(
    given: Body, expected: list[tuple[str, str, str]], server: ScriptedEngine, opened: Opened
) -> None:
    """Null content beside them is no error, and "stop" becomes "tool_calls"."""
    server.script = replies(message(content=None, **given))
    reply = await ask(opened(), tools=[TOOL])
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in reply.message["tool_calls"]]
    assert calls == expected
    assert reply.finish_reason == "tool_calls"


async def test_ids_of_calls_are_new_in_every_turn(server: ScriptedEngine, opened: Opened) -> None:
    """An API without ids does not give two calls of a conversation the same one."""
    server.script = lambda ask: message(content=None, tool_calls=[{"function": {"name": "add"}}])
    engine = opened()
    first = await ask(engine, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
    second = await ask(engine, USER, first.message, result, tools=[TOOL])
    assert [reply.message["tool_calls"][0]["id"] for reply in (first, second)] == ["call00000", "call00001"]


@pytest.mark.parametrize("given", [{"content": None}, {"content": ""}, {}])
async def test_a_refusal_is_what_the_model_said(given: Body, server: ScriptedEngine, opened: Opened) -> None:
    """The text of `refusal` is the answer, for the reward to judge."""
    server.script = replies(message(refusal="I can't help with that.", **given))
    reply = await ask(opened())
    assert reply.message == {"role": "assistant", "content": "I can't help with that."}
    assert reply.finish_reason == "stop"


async def test_thoughts_without_an_answer_are_an_empty_answer(server: ScriptedEngine, opened: Opened) -> None:
    """A model that stopped after thinking has said nothing; an answer without anything is an error."""
    server.script = replies(message(content=None, reasoning="hm"), message(content=None))
    engine = opened()
    assert (await ask(engine)).message == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    with pytest.raises(EngineAnswerError, match="neither content nor tool calls"):
        await ask(engine)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("STOP", "stop"),
        ("COMPLETE", "stop"),
        ("end_turn", "stop"),
        ("MAX_TOKENS", "length"),
        ("model_context_window_exceeded", "length"),
        ("function_call", "tool_calls"),
        ("SAFETY", "abort"),
        ("content_filter", "abort"),
        ("insufficient_system_resource", "abort"),
        ("a new word", "none"),
        (None, "none"),
    ],
)
async def test_finish_reasons_are_read_in_every_spelling(
    word: str | None, reason: str, server: ScriptedEngine, opened: Opened
) -> None:
    """Upper case, other names, unknown ones."""
    server.script = replies(Answer(finish_reason=word))
    assert (await ask(opened())).finish_reason == reason


async def test_a_filtered_answer_may_be_empty(server: ScriptedEngine, opened: Opened) -> None:
    """The content filter leaves null: the turn is aborted, and no error of the engine."""
    server.script = replies(Answer(text=None, finish_reason="content_filter"))
    reply = await ask(opened())
    assert (reply.message["content"], reply.finish_reason) == (None, "abort")


async def test_missing_usage_is_counted_and_other_names_are_known(server: ScriptedEngine, opened: Opened) -> None:
    """No crash; zeros; the first, the tenth, ... are in the log. input_tokens and output_tokens count as well."""

    def other_names(body: Body) -> Body:
        return body | {"usage": {"input_tokens": 3, "output_tokens": 5}}

    server.script = lambda ask: Answer(usage=False) if ask.number < 12 else Answer(mangle=other_names)
    engine = opened()
    with capture_logs() as logs:
        counts = [await ask(engine) for _ in range(13)]
    assert [(reply.prompt_tokens, reply.completion_tokens) for reply in counts[-2:]] == [(0, 0), (3, 5)]
    assert engine.replies_without_usage == 12
    assert [entry["replies"] for entry in logs if entry["event"] == "usage.missing"] == [1, 10]


# -- how it is said that something is wrong


@pytest.mark.parametrize("inside", ["answer", "choice"])
@pytest.mark.usefixtures("short_backoff")
async def test_an_error_with_status_200_is_what_it_says(inside: str, server: ScriptedEngine, opened: Opened) -> None:
    """Routers report what went wrong behind them so: what may pass is tried again, what is final is not."""

    def with_error(code: int, text: str) -> Answer:
        error = {"code": code, "message": text}
        wrong = {"error": error} if inside == "answer" else {"choices": [{"finish_reason": "error", "error": error}]}
        return Answer(mangle=lambda body: wrong)

    server.script = replies(with_error(502, "upstream"), with_error(429, "slow down"), Answer())
    engine = opened()
    assert (await ask(engine)).message["content"] == "ok"
    assert server.count == 3
    server.script = lambda ask: with_error(402, "Insufficient credits")
    with pytest.raises(EngineRefused, match=r"402.*Insufficient credits"):
        await ask(engine)
    assert server.count == 4
    server.script = lambda ask: with_error(503, "no provider")
    with pytest.raises(EngineUnavailable, match="error 503: no provider"):
        await ask(opened(max_retries=1))
    assert server.count == 6


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "THE CAUSE", "code": "x"}},
        {"error": "THE CAUSE"},
        {"message": "THE CAUSE"},
        {"detail": "THE CAUSE"},
        {"detail": [{"loc": ["body"], "msg": "THE CAUSE"}]},
        [{"error": {"code": 400, "message": "THE CAUSE"}}],
        {"errors": [{"message": "THE CAUSE"}]},
        {"object": "error", "message": {"detail": [{"msg": "THE CAUSE"}]}},
        {"type": "error", "error": {"type": "invalid_request_error", "message": "THE CAUSE"}},
        {"error": {"message": "Provider returned error", "metadata": {"raw": "THE CAUSE"}}},
    ],
)
async def test_the_cause_is_found_in_every_shape_of_an_error(body: Any, server: ScriptedEngine, opened: Opened) -> None:
    """And is in the message, on one line."""
    server.script = lambda ask: refuse(body)
    with pytest.raises(EngineRefused, match="THE CAUSE") as error:
        await ask(opened())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "refusal",
    [
        refuse({"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}, 429),
        refuse({"error": {"message": "Insufficient Balance", "type": "unknown_error"}}, 402),
    ],
)
async def test_an_api_without_credit_is_found_by_the_next_check(
    refusal: Reply, server: ScriptedEngine, opened: Opened
) -> None:
    """It lists its models all the same; the check says no once, so that a worker hands the items back instead of using them up."""
    server.script = replies(refusal, Answer())
    engine = opened()
    await engine.check()
    with pytest.raises(EngineRefused):
        await ask(engine)
    with pytest.raises(EngineRefused, match=r"quota|Balance"):
        await engine.check()
    await engine.check()
    await ask(engine)
    await engine.check()


async def test_a_conversation_that_the_content_filter_refuses_is_an_error_that_says_so(
    server: ScriptedEngine, opened: Opened
) -> None:
    """It is not repeated, and teaches nothing."""
    text = "The response was filtered due to the prompt triggering the content management policy."
    server.script = lambda ask: openai_error(text, code="content_filter", param="prompt")
    engine = opened()
    with pytest.raises(EngineError, match="content management policy"):
        await ask(engine, temperature=0.7)
    assert server.count == 1
    assert engine.quirks.dropped == set()


# -- a whole run


async def test_groups_hold_the_temperature_that_was_sampled_with(redis_url: str, server: ScriptedEngine) -> None:
    """SFT on a model with a fixed temperature: the run asks for 0.7, no group claims it."""
    refused = TEMPERATURES["openai, a value"]
    server.script = lambda ask: refused if "temperature" in ask.body else says("number 7")
    config = run_config(
        server.url,
        run={"name": "run-1", "mode": "sft"},
        engine={"kind": "openai"},
        environment={"args": {"rows": 3}},
        sampling={"temperature": 0.7},
    )
    groups = await play_to_the_end(redis_url, config)
    assert [group.temperature for group in groups] == [1.0, 1.0, 1.0]
    assert all(rollout.reward == 7.0 for group in groups for rollout in group.rollouts)
