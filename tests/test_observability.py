"""P30: whoever watches a worker, or should and does not, never holds up its work."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry, Counter

from distaff.clients import connect
from distaff_worker.health import MAX_CONNECTIONS, HealthServer
from tests.engines_support import free_port
from tests.farm_support import produce, run_config, says, settled
from tests.harness.oracle import check
from tests.harness.processes import fds, start
from tests.scripted_engine import ScriptedEngine
from tests.worker_support import until, wait_until

ROOT = Path(__file__).parent.parent
SCRAPERS = 300
ANSWER_S = 10.0


@contextlib.contextmanager
def scrapers(port: int, count: int, *, say: bytes) -> Iterator[list[socket.socket]]:
    """So many clients that connect, say something (or nothing, or half a request), and never read."""
    clients = []
    try:
        for _ in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(ANSWER_S)
            client.connect(("127.0.0.1", port))
            client.sendall(say)
            clients.append(client)
        yield clients
    finally:
        for client in clients:
            client.close()


def get(port: int, path: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=ANSWER_S) as answer:
        answer.read()
        return int(answer.status)


@pytest.fixture
def health(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a health server whose metrics are larger than any socket's buffers, and which is patient for longer than a test."""
    monkeypatch.setattr("distaff_worker.health.IDLE_S", 60.0)
    registry = CollectorRegistry()
    big = Counter("big", "A metric with many labels", ["label"], registry=registry)
    for n in range(200):
        big.labels(f"{n:010000d}").inc()
    server = HealthServer(registry=registry, healthy=lambda: True, ready=lambda: True)
    port = server.start("127.0.0.1", 0)
    assert port is not None
    yield port
    server.stop()


@pytest.mark.parametrize(
    "say", [b"", b"GET /met", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_hundreds_of_scrapers_that_do_not_read_cost_a_few_threads_and_no_answer(health: int, say: bytes) -> None:
    """P30: half-open, half asked, or asked and not read: the next probe is answered, and threads and descriptors are bounded."""
    threads, files = threading.active_count(), fds(os.getpid())
    with scrapers(health, SCRAPERS, say=say):
        assert get(health, "/healthz") == 200
        wait_until(lambda: threading.active_count() <= threads + MAX_CONNECTIONS, what="too many threads")
        assert fds(os.getpid()) <= files + SCRAPERS + MAX_CONNECTIONS + 8
        assert get(health, "/healthz") == 200
    wait_until(lambda: threading.active_count() <= threads, seconds=15, what="threads are left behind")


def pipe_that_is_full() -> tuple[int, int]:
    """Both ends of a pipe with room for nothing."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 64)
    os.set_blocking(writing, True)
    return reading, writing


def command(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "distaff", "work", "--redis-url", url, "--worker.exit-when-done", "true", *flags]


async def play_with(url: str, client: redis.Redis, worker: subprocess.Popen[bytes]) -> None:
    """Wait until the worker has played everything and ended well."""
    try:
        assert await asyncio.to_thread(worker.wait, 150) == 0
    finally:
        worker.kill()
        worker.wait()
    assert settled(client, "run-1")
    check(client, "run-1")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_worker_that_is_watched_badly_in_every_way_does_its_work(redis_url: str, client: redis.Redis) -> None:
    """P30: its log pipe is full from the start, three hundred scrapers hang on its port: it is ready, plays everything, and ends with 0."""
    reading, writing = pipe_that_is_full()
    port = free_port()
    async with ScriptedEngine(script=lambda ask: says("number 1"), latency_s=0.3) as engine:
        await produce(redis_url, run_config(engine.url, environment={"args": {"rows": 14, "turns": 2}}))
        flags = ["--log.level", "debug", "--worker.health-port", str(port), "--worker.slots", "2"]
        worker = subprocess.Popen(command(redis_url, *flags), cwd=ROOT, stderr=writing, start_new_session=True)
        try:
            await until(
                lambda: client.hlen("distaff:run:run-1:state") and client.xlen("distaff:run:run-1:groups"), seconds=60
            )
            with scrapers(port, SCRAPERS, say=b"GET /metrics HTTP/1.1\r\n"):
                before = client.xlen("distaff:run:run-1:groups")
                assert await asyncio.to_thread(get, port, "/readyz") == 200
                await until(
                    lambda: client.xlen("distaff:run:run-1:groups") > before + 2, seconds=30, what="work stands still"
                )
                await play_with(redis_url, client, worker)
        finally:
            worker.kill()
            worker.wait()
            os.close(reading)
            os.close(writing)


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["closed", "gone"])
async def test_a_worker_without_standard_error_does_its_work(redis_url: str, client: redis.Redis, stream: str) -> None:
    """P30: descriptor 2 was closed before it began, or nobody holds the other end of the pipe any more."""
    async with ScriptedEngine(script=lambda ask: says("number 1")) as engine:
        await produce(redis_url, run_config(engine.url, environment={"args": {"rows": 4, "turns": 1}}))
        if stream == "closed":
            closing = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"]
            worker = subprocess.Popen([*closing, *command(redis_url, "--log.level", "debug")], cwd=ROOT)
        else:
            worker = subprocess.Popen(command(redis_url, "--log.level", "debug"), cwd=ROOT, stderr=subprocess.PIPE)
            assert worker.stderr is not None
            worker.stderr.close()
        await play_with(redis_url, client, worker)


def test_closed_standard_streams_never_become_sockets(redis_url: str) -> None:
    """P30: what a library prints to descriptor 2 must not end up in the connection to Redis."""
    code = (
        "import os, sys\n"
        "from distaff.cli import streams\n"
        "streams.secure()\n"
        "from distaff.clients import connect\n"
        f"client = connect({redis_url!r})\n"
        "client.ping()\n"
        "os.write(1, b'garbage'); os.write(2, b'garbage'); print('more', file=sys.stderr, flush=True)\n"
        "client.set('answer', min(client.connection_pool._available_connections[0]._sock.fileno(), 9))\n"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", code], cwd=ROOT, timeout=60
    )
    assert done.returncode == 0
    with connect(redis_url) as client:
        assert int(client.get("answer") or 0) > 2


def test_the_health_port_is_closed_with_the_worker() -> None:
    """P30: no thread of it keeps the process."""
    code = (
        "from prometheus_client import CollectorRegistry\n"
        "from distaff_worker.health import HealthServer\n"
        "import socket\n"
        "server = HealthServer(registry=CollectorRegistry(), healthy=lambda: True, ready=lambda: True)\n"
        "port = server.start('127.0.0.1', 0)\n"
        "held = [socket.create_connection(('127.0.0.1', port)) for _ in range(50)]\n"
        "server.stop()\n"
    )
    began = time.monotonic()
    with start([sys.executable, "-c", code]) as child:
        assert child.wait(30) == 0, child.log
    assert time.monotonic() - began < 30
