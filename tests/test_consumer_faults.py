"""Consumers that die, Redis that goes away: every group comes back, at most so often, and nothing is acknowledged unseen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from distaff import GroupConsumer
from distaff.consuming import ConsumerCore
from distaff.consuming_steps import Call, Delivery, Pause, RunScript, Step, Steps, Work
from distaff.errors import RedisUnavailable
from distaff.keys import RunKeys
from distaff.scripts import load
from distaff.wire import encode_group
from tests.group_support import append_groups, make_group
from tests.harness.servers import RedisServer

KEYS = RunKeys("run")
ROOT = Path(__file__).parent.parent
COUNT = 10


def _groups(start: int, stop: int) -> Iterator[Any]:
    return (make_group(seq=seq, rollouts=2, tokens=8) for seq in range(start, stop))


def _pending(client: redis.Redis) -> int:
    summary: Any = client.xpending(KEYS.groups, "trainer")
    return int(summary["pending"])


@contextmanager
def _process(url: str, name: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.consumer_process", url, name, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    if process.stdout is None:
        raise RuntimeError("no pipe")
    lines: list[str] = []
    for line in process.stdout:
        if line.strip() == last:
            return lines
        lines.append(line.strip())
    raise AssertionError(f"ended without {last!r}: {lines}")


def test_the_groups_of_a_killed_consumer_are_taken_over_and_the_run_ends(client: redis.Redis, redis_url: str) -> None:
    """kill -9 while it holds three of ten: another member waits for its time to run out, claims, and sees the end."""
    append_groups(client, _groups(0, COUNT))
    with _process(redis_url, "doomed", "--stop-after", "3") as doomed:
        assert _lines_until(doomed, "holding") == ["0 1", "1 1", "2 1"]
        os.kill(doomed.pid, signal.SIGKILL)
        doomed.wait(10)
    with GroupConsumer("run", redis_url, consumer="heir", batch=4, block_s=0.1, claim_idle_s=0.3) as heir:
        got = {}
        for delivery in heir:
            got[delivery.group.seq] = delivery.deliveries
            heir.ack(delivery)
    assert got == {seq: 2 if seq < 4 else 1 for seq in range(COUNT)}, "the fourth had been fetched with the batch"
    assert _pending(client) == client.xlen(KEYS.groups) == 0


def test_a_killed_consumer_started_again_under_its_name_waits_for_nobody(client: redis.Redis, redis_url: str) -> None:
    """Its own deliveries come first, at once, in order."""
    append_groups(client, _groups(0, COUNT))
    with _process(redis_url, "trainer-0", "--stop-after", "3") as doomed:
        _lines_until(doomed, "holding")
        os.kill(doomed.pid, signal.SIGKILL)
        doomed.wait(10)
    with _process(redis_url, "trainer-0", "--ack") as again:
        output, _ = again.communicate(timeout=20)
    assert output.split("\n")[:-1] == [f"{seq} {2 if seq < 4 else 1}" for seq in range(COUNT)]
    assert _pending(client) == client.xlen(KEYS.groups) == 0


def test_a_group_that_kills_every_consumer_is_parked_after_max_deliveries(client: redis.Redis, redis_url: str) -> None:
    """P22: at most n deliveries, then it lies in the parked stream and the rest goes on."""
    append_groups(client, _groups(0, 2))
    lives = 0
    while True:
        consumer = GroupConsumer("run", redis_url, consumer="trainer-0", batch=1, block_s=0.05, max_deliveries=3)
        first = next(consumer)
        if first.group.seq == 1:
            break
        lives += 1
        assert first.deliveries == lives
    assert lives == 3
    assert consumer.parked == 1
    assert consumer.ack(first) == 1
    assert list(consumer) == []
    parked: Any = client.xrange(KEYS.parked("trainer"))
    assert b"never acknowledged" in parked[0][1][b"reason"]
    assert client.xlen(KEYS.groups) == 0


class Killed(BaseException):
    """The process ends here."""


class Dying:
    """Drives a core against a real Redis and dies at its k-th command, before it is sent or after Redis has done it."""

    def __init__(
        self, client: redis.Redis, *, at: int, after: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.core = ConsumerCore("run", consumer="trainer-0", batch=3, block_s=0.02, max_deliveries=50, clock=clock)
        self._client, self._at, self._after, self._sent = client, at, after, 0

    def die_at_next(self) -> None:
        self._at = self._sent + 1

    def drive(self, steps: Steps[Any]) -> Any:
        try:
            step = next(steps)
            while True:
                step = steps.send(self._perform(step))
        except StopIteration as stop:
            return stop.value

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Work):
            return step.function()
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        self._sent += 1
        if self._sent == self._at and not self._after:
            raise Killed
        reply = self._send(step)
        if self._sent == self._at:
            raise Killed
        return reply

    def _send(self, step: Call | RunScript) -> Any:
        if isinstance(step, RunScript):
            return self._client.eval(load(step.name), len(step.keys), *step.keys, *step.args)
        try:
            return getattr(self._client, step.method)(*step.args, **step.options)
        except redis.exceptions.ResponseError as error:
            if str(error).startswith("BUSYGROUP"):
                return None
            raise


def _consume(worker: Dying, done: list[int]) -> bool:
    """Consume and acknowledge one by one; True at the end of the run, False when killed."""
    try:
        while True:
            delivery: Delivery | None = worker.drive(worker.core.next_delivery())
            if delivery is None:
                return True
            done.append(delivery.group.seq)
            worker.drive(worker.core.acknowledge([delivery]))
    except Killed:
        return False


def test_a_consumer_killed_at_every_command_loses_nothing(client: redis.Redis) -> None:
    """Before and after each k-th command: a second life gets everything the first had not acknowledged."""
    for after in (False, True):
        for at in range(1, 60):
            client.flushall()
            append_groups(client, _groups(0, 5))
            done: list[int] = []
            survived = _consume(Dying(client, at=at, after=after), done)
            rest: list[int] = []
            assert _consume(Dying(client, at=0, after=False), rest)
            assert sorted({*done, *rest}) == [0, 1, 2, 3, 4], f"command {at}, after={after}"
            assert len(done) + len(rest) <= 6, "more than the one in hand came back"
            assert _pending(client) == client.xlen(KEYS.groups) == client.exists(KEYS.parked("trainer")) == 0
            if survived:
                break
        else:
            pytest.fail("more commands than expected: raise the bound")


def test_what_the_server_gives_to_a_read_that_nobody_waits_for_is_found(client: redis.Redis) -> None:
    """It may deliver after the backlog was looked through; a second look, a little later, finds that."""
    now = 0.0
    worker = Dying(client, at=0, after=False, clock=lambda: now)

    def next_seq() -> int:
        delivery = worker.drive(worker.core.next_delivery())
        return int(delivery.group.seq)

    append_groups(client, _groups(0, 1), close=False)
    assert next_seq() == 0
    worker.die_at_next()
    with pytest.raises(Killed):
        next_seq()
    append_groups(client, _groups(1, 2), close=False)
    assert next_seq() == 1
    append_groups(client, _groups(2, 3), close=False)
    client.xreadgroup("trainer", "trainer-0", {KEYS.groups: ">"})
    append_groups(client, _groups(3, 4), close=False)
    now = 2.0
    assert [next_seq(), next_seq()] == [2, 3]


def test_a_consumer_outlives_a_restart_of_redis(tmp_path: Path) -> None:
    """P7: kill -9 of Redis while the consumer reads; what comes after the restart is read, everything once."""
    with RedisServer(tmp_path, aof=True, config={"appendfsync": "always"}) as server:
        append_groups(server.client(), _groups(0, 5), close=False)
        seqs: list[int] = []
        reading = threading.Event()

        def consume() -> None:
            with GroupConsumer("run", server.url, batch=2, block_s=0.2) as consumer:
                for delivery in consumer:
                    seqs.append(delivery.group.seq)
                    consumer.ack(delivery)
                    if len(seqs) == 5:
                        reading.set()

        thread = threading.Thread(target=consume)
        thread.start()
        assert reading.wait(10)
        server.kill()
        server.start()
        append_groups(server.client(), _groups(5, COUNT))
        thread.join(20)
        assert not thread.is_alive()
        assert seqs == list(range(COUNT))


def test_a_consumer_whose_group_was_flushed_begins_again(client: redis.Redis) -> None:
    """NOGROUP is not an end: the group is created again and the new run read."""
    with GroupConsumer("run", client, block_s=0.1) as consumer:
        append_groups(client, _groups(0, 2), close=False)
        held = [next(consumer), next(consumer)]
        client.flushall()
        append_groups(client, _groups(0, 3))
        client.hset(KEYS.state, "opened", "1790000001.0")
        assert [delivery.group.seq for delivery in consumer] == [0, 1, 2]
        assert consumer.ack(*held) == 0


def test_redis_away_for_longer_than_the_budget_is_one_clear_error(tmp_path: Path) -> None:
    """Named, with what to do; acknowledging says the same."""
    url = f"unix://{tmp_path}/nobody.sock"
    consumer = GroupConsumer("run", url, reconnect_s=0.1)
    for action in (lambda: next(consumer), consumer.join, consumer.ack):
        with pytest.raises(RedisUnavailable, match=r"more than 0\.1 s .*reconnect_s"):
            action()
    consumer.close()


def test_a_wrong_password_is_not_waited_for(client: redis.Redis, redis_url: str) -> None:
    """Refused credentials do not heal: the error comes at once and does not hold the password."""
    client.acl_setuser("somebody", enabled=True, passwords=["+right"], keys=["*"], categories=["+@all"])
    try:
        url = redis_url.replace("unix://", "unix://somebody:wrong-canary@")
        with pytest.raises(RedisUnavailable, match="refuses the credentials") as caught:
            next(GroupConsumer("run", url))
        assert "canary" not in str(caught.value)
    finally:
        client.acl_deluser("somebody")


def test_acknowledged_groups_are_freed_while_redis_is_full(client: redis.Redis) -> None:
    """P8: reading and acknowledging work under maxmemory, which is what makes room again."""
    append_groups(client, (make_group(seq=seq, tokens=512) for seq in range(40)))
    next(GroupConsumer("run", client, consumer="dead", batch=1))
    memory: Any = client.info("memory")
    assert int(client.memory_usage(KEYS.groups) or 0) > 400_000, "what is freed is to be much more than what is wanting"
    client.config_set("maxmemory", int(memory["used_memory"]) - 100_000)
    try:
        with pytest.raises(redis.exceptions.ResponseError, match="maxmemory"):
            client.xadd(KEYS.groups, {"x": "y"})
        with GroupConsumer("run", client, block_s=0.1, batch=1, max_deliveries=1, claim_idle_s=0.001) as consumer:
            for delivery in consumer:
                consumer.ack(delivery)
        assert consumer.parked == 1, "the group that could not be parked while Redis was full"
        assert client.xlen(KEYS.groups) == 0
        client.xadd(KEYS.groups, encode_group(make_group(seq=40)))
    finally:
        client.config_set("maxmemory", 0)
