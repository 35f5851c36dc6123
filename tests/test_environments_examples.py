"""The environments that ship with distaff."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from distaff.environments.load import examples
from distaff.environments.releases import has_classic
from distaff.types import Message
from tests.environments_support import Answer, ScriptedModel, call, load_env, only, play

needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="reasoning-gym is an extra of its own (it needs a C compiler); the gate installs it",
)
needs_classic = pytest.mark.skipif(not has_classic(), reason="the installed verifiers has the v1 API only")
V1 = ("propose-solve", "word-count")
EXAMPLES = [
    pytest.param(
        name, marks=() if name in V1 else [needs_classic, *([needs_reasoning_gym] if name == "reasoning-gym" else [])]
    )
    for name in examples()
]


@pytest.mark.parametrize("environment_id", EXAMPLES)
def test_the_same_arguments_give_the_same_json_rows(environment_id: str) -> None:
    """Train and eval sizes as asked for, the splits differ, another seed gives other rows."""
    sizes = {"train_size": 6, "eval_size": 4}
    one, two = load_env(environment_id, **sizes), load_env(environment_id, **sizes)
    other = load_env(environment_id, **sizes, seed=1)
    assert (one.size("train"), one.size("eval")) == (6, 4)
    rows = list(one.rows("train", 0))
    assert rows == list(two.rows("train", 0)) == [one.row("train", i) for i in range(6)]
    assert rows == json.loads(json.dumps(rows))
    assert rows[:4] != list(one.rows("eval", 0))
    assert rows != list(other.rows("train", 0))


def bisect(n: int, messages: Sequence[Message]) -> str:
    """A perfect player of 1 to 20: halves what the hints leave."""
    low, high = 1, 20
    for guess, hint in zip(messages[1::2], messages[2::2], strict=False):
        middle = int(guess["content"])
        low, high = (middle + 1, high) if "Higher" in hint["content"] else (low, middle - 1)
    return str((low + high) // 2)


@needs_classic
async def test_guess_number_rewards_closeness() -> None:
    """A player that halves wins in five guesses; one that babbles gets 0; in between the reward tells good from bad."""
    env = load_env("guess-number", max_turns=5)
    row = env.row("train", 0)
    secret = int(row["answer"])
    won, _ = await play(env, row, bisect)
    assert only(won).stop_condition == "guessed"
    scripts: list[list[Answer]] = [
        ["no idea"],
        [str(secret)],
        ["1"] * 5,
        ["20"] * 5,
        [f"maybe {secret + 1}, I think"] * 5,
    ]
    episodes = [won, *[(await play(env, row, script))[0] for script in scripts]]
    rewards: list[Any] = [score.reward for (score,) in await env.score(episodes)]
    assert rewards[0] == 1.0
    assert rewards[1] == 0.0
    assert rewards[2] == 1.0
    assert 0.0 <= min(rewards[3:]) < max(rewards[3:]) < 1.0
    assert rewards[5] == max(rewards[3:])


@needs_classic
async def test_calculator_tool_pays_the_right_number_and_the_use_of_the_tools() -> None:
    """1.2 for both, 1.0 for a result out of the air, 0.2 for tools and a wrong result; the answer is parsed."""
    env = load_env("calculator-tool")
    row = env.row("eval", 0)
    found = re.search(r"(\d+) \* (\d+) \+ (\d+)", row["question"])
    assert found is not None
    a, b, c = map(int, found.groups())
    tools: list[Answer] = [
        call("multiply", json.dumps({"a": a, "b": b})),
        call("add", json.dumps({"a": a * b, "b": c}), id="c2"),
    ]
    scripts: list[list[Answer]] = [[*tools, f"The result is {row['answer']}"], [row["answer"]], [*tools, "7"]]
    episodes = [(await play(env, row, script))[0] for script in scripts]
    scores = [score for (score,) in await env.score(episodes)]
    assert [score.reward for score in scores] == [1.2, 1.0, 0.2]
    assert [score.answer for score in scores] == [row["answer"], row["answer"], "7"]


@needs_classic
@needs_reasoning_gym
async def test_reasoning_gym_scores_with_the_generators_own_verifier() -> None:
    """The entry in the row is enough: another worker with another seed scores the same."""
    env, elsewhere = load_env("reasoning-gym"), load_env("reasoning-gym", seed=5, train_size=1)
    row = env.row("train", 3)
    scripts: list[list[Answer]] = [[f"Well. <answer>{row['answer']}</answer>"], ["<answer>-1</answer>"]]
    episodes = [(await play(elsewhere, row, script))[0] for script in scripts]
    right, wrong = (score for (score,) in await elsewhere.score(episodes))
    assert (right.reward, right.answer) == (1.0, row["answer"])
    assert wrong.reward is not None
    assert wrong.reward < 0.5


@needs_classic
@needs_reasoning_gym
async def test_reasoning_gym_pays_an_answer_of_tuples_and_survives_nonsense() -> None:
    """arc_agi's scorer compares with tuples, which JSON has not; prime_factorization's fails at an answer that is no number."""
    said: dict[str, list[str | None]] = {"arc_agi": [None], "prime_factorization": [None, "no idea", ""]}
    for gym, answers in said.items():
        env = load_env("reasoning-gym", gym=gym, train_size=1)
        row = env.row("train", 0)
        scripts = [f"<answer>{row['answer'] if text is None else text}</answer>" for text in answers]
        episodes = [(await play(env, row, [script]))[0] for script in scripts]
        scores = [score for (score,) in await env.score(episodes)]
        assert [score.error for score in scores] == [None] * len(answers)
        assert scores[0].reward == 1.0
        assert all(score.reward is not None and score.reward < 0.5 for score in scores[1:])


async def test_propose_solve_pays_both_seats() -> None:
    """The proposer for the sum and for a solver who gets it, the solver for the number; without an addition there is a spare one."""
    env = load_env("propose-solve")
    row = env.row("train", 0)
    target, spare = row["target"], sum(row["spare"])

    async def played(proposal: str, answer: str) -> dict[str, float | None]:
        models = {"proposer": ScriptedModel([proposal]), "solver": ScriptedModel([answer])}
        episode = await env.play(row, lambda seat: models[seat])
        (scores,) = await env.score([episode])
        assert len(models["solver"].asked) == 1
        return {seat.seat: score.reward for seat, score in zip(episode.plays, scores, strict=True)}

    assert await played(f"{target - 1} + 1", str(target)) == {"proposer": 1.0, "solver": 1.0}
    assert await played(f"{target - 1} + 1", "no idea") == {"proposer": 0.8, "solver": 0.0}
    assert await played("no idea", str(spare)) == {"proposer": 0.2, "solver": 1.0}
    near = await played(f"{target} + 1", str(target))
    assert near["proposer"] is not None
    assert near["solver"] is not None
    assert 0 < near["proposer"] < 0.8
    assert 0 < near["solver"] < 1
    await env.close()


async def test_word_count_gives_three_tries() -> None:
    """Full marks for the first, 0.8 for the third, the distance counts."""
    env = load_env("word-count")
    row = env.row("train", 0)
    right, far = str(row["answer"]), str(row["answer"] + 40)
    scripts: list[list[Answer]] = [[right], [far, far, right], [far]]
    episodes = [(await play(env, row, script))[0] for script in scripts]
    assert [only(episode).turns for episode in episodes] == [1, 3, 3]
    assert [scores[0].reward for scores in await env.score(episodes)] == [1.0, 0.8, 0.0]
    await env.close()
