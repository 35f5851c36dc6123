"""A real Redis server for whoever needs one of its own and does nothing to it: tests and benchmarks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.harness.servers import RedisServer


@contextlib.contextmanager
def running_redis() -> Iterator[str]:
    """URL of an empty server on a Unix socket: redis-server where it is installed, else the embedded Valkey. Keeps nothing."""
    with tempfile.TemporaryDirectory(prefix="dt") as folder, RedisServer(Path(folder)) as server:
        yield server.url
