"""Whatever is written is read back as it was: groups, jobs, dead letters, the policy version, the configuration of a run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from distaff import dead
from distaff.config import RunConfig
from distaff.errors import AlignmentError, ConfigurationError, WireError
from distaff.keys import RunKeys, job_id
from distaff.policy import publish_policy_version, read_policy_version
from distaff.types import DeadLetter, RolloutItem, ScoredGroup
from distaff.wire import Compression, decode_group, encode_group
from distaff_producer.admit import Admission, check_same
from distaff_producer.rows import check_row
from distaff_producer.rq_jobs import queued_job
from distaff_worker.rq_schema import decode_job
from tests.codec_strategies import configs, groups, items, letters
from tests.group_support import as_read, assert_same_group, make_group

QUICK = settings(max_examples=60, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(
    max_examples=5000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NOWHERE = redis.Redis(host="127.0.0.1", port=1)
"""RQ wants a client to make a job; nothing is sent."""


def _same_after_the_wire(group: ScoredGroup, compression: Compression) -> None:
    entry = encode_group(group, compression=compression)
    assert_same_group(decode_group(as_read(entry)), group)
    assert_same_group(decode_group(entry), group)
    again = decode_group(encode_group(decode_group(entry), compression=compression))
    assert_same_group(again, group)


@QUICK
@given(group=groups(), compression=st.sampled_from(["none", "zstd"]))
@example(group=make_group(rollouts=0), compression="none")
@example(group=make_group(mode="sft", rollouts=3, failed=3), compression="zstd")
@example(group=make_group(rollouts=2, branches=64, tokens=3), compression="none")
def test_a_group_of_any_shape_is_the_same_after_the_wire(group: ScoredGroup, compression: Compression) -> None:
    """No rollouts, no samples, many branches, any text and number, read once and written again."""
    _same_after_the_wire(group, compression)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@MANY
@given(group=groups(), compression=st.sampled_from(["none", "zstd"]))
def test_thousands_of_groups_are_the_same_after_the_wire(group: ScoredGroup, compression: Compression) -> None:
    """As above."""
    _same_after_the_wire(group, compression)


@QUICK
@given(group=groups(), value=st.sampled_from([math.nan, math.inf, -math.inf]), place=st.integers(0, 5))
def test_a_number_that_is_not_finite_is_refused_where_the_group_is_written(
    group: ScoredGroup, value: float, place: int
) -> None:
    """In a metric, a reward, an advantage, a log-probability, the temperature: never on the stream."""
    damaged = _damaged(group, value, place)
    if damaged is None:
        return
    with pytest.raises(AlignmentError):
        encode_group(damaged)


def _damaged(group: ScoredGroup, value: float, place: int) -> ScoredGroup | None:
    arrays = group.samples
    if place == 0:
        return replace(group, temperature=value)
    if place in (1, 2) and group.rollouts:
        metrics = {**group.rollouts[-1].metrics, "m": value}
        changed = replace(group.rollouts[-1], **({"reward": value} if place == 1 else {"metrics": metrics}))
        return replace(group, rollouts=[*group.rollouts[:-1], changed])
    if place == 3 and len(arrays):
        return replace(group, samples=replace(arrays, advantages=np.full_like(arrays.advantages, value)))
    if place == 4 and arrays.logprobs is not None and arrays.loss_mask.any():
        return replace(group, samples=replace(arrays, logprobs=np.full_like(arrays.logprobs, value)))
    return None


def _job(item: RolloutItem) -> tuple[bytes, str]:
    job = queued_job(item, pool="p", group_timeout_s=1.0, client=NOWHERE)
    hash_fields = dict(zip(job.fields[::2], job.fields[1::2], strict=True))
    data = hash_fields["data"]
    assert isinstance(data, bytes)
    return data, job.id


@QUICK
@given(item=items())
def test_an_item_that_the_producer_admits_is_the_one_the_worker_plays(item: RolloutItem) -> None:
    """Through RQ's job and its serializer, whatever JSON the row holds."""
    check_row(item.task, place="row")
    data, name = _job(item)
    assert decode_job(data, job_id=name) == item


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@MANY
@given(item=items())
def test_thousands_of_items_are_those_the_worker_plays(item: RolloutItem) -> None:
    """As above."""
    check_row(item.task, place="row")
    data, name = _job(item)
    assert decode_job(data, job_id=name) == item


@pytest.mark.parametrize("depth", [1, 99, 100])
@pytest.mark.parametrize("kind", ["list", "object"])
def test_the_deepest_row_the_producer_takes_is_played_and_buried(depth: int, kind: str) -> None:
    """One limit on both sides: what is admitted can be decoded, and its letter written."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"k": value}
    item = RolloutItem(run="r", seq=0, key="k", epoch=0, split="train", task={"deep": value}, seed=0)
    check_row(item.task, place="row")
    data, name = _job(item)
    assert decode_job(data, job_id=name) == item
    assert json.loads(json.dumps(asdict(item)))["task"] == item.task


@QUICK
@given(letter=letters())
def test_a_dead_letter_is_read_as_it_was_written(letter: DeadLetter) -> None:
    """By JSON, and by what shows and retries letters."""
    content = json.loads(json.dumps(asdict(letter)))
    assert DeadLetter(**{**content, "item": RolloutItem(**content["item"])}) == letter
    text = json.dumps(asdict(letter)).encode()
    read = dead.Summary.of(dead.Letter(seq=letter.item.seq, text=text, content=content))
    for field in fields(dead.Summary):
        assert getattr(read, field.name) == (letter.item.seq if field.name == "seq" else getattr(letter, field.name))


@settings(QUICK, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(versions=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6))
@example(versions=[2**53, 2**53 + 1, 2**53])
@example(versions=[9, 10, 9])
def test_the_highest_policy_version_stands(client: redis.Redis, versions: list[int]) -> None:
    """Exactly, also beyond what Lua's numbers can tell apart (times in nanoseconds)."""
    client.delete(RunKeys("r").policy)
    for place, version in enumerate(versions):
        assert publish_policy_version(client, "r", version) == (version >= max(versions[:place], default=0))
        assert read_policy_version(client, "r") == max(versions[: place + 1])


def test_a_policy_version_is_any_kind_of_integer_and_nothing_else(client: redis.Redis) -> None:
    """A trainer's counter may be numpy's; what has no place on the wire is refused here, not in every group."""
    assert publish_policy_version(client, "r", np.int64(7))
    assert read_policy_version(client, "r") == 7
    wrong: list[Any] = [-1, 2**63, 1.5, "3", None]
    for version in wrong:
        with pytest.raises(ConfigurationError, match="policy version"):
            publish_policy_version(client, "r", version)


@settings(QUICK, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sections=configs())
def test_a_configuration_is_stored_as_it_is(client: redis.Redis, sections: dict[str, Any]) -> None:
    """What a worker reads equals what the producer was given, and the producer that comes again finds it is the same."""
    try:
        config = RunConfig(**sections)
    except ValidationError:
        return
    client.flushall()
    for _ in range(2):
        Admission(client, config).open(target=None)
    stored: Any = client.get(RunKeys(config.run.name).config)
    assert RunConfig.model_validate_json(stored) == config
    check_same(config, stored.decode())


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], {"x": [math.nan]}])
@pytest.mark.parametrize("place", [("sampling", "extra"), ("environment", "args")])
def test_a_setting_that_json_cannot_hold_is_refused_when_it_is_given(value: Any, place: tuple[str, str]) -> None:
    """TOML has nan and inf; stored they would come back as something else."""
    section, key = place
    with pytest.raises(ValidationError):
        RunConfig.model_validate({section: {key: {"x": value}}})


def test_an_item_with_a_value_beyond_its_type_is_refused_by_the_worker() -> None:
    """A job that was not made by the producer."""
    item = RolloutItem(run="r", seq=1, key="k", epoch=0, split="train", task={}, seed=0)
    wrong: list[dict[str, Any]] = [
        {"key": 5},
        {"split": "test"},
        {"seed": 2**64},
        {"seed": 1.0},
        {"priority": True},
        {"trace": {"a": 1}},
        {"trace": []},
        {"task": {"x": math.nan}},
        {"task": [1]},
    ]
    for change in wrong:
        data, name = _job(replace(item, **change))
        with pytest.raises(WireError):
            decode_job(data, job_id=name)
    assert name == job_id("r", 1)
