"""Fixtures every test may use: a real Redis server of its own, empty. And one that every test has: no secret leaks (P28)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import structlog

from distaff.clients import connect
from tests.harness.canaries import CANARY, assert_nowhere
from tests.harness.processes import KEPT_LOGS
from tests.redis_support import running_redis


def pytest_configure() -> None:
    """Secrets for every process that a test starts. And tracebacks in logs as commands print them: structlog's own default draws every
    local variable, for seconds."""
    os.environ.update(CANARY)
    _configure_structlog()


def _configure_structlog() -> None:
    structlog.reset_defaults()
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    merge, level = structlog.contextvars.merge_contextvars, structlog.processors.add_log_level
    structlog.configure(processors=[merge, level, structlog.processors.TimeStamper("%H:%M:%S.%f"), renderer])


@pytest.fixture(autouse=True)
def structlog_as_configured_here() -> None:
    """A test that ran a command in this process may have left its level or its stream behind."""
    _configure_structlog()


@pytest.fixture(autouse=True)
def no_secret_leaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """P28: after each test its Redis, and if it started processes their logs, arguments and its folder, hold none of the canaries.

    A module that plants them on purpose overrides this fixture.
    """
    server, folder = (
        request.getfixturevalue(name) if name in request.fixturenames else None for name in ("redis_server", "tmp_path")
    )
    with tempfile.TemporaryDirectory(prefix="dt") as said:
        monkeypatch.setenv(KEPT_LOGS, said)
        yield
        folders = [Path(said)]
        if folder is not None and any(folders[0].iterdir()):
            folders.append(folder)
        with connect(server) if server is not None else contextlib.nullcontext() as client:
            assert_nowhere(client, folders=folders)


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
