"""verifiers v1 tasksets and environments (0.3 and 0.4): with `v1_client` and `harness` the only place that knows that API.

Invariant: a task is rebuilt from its data, never from an index; a trace is scored by its named rewards, never by its total alone
(a failed trace has the total 0). One `env.serving()` lives as long as the environment, in a task of its own. What 0.3 and 0.4 call or
judge differently (stop conditions, a full context, an agent's timeout) comes out of here the same.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.generic import deep_merge

from distaff.environments import harness
from distaff.environments.failures import attempt, clip, failure, guarded, scoring_failure
from distaff.environments.messages import openai_message
from distaff.environments.protocol import Episode, ModelFactory, Play, Score
from distaff.environments.v1_client import MODEL_NAME, SeatClient, SeatConfig, SeatedInterception, Seats
from distaff.errors import EnvironmentFailure, EnvironmentLoadError
from distaff.types import JSON, RolloutFailure, Split, finite_metrics, reward_problem

log = logging.getLogger(__name__)


def build(module: ModuleType, *, environment_id: str, version: str, args: Mapping[str, JSON]) -> V1Environment:
    """The taskset of `module` with `args` as its configuration; args["env"] configures the environment around it (id, seats).

    Raises pydantic's ValidationError for wrong arguments, EnvironmentLoadError when the tasks need a container.
    """
    env = vf.load_environment(_env_config(_plugin_id(module), args))
    _check_runtimes(env, environment_id)
    return V1Environment(env, environment_id=environment_id, version=version, chooses_split="split" not in args)


def _env_config(taskset_id: str, args: Mapping[str, JSON]) -> Any:
    around = dict(args.get("env") or {})
    taskset = {"id": taskset_id, **{key: value for key, value in args.items() if key != "env"}}
    cls = vf.env_config_type(taskset_id, around.get("id", ""))
    ours = {"harness": {"id": _plugin_id(harness)}, "runtime": {"type": "subprocess"}}
    seats = {name: deep_merge(ours, around.get(name) or {}) for name in _seats(cls)}
    for seat in seats.values():
        seat["retries"] = {"max_retries": 0}  # a rollout is played again by the worker
    return vf.resolve_env_config({**around, **seats, "taskset": taskset, "retries": {"max_retries": 0}})


def _seats(config_type: Any) -> list[str]:
    return [name for name, field in config_type.model_fields.items() if isinstance(field.default, AgentConfig)]


def _plugin_id(module: ModuleType) -> str:
    """verifiers finds plugins by plain module names; a dotted module gets one."""
    if module.__name__.startswith("verifiers.v1.tasksets."):
        return module.__name__.rsplit(".", 1)[-1]
    alias = f"distaff_plugin_{module.__name__.replace('.', '_').lower()}"
    sys.modules[alias] = module
    return alias


def _check_runtimes(env: Any, environment_id: str) -> None:
    local = [
        name for name in _seats(type(env.config)) if isinstance(getattr(env.config, name).runtime, SubprocessConfig)
    ]
    if type(env.taskset).task_type().NEEDS_CONTAINER and local:
        raise EnvironmentLoadError(
            f"environment {environment_id!r}: its tasks need a container, and seat {local[0]!r} runs as a subprocess. Set "
            f'[environment.args.env.{local[0]}.runtime] type = "docker"'
        )


class V1Environment:
    """A v1 environment behind the `Environment` protocol. Scoring is part of an episode there: `score` reads the traces."""

    api: Literal["classic", "v1"] = "v1"

    def __init__(self, env: Any, *, environment_id: str, version: str, chooses_split: bool) -> None:
        self.id = environment_id
        self.version = version
        self._env = env
        self._chooses_split = chooses_split
        self._task_type = _guarded_type(type(env.taskset).task_type())
        self._tasks: dict[Split, list[Any]] = {}
        self._single = len(_seats(type(env.config))) == 1
        self._ready: asyncio.Future[None]
        self._serving: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    def size(self, split: Split) -> int | None:
        return None if self._taskset(split).INFINITE else len(self._all(split))

    def row(self, split: Split, index: int) -> dict[str, JSON]:
        return _row(self._all(split)[index])

    def rows(self, split: Split, start: int) -> Iterator[dict[str, JSON]]:
        taskset = self._taskset(split)
        tasks = iter(taskset) if taskset.INFINITE else iter(self._all(split))
        return map(_row, itertools.islice(tasks, start, None))

    def _all(self, split: Split) -> list[Any]:
        if split not in self._tasks:
            self._tasks[split] = list(self._taskset(split))
        return self._tasks[split]

    def _taskset(self, split: Split) -> Any:
        """The taskset; with `split` set where its configuration has such a field and the arguments leave it open."""
        taskset = self._env.taskset
        if self._chooses_split and "split" in type(taskset.config).model_fields:
            try:
                config = type(taskset.config).model_validate({**taskset.config.model_dump(), "split": split})
            except ValidationError:  # it calls its splits something else
                return taskset
            return type(taskset)(config)
        return taskset

    async def play(self, task: Mapping[str, JSON], model_for: ModelFactory) -> Episode:
        seats = Seats(model_for, single=self._single)
        outcome = await attempt(self._episode(task, seats))
        episode = outcome.value
        traces = [] if episode is None else [trace for trace in episode.traces if trace.agent.trainable]
        if not traces:
            return Episode(plays=[_no_play(_episode_failure(episode, outcome.error))])
        broken = _broken(episode)
        return Episode(plays=[_play(trace, seats.of(trace), broken) for trace in traces], handle=(episode, traces))

    async def _episode(self, task: Mapping[str, JSON], seats: Seats) -> Any:
        await self._serve()
        data = self._task_type.data_type().model_validate(dict(task))
        (slot,) = self._env.slots(self._task_type(data, self._env.config.taskset.task), 1)
        context = vf.ModelContext(model=MODEL_NAME, client=SeatConfig.carrying(seats), sampling=vf.SamplingConfig())
        return await self._env.run_slot(slot, context)

    async def score(self, episodes: Sequence[Episode]) -> list[list[Score]]:
        return [[_score(episode.handle[0], trace) for trace in episode.handle[1]] for episode in episodes]

    async def _serve(self) -> None:
        """Bring up what all episodes share (interception, taskset-wide tools), once; again after it failed."""
        if self._serving is None or self._serving.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._stop.clear()
            self._serving = asyncio.create_task(self._serve_until_stopped(self._ready), name=f"serve {self.id}")
        await asyncio.shield(self._ready)

    async def _serve_until_stopped(self, ready: asyncio.Future[None]) -> None:
        outcome = await attempt(self._hold_open(ready))
        if outcome.error is not None and not ready.done():
            ready.set_exception(outcome.error)
        elif outcome.error is not None:
            log.error("environment.serving_failed environment=%s error=%r", self.id, outcome.error)

    async def _hold_open(self, ready: asyncio.Future[None]) -> None:
        async with self._env.serving():
            self._env._interception = SeatedInterception(self._env._interception)
            ready.set_result(None)
            await self._stop.wait()

    async def close(self) -> None:
        """Take the shared services down; on the loop of `play`."""
        self._stop.set()
        if self._serving is not None:
            await asyncio.wait({self._serving})


def _row(task: Any) -> dict[str, JSON]:
    """The task's data as JSON, without the fields that have their default value."""
    data = task.data
    fields = type(data).model_fields
    defaults = {name for name, f in fields.items() if getattr(data, name) == f.get_default(call_default_factory=True)}
    return dict(data.model_dump(mode="json", exclude=defaults))


def _guarded_type(task_type: Any) -> Any:
    """`task_type` with its own code kept from ending the process. A type and not the object, so that the copies an environment
    makes of its task are bound to their own data."""

    def hooks(task: Any, kind: str) -> list[Any]:
        return [_guarded(hook, "step" if kind == "stop" else "reward") for hook in task_type.hooks(task, kind)]

    own = {name: _guarded(getattr(task_type, name), name) for name in ("setup", "finalize")}
    names = {name: getattr(task_type, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(task_type.__name__, (task_type,), {**names, **own, "hooks": hooks})


def _guarded(function: Any, place: str) -> Any:
    return guarded(function, lambda *_, **__: place, exits_as=EnvironmentFailure)


def _play(trace: Any, client: SeatClient, broken: RolloutFailure | None) -> Play:
    timing = trace.timing
    timings = {
        "setup": timing.boot.duration + timing.setup.duration,
        "environment": timing.agent.harness.duration,
        "score": timing.scoring.duration,
    }
    return Play(
        seat=client.seat,
        messages=client.recall.openai(trace.messages) or _prompt(trace.task.data),
        tools=client.tools,
        turns=client.turns,
        stop_condition=(trace.stop_condition or "") if trace.ok else "error",
        truncated=bool(trace.is_truncated) or client.truncated,
        error=_trace_failure(trace, client) or broken,
        timings=finite_metrics(timings),
    )


def _prompt(data: Any) -> list[Any]:
    if isinstance(data.prompt, str):
        return [{"role": "user", "content": data.prompt}]
    return [openai_message(message) for message in data.prompt or []]


def _no_play(error: RolloutFailure) -> Play:
    return Play(seat="", messages=[], tools=[], turns=0, stop_condition="", truncated=False, error=error)


def _trace_failure(trace: Any, client: SeatClient) -> RolloutFailure | None:
    """Why the trace cannot be scored. A failure of the scoring itself is left to `_score`."""
    error = trace.last_error
    if _timed_out(trace):
        message = (
            f"{error.type}: {error.message}" if error is not None else f"the agent's own limit: {trace.stop_condition}"
        )
        return RolloutFailure(kind="timeout", boundary="deadline", message=clip(message))
    if trace.ok or trace.timing.scoring.start:
        return None
    if client.error is not None:
        return failure(client.error, "step")
    message = clip("unknown error" if error is None else f"{error.type}: {error.message}")
    return RolloutFailure(kind="environment_error", boundary=_stage(trace.timing), message=message)


def _timed_out(trace: Any) -> bool:
    """Whether a seat's own timeout ended it: a failed trace in 0.3, a scored one in 0.4, and how far a machine got in a time
    is no reward to train on."""
    error = trace.last_error
    failed = not trace.ok and error is not None and error.type == "HarnessError"
    return bool(getattr(trace, "is_timeout", False)) or (failed and error.message.startswith("agent timeout"))


def _stage(timing: Any) -> str:
    if timing.finalize.start:
        return "finalize"
    return "step" if timing.agent.start else "setup"


def _broken(episode: Any) -> RolloutFailure | None:
    """What the environment's own `run` raised; its `finalize` is judgement and left to `_score`."""
    return _episode_failure(episode, None) if episode.errors and not _judgement_failed(episode) else None


def _judgement_failed(episode: Any) -> bool:
    return any(".finalize()" in error.message for error in episode.errors)


def _episode_failure(episode: Any, error: BaseException | None) -> RolloutFailure:
    if error is not None:
        return failure(error, "setup")
    last = episode.errors[-1] if episode.errors else None
    message = (
        "no agent of the environment that is trained has played" if last is None else f"{last.type}: {last.message}"
    )
    return RolloutFailure(kind="environment_error", boundary="step", message=clip(message))


def _score(episode: Any, trace: Any) -> Score:
    problem = _scoring_problem(episode, trace)
    if problem is not None:
        return Score(reward=None, metrics={}, error=scoring_failure(problem))
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    return Score(reward=float(trace.reward), metrics=finite_metrics({**trace.metrics, **rewards}))


def _scoring_problem(episode: Any, trace: Any) -> str | None:
    if not trace.ok:
        error = trace.last_error
        return "the trace failed" if error is None else f"{error.type}: {error.message}"
    if episode.errors:
        return f"{episode.errors[-1].type}: {episode.errors[-1].message}"
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing:
        return f"no value for the rewards {missing}"
    return reward_problem(trace.reward)
