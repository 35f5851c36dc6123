"""Items in, scored groups out, through everything but a real model: every number is compared with what the engine said."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis

from distaff.clients import connect
from distaff.errors import FatalRun
from distaff.keys import RunKeys
from distaff.policy import publish_policy_version
from distaff.types import ScoredGroup, TrainingSample
from tests.farm_support import (
    groups_of,
    make_worker,
    play_to_the_end,
    produce,
    run_config,
    says,
    settled,
    tokenizer,
    work_until_it_ends,
    working_on,
)
from tests.scripted_engine import Answer, Ask, Reply, ScriptedEngine, status
from tests.worker_support import check_oracle, until


def is_probe(ask: Ask) -> bool:
    """The one-token request a worker sends before it plays anything."""
    return ask.sampling.get("max_tokens") == 1


def numbered(rng: random.Random) -> Callable[[Ask], Any]:
    """Answers "number <n>" where n counts requests, each with a log-probability of its own, in shuffled order."""

    async def script(ask: Ask) -> Reply:
        await asyncio.sleep(rng.random() * 0.2)
        return says(f"number {ask.number}", logprob=-(ask.number + 1) / 1024)

    return script


def trained_text(sample: TrainingSample) -> str:
    return str(tokenizer().decode(sample.token_ids[sample.loss_mask]))


async def test_no_reward_mask_or_logprob_lands_on_another_rollout(redis_url: str, client: redis.Redis) -> None:
    """Groups of 16 whose turns finish in shuffled order, each with a marker: everything of a rollout carries its own."""
    async with ScriptedEngine(script=numbered(random.Random(3))) as engine:
        config = run_config(engine.url, rollouts={"group_size": 16}, environment={"args": {"rows": 3, "turns": 3}})
        groups = await play_to_the_end(redis_url, config)
    assert [len(group.rollouts) for group in groups] == [16, 16, 16]
    orders = []
    for group in groups:
        for sample in group.samples:
            markers = [int(n) for n in re.findall(r"number (\d+)", trained_text(sample))]
            assert len(markers) == 3
            assert sample.logprobs is not None
            assert group.rollouts[sample.rollout].reward == markers[-1]
            spoken = [m["content"] for m in group.rollouts[sample.rollout].messages if m["role"] == "assistant"]
            assert spoken == [f"number {marker}" for marker in markers]
            expected = [-(n + 1) / 1024 for n in markers for _ in says(f"number {n}").token_ids]
            assert sample.logprobs[sample.loss_mask].tolist() == expected
            orders.append(markers[-1])
        rewards = np.array([rollout.reward for rollout in group.rollouts], np.float64)
        assert np.allclose([sample.advantage for sample in group.samples], rewards - rewards.mean(), atol=1e-4)
    assert orders != sorted(orders)
    check_oracle(client, "run-1")


async def test_ids_are_what_the_engine_saw_and_sampled(redis_url: str) -> None:
    """RL: a sample is the last prompt sent plus the last completion, token for token, and decodes to the conversation."""
    async with ScriptedEngine(script=numbered(random.Random(5))) as engine:
        config = run_config(engine.url, environment={"args": {"rows": 2, "turns": 3}})
        groups = await play_to_the_end(redis_url, config)
        seen = {
            tuple(record.ask.prompt_ids + record.reply.token_ids)
            for record in engine.records
            if isinstance(record.reply, Answer)
        }
    for group in groups:
        assert len(group.samples) == 4
        assert [rollout.metrics["distaff/prefix_share"] for rollout in group.rollouts] == [1.0] * 4
        for sample in group.samples:
            assert tuple(sample.token_ids.tolist()) in seen
            rendered = tokenizer().apply_chat_template(group.rollouts[sample.rollout].messages, return_dict=False)
            assert sample.token_ids.tolist() == rendered[: len(sample.token_ids)]
            assert not sample.loss_mask[: len(sample.token_ids) // 4].any()


async def test_a_rollout_whose_token_budget_is_used_up_is_truncated_and_trained(redis_url: str) -> None:
    """A clean verdict: the turns so far are scored and kept, the engine is not asked for more."""
    size = len(says("number 1").token_ids)
    limits = {"group_size": 2, "max_total_completion_tokens": 2 * size}
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        config = run_config(engine.url, rollouts=limits, environment={"args": {"rows": 1, "turns": 3}})
        (group,) = await play_to_the_end(redis_url, config)
        asked = [record.ask.sampling["max_tokens"] for record in engine.records if not is_probe(record.ask)]
    assert [(rollout.verdict, rollout.completion_tokens, rollout.turns) for rollout in group.rollouts] == [
        ("truncated", 2 * size, 2),
        ("truncated", 2 * size, 2),
    ]
    assert sorted(asked) == [size, size, 2 * size, 2 * size]
    assert [int(sample.loss_mask.sum()) for sample in group.samples] == [2 * size] * 2


async def test_sft_trains_every_assistant_turn(redis_url: str) -> None:
    """SFT: text from a chat API, tokenized here; no log-probabilities, no advantages, the answers under the mask."""
    async with ScriptedEngine(script=numbered(random.Random(7))) as engine:
        config = run_config(engine.url, run={"name": "sft-1", "mode": "sft"}, engine={"kind": "openai"})
        groups = await play_to_the_end(redis_url, config)
    assert len(groups) == 8
    for group in groups:
        assert group.samples.logprobs is None
        assert not group.samples.advantages.any()
        for sample in group.samples:
            spoken = [m["content"] for m in group.rollouts[sample.rollout].messages if m["role"] == "assistant"]
            assert trained_text(sample) == "".join(f"{text}<|im_end|>" for text in spoken)


async def test_evaluation_keeps_conversations_and_no_tokens(redis_url: str) -> None:
    """Mode eval needs no tokenizer and gives rewards, answers and messages."""
    async with ScriptedEngine(script=lambda ask: says("number 4")) as engine:
        mode = {"name": "eval-1", "mode": "eval"}
        config = run_config(
            engine.url, run=mode, engine={"kind": "openai"}, tokenizer={"name": ""}, rollouts={"group_size": 1}
        )
        groups = await play_to_the_end(redis_url, config)
    assert {rollout.reward for group in groups for rollout in group.rollouts} == {4.0}
    assert [group.task["extra"] for group in groups] == [{"kept": n} for n in range(8)]
    assert all(len(group.samples) == 0 and group.rollouts[0].messages for group in groups)


async def test_versions_are_stamped_at_dispatch_and_at_completion(redis_url: str, client: redis.Redis) -> None:
    """A version published while a group is in flight is its end, not its start."""
    go = asyncio.Event()
    waiting: list[int] = []

    async def script(ask: Ask) -> Reply:
        if not is_probe(ask):
            waiting.append(ask.number)
            await go.wait()
        return says("number 1")

    async with ScriptedEngine(script=script) as engine:
        config = run_config(engine.url, environment={"args": {"rows": 1, "turns": 1}})
        publish_policy_version(client, "run-1", 7)
        async with working_on(redis_url, config):
            await until(lambda: len(waiting) == 4)
            publish_policy_version(client, "run-1", 9)
            go.set()
            await until(lambda: settled(client, "run-1"))
    [group] = groups_of(client, "run-1")
    assert (group.policy.start, group.policy.end) == (7, 9)
    entries: Any = client.xrange(RunKeys("run-1").groups)
    assert entries[0][1][b"policy"] == b"7:9"


async def test_a_rollout_that_fails_is_left_out_and_the_others_keep_their_places(redis_url: str) -> None:
    """P12: One broken answer in a group: a recorded failure without samples, and no shift of anybody's reward."""
    refused: list[int] = []

    async def script(ask: Ask) -> Reply:
        if not is_probe(ask) and not refused:
            refused.append(ask.number)
            return status(400, "bad request")
        await asyncio.sleep(0.05)
        return says(f"number {ask.number}", logprob=-(ask.number + 1) / 1024)

    async with ScriptedEngine(script=script) as engine:
        config = run_config(engine.url, environment={"args": {"rows": 1, "turns": 1}})
        [group] = await play_to_the_end(redis_url, config)
    failed = [rollout for rollout in group.rollouts if rollout.error]
    assert [rollout.verdict for rollout in failed] == ["engine_error"]
    assert len(group.samples) == 3
    for sample in group.samples:
        assert f"number {group.rollouts[sample.rollout].reward:.0f}<" in trained_text(sample)


@pytest.mark.parametrize(("fault", "where"), [("raise", "reward"), ("raise", "step")])
async def test_environment_code_that_raises_is_a_dead_letter_that_names_the_place(
    redis_url: str, client: redis.Redis, fault: str, where: str
) -> None:
    """P13, P14: after the attempts, a dead letter with the boundary; the other rows go on."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        args = {"rows": 4, "turns": 2, "fault": fault, "where": where}
        config = run_config(engine.url, environment={"args": args}, rollouts={"max_attempts": 2, "rollout_retries": 0})
        groups = await play_to_the_end(redis_url, config)
    assert [group.seq for group in groups] == [1, 2]
    letters = {int(seq): json.loads(text) for seq, text in client.hgetall(RunKeys("run-1").dead).items()}
    assert sorted(letters) == [0, 3]
    for seq, letter in letters.items():
        assert letter["kind"] == ("scoring_error" if where == "reward" else "environment_error")
        assert where in letter["boundary"] or letter["boundary"]
        assert f"row {seq} is cursed" in letter["message"]
        assert letter["attempts"] == 2
        assert letter["item"]["task"]["extra"] == {"kept": seq}
    check_oracle(client, "run-1")


async def test_a_reward_that_blocks_costs_its_deadline_and_nobody_elses(redis_url: str, client: redis.Redis) -> None:
    """P15: `time.sleep` in a reward function ends as a timeout while the other rows are scored."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        args = {"rows": 3, "turns": 1, "fault": "block"}
        limits = {"max_attempts": 1, "score_timeout_s": 0.7, "group_size": 2}
        groups = await play_to_the_end(redis_url, run_config(engine.url, environment={"args": args}, rollouts=limits))
    assert [group.seq for group in groups] == [1, 2]
    letter = json.loads(client.hget(RunKeys("run-1").dead, "0") or b"")
    assert (letter["kind"], letter["boundary"]) == ("timeout", "reward")
    check_oracle(client, "run-1")


async def test_groups_without_variance_can_be_dropped_and_are_replaced(redis_url: str, client: redis.Redis) -> None:
    """`zero_variance = drop`: the group is a dead letter of kind dropped, counted, and another item takes its place."""
    answers = iter(range(10_000))

    async def script(ask: Ask) -> Reply:
        text = str(tokenizer().decode(ask.prompt_ids))
        return says("number 1" if "row 0" in text or "row 2" in text else f"number {next(answers)}")

    async with ScriptedEngine(script=script) as engine:
        config = run_config(
            engine.url,
            environment={"args": {"rows": 8, "turns": 1}},
            rollouts={"zero_variance": "drop"},
            producer={"shuffle": False, "limit": 4},
        )
        admitting = asyncio.create_task(produce(redis_url, config))
        with connect(redis_url) as reader:
            await until(lambda: reader.exists(RunKeys("run-1").state))
            service, _ = make_worker(redis_url)
            working = asyncio.create_task(service.run())
            report = await asyncio.wait_for(admitting, 60)
            await until(lambda: settled(reader, "run-1"))
            service._stop("test")
            await working
    assert report.replaced == 2
    assert [group.seq for group in groups_of(client, "run-1")] == [1, 3, 4, 5]
    assert client.hget(RunKeys("run-1").state, "dropped") == b"2"
    check_oracle(client, "run-1")


async def test_a_group_over_the_size_limit_is_refused_whole(redis_url: str, client: redis.Redis) -> None:
    """P21: `too_large` dead letters, nothing half-written."""
    async with ScriptedEngine(script=lambda ask: says("number 1 " * 40)) as engine:
        config = run_config(engine.url, environment={"args": {"rows": 2}}, wire={"max_group_bytes": 500})
        assert await play_to_the_end(redis_url, config) == []
    kinds = {json.loads(text)["kind"] for text in client.hvals(RunKeys("run-1").dead)}
    assert kinds == {"too_large"}
    check_oracle(client, "run-1")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": {"kind": "openai"}}, "needs the sampled token"),
        ({"engine": {"model": "other"}}, "scripted"),
        ({"engine": {"base_urls": ["http://127.0.0.1:9"]}}, "engine.base_urls"),
        ({"engine": {"api_key_var": "DISTAFF_TEST_NO_SUCH_KEY"}}, "DISTAFF_TEST_NO_SUCH_KEY"),
        ({"tokenizer": {"name": "/nonexistent/tokenizer"}}, "tokenizer.name"),
    ],
)
async def test_a_run_this_worker_cannot_play_ends_it_with_the_mend(
    redis_url: str, client: redis.Redis, changes: dict[str, Any], words: str
) -> None:
    """A wrong setting found at run time: the worker ends, its items are back on the queue, the message says what to do."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        config = run_config(engine.url, environment={"args": {"rows": 2}}, **changes)
        with pytest.raises(FatalRun, match=words):
            await work_until_it_ends(redis_url, config)
    assert client.llen("rq:queue:default") == 2
    assert client.zcard("rq:wip:default") == 0


async def test_a_tokenizer_that_does_not_fit_the_model_is_refused(redis_url: str) -> None:
    """The engine encodes a probe text otherwise than the run's tokenizer: found before any item is played."""

    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        engine.documents["/tokenize"] = {"tokens": [1, 2, 3]}
        with pytest.raises(FatalRun, match=r"does not fit the model.*tokenizer\.name"):
            await work_until_it_ends(redis_url, run_config(engine.url))


async def test_an_engine_that_returns_no_ids_is_refused_in_rl(redis_url: str) -> None:
    """The probe finds it before any item is played."""

    def without_ids(body: dict[str, Any]) -> dict[str, Any]:
        for choice in body["choices"]:
            choice.pop("token_ids")
        return body

    async with ScriptedEngine(script=lambda ask: Answer(mangle=without_ids)) as engine:
        with pytest.raises(FatalRun, match="token"):
            await work_until_it_ends(redis_url, run_config(engine.url))


async def test_same_seed_and_same_answers_give_the_same_bytes(redis_url: str, client: redis.Redis) -> None:
    """P29: two plays of one run differ in times and names only."""

    def stable(group: ScoredGroup) -> dict[str, Any]:
        arrays = group.samples
        rewards = [rollout.reward for rollout in group.rollouts]
        return {
            "ids": arrays.token_ids.tolist(),
            "mask": arrays.loss_mask.tolist(),
            "logprobs": arrays.logprobs.tolist() if arrays.logprobs is not None else None,
            "advantages": arrays.advantages.tolist(),
            "rewards": rewards,
            "messages": [rollout.messages for rollout in group.rollouts],
            "task": group.task,
            "key": group.key,
        }

    async def script(ask: Ask) -> Reply:
        return says(f"number {ask.sampling.get('seed', 0) % 97}", logprob=-(ask.sampling.get("seed", 0) % 89) / 128)

    plays = []
    for name in ("one", "two"):
        async with ScriptedEngine(script=script) as engine:
            config = run_config(engine.url, name=name, sampling={"seed": 11}, environment={"args": {"rows": 3}})
            plays.append([stable(group) for group in await play_to_the_end(redis_url, config)])
    assert plays[0] == plays[1]
    assert len({str(play["rewards"]) for play in plays[0]}) > 1
