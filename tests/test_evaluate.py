"""Known rewards give known numbers, and the same groups the same bytes."""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from distaff.errors import ConfigurationError
from distaff.keys import RunKeys
from distaff.settings import EvaluateSection
from distaff.types import JSON, RolloutFailure, ScoredGroup
from distaff_consumer import evaluate_command
from distaff_consumer.errors import ArchiveError
from distaff_consumer.estimates import estimate, pass_at, standard_error
from distaff_consumer.evaluate import ItemResult, metrics
from distaff_consumer.evaluate_command import EvaluationReport
from distaff_consumer.report import render_metrics
from distaff_consumer.rows import gold_answer, question, task_name
from distaff_consumer.samples import samples_of, write_samples
from tests.group_support import append_groups, make_group

CONFIG = {
    "run": {"mode": "eval"},
    "engine": {"model": "configured"},
    "environment": {"args": {"level": 2}},
    "sampling": {"temperature": 0.0, "top_p": 1.0},
    "rollouts": {"group_size": 2, "max_turns": 0},
}


def group(seq: int, rewards: list[float | None], **changes: Any) -> ScoredGroup:
    """An evaluated item with these rewards; None is a failed rollout."""
    made = make_group(seq=seq, mode="eval", rollouts=len(rewards))
    failure = RolloutFailure(kind="engine_error", boundary="engine", message="503")
    rollouts = [
        replace(
            rollout,
            reward=reward,
            metrics={} if reward is None else {"correct": reward, "length": float(seq)},
            verdict="ok" if reward is not None else "engine_error",
            error=None if reward is not None else failure,
            prompt_tokens=10,
            completion_tokens=5,
        )
        for rollout, reward in zip(made.rollouts, rewards, strict=True)
    ]
    return replace(made, **{"rollouts": rollouts, "temperature": 0.0, **changes})


def letter(seq: int, kind: str = "timeout") -> dict[str, JSON]:
    item = {"run": "run", "seq": seq, "key": f"key-{seq}", "task": {}}
    return {"item": item, "kind": kind, "boundary": "deadline", "message": "600 s", "attempts": 3, "first": 1.0}


def numbers(groups: list[ScoredGroup], letters: list[dict[str, JSON]] | None = None) -> dict[str, JSON]:
    return metrics(
        map(ItemResult.of, groups), run="run", config=CONFIG, dead_letters=letters or [], opened=1_790_000_000.0
    )


def test_known_rewards_give_known_numbers() -> None:
    """Mean, standard error, deviation, pass@k and the failures, by hand."""
    result = numbers([group(0, [1.0, 0.0]), group(1, [1.0, 1.0]), group(2, [0.0, None])], [letter(3)])
    # item means 0.5, 1, 0: mean 0.5, sample deviation 0.5, standard error 0.5 / sqrt(3)
    assert result["reward"] == {
        "mean": 0.5,
        "standard_error": pytest.approx(0.5 / math.sqrt(3), rel=1e-15),
        "std": pytest.approx(math.sqrt(0.24), rel=1e-15),
        "min": 0.0,
        "max": 1.0,
        "items": 3,
        "values": 5,
    }
    assert result["pass"] == {"reward": 1.0, "at": {"1": 0.5, "2": 1.0}}
    assert result["reward_mean_failures_as_zero"] == 1.5 / 4
    assert result["items"] == {"settled": 4, "played": 3, "dead": 1}
    assert result["rollouts"] == {"per_item": 2, "played": 6, "scored": 5, "failed": 1}
    assert result["metrics"]["correct"] == result["reward"]
    assert result["metrics"]["length"]["mean"] == 1.0
    assert result["counts"]["verdicts"] == {"ok": 5, "engine_error": 1}
    assert result["counts"]["errors"] == {"engine_error at engine": 1}
    assert result["counts"]["finish_reasons"] == {"stop": 6}
    assert result["counts"]["stop_conditions"] == {"max_turns_reached": 6}
    assert result["dead_letters"]["kinds"] == {"timeout": 1}
    assert result["dead_letters"]["letters"] == [
        {"seq": 3, "key": "key-3", "kind": "timeout", "boundary": "deadline", "message": "600 s"}
    ]
    assert result["tokens"] == {"prompt": 60, "completion": 30}
    assert result["per_item"][2]["rewards"] == [0.0, None]
    assert result["model"] == "small-model"
    assert result["sampling"]["temperature"] == 0.0
    assert result["times"]["seconds"] == 2.25


def test_the_temperature_is_the_one_that_was_sampled_with() -> None:
    """An API with a fixed temperature has not taken the run's: the report does not claim it either."""
    items = [ItemResult.of(group(seq, [1.0, 0.0], temperature=1.0)) for seq in range(3)]
    result = metrics(items, run="run-1", config=CONFIG, dead_letters=[], opened=0.0)
    assert result["sampling"] == {"temperature": 1.0, "top_p": 1.0}
    assert "temperature 1.0" in render_metrics(result)


def test_the_standard_error_with_one_rollout_an_item_is_the_usual_one() -> None:
    """The sample deviation over the root of n, computed by another implementation."""
    rewards = [random.Random(4).random() for _ in range(50)]
    expected = statistics.stdev(rewards) / math.sqrt(50)
    assert standard_error(rewards) == pytest.approx(expected, rel=1e-12)
    assert estimate([value] for value in rewards).standard_error == pytest.approx(expected, rel=1e-12)


def test_the_standard_error_counts_items_and_not_rollouts() -> None:
    """Playing each item four times with the same outcome must not halve the error."""
    once = estimate([[0.0], [1.0], [1.0]])
    four = estimate([[0.0] * 4, [1.0] * 4, [1.0] * 4])
    assert once.standard_error == four.standard_error
    assert estimate([[1.0, 0.0]]).standard_error is None


def test_pass_at_k_is_the_share_of_draws_with_a_pass() -> None:
    """Against enumeration of all draws."""
    from itertools import combinations

    for played in range(1, 6):
        for passed in range(played + 1):
            outcomes = [True] * passed + [False] * (played - passed)
            for k in range(1, played + 1):
                draws = [any(draw) for draw in combinations(outcomes, k)]
                assert pass_at(k, played=played, passed=passed) == pytest.approx(sum(draws) / len(draws))


def test_the_order_of_arrival_changes_no_byte() -> None:
    """metrics.json is the same for the same groups, whichever came first."""
    values = random.Random(0)
    groups = [group(seq, [values.random(), values.random()]) for seq in range(40)]
    letters = [letter(40), letter(41, "lost")]
    first = json.dumps(numbers(groups, letters))
    values.shuffle(groups)
    assert json.dumps(numbers(groups, letters[::-1])) == first


def test_tasks_are_told_apart() -> None:
    """The breakdown goes by the row's task; each task has its own numbers."""
    rows = [{"task": "sums"}, {"info": {"env_id": "primes"}}, {"task": "sums"}]
    result = numbers([group(seq, [float(seq)], task=row) for seq, row in enumerate(rows)])
    assert list(result["tasks"]) == ["primes", "sums"]
    assert result["tasks"]["sums"]["reward"]["mean"] == 1.0
    assert result["tasks"]["primes"]["reward"]["mean"] == 1.0
    assert result["tasks"]["sums"]["items"] == 2


def test_an_evaluation_without_results_has_no_numbers() -> None:
    """No group at all gives nulls and a table with dashes, not an exception."""
    for letters in ([], [letter(0)]):
        result = json.loads(json.dumps(numbers([], letters), allow_nan=False))
        assert result["reward"]["mean"] is None
        assert result["model"] == "configured"
        assert "-" in render_metrics(result)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({}, "default"),
        ({"task": "a", "info": {"env_id": "b"}}, "a"),
        ({"task": {"nested": 1}, "info": {"env_id": "b"}}, "b"),
        ({"info": '{"env_id": ["outer", "inner"]}'}, "outer/inner"),
        ({"info": "no json", "dataset": "c"}, "c"),
        ({"info": None, "source": 3}, "default"),
    ],
)
def test_the_task_of_a_row(row: dict[str, JSON], name: str) -> None:
    """Task column, route of an EnvGroup, dataset columns, else the environment."""
    assert task_name(row, default="default") == name


def test_the_question_and_answer_of_a_row() -> None:
    """From the columns environments have them in, from the prompt, and from the conversation."""
    user = {"role": "user", "content": [{"type": "text", "text": "from parts"}]}
    assert question({"question": "q", "prompt": [user]}, []) == "q"
    assert question({"prompt": [{"role": "system", "content": "s"}, user]}, []) == "from parts"
    assert question({"prompt": "p"}, []) == "p"
    assert question({}, [{"role": "user", "content": "first"}, {"role": "user", "content": "second"}]) == "first"
    assert question({}, []) == ""
    assert gold_answer({"answer": "", "target": 7}) == 7
    assert gold_answer({}) is None


def test_samples_hold_what_is_needed_to_look_at_a_rollout(tmp_path: Path) -> None:
    """One line for each rollout with question, answers, score and conversation."""
    made = group(5, [1.0, None])
    first, second = samples_of(made)
    assert first["question"] == "What is 2 + 2?"
    assert first["answer"] == "4"
    assert first["parsed_answer"] == "4"
    assert first["reward"] == 1.0
    assert first["messages"] == made.rollouts[0].messages
    assert (second["seq"], second["rollout"], second["reward"]) == (5, 1, None)
    assert second["error"] == "engine: 503"
    path = tmp_path / "samples.jsonl"
    assert write_samples(path, [made, made]) == 4
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [first, second, first, second]
    assert [entry.name for entry in tmp_path.iterdir()] == ["samples.jsonl"]


def test_the_table_shows_scores_and_dead_letters() -> None:
    """What a user looks for first is in the printed table."""
    shown = render_metrics(numbers([group(0, [1.0, 0.0]), group(1, [1.0, 1.0])], [letter(2)]), width=160)
    for text in ("small-model", "arithmetic 0.1.0", "0.7500", "pass@2", "correct", "1 timeout", "max_turns_reached"):
        assert text in shown


KEYS = RunKeys("run")


def publish(client: redis.Redis, groups: list[ScoredGroup], letters: list[dict[str, JSON]]) -> None:
    """An evaluation as producer and workers leave it, still open."""
    client.set(KEYS.config, json.dumps(CONFIG))
    append_groups(client, groups, close=False)
    for one in letters:
        client.hset(KEYS.dead, str(one["item"]["seq"]), json.dumps(one))
        client.hincrby(KEYS.state, "admitted", 1)
        client.hincrby(KEYS.state, "dead", 1)


def close(client: redis.Redis) -> None:
    client.hset(KEYS.state, "status", "closed")


def evaluate(url: str, directory: Path, **options: Any) -> EvaluationReport:
    section = EvaluateSection(directory=str(directory))
    return evaluate_command.run("run", redis_url=url, evaluate=section, **options)


def test_an_evaluation_writes_numbers_and_samples(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """The files hold every group in the order of the items, whatever the order of arrival; the table names them."""
    groups = [group(seq, [1.0, 0.0] if seq % 2 else [1.0, None]) for seq in range(10)]
    publish(client, groups[::-1], [letter(10)])
    close(client)
    report = evaluate(redis_url, tmp_path)
    assert report.ended
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written == report.metrics == numbers(groups, [letter(10)]) | {"times": written["times"]}
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_bytes().splitlines()]
    assert [(sample["seq"], sample["rollout"]) for sample in samples] == [(n // 2, n % 2) for n in range(20)]
    assert client.xlen(KEYS.groups) == 0
    shown = report.summary()
    assert "0.7500" in shown
    assert str(tmp_path / "metrics.json") in shown


def test_an_interrupted_evaluation_goes_on_and_gives_the_same_bytes(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Stop and resume = one run: metrics.json and samples.jsonl are those of an evaluation that was not interrupted."""
    groups = [group(seq, [float(seq % 3), 1.0]) for seq in range(12)]
    publish(client, groups[7:], [])
    stopped = threading.Event()
    report = evaluate(
        redis_url, tmp_path / "a", stop=stopped, progress=lambda at: stopped.set() if at.done == 5 else None
    )
    assert not report.ended
    assert "run the same command again" in report.summary()
    assert not (tmp_path / "a" / "metrics.json").exists()
    publish(client, groups[:7], [])
    close(client)
    assert evaluate(redis_url, tmp_path / "a").ended
    again = {name: (tmp_path / "a" / name).read_bytes() for name in ("metrics.json", "samples.jsonl")}

    client.flushall()
    publish(client, groups, [])
    close(client)
    evaluate(redis_url, tmp_path / "b")
    assert {name: (tmp_path / "b" / name).read_bytes() for name in again} == again


def test_a_finished_evaluation_can_be_reported_again(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """The report is made from the files that are there; a lost samples.jsonl comes back."""
    publish(client, [group(seq, [1.0]) for seq in range(3)], [])
    close(client)
    evaluate(redis_url, tmp_path)
    before = (tmp_path / "samples.jsonl").read_bytes()
    (tmp_path / "samples.jsonl").unlink()
    evaluate(redis_url, tmp_path)
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def test_a_report_with_groups_missing_is_refused(redis_url: str, client: redis.Redis, tmp_path: Path) -> None:
    """Groups that were acknowledged into a directory that is gone cannot be reported on; nothing is made up."""
    publish(client, [group(seq, [1.0]) for seq in range(3)], [])
    close(client)
    evaluate(redis_url, tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(ArchiveError, match="holds 0 of the 3 groups"):
        evaluate(redis_url, tmp_path / "a")
    assert not (tmp_path / "a" / "metrics.json").exists()


def test_an_evaluation_in_the_directory_of_another_is_refused(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """The groups of two evaluations are never mixed."""
    publish(client, [group(0, [1.0])], [])
    close(client)
    evaluate(redis_url, tmp_path)
    with pytest.raises(ConfigurationError, match="run 'run', not of 'other'"):
        evaluate_command.run("other", redis_url=redis_url, evaluate=EvaluateSection(directory=str(tmp_path)))
