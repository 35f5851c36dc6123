"""Every kind of environment through a whole worker, in RL and in SFT mode."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import Any

import pytest

from distaff.environments.load import examples
from distaff.environments.releases import has_classic
from tests.environment_farm_support import Call, Case, Mode, Played, Policy, Prompt, check, play_all
from tests.scripted_engine import Answer, ScriptedEngine

pytestmark = pytest.mark.slow

CLASSIC = "tests.zoo_classic_support"
needs_classic = pytest.mark.skipif(not has_classic(), reason="the installed verifiers has the v1 API only")
both_modes = pytest.mark.parametrize("mode", ["rl", "sft"])


def number(prompt: Prompt) -> str:
    """A number of its own for each request."""
    return str(prompt.number * 7 % 20 + 1)


def calculate(prompt: Prompt) -> str | Call:
    """Multiply, add, answer: right three times of four."""
    a, b, c = (int(found) for found in re.findall(r"What is (\d+) \* (\d+) \+ (\d+)", prompt.text)[-1])
    if prompt.tool_results == 0:
        return {"name": "multiply", "arguments": {"a": a, "b": b}}
    if prompt.tool_results == 1:
        return {"name": "add", "arguments": {"a": a * b, "b": c}}
    return str(a * b + c if prompt.number % 4 else 7)


def spell(prompt: Prompt) -> str:
    """The word backward, every other time."""
    word = re.findall(r"nus\): (\w+)", prompt.text)[-1]
    return f"<answer>{word[::-1] if prompt.number % 2 else 'no idea'}</answer>"


def propose_or_solve(prompt: Prompt) -> str:
    return f"{prompt.number % 9 + 1} + 3" if "Write an addition" in prompt.text else number(prompt)


def calling(name: str, *arguments: str) -> Policy:
    """One call of a tool with numbers of the request's own, where there are tools; then a number."""

    def policy(prompt: Prompt) -> str | Call:
        if prompt.tool_results or not prompt.tools:
            return number(prompt)
        return {"name": name, "arguments": dict.fromkeys(arguments, prompt.number)}

    return policy


SHIPPED = {
    "calculator-tool": Case(name="calculator", id="calculator-tool", policy=calculate, style="qwen3_style"),
    "guess-number": Case(name="guess", id="guess-number", policy=number),
    "propose-solve": Case(name="propose", id="propose-solve", policy=propose_or_solve, seats=("proposer", "solver")),
    "reasoning-gym": Case(name="gym", id="reasoning-gym", policy=spell, args={"gym": "spell_backward"}),
    "word-count": Case(name="words", id="word-count", policy=number),
}


def playable(cases: dict[str, Case]) -> list[Case]:
    """Those that the installed packages can play."""
    missing = {"reasoning-gym"} if importlib.util.find_spec("reasoning_gym") is None else set()
    v1_only = set() if has_classic() else set(cases) - {"propose-solve", "word-count"}
    return [case for name, case in cases.items() if name not in missing | v1_only]


def rewards(played: Played, *, seat: str = "") -> set[float]:
    return {r.reward for group in played.groups for r in group.rollouts if r.seat == seat and r.reward is not None}


@both_modes
async def test_every_shipped_example_is_played_scored_and_tokenized(redis_url: str, mode: Mode) -> None:
    """All at once on one worker: no run gets a token, a reward or a row of another, and rewards tell good from bad."""
    assert set(SHIPPED) == set(examples())
    for played in await play_all(redis_url, playable(SHIPPED), mode):
        check(played, mode)
        assert all(len(rewards(played, seat=seat)) > 1 for seat in played.case.seats), played.case.name


def classic_zoo(judge_url: str) -> list[Case]:
    """One case for each thing a classic environment can be made of."""

    def zoo(kind: str, policy: Policy = number, **fields: Any) -> Case:
        args = {"kind": kind, **fields.pop("args", {})}
        return Case(name=kind.replace("_", "-"), id=CLASSIC, policy=policy, args=args, **fields)

    return [
        zoo("single"),
        zoo("eval_only"),
        zoo("columns"),
        zoo("chat", args={"turns": 3}),
        zoo("group_rewards"),
        zoo("env_group", calling("add", "a", "b"), style="qwen3_style", items=10),
        zoo("ledger", calling("book", "amount"), style="qwen3_style"),
        zoo("judged", args={"url": judge_url}),
    ]


@needs_classic
@pytest.mark.parametrize("mode", ["rl", pytest.param("sft", marks=pytest.mark.exhaustive)])
async def test_every_kind_of_classic_environment_is_played_scored_and_tokenized(redis_url: str, mode: Mode) -> None:
    """One and several turns, tools with and without a state, nested groups, group rewards, a judge, extra columns, eval only."""
    async with ScriptedEngine(script=lambda ask: Answer(text=str(ask.number % 3))) as judge:
        played = {one.case.args["kind"]: one for one in await play_all(redis_url, classic_zoo(f"{judge.url}/v1"), mode)}
        assert judge.count == 6
    for one in played.values():
        check(one, mode)
    # A judge's verdict, the booked amounts and the ranks of a group arrive at the rollouts they were made for.
    assert rewards(played["judged"]) == {0.0, 1.0, 2.0}
    for group in played["ledger"].groups:
        for rollout in group.rollouts:
            (call,) = (c for m in rollout.messages for c in m.get("tool_calls") or [])
            assert rollout.reward == json.loads(call["function"]["arguments"])["amount"]
    for group in played["group_rewards"].groups:
        assert sorted(rollout.metrics["rank"] for rollout in group.rollouts) == [0.0, 1.0, 2.0]
    assert all(
        group.task["difficulty"] == 7 and group.task["task"] == "arithmetic" for group in played["columns"].groups
    )


async def test_two_environments_stay_apart_although_their_rows_have_the_same_ids(redis_url: str) -> None:
    """The same environment with other arguments, and another one, with equal example ids in one pool: each group is its own run's."""
    near = Case(name="near", id="word-count", policy=number, args={"seed": 1})
    far = Case(name="far", id="word-count", policy=number, args={"seed": 2})
    other = Case(name="other", id="propose-solve", policy=propose_or_solve, seats=("proposer", "solver"))
    played = await play_all(redis_url, [near, far, other], "rl")
    for one in played:
        check(one, "rl")
    groups = [group for one in played for group in one.groups]
    assert [group.task["idx"] for group in groups] == [0, 1] * 3
    assert len({group.key for group in groups}) == 6
    assert len({json.dumps(group.task, sort_keys=True) for group in groups}) == 6
    assert len({(group.environment.id, group.environment.args_hash) for group in groups}) == 3


def v1_zoo() -> list[Case]:
    """One case for each thing a v1 environment can be made of."""
    branching = {"env": {"agent": {"harness": {"id": "zoo_branching_harness"}}}}
    return [
        Case(name="infinite", id="tests.zoo_v1_support", policy=number, args={"size": 0}),
        Case(
            name="debate",
            id="tests.zoo_v1_seats_support",
            policy=number,
            args={"rounds": 2},
            items=1,
            seats=("left", "right", "left#2", "right#2"),
        ),
        Case(name="branches", id="tests.zoo_v1_branches_support", policy=number, args=branching, samples=2),
        Case(
            name="tools",
            id="tests.zoo_v1_tools_support",
            policy=calling("calc_add", "a", "b"),
            items=1,
            style="qwen3_style",
        ),
    ]


@both_modes
async def test_every_kind_of_v1_environment_is_played_scored_and_tokenized(redis_url: str, mode: Mode) -> None:
    """An infinite taskset, trained seats beside one that is not, a harness that starts anew, tools of an MCP server (a process of
    some seconds, so in one mode only)."""
    cases = v1_zoo()[: 4 if mode == "rl" else 3]
    played = {one.case.name: one for one in await play_all(redis_url, cases, mode)}
    for one in played.values():
        check(one, mode)
    assert rewards(played["branches"]) == {2.0}
    assert "tools" not in played or rewards(played["tools"]) == {1.0}
    # The judge asks the policy as well, and none of its tokens is in a sample.
    asked = [record for record in played["debate"].engine.records if record.ask.sampling.get("max_tokens") != 1]
    assert len(asked) == 3 * 5, "two seats twice, and a judge, in each of three episodes"
    (group,) = played["debate"].groups
    assert len(group.samples) == 3 * 4
