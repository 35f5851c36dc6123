"""verifiers v1 tasksets and environments through the adapter."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from distaff.environments.protocol import Environment, Episode, Score
from distaff.errors import ContextOverflow, EngineRefused, EngineUnavailable, TokenizationError, TurnLimit
from tests.environments_support import ScriptedModel, call, load_env, only, play, turn

ZOO = "tests.zoo_v1_support"
Loader = Callable[..., Environment]


@pytest.fixture
async def zoo() -> AsyncIterator[Loader]:
    """Loads environments and closes them on the loop they played on."""
    opened: list[Environment] = []

    def open_one(environment_id: str = ZOO, **args: Any) -> Environment:
        opened.append(load_env(environment_id, **args))
        return opened[-1]

    yield open_one
    for env in opened:
        await env.close()


async def scored(env: Environment, *episodes: Episode) -> list[Score]:
    return [score for scores in await env.score(episodes) for score in scores]


async def test_a_task_is_played_and_scored_from_its_data(zoo: Loader) -> None:
    """Messages, turns, stop condition, weighted reward, raw metrics, compact row."""
    env = zoo()
    row = env.row("train", 1)
    assert row == {"idx": 1, "prompt": "q1", "answer": "1"}
    assert (env.api, env.size("train"), env.size("eval")) == ("v1", 3, 3)
    episode, model = await play(env, row, ["21"])
    single = only(episode)
    assert single.seat == ""
    assert single.messages == [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "21"}]
    assert (single.turns, single.stop_condition, single.truncated, single.error) == (1, "agent_completed", False, None)
    assert model.asked == [[{"role": "user", "content": "q1"}]]
    (score,) = await scored(env, episode)
    assert (score.reward, score.metrics, score.error) == (42.0, {"number": 21.0, "length": 2.0}, None)


async def test_no_reward_lands_on_another_rollout(zoo: Loader) -> None:
    """A group of 16 that finish in shuffled order: each says a number of its own and is paid twice that."""
    env = zoo()
    numbers = random.Random(1).sample(range(100), 16)
    delays = random.Random(2).sample(range(16), 16)
    row = env.row("train", 0)
    played = await asyncio.gather(
        *(play(env, row, [str(n)], delay_s=d / 100) for n, d in zip(numbers, delays, strict=True))
    )
    scores = await scored(env, *(episode for episode, _ in played))
    for n, (episode, model), score in zip(numbers, played, scores, strict=True):
        assert only(episode).messages[-1]["content"] == str(n)
        assert len(model.asked) == 1
        assert score.reward == 2 * n


def test_an_infinite_taskset_has_no_size_and_is_walked(zoo: Any) -> None:
    """rows() from the middle, again and again."""
    env = load_env(ZOO, size=0)
    assert env.size("train") is None
    for _ in range(2):
        assert [row["idx"] for row in itertools.islice(env.rows("train", 5), 3)] == [5, 6, 7]


@pytest.mark.parametrize("error", ["ValueError", "SystemExit", "KeyboardInterrupt", "CancelledError"])
@pytest.mark.parametrize("place", ["setup", "step", "finalize"])
async def test_what_task_code_raises_names_its_place(zoo: Loader, place: str, error: str) -> None:
    """P14 for v1 tasks: setup, a stop condition, finalize."""
    env = zoo(place=place, error=error)
    episode, _ = await play(env, env.row("train", 0), ["1"])
    failed = only(episode).error
    assert failed is not None
    assert (failed.kind, failed.boundary) == ("environment_error", place)
    assert error in failed.message


@pytest.mark.parametrize("error", ["ValueError", "SystemExit", "KeyboardInterrupt"])
async def test_a_reward_that_raises_is_a_scoring_error(zoo: Loader, error: str) -> None:
    """verifiers gives such a trace the total 0, which is no reward."""
    env = zoo(place="reward", error=error)
    episode, _ = await play(env, env.row("train", 0), ["1"])
    assert only(episode).error is None
    (score,) = await scored(env, episode)
    assert (score.reward, score.metrics) == (None, {})
    assert score.error is not None
    assert (score.error.kind, score.error.boundary) == ("scoring_error", "reward")
    assert error in score.error.message


async def test_a_reward_that_is_not_finite_is_a_scoring_error(zoo: Loader) -> None:
    """NaN."""
    env = zoo(place="nan")
    episode, _ = await play(env, env.row("train", 0), ["1"])
    (score,) = await scored(env, episode)
    assert score.error is not None
    assert "finite" in score.error.message


@pytest.mark.parametrize(
    ("error", "kind", "boundary", "retryable"),
    [
        (EngineUnavailable("503"), "engine_error", "engine", True),
        (EngineRefused("bad key"), "engine_error", "engine", False),
        (TokenizationError("no template"), "tokenization_error", "tokenization", False),
    ],
)
async def test_the_models_own_errors_pass_through(
    zoo: Loader, error: Exception, kind: str, boundary: str, retryable: bool
) -> None:
    """An engine or tokenization error is that, not the environment's, and is asked for once."""
    env = zoo()
    episode, model = await play(env, env.row("train", 0), [error])
    failed = only(episode).error
    assert failed is not None
    assert (failed.kind, failed.boundary, failed.retryable) == (kind, boundary, retryable)
    assert str(error) in failed.message
    assert len(model.asked) == 1
    assert only(episode).messages == [{"role": "user", "content": "q0"}]


@pytest.mark.parametrize(
    ("end", "stop"), [(ContextOverflow("full"), "context_length"), (TurnLimit("enough"), "max_turns")]
)
async def test_a_full_context_and_a_turn_limit_end_a_rollout_cleanly(zoo: Loader, end: Exception, stop: str) -> None:
    """Truncated, without an error, and scored."""
    env = zoo("word-count")
    episode, _ = await play(env, env.row("train", 0), ["0", end])
    single = only(episode)
    assert (single.error, single.truncated, single.stop_condition, single.turns) == (None, True, stop, 1)
    (score,) = await scored(env, episode)
    assert score.reward is not None


async def test_a_cut_answer_marks_the_rollout_truncated_and_an_empty_one_is_a_turn(zoo: Loader) -> None:
    """finish_reason length; content "" and None."""
    env = zoo()
    row = env.row("train", 0)
    cut, _ = await play(env, row, [turn("1", finish="length")])
    assert (only(cut).truncated, only(cut).error) == (True, None)
    for nothing in ("", None):
        empty, _ = await play(env, row, [turn(nothing)])
        assert (only(empty).turns, only(empty).error) == (1, None)


async def test_an_agents_timeout_is_a_timeout(zoo: Loader) -> None:
    """The environment's own deadline of a seat, set through args.env."""
    env = zoo(env={"agent": {"timeout": {"rollout": 0.2}}})
    episode, _ = await play(env, env.row("train", 0), ["1"], delay_s=5)
    failed = only(episode).error
    assert failed is not None
    assert (failed.kind, failed.boundary) == ("timeout", "deadline")


async def test_a_copy_of_a_task_has_the_data_of_the_copy(zoo: Loader) -> None:
    """What guards a task's own code goes with the copies an environment makes of it."""
    env = zoo("tests.zoo_v1_copies_support")
    models: list[ScriptedModel] = []

    def model_for(seat: str) -> ScriptedModel:
        models.append(ScriptedModel(["1"]))
        return models[-1]

    episode = await env.play(env.row("train", 0), model_for)
    assert [single.error for single in episode.plays] == [None, None]
    assert [model.asked[0][0]["content"] for model in models] == ["be kind", "be brief"]
    assert [score.metrics["seen"] for score in await scored(env, episode)] == [len("be kind"), len("be brief")]
    broken = await env.play({**env.row("train", 0), "leave": True}, model_for)
    failed = broken.plays[-1].error
    assert failed is not None
    assert (failed.kind, failed.boundary) == ("environment_error", "setup")


async def test_a_cancelled_rollout_ends_although_its_code_swallows_the_cancellation(zoo: Loader) -> None:
    """P14, and the environment plays on."""
    env = zoo(place="stubborn")
    model = ScriptedModel(["1"])
    task = asyncio.create_task(env.play(env.row("train", 0), lambda seat: model))
    await asyncio.wait_for(model.started.wait(), 10)
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
    episode, _ = await play(env, {"prompt": "q"}, ["1"])
    assert only(episode).error is None


async def test_every_trained_seat_is_a_play_with_a_model_of_its_own(zoo: Loader) -> None:
    """Two seats and a judge that is asked but not trained; a seat that plays twice is two plays."""
    env = zoo("tests.zoo_v1_seats_support", rounds=2)
    models: dict[str, ScriptedModel] = {}
    said = {"left": "1", "right": "2", "judge": "100", "left#2": "3", "right#2": "4"}

    def model_for(seat: str) -> ScriptedModel:
        assert seat not in models
        models[seat] = ScriptedModel([said[seat]])
        return models[seat]

    episode = await env.play(env.row("train", 0), model_for)
    assert [p.seat for p in episode.plays] == ["left", "right", "left#2", "right#2"]
    assert [p.messages[-1]["content"] for p in episode.plays] == ["1", "2", "3", "4"]
    assert [p.error for p in episode.plays] == [None] * 4
    assert set(models) == set(said)
    assert all(len(model.asked) == 1 for model in models.values())
    scores = await scored(env, episode)
    assert [s.reward for s in scores] == [101.0, 102.0, 103.0, 104.0]
    assert scores[0].metrics == {"said": 1.0, "verdict": 100.0}


async def test_a_failing_episode_fails_its_plays(zoo: Loader) -> None:
    """run() is the rollout, finalize() the judgement."""
    ran, judged = (zoo("tests.zoo_v1_seats_support", fail=fail) for fail in ("run", "finalize"))
    broken = await ran.play(ran.row("train", 0), lambda seat: ScriptedModel(["1"]))
    for single in broken.plays:
        assert single.error is not None
        assert (single.error.kind, single.error.boundary) == ("environment_error", "step")
        assert "boom" in single.error.message
    unjudged = await judged.play(judged.row("train", 0), lambda seat: ScriptedModel(["1"]))
    assert [p.error for p in unjudged.plays] == [None, None]
    for score in await scored(judged, unjudged):
        assert score.error is not None
        assert score.error.kind == "scoring_error"


async def test_tools_are_called_through_the_tasksets_mcp_server(
    zoo: Loader, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """Definitions reach the model, results and mistakes come back as tool messages; two rollouts share the server."""
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))  # the server is a process of its own
    env = zoo("tests.zoo_v1_tools_support")
    row = env.row("train", 0)
    script: list[Any] = [
        call("calc_add", '{"a": 1, "b": 2}'),
        call("calc_add", '{"a": -1, "b": 2}', id="c2"),
        call("calc_add", "{", id="c3"),
        call("nope", "{}", id="c4"),
        "3",
    ]
    (episode, model), (other, _) = await asyncio.gather(play(env, row, script), play(env, row, [script[0], "3"]))
    single = only(episode)
    assert single.error is None
    assert [tool["function"]["name"] for tool in model.tools[0]] == ["calc_add"]
    assert single.messages[0] == {"role": "system", "content": "Use the tool."}
    answers = [m["content"] for m in single.messages if m["role"] == "tool"]
    assert answers[0] == "3"
    assert all(words in text for words, text in zip(("no negative", "not JSON", "no tool"), answers[1:], strict=True))
    assert model.asked[1][2] is script[0]
    assert [s.reward for s in await scored(env, episode, other)] == [4.0, 1.0]


async def test_a_task_that_is_no_task_fails_its_rollout(zoo: Loader) -> None:
    """Data that the task type refuses."""
    env = zoo()
    episode, model = await play(env, {"prompt": 5}, ["1"])
    failed = only(episode).error
    assert failed is not None
    assert (failed.kind, failed.boundary) == ("environment_error", "setup")
    assert model.asked == []
