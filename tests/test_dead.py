"""`distaff dead`: letters are shown, put back and forgotten, and no item is lost or doubled by it."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.exceptions import InvalidJobOperation
from rq.job import Job
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from distaff import GroupConsumer, dead
from distaff.cli.main import main
from distaff.config import RunConfig
from distaff.keys import RunKeys, job_id
from distaff.runs import read_state
from distaff.types import DeadLetter, RolloutItem
from distaff.wire import encode_group
from distaff_consumer import archive_command
from distaff_producer import rq_jobs
from distaff_worker import rq_schema
from distaff_worker.claim import Claimer
from distaff_worker.leases import Counts, Lease
from distaff_worker.rq_schema import JOB_PREFIX, JSONQueue, decode_job
from distaff_worker.settle import Settler
from tests.archive_process import PlainArchive
from tests.group_support import make_group
from tests.worker_support import POOL, check_oracle, enqueue, make_item, open_run

RUN = "run"
Capture = pytest.CaptureFixture[str]
WORKER: dict[str, Any] = {"pool": POOL, "worker": "w", "worker_key": "rq:worker:w"}


def opened(client: redis.Redis, *, status: str = "closed") -> RunKeys:
    """The run with a configuration."""
    keys = open_run(client, RUN)
    client.set(keys.config, RunConfig.model_validate({"run": {"name": RUN, "pool": POOL}}).model_dump_json())
    client.hset(keys.state, "status", status)
    return keys


def claim(client: redis.Redis, count: int = 100) -> list[Lease]:
    return Claimer(client, **WORKER, lease_s=30).claim(count)


def bury(client: redis.Redis, lease: Lease, *, kind: str = "timeout", boundary: str = "reward", **content: Any) -> None:
    """Settle a lease as a worker does when the item is given up."""
    values: dict[str, Any] = {"message": f"item {lease.place[1]} took too long", "attempts": 3, "first": 100.0}
    values |= {"item": make_item(RUN, lease.place[1]), "kind": kind, "boundary": boundary, "last": 200.0, "worker": "w"}
    letter = DeadLetter(**{**values, **content})
    answer = Settler(client, **WORKER).bury(lease, json.dumps(asdict(letter)), text="t", dropped=kind == "dropped")
    assert answer == "buried"


def emit(client: redis.Redis, lease: Lease) -> None:
    counts = Counts(rollouts=1, samples=1, tokens=1, trained_tokens=1, reward_sum=0.0, reward_count=1)
    fields = encode_group(make_group(run=RUN, seq=lease.place[1], rollouts=2, tokens=8))
    assert Settler(client, **WORKER).emit(lease, fields, counts) == "emitted"


@pytest.fixture
def letters(client: redis.Redis) -> RunKeys:
    """Six items: 0 and 1 time-outs, 2 a scoring error, 3 dropped, 4 emitted, 5 on the queue."""
    keys = opened(client)
    enqueue(client, RUN, 5)
    leases = claim(client)
    bury(client, leases[0])
    bury(client, leases[1], boundary="rollout")
    bury(client, leases[2], kind="scoring_error", message="no\nnumber " + "x" * 300)
    bury(client, leases[3], kind="dropped", boundary="group")
    emit(client, leases[4])
    enqueue(client, RUN, 1)
    return keys


def distaff(*argv: str, url: str) -> int:
    return main(["dead", *argv, "--redis-url", url])


def queued(client: redis.Redis) -> list[str]:
    names: Any = client.lrange(f"rq:queue:{POOL}", 0, -1)
    return [name.decode() for name in names]


def test_letters_are_listed_with_their_counts(letters: RunKeys, redis_url: str, capsys: Capture) -> None:
    """A line each, the message on one line, and what kinds there are."""
    assert distaff("list", RUN, url=redis_url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "run run: 4 dead letters: timeout 2, scoring_error 1, dropped 1"
    assert len(lines) == 6
    assert [line.split()[0] for line in lines[1:5]] == ["0", "1", "2", "3"]
    assert "no number xxx" in lines[3]
    assert lines[3].endswith("…")


def test_letters_are_chosen_by_kind_boundary_and_number(letters: RunKeys, redis_url: str, capsys: Capture) -> None:
    """Filters narrow each other; --json is one object without the items."""
    for argv, seqs in (
        (["--kind", "timeout"], [0, 1]),
        (["--kind", "timeout", "--kind", "dropped"], [0, 1, 3]),
        (["--kind", "timeout", "--boundary", "rollout"], [1]),
        (["1-2"], [1, 2]),
        (["--boundary", "nowhere"], []),
    ):
        capsys.readouterr()
        assert distaff("list", RUN, *argv, "--json", url=redis_url) == 0
        shown = json.loads(capsys.readouterr().out)
        assert [letter["seq"] for letter in shown["letters"]] == seqs
        assert sum(shown["by_kind"].values()) == len(seqs)
        assert (shown["run"], shown["dead"], shown["forgotten"]) == (RUN, 4, 0)
        assert not any("item" in letter for letter in shown["letters"])


def test_a_letter_is_shown_whole_and_redacted(client: redis.Redis, redis_url: str, capsys: Capture) -> None:
    """Its item too, and nothing that looks like a secret, whether by its shape or by the name it stands under."""
    opened(client)
    enqueue(client, RUN, 1)
    task = {"text": "Bearer abcdefghijkl", "api_key": "plain-looking", "n": 3, "deep": [{"password": 12345}]}
    [lease] = claim(client)
    bury(client, lease, item=RolloutItem(run=RUN, seq=0, key="k0", epoch=0, split="train", task=task, seed=0))
    assert distaff("show", RUN, "0", url=redis_url) == 0
    letter = json.loads(capsys.readouterr().out)["letter"]
    assert letter["item"]["task"] == {"text": "Bearer ***", "api_key": "***", "n": 3, "deep": [{"password": "***"}]}
    assert (letter["kind"], letter["attempts"], letter["item"]["key"]) == ("timeout", 3, "k0")


def test_a_letter_that_cannot_be_read_is_shown_all_the_same(
    letters: RunKeys, client: redis.Redis, redis_url: str, capsys: Capture
) -> None:
    """Of another version, or damaged: no traceback, and it can be put back or dropped like any other."""
    for seq, text in (
        ("0", b"\xff{"),
        ("1", b"[1]"),
        ("2", b"[" * 100_000),
        ("3", b'{"first": "x", "attempts": null}'),
    ):
        client.hset(letters.dead, seq, text)
    assert distaff("list", RUN, url=redis_url) == 0
    assert "unreadable 4" in capsys.readouterr().out
    assert distaff("show", RUN, "0-3", url=redis_url) == 0
    assert distaff("retry", RUN, "0-2", url=redis_url) == 0
    assert distaff("drop", RUN, "3", url=redis_url) == 0
    assert len(claim(client)) == 4


def test_retried_letters_are_played_again_and_settled_once(
    letters: RunKeys, client: redis.Redis, redis_url: str, capsys: Capture
) -> None:
    """The letter is gone with the command, the item has all its attempts again, and the counters agree at the end."""
    client.hset(f"{JOB_PREFIX}{job_id(RUN, 0)}", mapping={"distaff_attempts": 2, "distaff_lost": 1})
    assert distaff("retry", RUN, "0-2", url=redis_url) == 0
    assert "3 back on the queue of pool default" in capsys.readouterr().out
    assert queued(client) == [job_id(RUN, seq) for seq in (5, 0, 1, 2)]
    assert client.hkeys(letters.dead) == [b"3"]
    state = read_state(client, RUN)
    assert state is not None
    assert (state.dead, state.settled, state.ended) == (1, 2, False)
    assert FailedJobRegistry(queue=JSONQueue(POOL, connection=client)).get_job_ids() == [job_id(RUN, 3)]
    leases = claim(client)
    assert {(lease.attempts, lease.lost) for lease in leases} == {(0, 0)}
    emit(client, leases[0])
    emit(client, leases[1])
    bury(client, leases[2])
    bury(client, leases[3], kind="scoring_error")
    check_oracle(client, RUN)


def test_a_retry_said_twice_puts_an_item_back_once(
    letters: RunKeys, client: redis.Redis, redis_url: str, capsys: Capture
) -> None:
    """Also while it is being played, and after the reply to the first was lost."""
    for words in ("1 back on the queue", "0 back on the queue of pool default, 1 on their way already"):
        assert distaff("retry", RUN, "1", url=redis_url) == 0
        assert words in capsys.readouterr().out
    leases = claim(client)
    assert [lease.place[1] for lease in leases] == [5, 1]
    assert distaff("retry", RUN, "1", url=redis_url) == 0
    assert "0 back on the queue" in capsys.readouterr().out
    assert queued(client) == []
    for lease in leases:
        emit(client, lease)
    check_oracle(client, RUN)


def test_all_leaves_out_what_was_dropped_on_purpose(
    letters: RunKeys, client: redis.Redis, redis_url: str, capsys: Capture
) -> None:
    """Other items took the place of dropped groups; they are retried when they are named."""
    assert distaff("retry", RUN, "--all", url=redis_url) == 0
    assert "3 back on the queue of pool default; 1 of kind dropped left out" in capsys.readouterr().out
    assert distaff("retry", RUN, "--kind", "dropped", url=redis_url) == 0
    assert client.hmget(letters.state, "dead", "dropped") == [b"0", b"0"]
    assert len(queued(client)) == 5


def test_the_job_of_a_letter_is_made_anew_when_it_is_gone(
    letters: RunKeys, client: redis.Redis, redis_url: str
) -> None:
    """Failed jobs expire after a week. RQ and the worker read the new one like the producer's."""
    name = job_id(RUN, 0)
    client.delete(f"{JOB_PREFIX}{name}")
    assert distaff("retry", RUN, "--kind", "timeout", url=redis_url) == 0
    made: Any = client.hgetall(f"{JOB_PREFIX}{name}")
    assert decode_job(made[b"data"], job_id=name) == make_item(RUN, 0)
    job = Job.fetch(name, connection=client, serializer=JSONSerializer)
    assert (job.is_queued, job.origin, job.func_name) == (True, POOL, rq_jobs.FUNCTION)
    theirs = rq_jobs.queued_job(make_item(RUN, 0), pool=POOL, group_timeout_s=1800.0, client=client)
    pairs = dict(zip(map(str, theirs.fields[::2]), theirs.fields[1::2], strict=True))
    same = ["origin", "description", "timeout", "result_ttl", "failure_ttl", "retries_left"]
    assert {field: made[field.encode()].decode() for field in same} == {field: str(pairs[field]) for field in same}
    assert dead.JOB_FUNCTION == rq_jobs.FUNCTION == rq_schema.JOB_FUNCTION
    leases = claim(client)
    assert [lease.place[1] for lease in leases] == [5, 0, 1]
    assert leases[1].payload == made[b"data"]


def test_a_letter_without_its_item_is_said_to_be_gone(client: redis.Redis, redis_url: str, capsys: Capture) -> None:
    """What was rejected on the queue is played as it is while it is there; it is not made up when it is not."""
    keys = opened(client)
    enqueue(client, RUN, 2, data=b"none of ours")
    for lease in claim(client):
        bury(client, lease, kind="rejected", boundary="queue")
    client.delete(f"{JOB_PREFIX}{job_id(RUN, 1)}")
    assert distaff("retry", RUN, "--all", url=redis_url) == 1
    shown = capsys.readouterr()
    assert "1 back on the queue" in shown.out
    assert "1 cannot be played again" in shown.err
    assert client.hkeys(keys.dead) == [b"1"]
    [lease] = claim(client)
    assert lease.payload == b"none of ours"


def test_a_full_redis_takes_no_letter_back_by_halves(
    letters: RunKeys, client: redis.Redis, redis_url: str, capsys: Capture
) -> None:
    """P8: refused whole, with the mend; nothing changed."""
    client.delete(f"{JOB_PREFIX}{job_id(RUN, 0)}")

    def everything() -> dict[Any, Any]:
        return {key: client.dump(key) for key in client.scan_iter() if key != b"rq:queues"}

    before = everything()
    client.config_set("maxmemory", "1")
    try:
        assert distaff("retry", RUN, "0-1", url=redis_url) == 2
    finally:
        client.config_set("maxmemory", "0")
    assert everything() == before
    assert "is full: raise its maxmemory" in capsys.readouterr().err


def test_a_requeue_by_rq_and_a_retry_of_ours_put_an_item_back_once(
    letters: RunKeys, client: redis.Redis, redis_url: str
) -> None:
    """In either order."""
    failed = FailedJobRegistry(queue=JSONQueue(POOL, connection=client))
    failed.requeue(job_id(RUN, 0))
    assert distaff("retry", RUN, "0-1", url=redis_url) == 0
    with pytest.raises(InvalidJobOperation):
        failed.requeue(job_id(RUN, 1))
    assert sorted(queued(client)) == [job_id(RUN, seq) for seq in (0, 1, 5)]
    leases = claim(client)
    assert sorted(lease.place[1] for lease in leases) == [0, 1, 5]
    for lease in leases:
        emit(client, lease)
    check_oracle(client, RUN)


def read_all(url: str) -> list[int]:
    with GroupConsumer(RUN, url, consumer="c", block_s=0.05) as consumer:
        seqs = []
        for delivery in consumer:
            seqs.append(delivery.group.seq)
            consumer.ack(delivery)
        return seqs


def test_consumers_that_saw_the_end_get_what_is_retried_when_they_are_started_again(
    client: redis.Redis, redis_url: str, tmp_path: Path, capsys: Capture
) -> None:
    """Trainer and archiver come to the end, a letter is retried and emitted, both are started again: the new group, once."""
    opened(client)
    enqueue(client, RUN, 3)
    one, two, three = claim(client)
    emit(client, one)
    bury(client, two)
    emit(client, three)
    client.xgroup_create(RunKeys(RUN).groups, "trainer", "0")
    client.xgroup_create(RunKeys(RUN).groups, "archive", "0")

    def archived() -> int:
        return archive_command.run(RUN, redis_url=redis_url, archive=PlainArchive(tmp_path)).archived

    assert read_all(redis_url) == [0, 2]
    assert archived() == 2
    assert distaff("retry", RUN, "1", url=redis_url) == 0
    assert "start consumers that had come to the end of the run again" in capsys.readouterr().out
    consumer = GroupConsumer(RUN, redis_url, consumer="c", block_s=0.05)
    assert consumer._drive(consumer._core._run_is_over()) is False
    consumer.close()
    [lease] = claim(client)
    emit(client, lease)
    assert read_all(redis_url) == [1]
    assert archived() == 3
    assert client.xlen(RunKeys(RUN).groups) == 0


def test_dropped_letters_are_written_out_first_and_stay_settled(
    letters: RunKeys, client: redis.Redis, redis_url: str, tmp_path: Path, capsys: Capture
) -> None:
    """A private JSONL file of the letters as they were; the counters stay; not even `rq requeue` plays them again."""
    before = {int(seq): json.loads(text) for seq, text in client.hgetall(letters.dead).items()}
    file = tmp_path / "letters.jsonl"
    assert distaff("drop", RUN, "--kind", "timeout", "--to", str(file), url=redis_url) == 0
    assert "2 dead letters dropped" in capsys.readouterr().out
    assert [json.loads(line) for line in file.read_text().splitlines()] == [before[0], before[1]]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert sorted(client.hkeys(letters.dead)) == [b"2", b"3"]
    assert client.hget(letters.state, "dead") == b"4"
    assert distaff("list", RUN, url=redis_url) == 0
    assert "2 dead letters: scoring_error 1, dropped 1; 2 were dropped" in capsys.readouterr().out
    FailedJobRegistry(queue=JSONQueue(POOL, connection=client)).requeue(job_id(RUN, 0))
    assert [lease.place[1] for lease in claim(client)] == [5]


def test_nothing_is_dropped_when_the_file_cannot_be_written(
    letters: RunKeys, client: redis.Redis, redis_url: str, tmp_path: Path, capsys: Capture
) -> None:
    """An existing file is not overwritten either."""
    (tmp_path / "there").write_text("mine")
    for name in ("there", "nowhere/x", "."):
        assert distaff("drop", RUN, "--all", "--to", str(tmp_path / name), url=redis_url) == 2
        assert "nothing was dropped" in capsys.readouterr().err
    assert client.hlen(letters.dead) == 4
    assert (tmp_path / "there").read_text() == "mine"


def test_a_letter_that_changed_meanwhile_is_not_dropped(letters: RunKeys, client: redis.Redis) -> None:
    """Retried and given up again while it was being written out: the new letter stays."""
    [read] = dead.read(client, RUN, [0, 1])
    client.hset(letters.dead, "0", "another")
    assert dead.forget(client, RUN, read) == 1
    assert dead.forget(client, RUN, read) == 0
    assert sorted(client.hkeys(letters.dead)) == [b"0", b"2", b"3"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the following arguments are required"),
        (["bury", RUN], "invalid choice: 'bury'"),
        (["list"], "the following arguments are required: RUN"),
        (["list", "a/b"], "'a/b' is no run name"),
        (["list", "other"], "there is no run 'other' at unix://"),
        (["list", RUN, "--kind", "timeuot"], "--kind 'timeuot': there is no such kind; did you mean timeout?"),
        (["list", RUN, "--kind", "?"], "known are environment_error, "),
        (["list", RUN, "--to", "x"], "--to belongs to drop"),
        (["show", RUN], "give the numbers of the letters"),
        (["show", RUN, "4"], "run 'run' has no dead letter 4; `distaff dead list run` shows"),
        (["show", RUN, "0", "--all"], "nothing else to choose by"),
        (["show", RUN, "0", "--json"], "--json belongs to list"),
        (["show", RUN, "x"], "SEQ 'x': give the number of an item"),
        (["show", RUN, "7-3"], "SEQ 7-3: give a range from low to high"),
        (["retry", RUN, "0-99999999"], "of at most 1000000 items"),
        (["retry", RUN], "say which letters, in one way"),
        (["retry", RUN, "0", "--all"], "say which letters, in one way"),
        (["retry", RUN, "--all", "--kind", "timeout"], "say which letters, in one way"),
        (["retry", RUN, "0", "4"], "has no dead letter 4"),
        (["retry", RUN, "77"], "has no dead letter 77"),
        (["drop", RUN], "say which letters, in one way"),
        (["drop", RUN, "5"], "has no dead letter 5"),
        (["drop", RUN, "0", "nowhere.toml"], "nowhere.toml: there is no such file"),
    ],
)
def test_what_is_asked_wrongly_is_exit_code_2(
    argv: list[str], said: str, letters: RunKeys, client: redis.Redis, redis_url: str, capsys: Capture
) -> None:
    """One message that says what is wrong and what to do; nothing changes."""
    assert distaff(*argv, url=redis_url) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert client.hlen(letters.dead) == 4
    assert len(queued(client)) == 1


def test_a_run_without_a_configuration_is_not_retried(
    letters: RunKeys, client: redis.Redis, redis_url: str, capsys: Capture
) -> None:
    """Half deleted: nobody could play it."""
    client.delete(letters.config)
    assert distaff("retry", RUN, "--all", url=redis_url) == 2
    assert "has no configuration in Redis" in capsys.readouterr().err


def test_settings_come_from_a_file_too(letters: RunKeys, redis_url: str, tmp_path: Path, capsys: Capture) -> None:
    """As in every other command; it stands among the numbers."""
    file = tmp_path / "run.toml"
    file.write_text(f'redis_url = "{redis_url}"\n')
    assert main(["dead", "show", RUN, "0", str(file), "1"]) == 0
    assert [json.loads(part)["seq"] for part in _objects(capsys.readouterr().out)] == [0, 1]


def _objects(text: str) -> Iterable[str]:
    parts = text.split("\n}\n")
    return (f"{part}\n}}" for part in parts if part.strip())


def test_the_script_itself_may_be_sent_again(letters: RunKeys, client: redis.Redis) -> None:
    """A lost reply: the second answer is `underway`, and nothing was counted twice."""
    retrier = dead.Retrier(client, RUN)
    [[letter]] = dead.read(client, RUN, [0])
    assert [retrier.retry(letter), retrier.retry(letter)] == ["queued", "underway"]
    assert client.hget(letters.state, "dead") == b"3"
    assert queued(client).count(job_id(RUN, 0)) == 1
