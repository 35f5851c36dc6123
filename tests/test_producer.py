"""The producer as a whole: every item once, whoever produces, whatever is killed, however slow the consumers are."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from distaff.config import RunConfig
from distaff.errors import ConfigurationError, EnvironmentFailure, RedisUnavailable
from distaff.runs import RunState, delete_run, read_state
from distaff_producer import command
from distaff_producer.admit import Admission, Admitted
from distaff_producer.produce import Producer
from distaff_producer.report import ProduceReport, Progress, Tally
from distaff_producer.rq_jobs import QueuedJob
from distaff_producer.window import read_standing
from tests.acl_support import acl_rules
from tests.harness.servers import RedisServer
from tests.producer_support import Numbers, Settler, config, item_on_queue, queued_seqs

ROOT = Path(__file__).parent.parent


def state_of(client: redis.Redis) -> RunState:
    state = read_state(client, "r")
    assert state is not None
    return state


def until(condition: Callable[[], bool], *, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def until_admitted(client: redis.Redis, count: int) -> None:
    """Wait until at least `count` items are admitted."""

    def enough() -> bool:
        state = read_state(client, "r")
        return state is not None and state.admitted >= count

    until(enough)


def in_flight(client: redis.Redis) -> int:
    """Items queued, running or unacknowledged, read in one step."""
    standing = read_standing(client, "r")
    assert standing is not None
    return standing.state.admitted - standing.state.settled + standing.unread


@contextmanager
def user(client: redis.Redis, name: str, *rules: str) -> Iterator[None]:
    """A Redis user with the password "pw"."""
    client.execute_command("ACL", "SETUSER", name, "reset", "on", ">pw", *rules)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        client.execute_command("ACL", "DELUSER", name)  # type: ignore[no-untyped-call]


@contextmanager
def producing(settings: RunConfig, url: str, environment: Numbers, **options: Any) -> Iterator[Future[ProduceReport]]:
    """A producer in a thread; stopped, if it still runs, at the end of the block."""
    stop = threading.Event()
    producer = Producer(settings, url, environment, stop=stop, **options)
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(producer.run)
        finally:
            stop.set()


def process(url: str, settings: RunConfig, rows: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.producer_support", url, settings.model_dump_json(), str(rows)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_every_item_is_admitted_once_and_the_run_is_closed(client: redis.Redis, redis_url: str) -> None:
    """Two epochs of ten rows are twenty jobs with each row twice, in the producer's order; then the run is closed."""
    seen: list[Progress] = []
    report = Producer(config(epochs=2, batch=3), redis_url, Numbers(rows=10)).run(seen.append)
    assert queued_seqs(client) == list(range(20))
    rows = [item_on_queue(client, f"r-{seq:09d}")["task"]["answer"] for seq in range(20)]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != list(range(10))
    assert (report.admitted, report.already_there, report.elsewhere, report.total) == (20, 0, 0, 20)
    assert (report.closed, report.was_closed, state_of(client).status) == (True, False, "closed")
    assert (seen[0].admitted, seen[0].target, seen[-1].admitted, seen[-1].phase) == (3, 20, 20, "closed")


def test_a_closed_run_says_so(client: redis.Redis, redis_url: str) -> None:
    """Producing again adds nothing and says how many items were there."""
    Producer(config(), redis_url, Numbers(rows=4)).run()
    report = Producer(config(), redis_url, Numbers(rows=4)).run()
    assert (report.was_closed, report.closed, report.admitted, report.already_there) == (True, True, 0, 4)
    assert report.summary() == "run r was closed already, with 4 items: nothing to do"
    assert queued_seqs(client) == [0, 1, 2, 3]


def test_a_stopped_producer_leaves_the_run_open_and_the_next_goes_on(client: redis.Redis, redis_url: str) -> None:
    """A stop ends between batches; the next call says what was there and admits the rest."""
    stop = threading.Event()
    settings = config(batch=4)
    report = Producer(settings, redis_url, Numbers(rows=30), stop=stop).run(lambda _: stop.set())
    assert (report.closed, report.admitted, state_of(client).status) == (False, 4, "open")
    assert report.summary() == (
        "run r has 4 items (4 admitted now, 0 were there already) and is still open: produce again to go on"
    )
    report = Producer(settings, redis_url, Numbers(rows=30)).run()
    assert (report.closed, report.admitted, report.already_there, report.total) == (True, 26, 4, 30)
    assert report.summary() == "run r has 30 items (26 admitted now, 4 were there already) and is closed"
    assert queued_seqs(client) == list(range(30))


def test_a_killed_producer_is_continued_exactly(client: redis.Redis, redis_url: str) -> None:
    """P6: kill -9 in the middle, twice over, and the last run to its end: every item once, in order."""
    settings = config(batch=1, epochs=20, window=10_000)
    for goal in (50, 700):
        killed = process(redis_url, settings, 100)
        until_admitted(client, goal)
        killed.kill()
        killed.communicate()
    assert state_of(client).admitted < 2000
    there = state_of(client).admitted
    last = process(redis_url, settings, 100)
    shown, _ = last.communicate(timeout=60)
    assert shown.splitlines()[-1] == f"report admitted={2000 - there} there={there} closed=True"
    assert queued_seqs(client) == list(range(2000))
    assert len(list(client.scan_iter("rq:job:*", count=1000))) == 2000


def test_sigterm_stops_a_producer_that_waits(client: redis.Redis, redis_url: str) -> None:
    """P17: with a full window and nobody consuming, the signal ends the process at once, with exit code 0."""
    waiting = process(redis_url, config(window=3), 10)
    until(lambda: client.llen("rq:queue:p") == 3)
    waiting.terminate()
    shown, _ = waiting.communicate(timeout=10)
    assert (waiting.returncode, shown.splitlines()[-1]) == (0, "report admitted=3 there=0 closed=False")


def test_two_producers_admit_every_item_once(client: redis.Redis, redis_url: str) -> None:
    """P6: two producers of one run share the work without meeting."""
    settings = config(batch=3, window=10_000)
    with (
        producing(settings, redis_url, Numbers(rows=500)) as one,
        producing(settings, redis_url, Numbers(rows=500)) as two,
    ):
        reports = [one.result(30), two.result(30)]
    assert queued_seqs(client) == list(range(500))
    assert sum(report.admitted for report in reports) == 500
    assert all(report.admitted + report.elsewhere + report.already_there == report.total == 500 for report in reports)


def test_a_lost_reply_admits_nothing_twice(
    client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: the connection breaks after Redis admitted a batch; the producer looks at the cursor and goes on behind it."""
    real = Admission.admit
    lost: list[int] = []

    def admit(self: Admission, jobs: list[QueuedJob], *, expected: int, target: int | None) -> Admitted:
        outcome = real(self, jobs, expected=expected, target=target)
        if expected in (4, 12) and expected not in lost:
            lost.append(expected)
            raise redis.exceptions.ConnectionError("cut")
        return outcome

    monkeypatch.setattr(Admission, "admit", admit)
    report = Producer(config(batch=4), redis_url, Numbers(rows=20)).run()
    assert lost == [4, 12]
    assert queued_seqs(client) == list(range(20))
    assert (report.admitted, report.elsewhere) == (20, 0)


def test_the_window_holds_exactly_and_the_run_drains(client: redis.Redis, redis_url: str) -> None:
    """P9: queued + running + unacknowledged is never above the window, reaches it, and every item comes through."""
    settler = Settler(client)
    with producing(config(window=5, batch=3), redis_url, Numbers(rows=40)) as report:
        until(lambda: len(queued_seqs(client)) == 5)
        time.sleep(0.05)
        assert state_of(client).admitted == 5
        for settled in range(1, 41):
            until(settler.emit)
            until_admitted(client, min(40, 5 + settled - 1))
            assert settler.acknowledge()
            until_admitted(client, min(40, 5 + settled))
            assert in_flight(client) <= 5
        assert report.result(10).admitted == 40


def test_dropped_groups_are_replaced_by_new_rows_within_the_budget(client: redis.Redis, redis_url: str) -> None:
    """With zero_variance "drop" the run closes when everything is settled, with one further item for each dropped group."""
    settings = config(limit=5, replacements=2, rollouts={"zero_variance": "drop"})
    settler = Settler(client)
    with producing(settings, redis_url, Numbers(rows=10)) as report:
        until(lambda: len(queued_seqs(client)) == 5)
        assert settler.emit()
        assert settler.drop()
        until(lambda: state_of(client).admitted == 6)
        assert state_of(client).status == "open"
        while settler.drop():
            until(lambda: state_of(client).admitted == min(7, 5 + state_of(client).dropped))
        result = report.result(10)
    assert (result.total, result.replaced, result.closed) == (7, 2, True)
    assert "2 in place of dropped groups" in result.summary()
    keys = {item_on_queue(client, f"r-{seq:09d}")["key"] for seq in range(7)}
    assert len(keys) == 7


def test_dropped_groups_are_not_replaced_when_they_are_kept(client: redis.Redis, redis_url: str) -> None:
    """Only RL runs that ask for it replace anything: in SFT the run closes when all is admitted."""
    settings = config(run={"mode": "sft"}, rollouts={"zero_variance": "drop"})
    assert Producer(settings, redis_url, Numbers(rows=3)).run().total == 3


def test_an_infinite_taskset_stops_at_its_limit(client: redis.Redis, redis_url: str) -> None:
    """Rows come in the set's order, and the limit closes the run; going on begins the walk where the cursor stands."""
    environment = Numbers(rows=None)
    stop = threading.Event()
    settings = config(limit=9, batch=4)
    Producer(settings, redis_url, environment, stop=stop).run(lambda _: stop.set())
    report = Producer(settings, redis_url, environment).run()
    assert environment.walks == [0, 4]
    assert [item_on_queue(client, f"r-{seq:09d}")["task"]["answer"] for seq in range(9)] == list(range(9))
    assert (report.total, report.closed) == (9, True)


def test_a_taskset_that_ends_early_closes_the_run(client: redis.Redis, redis_url: str) -> None:
    """A set that said it was infinite and is not: the run has what there was, and its end is told."""
    report = Producer(config(limit=9, batch=4), redis_url, Numbers(rows=None, ends_at=6)).run()
    assert (report.total, report.closed, state_of(client).target) == (6, True, 6)


def test_an_item_above_the_limit_is_refused_with_its_size(client: redis.Redis, redis_url: str) -> None:
    """The error names row, size and setting; what was admitted before stays, and the run stays open."""
    with pytest.raises(
        ConfigurationError, match=r"row \d of the train split .* of (\d+) bytes; .* is 500. Raise it to"
    ) as e:
        Producer(config(max_item_bytes=500), redis_url, Numbers(extra={"text": "x" * 600})).run()
    assert "reference" in str(e.value)
    assert state_of(client).status == "open"


def test_a_row_that_is_not_json_ends_the_producer(redis_url: str) -> None:
    """The error names environment, row and column."""
    with pytest.raises(
        ConfigurationError, match=r"row 0 of the train split of environment 'numbers': column 'day' holds"
    ):
        Producer(config(shuffle=False), redis_url, Numbers(extra={"day": datetime.date(2026, 1, 1)})).run()


def test_an_outage_is_waited_out(tmp_path: Path) -> None:
    """P7: Redis is killed and comes back from its append-only file: the same items, once each."""
    with RedisServer(tmp_path, aof=True, config={"appendfsync": "always"}) as server:
        client = server.client()
        with producing(config(window=4), server.url, Numbers(rows=12)) as report:
            until(lambda: client.llen("rq:queue:p") == 4)
            server.kill()
            server.start()
            settler = Settler(client)
            for _ in range(12):
                until(settler.emit)
                until(settler.acknowledge)
            assert report.result(20).total == 12
            assert state_of(client).admitted == 12


def test_a_redis_that_stays_away_ends_the_producer_after_the_budget(tmp_path: Path) -> None:
    """Nobody answers: one clear error, and no endless wait."""
    producer = Producer(config(), f"unix://{tmp_path}/none.sock", Numbers(), outage_budget_s=0.2)
    with pytest.raises(RedisUnavailable, match=r"has not answered for .* it goes on where it stands"):
        producer.run()


def test_a_full_redis_is_waited_for(client: redis.Redis, redis_url: str) -> None:
    """P8: out of memory is no error, however long it lasts; the producer goes on when there is room."""
    client.config_set("maxmemory", "1")
    with producing(config(), redis_url, Numbers(rows=3), outage_budget_s=0.0) as report:
        time.sleep(0.3)
        assert not report.done()
        client.config_set("maxmemory", "0")
        assert report.result(20).admitted == 3


def test_a_user_without_the_right_is_told_at_once(client: redis.Redis, redis_url: str) -> None:
    """P27: what an ACL refuses is not waited for."""
    producer = Producer(config(), redis_url.replace("unix://", "unix://weak:pw@"), Numbers())
    refused = pytest.raises(RedisUnavailable, match=r"refuses a command of the producer: .*permissions")
    with user(client, "weak", "~*", "+@all", "-evalsha", "-eval"), refused:
        producer.run()


def test_the_least_privileges_of_a_producer_suffice(client: redis.Redis, redis_url: str) -> None:
    """P27: the producer's user of `distaff acl` runs it to its end, and lets it put lost items back."""
    with user(client, "producer", *acl_rules("producer")):
        url = redis_url.replace("unix://", "unix://producer:pw@")
        assert Producer(config(), url, Numbers(rows=3)).run().closed
        client.delete("rq:queue:p", "rq:job:r-000000001")
        client.hset("rq:job:r-000000002", mapping={"status": "started", "distaff_exec": "gone"})
        assert Producer(config(), url, Numbers(rows=3)).run().restored == 3


def test_deleting_a_run_stops_its_producer(client: redis.Redis, redis_url: str) -> None:
    """A producer whose run is deleted says so instead of making a new one."""
    with producing(config(window=3), redis_url, Numbers(rows=10)) as report:
        until(lambda: len(queued_seqs(client)) == 3)
        assert delete_run(client, "r")
        with pytest.raises(ConfigurationError, match="run 'r' is gone from Redis"):
            report.result(10)
    assert client.keys() == []


def test_an_environment_that_fails_names_the_row(redis_url: str) -> None:
    """A dataset that raises in the middle ends the producer with the row in the message."""

    class Broken(Numbers):
        def row(self, split: Any, index: int) -> dict[str, Any]:
            return {"x": [1][index]}

    with pytest.raises(EnvironmentFailure, match="row 1 of the train split"):
        Producer(config(shuffle=False), redis_url, Broken()).run()


def test_the_tally_counts_every_advance_once() -> None:
    """Ours up to what was sent, another producer's beyond it; a cursor that went back takes from ours."""
    tally = Tally(10)
    tally.sending(4)
    tally.follow(14)
    tally.follow(20)
    tally.sending(4)
    tally.refused()
    tally.follow(23)
    tally.sending(4)
    tally.follow(29)
    assert (tally.already_there, tally.admitted, tally.elsewhere, tally.cursor) == (10, 8, 11, 29)
    tally.follow(27)
    assert (tally.admitted, tally.elsewhere) == (6, 11)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the environments that were loaded; each is `Numbers`."""
    ids: list[str] = []

    def load(section: Any) -> Numbers:
        ids.append(section.id)
        return Numbers(rows=3)

    monkeypatch.setitem(sys.modules, "distaff.environments.load", SimpleNamespace(load=load))
    return ids


def test_the_command_checks_loads_and_produces(client: redis.Redis, redis_url: str, loaded: list[str]) -> None:
    """One call does it all; a closed run is recognised before the environment is loaded."""
    assert command.run(config(), redis_url=redis_url).admitted == 3
    assert command.run(config(), redis_url=redis_url).was_closed
    assert loaded == ["numbers"]
    with pytest.raises(ConfigurationError, match=r"producer\.limit: 0 in the run, 2 now"):
        command.run(config(limit=2), redis_url=redis_url)


def test_a_shipped_environment_is_produced(client: redis.Redis, redis_url: str) -> None:
    """A real environment, loaded for real: every column of its rows is on the queue."""
    settings = RunConfig.model_validate(
        {"run": {"name": "r", "pool": "p"}, "environment": {"id": "guess_number"}, "producer": {"limit": 3}}
    )
    assert command.run(settings, redis_url=redis_url).total == 3
    item = item_on_queue(client, "r-000000002")
    assert {"prompt", "info"} <= item["task"].keys()
    assert item["key"].startswith("guess_number@")


def test_the_command_refuses_what_is_not_there_or_not_safe(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """No server, and a server that evicts, are one error each before anything is loaded."""
    with pytest.raises(RedisUnavailable, match="cannot be reached"):
        command.run(config(), redis_url=f"unix://{tmp_path}/none.sock")
    client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ConfigurationError, match="CONFIG SET maxmemory-policy noeviction"):
            command.run(config(), redis_url=redis_url)
    finally:
        client.config_set("maxmemory-policy", "noeviction")
