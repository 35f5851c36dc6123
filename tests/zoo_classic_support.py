"""Small classic environments for the tests, one for each thing the adapter must cope with. Loaded by the id tests.zoo_classic_support."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import verifiers.legacy as vf
from datasets import Dataset
from openai import AsyncOpenAI

from tests.zoo_errors_support import ERRORS as PLAIN_ERRORS

ERRORS: dict[str, Callable[[], BaseException]] = {**PLAIN_ERRORS, "vf.Error": lambda: vf.Error("boom")}


def rows(n: int = 4, **columns: Any) -> Dataset:
    return Dataset.from_list([{"question": f"q{i}", "answer": str(i), **columns} for i in range(n)])


def load_environment(kind: str = "single", **options: Any) -> vf.Environment:
    return KINDS[kind](**options)


def number(completion: vf.Messages) -> float:
    """The reward is the number the model gave last."""
    return float(str([m for m in completion if m.role == "assistant"][-1].content))


def single(**options: Any) -> vf.Environment:
    return vf.SingleTurnEnv(dataset=rows(), rubric=vf.Rubric(funcs=[number]), **options)


def eval_only() -> vf.Environment:
    return vf.SingleTurnEnv(eval_dataset=rows(3), rubric=vf.Rubric(funcs=[number]))


def columns() -> vf.Environment:
    """Extra columns reach the reward function as arguments; a plain string `task` is no task of verifiers'."""

    def difficulty_of(difficulty: int, state: vf.State) -> float:
        return float(difficulty + state["input"]["difficulty"])

    return vf.SingleTurnEnv(
        dataset=rows(difficulty=7, task="arithmetic", info={"task": "plain", "level": 3}),
        rubric=vf.Rubric(funcs=[difficulty_of]),
    )


class Chat(vf.MultiTurnEnv):  # type: ignore[misc]
    """Says "next" after every answer, "the end" at the last."""

    def __init__(self, turns: int = 2, **options: Any) -> None:
        super().__init__(dataset=options.pop("dataset", None) or rows(), **options)
        self.turns = turns

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        reply = [vf.UserMessage(content="next")]
        if len(state["trajectory"]) >= self.turns:
            state["final_env_response"] = [vf.UserMessage(content="the end")]
        return reply


def chat(turns: int = 2, **options: Any) -> vf.Environment:
    return Chat(turns, rubric=vf.Rubric(funcs=[number]), **options)


class Broken(Chat):
    """Raises `error` at `place`."""

    def __init__(self, place: str, error: str, **options: Any) -> None:
        super().__init__(rubric=vf.Rubric(funcs=[number]), **options)
        self.place, self.error = place, error

    def _at(self, place: str) -> None:
        if place == self.place:
            raise ERRORS[self.error]()

    async def setup_state(self, state: vf.State) -> None:
        self._at("setup")

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        self._at("step")
        return await super().env_response(messages, state)

    @vf.cleanup  # type: ignore[untyped-decorator]
    async def tidy(self, state: vf.State) -> None:
        self._at("cleanup")


class Stubborn(Chat):
    """Swallows its cancellation once and goes on."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            state["swallowed"] = True
        return [vf.UserMessage(content="next")]


def self_judge() -> vf.Environment:
    """A reward function that asks the policy: refused, the rollout is over."""

    async def judged(state: vf.State) -> float:
        await state["client"].get_response("how was it?", "policy", {})
        return 1.0

    return Chat(rubric=vf.Rubric(funcs=[judged]))


def rewards(reward: str = "good", weight: float = 1.0) -> vf.Environment:
    """One reward function that is `reward` for the rollout that said "13", and the number said for the others."""

    async def fickle(completion: vf.Messages) -> Any:
        value = number(completion)
        if value != 13 or reward == "good":
            return value
        if reward in ERRORS:
            raise ERRORS[reward]()
        return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "much", "bool": True}[reward]

    def said(completion: vf.Messages) -> float:
        return number(completion)

    return Chat(turns=1, rubric=vf.Rubric(funcs=[fickle, said], weights=[weight, 1.0]))


def group_rewards(fault: str = "") -> vf.Environment:
    """The reward of a rollout is its rank in its group, twice its number (another rubric), and a metric."""

    async def rank(completions: list[vf.Messages], states: list[vf.State]) -> list[float]:
        if fault == "raise":
            raise ValueError("no rank")
        if fault == "length":
            return [1.0]
        if fault == "scalar":
            return 1.0  # type: ignore[return-value]
        order = sorted(range(len(states)), key=lambda i: number(completions[i]))
        return [float(order.index(i)) for i in range(len(states))]

    async def words(completion: vf.Messages) -> float:
        return float(len(completion))

    first = vf.Rubric(funcs=[rank, words], weights=[1.0, 0.0])
    return Chat(turns=1, rubric=vf.RubricGroup([first, vf.Rubric(funcs=[number], weights=[2.0])]))


def env_group() -> vf.Environment:
    """A group in a group, each child with a rubric and tools of its own."""

    def tenfold(completion: vf.Messages) -> float:
        return 10 * number(completion)

    inner = vf.EnvGroup(
        [
            single(sampling_args={"temperature": 0.5}),
            vf.SingleTurnEnv(dataset=rows(2), rubric=vf.Rubric(funcs=[tenfold])),
        ],
        env_names=["plain", "tenfold"],
    )
    return vf.EnvGroup([inner, vf.EnvGroup([tools()], env_names=["tools"])], env_names=["inner", "outer"])


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def explode(error: str) -> str:
    """Raise."""
    raise ERRORS[error]()


def used(completion: vf.Messages) -> float:
    return float(sum(m.role == "tool" for m in completion))


def tools(stop: bool = False, **options: Any) -> vf.Environment:
    return vf.ToolEnv(
        dataset=rows(),
        tools=[add, explode],
        stop_errors=[ValueError] if stop else [],
        rubric=vf.Rubric(funcs=[used]),
        **options,
    )


class Ledger(vf.StatefulToolEnv):  # type: ignore[misc]
    """A tool that is handed the rollout's own ledger."""

    def __init__(self) -> None:
        super().__init__(dataset=rows(), rubric=vf.Rubric(funcs=[self.total]), max_turns=5)
        self.add_tool(self.book, args_to_skip=["ledger"])

    @staticmethod
    async def total(state: vf.State) -> float:
        return float(sum(state["ledger"]))

    async def setup_state(self, state: vf.State) -> None:
        state["ledger"] = []

    def update_tool_args(self, tool_name: str, tool_args: dict, messages: Any, state: vf.State, **kwargs: Any) -> dict:  # type: ignore[type-arg]
        return {**tool_args, "ledger": state["ledger"]}

    async def book(self, amount: int, ledger: list) -> str:  # type: ignore[type-arg]
        """Book an amount."""
        await asyncio.sleep(0)
        ledger.append(amount)
        return f"{len(ledger)} entries"


def judged(url: str) -> vf.Environment:
    """A judge behind an API."""
    rubric = vf.JudgeRubric(judge_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))

    async def verdict(judge: Any, prompt: Any, completion: Any, answer: str) -> float:
        return float(await judge(prompt, completion, answer))

    rubric.add_reward_func(verdict)
    return vf.SingleTurnEnv(dataset=rows(), rubric=rubric)


KINDS: dict[str, Callable[..., Any]] = {
    "single": single,
    "eval_only": eval_only,
    "columns": columns,
    "chat": chat,
    "broken": Broken,
    "stubborn": lambda: Stubborn(rubric=vf.Rubric(funcs=[number])),
    "self_judge": self_judge,
    "rewards": rewards,
    "group_rewards": group_rewards,
    "env_group": env_group,
    "tools": tools,
    "ledger": Ledger,
    "judged": judged,
}
