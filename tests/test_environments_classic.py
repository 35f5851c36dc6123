"""Classic verifiers environments through the adapter."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from distaff.environments.protocol import Environment, Episode, Score
from distaff.errors import ContextOverflow, EngineRefused, EngineUnavailable, TokenizationError, TurnLimit
from tests.environments_support import Answer, ScriptedModel, call, load_env, only, play, turn

ZOO = "tests.zoo_classic_support"


def zoo(kind: str, **options: Any) -> Environment:
    return load_env(ZOO, kind=kind, **options)


async def score_elsewhere(env: Environment, episodes: list[Episode]) -> list[Score]:
    """Score on another loop in another thread, as a worker does."""
    scores = await asyncio.to_thread(lambda: asyncio.run(env.score(episodes)))
    return [single for (single,) in scores]


async def test_a_conversation_is_kept_with_what_the_environment_said_last() -> None:
    """Messages, turns and the stop condition of a multi-turn rollout."""
    env = zoo("chat")
    episode, model = await play(env, env.row("train", 1), ["1", "2"])
    single = only(episode)
    assert [m["content"] for m in single.messages] == ["q1", "1", "next", "2", "the end"]
    assert (single.turns, single.stop_condition, single.truncated) == (2, "has_final_env_response", False)
    assert single.error is None
    assert len(model.asked) == 2
    (score,) = await score_elsewhere(env, [episode])
    assert score.reward == 2.0
    assert score.metrics == {"number": 2.0, "num_turns": 2.0}


async def test_a_model_gets_its_own_messages_back_as_it_gave_them() -> None:
    """Reasoning, tool calls and absent content survive the way through verifiers."""
    env = zoo("tools")
    first = {**call("add", '{"a": 1,  "b": 2}'), "reasoning_content": "hm"}
    _, model = await play(env, env.row("train", 0), [first, "3"])
    assert model.asked[1][1] is first
    assert model.asked[1][2] == {"role": "tool", "content": "3", "tool_call_id": "c1"}


async def test_tools_reach_the_model_and_results_the_conversation() -> None:
    """ToolEnv: definitions in the OpenAI shape, several calls in one message, metrics of the tool monitor."""
    env = zoo("tools")
    both = call("add", '{"a": 1, "b": 2}')
    both["tool_calls"] += call("add", '{"a": 3, "b": 4}', id="c2")["tool_calls"]
    episode, model = await play(env, env.row("train", 0), [both, "done"])
    assert [tool["function"]["name"] for tool in model.tools[0]] == ["add", "explode"]
    assert model.tools[0][0]["function"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert [m["content"] for m in only(episode).messages if m["role"] == "tool"] == ["3", "7"]
    assert only(episode).tools == model.tools[0]
    (score,) = await score_elsewhere(env, [episode])
    assert (score.reward, score.metrics["total_tool_calls"], score.metrics["add_calls"]) == (2.0, 2.0, 2.0)


async def test_a_stateful_tool_sees_its_own_rollout_only() -> None:
    """StatefulToolEnv: two rollouts at once book into ledgers of their own, and the hidden argument stays hidden."""
    env = zoo("ledger")
    booked = [play(env, env.row("train", 0), [call("book", f'{{"amount": {n}}}'), "done"]) for n in (5, 70)]
    (one, model), (two, _) = await asyncio.gather(*booked)
    assert list(model.tools[0][0]["function"]["parameters"]["properties"]) == ["amount"]
    assert [s.reward for s in await score_elsewhere(env, [one, two])] == [5.0, 70.0]


async def test_no_reward_lands_on_another_rollout() -> None:
    """A group of 16 that finish in shuffled order: each says a number of its own and is paid that number."""
    env = zoo("group_rewards")
    numbers = random.Random(1).sample(range(100), 16)
    delays = random.Random(2).sample(range(16), 16)
    row = env.row("train", 0)
    played = await asyncio.gather(
        *(play(env, row, [str(n)], delay_s=d / 200) for n, d in zip(numbers, delays, strict=True))
    )
    scores = await score_elsewhere(env, [episode for episode, _ in played])
    for n, (episode, model), score in zip(numbers, played, scores, strict=True):
        assert only(episode).messages[1]["content"] == str(n)
        assert len(model.asked) == 1
        rank = sorted(numbers).index(n)
        assert score.reward == 2 * n + rank
        assert score.metrics == {"rank": rank, "words": 2.0, "number": n, "num_turns": 1.0}


@pytest.mark.parametrize(
    ("fault", "words"), [("raise", "no rank"), ("length", "1 rewards for 2"), ("scalar", "not a list")]
)
async def test_a_group_reward_that_fails_fails_the_group(fault: str, words: str) -> None:
    """A group reward function that raises, or returns too few values or no list, leaves no reward behind."""
    env = zoo("group_rewards", fault=fault)
    episodes = [(await play(env, env.row("train", 0), [n]))[0] for n in "12"]
    for score in await score_elsewhere(env, episodes):
        assert score.reward is None
        assert score.error is not None
        assert score.error.kind == "scoring_error"
        assert words in score.error.message
        assert "rank" in score.error.message


@pytest.mark.parametrize(
    "reward",
    ["ValueError", "vf.Error", "SystemExit", "KeyboardInterrupt", "CancelledError", "nan", "inf", "none", "text"],
)
async def test_a_reward_function_that_fails_fails_its_rollout_only(reward: str) -> None:
    """verifiers would log it and pay 0.0; the rollout gets an error and the others their reward."""
    env = zoo("rewards", reward=reward)
    episodes = [(await play(env, env.row("train", 0), [n]))[0] for n in ("1", "13", "2")]
    one, bad, two = await score_elsewhere(env, episodes)
    assert (one.reward, two.reward) == (2.0, 4.0)
    assert (bad.reward, bad.metrics) == (None, {})
    assert bad.error is not None
    assert (bad.error.kind, bad.error.boundary) == ("scoring_error", "reward")
    assert "'fickle'" in bad.error.message


@pytest.mark.parametrize("reward", ["ValueError", "nan"])
async def test_a_metric_that_fails_costs_its_own_entry_only(reward: str) -> None:
    """A function of weight 0 is no reason to throw a rollout away."""
    env = zoo("rewards", reward=reward, weight=0.0)
    episodes = [(await play(env, env.row("train", 0), [n]))[0] for n in ("1", "13")]
    one, two = await score_elsewhere(env, episodes)
    assert (one.reward, two.reward) == (1.0, 13.0)
    assert one.metrics["fickle"] == 1.0
    assert "fickle" not in two.metrics
    assert two.error is None


async def test_a_bool_is_a_reward() -> None:
    """True counts 1."""
    env = zoo("rewards", reward="bool")
    episode, _ = await play(env, env.row("train", 0), ["13"])
    (score,) = await score_elsewhere(env, [episode])
    assert score.reward == 14.0


@pytest.mark.parametrize("error", ["ValueError", "vf.Error", "SystemExit", "KeyboardInterrupt", "CancelledError"])
@pytest.mark.parametrize("place", ["setup", "step", "cleanup"])
async def test_what_environment_code_raises_names_its_place(place: str, error: str) -> None:
    """P14: raised in setup, step or cleanup, also inside verifiers' own timeout task."""
    env = zoo("broken", place=place, error=error, timeout_seconds=30)
    episode, _ = await play(env, env.row("train", 0), ["1"])
    failed = only(episode).error
    assert failed is not None
    assert (failed.kind, failed.boundary, failed.retryable) == ("environment_error", place, True)
    assert error.removeprefix("vf.") in failed.message
    assert only(episode).messages[0]["content"] == "q0"


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt", "CancelledError"])
async def test_a_tool_that_ends_the_process_fails_its_rollout(error: str) -> None:
    """P14: what ToolEnv does not turn into a tool message is recorded with the tool's name."""
    env = zoo("tools")
    episode, _ = await play(env, env.row("train", 0), [call("explode", f'{{"error": "{error}"}}')])
    failed = only(episode).error
    assert failed is not None
    assert (failed.kind, failed.boundary) == ("environment_error", "tool:explode")


async def test_a_tool_error_is_a_message_unless_the_environment_stops_at_it() -> None:
    """ToolEnv's stop_errors decide; then the tool is named."""
    script: list[Answer] = [call("explode", '{"error": "ValueError"}'), "done"]
    lenient, strict = zoo("tools"), zoo("tools", stop=True)
    going_on, _ = await play(lenient, lenient.row("train", 0), script)
    assert only(going_on).error is None
    assert only(going_on).messages[2]["content"] == "boom"
    stopped, _ = await play(strict, strict.row("train", 0), script)
    failed = only(stopped).error
    assert failed is not None
    assert failed.boundary == "tool:explode"
    assert "boom" in failed.message


async def test_a_cancelled_rollout_ends_although_its_code_swallows_the_cancellation() -> None:
    """P14: CancelledError comes out, and the model is not asked again."""
    env = zoo("stubborn")
    model = ScriptedModel(["1"])
    task = asyncio.create_task(env.play(env.row("train", 0), lambda seat: model))
    await asyncio.wait_for(model.started.wait(), 5)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()
    assert len(model.asked) == 1


@pytest.mark.parametrize(
    ("error", "kind", "boundary", "retryable"),
    [
        (EngineUnavailable("503"), "engine_error", "engine", True),
        (EngineRefused("bad key"), "engine_error", "engine", False),
        (TokenizationError("no template"), "tokenization_error", "tokenization", False),
    ],
)
async def test_the_models_own_errors_pass_through(error: Exception, kind: str, boundary: str, retryable: bool) -> None:
    """An engine or tokenization error in the second turn is that, not the environment's."""
    env = zoo("chat")
    episode, _ = await play(env, env.row("train", 0), ["1", error])
    failed = only(episode).error
    assert failed is not None
    assert (failed.kind, failed.boundary, failed.retryable) == (kind, boundary, retryable)
    assert str(error) in failed.message
    assert [m["content"] for m in only(episode).messages] == ["q0", "1"]


@pytest.mark.parametrize(
    ("end", "stop"), [(ContextOverflow("full"), "prompt_too_long"), (TurnLimit("enough"), "max_turns_reached")]
)
async def test_a_full_context_and_a_turn_limit_end_a_rollout_cleanly(end: Exception, stop: str) -> None:
    """Truncated, without an error, and scored."""
    env = zoo("chat")
    episode, _ = await play(env, env.row("train", 0), ["5", end])
    single = only(episode)
    assert (single.error, single.truncated, single.stop_condition, single.turns) == (None, True, stop, 1)
    (score,) = await score_elsewhere(env, [episode])
    assert score.reward == 5.0


async def test_a_cut_answer_marks_the_rollout_truncated() -> None:
    """finish_reason length; the loop goes on."""
    env = zoo("chat")
    episode, _ = await play(env, env.row("train", 0), [turn("1", finish="length"), "2"])
    assert only(episode).truncated
    assert only(episode).turns == 2


async def test_an_empty_answer_is_a_turn() -> None:
    """A policy that ends at once has to be scored for it, not retried."""
    env = zoo("chat")
    episode, _ = await play(env, env.row("train", 0), [turn(""), "2"])
    assert (only(episode).error, only(episode).turns) == (None, 2)


async def test_the_environments_own_limits_are_clean_ends() -> None:
    """timeout_seconds of the environment: its stop condition, no error, scored."""
    env = zoo("chat", timeout_seconds=0.2)
    episode, _ = await play(env, env.row("train", 0), ["4", "5"], delay_s=0.15)
    assert (only(episode).stop_condition, only(episode).error) == ("timeout_reached", None)
    (score,) = await score_elsewhere(env, [episode])
    assert score.reward == 4.0


async def test_an_env_group_plays_and_scores_each_row_with_its_own_environment() -> None:
    """EnvGroup in an EnvGroup: rubric, tools and sampling of the child that owns the row."""
    env = zoo("env_group")
    routes = {str(row["info"]["env_id"]): row for row in env.rows("train", 0)}
    assert set(routes) == {"['inner', 'plain']", "['inner', 'tenfold']", "['outer', 'tools']"}
    plain, model = await play(env, routes["['inner', 'plain']"], ["3"])
    assert model.sampling[0] == {"temperature": 0.5}
    tenfold, _ = await play(env, routes["['inner', 'tenfold']"], ["3"])
    tooled, tool_model = await play(env, routes["['outer', 'tools']"], [call("add", '{"a": 1, "b": 1}'), "2"])
    assert len(tool_model.tools[0]) == 2
    assert [(await score_elsewhere(env, [e]))[0].reward for e in (plain, tenfold, tooled)] == [3.0, 30.0, 1.0]


async def test_a_broken_child_of_an_env_group_is_named() -> None:
    """Places are known inside a group as well."""
    env = zoo("env_group")
    row = next(row for row in env.rows("train", 0) if "tools" in row["info"]["env_id"])
    episode, _ = await play(env, row, [call("explode", '{"error": "SystemExit"}')])
    failed = only(episode).error
    assert failed is not None
    assert failed.boundary == "tool:explode"


async def test_every_column_reaches_the_reward_function() -> None:
    """Extra columns as arguments and in the state; the plain string `task` that verifiers refuses is left out of the rollout."""
    env = zoo("columns")
    row = env.row("train", 2)
    assert (row["difficulty"], row["task"], row["info"]) == (7, "arithmetic", {"task": "plain", "level": 3})
    episode, _ = await play(env, row, ["1"])
    assert only(episode).error is None
    (score,) = await score_elsewhere(env, [episode])
    assert score.reward == 14.0


@pytest.mark.parametrize(("kind", "size"), [("eval_only", 3), ("single", 4)])
def test_an_environment_with_one_split_gives_that_one(kind: str, size: int) -> None:
    """Train-only and eval-only sets, by index and in order."""
    env = zoo(kind)
    assert (env.size("train"), env.size("eval")) == (size, size)
    assert [row["answer"] for row in env.rows("eval", 1)] == [str(i) for i in range(1, size)]
    assert env.row("train", size - 1)["example_id"] == size - 1


async def test_the_policy_is_gone_while_scoring() -> None:
    """A reward function that asks the policy would add turns to a finished rollout: it fails, with the mend."""
    env = zoo("self_judge")
    episode, model = await play(env, env.row("train", 0), ["1", "2"])
    (score,) = await score_elsewhere(env, [episode])
    assert score.error is not None
    assert "judge client" in score.error.message
    assert len(model.asked) == 2


async def test_a_judge_answers_on_every_scoring_loop() -> None:
    """A worker that gave up a blocked scoring thread scores on a new loop; kept-alive connections of the old one are not used."""

    async def judge(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "0.5"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "j", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge)
    async with TestServer(app) as server:
        env = zoo("judged", url=str(server.make_url("/v1")))
        episode, _ = await play(env, env.row("train", 0), ["1"])
        for _ in range(3):
            (score,) = await score_elsewhere(env, [episode])
            assert (score.reward, score.error) == (0.5, None)


async def test_teardown_runs_once() -> None:
    """close() runs it; the call verifiers makes at exit finds nothing to do."""
    env: Any = zoo("single")
    calls: list[str] = []

    async def teardown() -> None:
        calls.append("teardown")

    env._env._teardown_handlers.append(teardown)
    await env.close()
    await env._env._teardown()
    assert calls == ["teardown"]
