"""Classic verifiers environments (`load_environment`, verifiers 0.3): the only place that knows that API.

Invariant: one rollout, one PolicyClient, one State; scores go to a rollout by the identity of its State. Never uses
`generate`, `run_group` or verifiers' advantages.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from datasets import disable_progress_bars
from verifiers.legacy.parsers.parser import Parser

from distaff.environments.classic_client import MODEL_NAME, PolicyClient
from distaff.environments.classic_rewards import FINDINGS, Findings, rebind_judges, watch
from distaff.environments.failures import TRAIL, Trail, attempt, failure, guarded, scoring_failure
from distaff.environments.messages import openai_message, openai_tool
from distaff.environments.protocol import Episode, ModelFactory, Play, Score
from distaff.errors import EnvironmentLoadError
from distaff.types import JSON, Message, RolloutFailure, Split, Tool, finite_metrics, reward_problem

log = logging.getLogger(__name__)

_PLACES = {
    "setup_state": "setup",
    "get_prompt_messages": "step",
    "env_response": "step",
    "add_model_response": "step",
    "is_completed": "step",
    "cleanup": "cleanup",
}


def build(module: ModuleType, *, environment_id: str, version: str, args: Mapping[str, JSON]) -> ClassicEnvironment:
    """Call the module's `load_environment(**args)`. Raises whatever that raises, EnvironmentLoadError for a wrong type."""
    disable_progress_bars()
    env = module.load_environment(**args)
    if not hasattr(env, "rollout") or not hasattr(env, "rubric"):
        raise EnvironmentLoadError(
            f"environment {environment_id!r}: load_environment returned a {type(env).__name__}; it must return a "
            "verifiers Environment (SingleTurnEnv, MultiTurnEnv, ToolEnv, ...)"
        )
    env.env_id = env.env_id or environment_id
    env.env_args = env.env_args or dict(args)
    return ClassicEnvironment(env, environment_id=environment_id, version=version)


@dataclass(frozen=True, slots=True, eq=False)
class _Played:
    """What scoring needs of a rollout."""

    state: Any
    environment: Any
    """The member of an EnvGroup that played it."""


class ClassicEnvironment:
    """A classic environment behind the `Environment` protocol."""

    api: Literal["classic", "v1"] = "classic"

    def __init__(self, env: Any, *, environment_id: str, version: str) -> None:
        self.id = environment_id
        self.version = version
        self._env = env
        self._scoring_loop: asyncio.AbstractEventLoop | None = None
        _guard(env)

    def size(self, split: Split) -> int | None:
        return len(self._dataset(split))

    def row(self, split: Split, index: int) -> dict[str, JSON]:
        return dict(self._dataset(split)[index])

    def rows(self, split: Split, start: int) -> Iterator[dict[str, JSON]]:
        dataset = self._dataset(split)
        return (dict(dataset[index]) for index in range(start, len(dataset)))

    def _dataset(self, split: Split) -> Any:
        """The split's dataset, the only one where there is one. `get_dataset` raises, `get_eval_dataset` warns."""
        train, evaluation = self._env.build_dataset, self._env.build_eval_dataset
        first, second = (evaluation, train) if split == "eval" else (train, evaluation)
        dataset = first()
        if dataset is None:
            dataset = second()
        if dataset is None:
            raise EnvironmentLoadError(f"environment {self.id!r} has neither a train nor an eval dataset")
        return dataset

    async def play(self, task: Mapping[str, JSON], model_for: ModelFactory) -> Episode:
        client = PolicyClient(model_for(""), environment=self._env)
        trail = Trail()
        token = TRAIL.set(trail)
        try:
            outcome = await attempt(self._rollout(task, client))
        finally:
            client.finish()
            TRAIL.reset(token)
        state = outcome.value if outcome.value is not None else client.state
        client.state = None  # a cycle that keeps every token of the rollout until a full garbage collection
        error = state.get("error") if outcome.error is None and state is not None else outcome.error
        failed = None if error is None else failure(error, trail.place(error, "step" if client.turns else "setup"))
        if failed is not None and state is not None:
            await self._clean(client.environment.rubric, [state])
        return Episode(plays=[_play(state, client, task, failed)], handle=_Played(state, client.environment))

    async def _rollout(self, task: Mapping[str, JSON], client: PolicyClient) -> Any:
        row = rollout_input(task)
        client.environment = _owner(self._env, row)
        return await self._env.rollout(row, client, MODEL_NAME, dict(client.environment.sampling_args))

    async def score(self, episodes: Sequence[Episode]) -> list[list[Score]]:
        if not episodes:
            return []
        self._enter_loop()
        states = [episode.handle.state for episode in episodes]
        owner = episodes[0].handle.environment  # an EnvGroup's own rubric finds nothing, and pays 0.0, when nested
        rubric = owner.rubric
        watch(rubric)
        findings = Findings()
        token = FINDINGS.set(findings)
        try:
            outcome = await attempt(rubric.score_group(states))
        finally:
            FINDINGS.reset(token)
        problem = (
            None if outcome.error is None else f"the rubric raised {type(outcome.error).__name__}: {outcome.error}"
        )
        scores = [[self._score(state, problem, findings, owner.parser)] for state in states]
        await self._clean(rubric, states)
        return scores

    async def close(self) -> None:
        """Run the environment's and its rubrics' teardown, once."""
        teardown, self._env._teardown = self._env._teardown, _nothing  # verifiers calls it again at exit
        await teardown()

    def _score(self, state: Any, problem: str | None, findings: Findings, parser: Any) -> Score:
        lost = findings.lost_metrics.get(id(state), set())
        raw = {k: v for k, v in (state.get("metrics") or {}).items() if k not in lost}
        problem = problem or findings.errors.get(id(state)) or reward_problem(state.get("reward"))
        if lost:
            log.warning("metric.failed environment=%s metrics=%s", self.id, sorted(lost))
        return Score(
            reward=None if problem else float(state["reward"]),
            metrics={} if problem else finite_metrics(raw),
            answer=_answer(parser, state),
            error=scoring_failure(problem) if problem else None,
        )

    def _enter_loop(self) -> None:
        """An HTTP pool works on one event loop only."""
        loop = asyncio.get_running_loop()
        if self._scoring_loop is not None and self._scoring_loop is not loop:
            rebind_judges(self._env.rubric)
        self._scoring_loop = loop

    async def _clean(self, rubric: Any, states: Sequence[Any]) -> None:
        for state in states:
            outcome = await attempt(guarded(rubric.cleanup, lambda *_: "cleanup")(state))
            if outcome.error is not None:
                log.warning("rubric.cleanup_failed environment=%s error=%r", self.id, outcome.error)


def _answer(parser: Any, state: Any) -> str | None:
    if type(parser) is Parser and parser.extract_fn is Parser.__init__.__defaults__[0]:
        return None  # the default, which parses nothing
    try:
        answer = parser.parse_answer(state["completion"])
    except Exception:  # noqa: BLE001 - environment code; the answer is for people to read
        return None
    return None if answer is None else str(answer)


def _owner(env: Any, row: Any) -> Any:
    """The environment that plays `row`: through EnvGroups by the route they put into its info."""
    info = row.get("info")
    info = json.loads(info) if isinstance(info, str) else info
    route = (info or {}).get("env_id") or []
    for name in [route] if isinstance(route, str) else route:
        env = getattr(env, "env_map", {}).get(name, env)
    return env


async def _nothing() -> None:
    return None


def rollout_input(task: Mapping[str, JSON]) -> dict[str, JSON]:
    """`task` as `rollout` takes it: verifiers 0.3.1 refuses the plain string `task` that 0.1 put there, so it is left out."""
    row = {key: value for key, value in task.items() if key != "task" or not _plain(value)}
    info = row.get("info")
    parsed = json.loads(info) if isinstance(info, str) and info.strip() else info
    if isinstance(parsed, Mapping) and _plain(parsed.get("task")):
        row["info"] = {key: value for key, value in parsed.items() if key != "task"}
    return row


def _plain(value: JSON) -> bool:
    return isinstance(value, str) and not value.lstrip().startswith("{")


def _guard(env: Any) -> None:
    """Note where the environment's own code raises; EnvGroups recursively."""
    for name, place in _PLACES.items():
        if hasattr(env, name):
            setattr(env, name, guarded(getattr(env, name), lambda *_, _place=place, **__: _place))
    if hasattr(env, "setup_state"):
        env.setup_state = _remembering(env.setup_state)
    if hasattr(env, "call_tool"):
        env.call_tool = guarded(env.call_tool, lambda name, *_, **__: f"tool:{name}")
    for child in getattr(env, "envs", []):
        _guard(child)


def _remembering(setup_state: Any) -> Any:
    async def setup(state: Any) -> Any:
        state["client"].state = state
        return await setup_state(state)

    return setup


def _play(state: Any, client: PolicyClient, task: Mapping[str, JSON], failed: RolloutFailure | None) -> Play:
    stop = "" if state is None else state.get("stop_condition") or ""
    return Play(
        seat="",
        messages=_conversation(state, client, task),
        tools=client.tools or _tools(state),
        turns=client.turns,
        stop_condition="max_turns_reached" if client.turn_limit else stop,
        truncated=client.truncated or bool(state is not None and state.get("is_truncated")),
        error=failed,
        timings={} if state is None else _timings(state),
    )


def _conversation(state: Any, client: PolicyClient, task: Mapping[str, JSON]) -> list[Message]:
    """The last prompt, the answer to it, and what the environment added last."""
    if state is None:
        prompt = task.get("prompt") or []
        return [openai_message(m) for m in prompt] if isinstance(prompt, list) else [_user(str(prompt))]
    last = state["trajectory"][-1] if state.get("trajectory") else None
    parts = list(state.get("prompt") or []) if last is None else [*last["prompt"], *last["completion"]]
    final = state.get("final_env_response") or []
    return client.recall.openai([*parts, *([_user(final)] if isinstance(final, str) else final)])


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _tools(state: Any) -> list[Tool]:
    return [] if state is None else [openai_tool(tool) for tool in state.get("tool_defs") or []]


def _timings(state: Any) -> dict[str, float]:
    timing = state.get("timing")
    spans = {"setup": getattr(timing, "setup", None), "environment": getattr(timing, "env", None)}
    return finite_metrics({name: getattr(span, "duration", None) for name, span in spans.items()})
