"""Fixtures every test may use: a real Redis server of its own, empty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
import structlog

from distaff.clients import connect
from tests.redis_support import running_redis


def pytest_configure() -> None:
    """Tracebacks in logs as commands print them: structlog's own default draws every local variable, for seconds."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    merge, level = structlog.contextvars.merge_contextvars, structlog.processors.add_log_level
    structlog.configure(processors=[merge, level, structlog.processors.TimeStamper("%H:%M:%S.%f"), renderer])


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of a server shared by the session."""
    with running_redis() as url:
        yield url


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
