"""The share of turns on the exact-prefix path: counted for each rollout and worker, and said, with the cause, when it falls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, cast

import pytest
import structlog
from structlog.testing import capture_logs

from distaff.config import RunConfig, SamplingSection
from distaff.environments.protocol import Episode, Play
from distaff.types import Tool
from distaff_worker.attempt import PREFIX_SHARE, Attempt, played_rollouts
from distaff_worker.chat_models import TokenChatModel
from distaff_worker.engines.protocol import Generation
from distaff_worker.job import GroupPlayer
from distaff_worker.metrics import Metrics
from distaff_worker.prefix_watch import FEWEST, PrefixWatch
from distaff_worker.rendering.template_backend import TemplateRenderer
from distaff_worker.sampling import Limits
from distaff_worker.warm import WarmRuns
from tests.group_support import make_group
from tests.matrix_support import ScriptedTokens
from tests.tokens_support import ADD, assistant, renderer, smollm2_folder, tokenizer, user

SESSION = "r0"


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def model(executor: Executor, *, answers: int = 4, chosen: Any = None) -> TokenChatModel:
    ids = [*tokenizer("smollm2").encode("yes"), 2]
    answer = Generation(token_ids=ids, logprobs=[-0.1] * len(ids), finish_reason="stop")
    return TokenChatModel(
        ScriptedTokens({SESSION: [answer] * answers}),
        chosen or renderer("smollm2"),
        sampling=SamplingSection(),
        rollout_seed=None,
        session=SESSION,
        limits=Limits(),
        executor=executor,
    )


async def test_a_continued_conversation_has_the_whole_share(executor: Executor) -> None:
    """The first turn has nothing to extend and does not count; one turn alone has no share."""
    made = model(executor)
    first = await made.complete([user("a")], [], {})
    assert made.prefix_share is None
    await made.complete([user("a"), first.message, user("b")], [], {})
    assert made.prefix_breaks == []
    assert made.bridged_turns == 1


async def test_a_changed_history_is_the_cause(executor: Executor) -> None:
    """Half of the later turns: the environment put other words into the model's mouth."""
    made = model(executor)
    first = await made.complete([user("a")], [], {})
    await made.complete([user("a"), assistant("no"), user("b")], [], {})
    await made.complete([user("a"), first.message, user("b")], [], {})
    assert (made.prefix_share, made.prefix_breaks) == (0.5, ["messages_changed"])


async def test_changed_tools_are_the_cause(executor: Executor) -> None:
    """The same words under another tool definition are another prompt."""
    chosen = renderer("qwen3_style")
    made = model(executor, chosen=chosen)
    first = await made.complete([user("a")], [ADD], {})
    other: Tool = {**ADD, "function": {**ADD["function"], "description": "Adds."}}
    await made.complete([user("a"), first.message, user("b")], [other], {})
    assert made.prefix_breaks == ["tools_changed"]


async def test_a_format_that_cannot_go_on_is_the_cause(executor: Executor) -> None:
    """A template without an end of turn: nobody knows where the answer stopped."""
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(smollm2_folder())
    plain.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    made = model(executor, chosen=TemplateRenderer(plain, name="plain", vocab_size=len(plain)))
    first = await made.complete([user("a")], [], {})
    await made.complete([user("a"), first.message, user("b")], [], {})
    assert made.prefix_breaks == ["format_not_continued"]


async def test_the_share_is_a_metric_of_the_rollout(executor: Executor) -> None:
    """Beside the rubric's own, under a name no rubric has; it stays when the tokens are let go of."""
    made = model(executor)
    await made.complete([user("a")], [], {})
    await made.complete([user("a"), assistant("no"), user("b")], [], {})
    made.forget_tokens()
    play = Play(seat="", messages=[], tools=[], turns=2, stop_condition="", truncated=False, error=None)
    attempt = Attempt(0, Episode(plays=[play]), {"": made}, 1.0)
    assert played_rollouts(attempt)[0].metrics == {PREFIX_SHARE: 0.0}


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    structlog.reset_defaults()
    with capture_logs() as caught:
        yield caught


def test_a_fall_is_said_once_with_the_cause_and_again_after_a_recovery(logs: list[Any]) -> None:
    """A worker warns of a run when too few of its later turns extend the one before, not with every group."""
    watch = PrefixWatch()
    for _ in range(FEWEST):
        watch.observe("run", bridged=1, breaks=[], least=0.9)
    assert logs == []
    for _ in range(5):
        watch.observe("run", bridged=1, breaks=["tools_changed", "messages_changed"], least=0.9)
    (fell,) = logs
    assert (fell["event"], fell["log_level"], fell["run"]) == ("prefix.fell", "warning", "run")
    assert fell["cause"] == "messages_changed"
    assert "environment" in fell["mend"]
    assert fell["share"] < fell["least"] == 0.9
    for _ in range(400):
        watch.observe("run", bridged=1, breaks=[], least=0.9)
    assert [entry["event"] for entry in logs] == ["prefix.fell", "prefix.recovered"]
    for _ in range(60):
        watch.observe("run", bridged=0, breaks=["format_not_continued"], least=0.9)
    assert [entry["event"] for entry in logs] == ["prefix.fell", "prefix.recovered", "prefix.fell"]


def test_a_few_turns_or_a_bound_of_zero_say_nothing(logs: list[Any]) -> None:
    """One broken turn of two is no trend; 0 turns the warning off. Runs are watched apart."""
    watch = PrefixWatch()
    watch.observe("few", bridged=1, breaks=["messages_changed"], least=0.9)
    for _ in range(100):
        watch.observe("off", bridged=0, breaks=["messages_changed"], least=0.0)
        watch.observe("good", bridged=1, breaks=[], least=0.9)
    assert logs == []


async def test_a_group_that_was_played_is_watched(logs: list[Any], executor: Executor) -> None:
    """The worker counts every rollout of its groups and warns by the run's own bound."""
    metrics = Metrics()
    player = GroupPlayer(lambda _: cast(WarmRuns, None), worker="w", metrics=metrics, read_policy=lambda _: 0)
    attempts = []
    for number in range(FEWEST):
        made = model(executor)
        await made.complete([user("a")], [], {})
        await made.complete([user("a"), assistant("no"), user("b")], [], {})
        attempts.append(Attempt(number, Episode(plays=[]), {"": made}, 1.0))
    config = RunConfig.model_validate({"rollouts": {"min_prefix_share": 0.5}})
    player._count(config, attempts, make_group(run="watched"))
    assert [(entry["event"], entry["run"], entry["least"]) for entry in logs] == [("prefix.fell", "watched", 0.5)]
    assert metrics.recent_prefix_share == 0.0
    await asyncio.to_thread(player._tokenizing.shutdown)
    await asyncio.to_thread(player._packing.shutdown)


def test_a_worker_says_its_share_and_counts_the_causes() -> None:
    """For `distaff status` and /metrics."""
    metrics = Metrics()
    assert metrics.recent_prefix_share is None
    metrics.count_turns(turns=5, bridged=3, breaks=["tools_changed"])
    assert metrics.recent_prefix_share == 0.75
    value = metrics.registry.get_sample_value("distaff_prefix_breaks_total", {"cause": "tools_changed"})
    assert value == 1.0
