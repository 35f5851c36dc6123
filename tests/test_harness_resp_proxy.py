"""The Redis proxy of the harness: it counts right, breaks off exactly where it is told to, and changes nothing else."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import redis

from distaff import scripts
from distaff.clients import connect, connect_async
from distaff_worker.claim import Claimer
from distaff_worker.settle import Settler
from tests.harness.processes import start
from tests.harness.resp import Scanner
from tests.harness.resp_proxy import RespProxy
from tests.harness.servers import RedisServer
from tests.worker_support import POOL, emit_of, enqueue, make_item, open_run, wait_until

RUN = "run-1"
Protocol = Literal[2, 3]


@pytest.fixture
def proxy(redis_url: str) -> Iterator[RespProxy]:
    with RespProxy(redis_url) as started:
        yield started


def plain(proxy: RespProxy, protocol: Protocol = 3) -> redis.Redis:
    """A client whose connection is made: the next command is the first of its own."""
    client = redis.Redis.from_url(proxy.url, protocol=protocol, retry=None, socket_timeout=5)
    client.ping()
    return client


def raw(proxy: RespProxy) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect(proxy.url.removeprefix("unix://").partition("?")[0])
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        piece = connection.recv(1 << 16)
        if not piece:
            raise AssertionError(f"closed after {data!r}")
        data += piece
    return data


def everything(connection: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


@pytest.mark.parametrize("protocol", [2, 3])
def test_pipelined_and_multi_commands_are_counted_one_by_one(proxy: RespProxy, protocol: Protocol) -> None:
    """A transaction of two is four commands; a pipeline of three is three; our scripts are called by name."""
    with plain(proxy, protocol) as client:
        before = proxy.count
        with client.pipeline(transaction=True) as pipeline:
            pipeline.set("a", 1).incr("a")
            assert pipeline.execute() == [True, 2]
        with client.pipeline(transaction=False) as pipeline:
            pipeline.get("a").get("b").lrange("c", 0, -1)
            assert pipeline.execute() == [b"2", None, []]
        assert proxy.names[before:] == ["MULTI", "SET", "INCRBY", "EXEC", "GET", "GET", "LRANGE"]
        open_run(client, RUN)
        Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=5).claim(1)
        assert "EVALSHA claim" in proxy.words


def test_commands_of_all_connections_are_counted(proxy: RespProxy) -> None:
    """One count, in order of arrival."""
    with plain(proxy) as one, plain(proxy) as two:
        before = proxy.count
        for number in range(5):
            one.set("a", number)
            two.get("a")
        assert proxy.names[before:] == ["SET", "GET"] * 5
        assert proxy.connections == 2


def test_inline_commands_and_bytes_that_come_one_at_a_time_are_understood(proxy: RespProxy) -> None:
    """However the stream is cut, a command is a command; an empty line is none."""
    with raw(proxy) as connection:
        for byte in b"PING\r\n\r\n*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n*1\r\n$4\r\nPING\r\n":
            connection.sendall(bytes([byte]))
        assert read_until(connection, b"$-1\r\n+PONG\r\n") == b"+PONG\r\n$-1\r\n+PONG\r\n"
    assert proxy.names == ["PING", "GET", "PING"]


def test_big_values_go_through_unchanged(proxy: RespProxy) -> None:
    """Eight megabytes with line breaks in them, both ways, also in the middle of a pipeline."""
    value = (b"\r\n$5\r\n*3\r\n" + os.urandom(100)) * 70_000
    with plain(proxy) as client, client.pipeline(transaction=False) as pipeline:
        pipeline.set("big", value).get("small").get("big").strlen("big")
        assert pipeline.execute() == [True, None, value, len(value)]
        assert proxy.names[-4:] == ["SET", "GET", "GET", "STRLEN"]


@pytest.mark.parametrize("protocol", [2, 3])
def test_replies_of_every_shape_stay_with_their_commands(proxy: RespProxy, protocol: Protocol) -> None:
    """Nulls, nested lists, maps, sets, doubles, errors: the break behind them happens where it should."""
    with plain(proxy, protocol) as client:
        client.xadd("s", {"f": "v"})
        client.zadd("z", {"m": 1.5})
        client.sadd("set", "x")
        cut = proxy.cut_reply(proxy.count + 10)
        pipeline = client.pipeline(transaction=False)
        pipeline.get("none").blpop("none", timeout=0.01).xinfo_stream("s", full=True).zscore("z", "m")
        pipeline.smembers("set").hgetall("none").eval("return {1,{2,{}},false,{err='E x'}}", 0)
        pipeline.lpush("s", "wrong").execute_command("CONFIG", "GET", "maxmemory*").set("last", 1).set("never", 1)
        with pytest.raises(redis.exceptions.ConnectionError):
            pipeline.execute(raise_on_error=False)
        assert cut.wait(5)
        assert (client.get("last"), client.get("never")) == (b"1", None)


async def test_blocking_commands_are_answered_when_their_time_comes(proxy: RespProxy, client: redis.Redis) -> None:
    """BLMOVE and XREADGROUP BLOCK wait, others go on beside them, and a break behind one happens with its answer."""
    client.xgroup_create("s", "g", mkstream=True)
    got: list[Any] = []
    with plain(proxy) as one, plain(proxy) as two, plain(proxy) as three:
        waiting = [
            threading.Thread(target=lambda: got.append(one.blmove("from", "to", 5))),
            threading.Thread(target=lambda: got.append(two.xreadgroup("g", "c", {"s": ">"}, block=5000))),
        ]
        for thread in waiting:
            thread.start()
        wait_until(lambda: int(client.info("clients")["blocked_clients"]) == 2)
        assert three.ping()
        client.rpush("from", "x")
        waiting[0].join(5)
        client.xadd("s", {"f": "v"})
        waiting[1].join(5)
        assert got[0] == b"x"
        assert got[1][b"s"] if isinstance(got[1], dict) else got[1][0][0] == b"s"
        cut = proxy.cut_reply(proxy.count + 1)
        client.rpush("from", "y")
        with pytest.raises(redis.exceptions.ConnectionError):
            one.blmove("from", "to", 5)
        assert cut.wait(5)
    assert client.lrange("to", 0, -1) == [b"x", b"y"], "the answer was lost, the move was made"


@pytest.mark.parametrize("protocol", [2, 3])
def test_published_messages_are_nobodys_reply(proxy: RespProxy, client: redis.Redis, protocol: Protocol) -> None:
    """Confirmations belong to their command, messages to none: a break behind UNSUBSCRIBE happens behind it."""
    with plain(proxy, protocol) as subscriber, subscriber.pubsub(ignore_subscribe_messages=False) as channel:
        channel.subscribe("a", "b")
        channel.psubscribe("p*")
        kinds = [channel.get_message(timeout=5)["type"] for _ in range(3)]
        assert kinds == ["subscribe", "subscribe", "psubscribe"]
        for name in ("a", "b", "pattern"):
            assert client.publish(name, "m") == 1
        assert [channel.get_message(timeout=5)["data"] for _ in range(3)] == [b"m"] * 3
        cut = proxy.cut_reply(proxy.count + 1)
        channel.unsubscribe()
        with pytest.raises(redis.exceptions.ConnectionError):
            [channel.get_message(timeout=5) for _ in range(3)]
        assert cut.wait(5)


def test_a_message_that_comes_while_a_command_waits_is_not_its_reply(proxy: RespProxy, client: redis.Redis) -> None:
    """RESP3: a subscriber blocks, a message comes, then the answer, which is the one that is cut."""
    with raw(proxy) as connection:
        connection.sendall(b"HELLO 3\r\nSUBSCRIBE a\r\nECHO ready\r\n")
        read_until(connection, b"ready\r\n")
        cut = proxy.cut_reply(proxy.count + 1)
        connection.sendall(b"BLPOP list 5\r\n")
        wait_until(lambda: int(client.info("clients")["blocked_clients"]) == 1)
        assert client.publish("a", "m") == 1
        read_until(connection, b"$7\r\nmessage\r\n$1\r\na\r\n$1\r\nm\r\n")
        assert not cut.is_set()
        client.rpush("list", 1)
        assert everything(connection) == b""
        assert cut.wait(5)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_break_in_a_pipeline_is_exactly_there(
    redis_url: str, client: redis.Redis, when: Literal["before", "after"], protocol: Protocol
) -> None:
    """For each k of a pipeline of eight: what comes before is applied, what comes behind is not, and k says `when`."""

    def look(seen: list[Any]) -> None:
        seen.append(client.lrange("l", 0, -1))

    for k in range(1, 9):
        client.delete("l")
        with RespProxy(redis_url) as proxy, plain(proxy, protocol) as victim:
            seen: list[Any] = []
            fired = proxy.at(proxy.count + k, partial(look, seen), when=when)
            pipeline = victim.pipeline(transaction=False)
            for number in range(1, 9):
                pipeline.rpush("l", number)
            with pytest.raises(redis.exceptions.ConnectionError):
                pipeline.execute()
            assert fired.wait(5)
        done = [str(number).encode() for number in range(1, k + (when == "after"))]
        assert seen == [done], f"at the moment of the break, k={k}"
        assert client.lrange("l", 0, -1) == done, f"afterwards, k={k}"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_break_in_a_transaction_leaves_it_whole_or_undone(
    redis_url: str, client: redis.Redis, when: Literal["before", "after"]
) -> None:
    """Only a break behind EXEC finds it applied."""
    applied = []
    for k in range(1, 5):
        client.delete("a")
        with RespProxy(redis_url) as proxy, plain(proxy) as victim:
            fired = proxy.at(proxy.count + k, lambda: None, when=when)
            with pytest.raises(redis.exceptions.ConnectionError):
                victim.pipeline(transaction=True).set("a", 1).incr("a").execute()
            assert fired.wait(5)
        applied.append(client.get("a"))
    assert applied == [None, None, None, b"2" if when == "after" else None]


@pytest.mark.parametrize("when", ["before", "after"])
def test_replies_before_the_break_reach_the_client_and_later_ones_do_not(
    proxy: RespProxy, when: Literal["before", "after"]
) -> None:
    """What a client knows when it dies is what it was told before k."""
    with raw(proxy) as connection:
        proxy.at(3, lambda: None, when=when)
        connection.sendall(b"ECHO 1\r\nECHO 2\r\nECHO 3\r\nECHO 4\r\n")
        assert everything(connection) == b"$1\r\n1\r\n$1\r\n2\r\n"
    assert proxy.count == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_server_killed_at_a_command_has_applied_it_only_if_it_answered(
    tmp_path: Path, when: Literal["before", "after"]
) -> None:
    """The action runs at that very moment, and may start the server again."""
    with RedisServer(tmp_path, aof=True, config={"appendfsync": "always"}) as server:

        def die() -> None:
            server.kill()
            server.start()

        with RespProxy(server.url) as proxy, plain(proxy) as victim:
            victim.set("a", 1)
            fired = proxy.at(proxy.count + 1, die, when=when)
            with pytest.raises(redis.exceptions.ConnectionError):
                victim.set("a", 2)
            assert fired.wait(5)
            assert victim.get("a") == {"before": b"1", "after": b"2"}[when]


def test_a_client_process_killed_by_an_action_never_learns_the_reply(proxy: RespProxy, client: redis.Redis) -> None:
    """Its last command is applied, and what it would have done with the answer is not."""
    program = "import redis,sys; c=redis.Redis.from_url(sys.argv[1]); [c.rpush('l', c.incr('n')) for _ in range(100)]"
    with ExitStack() as children:
        hit: list[int] = []

        def kill() -> None:
            hit.append(child.pid)
            child.kill()

        # Greeting and pairs of INCR, RPUSH: whatever the greeting has, an odd and an even number are both kinds.
        proxy.at(41, kill, when="after")
        child = children.enter_context(start([sys.executable, "-c", program, proxy.url]))
        wait_until(lambda: hit)
        assert child.wait(5) == -signal.SIGKILL
    last = proxy.names[-1]
    assert (proxy.count, last in ("INCRBY", "RPUSH")) == (41, True)
    assert client.llen("l") == int(client.get("n") or 0) - (last == "INCRBY")


def test_a_settlement_whose_reply_is_cut_is_applied_once_when_it_is_sent_again(
    proxy: RespProxy, client: redis.Redis
) -> None:
    """P5, through the proxy: emit, no reply, emit again."""
    keys = open_run(client, RUN)
    enqueue(client, RUN, 1)
    client.script_load(scripts.load("emit"))
    [lease] = Claimer(client, pool=POOL, worker="w", worker_key="rq:worker:w", lease_s=5).claim(1)
    with plain(proxy) as through:
        cut = proxy.cut_reply(proxy.count + 1)
        outcome = emit_of(make_item(RUN, 0))
        settler = Settler(through, pool=POOL, worker="w", worker_key="rq:worker:w")
        assert settler.emit(lease, outcome.fields, outcome.counts) == "already"
    assert cut.is_set()
    assert proxy.words.count("EVALSHA emit") == 2
    assert client.xlen(keys.groups) == 1


def test_random_faults_are_the_same_for_the_same_seed(redis_url: str) -> None:
    """Number and kind of each."""

    def suffered() -> list[tuple[int, str]]:
        with RespProxy(redis_url) as proxy, raw(proxy) as connection:
            proxy.faults(7, rate=0.1, kinds=("delay",))
            for _ in range(60):
                connection.sendall(b"PING\r\n")
                read_until(connection, b"+PONG\r\n")
            return list(proxy.injected)

    first = suffered()
    assert first
    assert first == suffered()


def test_a_client_that_repeats_survives_random_faults(proxy: RespProxy, client: redis.Redis) -> None:
    """Every kind occurs, a command is done at least as often as it was answered, and healing ends it."""
    answered = 0
    proxy.faults(1, rate=0.2)
    with connect(proxy.url) as through:
        while answered < 100:
            try:
                through.incr("n")
                answered += 1
            except redis.exceptions.ConnectionError:
                continue
        assert {kind for _, kind in proxy.injected} == {"cut_before", "cut_reply", "delay"}
        assert int(client.get("n") or 0) >= 100
        proxy.heal()
        suffered = len(proxy.injected)
        for _ in range(50):
            try:
                through.incr("n")
            except redis.exceptions.ConnectionError:
                continue
        assert len(proxy.injected) == suffered


def test_a_black_hole_swallows_nothing_for_good(proxy: RespProxy, client: redis.Redis) -> None:
    """Nothing arrives while it lasts; what was sent arrives when it ends."""
    with raw(proxy) as connection:
        proxy.black_hole()
        connection.sendall(b"SET a 1\r\n")
        wait_until(lambda: proxy.count == 1)
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert client.get("a") is None
        proxy.heal()
        connection.settimeout(5)
        assert read_until(connection, b"+OK\r\n")
        assert client.get("a") == b"1"


def test_a_delay_holds_every_reply_and_keeps_their_order(proxy: RespProxy) -> None:
    """The command itself is applied at once."""
    with raw(proxy) as connection:
        proxy.delay(0.3)
        began = time.monotonic()
        connection.sendall(b"ECHO 1\r\nECHO 2\r\nECHO 3\r\n")
        assert read_until(connection, b"3\r\n") == b"$1\r\n1\r\n$1\r\n2\r\n$1\r\n3\r\n"
        assert time.monotonic() - began >= 0.3
        proxy.delay(30)
        connection.sendall(b"ECHO 4\r\n")
        wait_until(lambda: proxy.count == 4)
        proxy.heal()
        assert read_until(connection, b"4\r\n")


def test_a_dribble_takes_as_long_as_its_bytes(proxy: RespProxy, client: redis.Redis) -> None:
    """Two kilobytes at five kilobytes a second; whole in the end, and at once when healed."""
    client.set("a", "x" * 2000)
    with raw(proxy) as connection:
        proxy.dribble(5000)
        began = time.monotonic()
        connection.sendall(b"GET a\r\n")
        assert len(read_until(connection, b"x\r\n")) == 2009
        assert time.monotonic() - began >= 0.3
        proxy.dribble(10)
        connection.sendall(b"GET a\r\n")
        connection.recv(1)
        proxy.heal()
        read_until(connection, b"x\r\n")


def test_cut_all_ends_every_connection_and_new_ones_are_welcome(proxy: RespProxy) -> None:
    """Both clients see the end of theirs."""
    with raw(proxy) as one, raw(proxy) as two:
        wait_until(lambda: proxy.connections == 2)
        proxy.cut_all()
        assert one.recv(1) == two.recv(1) == b""
    with plain(proxy) as client:
        assert client.ping()
    wait_until(lambda: proxy.connections == 0)


def test_a_proxy_that_is_turned_to_another_server_keeps_its_address(redis_url: str, tmp_path: Path) -> None:
    """Old connections are cut; a client that connects again is there."""
    with RedisServer(tmp_path) as other, RespProxy(redis_url) as proxy, plain(proxy) as client:
        other.client().set("who", "other")
        assert client.get("who") is None
        proxy.retarget(other.url)
        wait_until(lambda: proxy.connections == 0)
        assert client.get("who") == b"other"


def test_a_server_that_is_away_is_a_closed_connection(tmp_path: Any) -> None:
    """As without the proxy."""
    with RespProxy(f"unix://{tmp_path}/nobody.sock?db=0") as proxy, connect(proxy.url) as client:
        with pytest.raises(redis.exceptions.ConnectionError):
            client.ping()
        assert proxy.count == 0


def test_what_an_action_raises_is_raised_at_the_end(redis_url: str) -> None:
    """A check inside an action counts."""

    def action() -> None:
        raise AssertionError("seen")

    def break_once() -> None:
        with RespProxy(redis_url) as proxy, raw(proxy) as connection:
            fired = proxy.at(1, action, when="before")
            connection.sendall(b"PING\r\n")
            assert everything(connection) == b""
            assert fired.wait(5)

    with pytest.raises(AssertionError, match="seen"):
        break_once()


def test_databases_and_ports_and_logins_are_those_of_the_server(redis_url: str, client: redis.Redis) -> None:
    """`db=3` reaches database 3; with `tcp` the proxy has a port."""
    with RespProxy(redis_url.replace("db=0", "db=3")) as proxy, connect(proxy.url) as third:
        third.set("here", 1)
    assert client.get("here") is None
    with RespProxy(redis_url, tcp=True) as proxy, connect(proxy.url) as through:
        assert proxy.url.startswith("redis://127.0.0.1:")
        assert through.ping()
    client.acl_setuser("me", enabled=True, passwords=["+p"], categories=["+@all"], keys=["*"])
    try:
        with (
            RespProxy(redis_url.replace("unix://", "unix://me:p@")) as proxy,
            connect(proxy.url) as through,
        ):
            assert through.acl_whoami() in (b"me", "me")
    finally:
        client.acl_deluser("me")


async def test_an_asyncio_client_goes_through_it(proxy: RespProxy) -> None:
    """The proxy is on its own thread, so a test's loop may wait for it."""
    client = connect_async(proxy.url)
    try:
        assert await client.ping()
    finally:
        await client.aclose()


def test_a_scanner_finds_the_same_messages_however_the_bytes_are_cut() -> None:
    """Every RESP3 type, nested, with an attribute, in pieces of each size."""
    messages = [
        b"+OK\r\n",
        b"-ERR x\r\n",
        b":1\r\n",
        b"$-1\r\n",
        b"$0\r\n\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*2\r\n*1\r\n$1\r\na\r\n%1\r\n+k\r\n*0\r\n",
        b"_\r\n",
        b"#t\r\n",
        b",1.5\r\n",
        b"(123456789012345678901\r\n",
        b"=7\r\ntxt:a\r\n\r\n",
        b"!5\r\nERR x\r\n",
        b"~1\r\n+a\r\n",
        b">2\r\n$7\r\nmessage\r\n$2\r\n\r\n\r\n",
        b"|1\r\n+ttl\r\n:3\r\n*1\r\n|1\r\n+k\r\n+v\r\n:5\r\n",
        b"%0\r\n",
    ]
    stream = b"".join(messages)
    ends = [sum(map(len, messages[: number + 1])) for number in range(len(messages))]
    for size in (1, 2, 3, 5, 7, 11, 64, len(stream)):
        scanner, buffer, taken, found = Scanner(), bytearray(), 0, []
        for at in range(0, len(stream), size):
            buffer += stream[at : at + size]
            new = scanner.ends(buffer)
            found += [taken + end for end in new]
            if new:
                del buffer[: new[-1]]
                scanner.consumed(new[-1])
                taken += new[-1]
        assert found == ends, f"in pieces of {size}"


def test_the_proxy_itself_sends_nothing(proxy: RespProxy, client: redis.Redis) -> None:
    """A client that only greets leaves nothing."""
    with plain(proxy):
        assert client.dbsize() == 0
