"""The search for canary secrets finds each of them wherever it was left, in every spelling."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import redis
import zstandard

from distaff.clients import connect
from distaff.redaction import redact
from tests.harness import processes
from tests.harness.canaries import CANARY, REDIS_PASSWORD, assert_nowhere, environment, secrets_in, with_password
from tests.worker_support import wait_until

KEY = CANARY["CANARY_SERVICE_PASSWORD"]
SPELLINGS: dict[str, Callable[[str], bytes]] = {
    "plain": str.encode,
    "in a URL": lambda value: quote(value, safe="").encode(),
    "in JSON": lambda value: json.dumps({"x": value}).encode(),
    "in a job": lambda value: zlib.compress(value.encode()),
    "in a result": lambda value: base64.b64encode(zlib.compress(value.encode())),
    "in a compressed group": lambda value: zstandard.ZstdCompressor().compress(value.encode()),
    "in base64": lambda value: base64.b64encode(f"{value:<24}".encode()),
}
WAYS_INTO_REDIS: dict[str, Callable[[redis.Redis], object]] = {
    "key": lambda client: client.set(f"x:{KEY}", 1),
    "string": lambda client: client.set("x", KEY),
    "list": lambda client: client.rpush("x", "a", KEY),
    "set": lambda client: client.sadd("x", KEY),
    "zset": lambda client: client.zadd("x", {KEY: 1}),
    "hash field": lambda client: client.hset("x", KEY, "1"),
    "hash value": lambda client: client.hset("x", "data", zlib.compress(KEY.encode())),
    "stream": lambda client: client.xadd("x", {"a": "b", "c": KEY}),
    "consumer group": lambda client: client.xgroup_create("x", KEY, mkstream=True),
}


@pytest.fixture(autouse=True)
def no_secret_leaks() -> None:
    """Here they are planted on purpose."""


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("value", [*CANARY.values(), REDIS_PASSWORD])
def test_every_canary_is_found_in_every_spelling(spelling: str, value: str) -> None:
    """P28: One name for each, and none where there is none."""
    assert len(secrets_in(SPELLINGS[spelling](value))) == 1
    assert secrets_in(SPELLINGS[spelling]("nothing to see here")) == []


@pytest.mark.parametrize("value", [*CANARY.values(), REDIS_PASSWORD])
def test_our_own_masking_hides_every_canary(value: str) -> None:
    """What `redact` is told by the environment is what the canaries are."""
    variables = {**CANARY, "DISTAFF_REDIS_URL": with_password("redis://127.0.0.1:6379/0")}
    assert secrets_in(redact(f"failed with {value}", environ=variables).encode()) == []


@pytest.mark.parametrize("way", WAYS_INTO_REDIS)
def test_a_canary_in_redis_is_found(client: redis.Redis, way: str) -> None:
    """In the name of a key and in each kind of value."""
    client.rpush("innocent", "nothing")
    assert assert_nowhere(client) == 2
    WAYS_INTO_REDIS[way](client)
    with pytest.raises(AssertionError, match=r"service password in the (key|name)") as failed:
        assert_nowhere(client)
    assert KEY not in str(failed.value)


def test_a_canary_in_a_text_a_file_or_an_argument_is_found(tmp_path: Path) -> None:
    """The message names the place."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "log").write_text("innocent")
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', *sys.argv[1:]])"
    for arguments, leaks in ((["x"], False), ([KEY], True)):
        parent = subprocess.Popen([sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, env=environment())
        try:
            wait_until(lambda: Path(f"/proc/{parent.pid}/cmdline").read_bytes(), what="the process did not start")  # noqa: B023
            if leaks:
                with pytest.raises(AssertionError, match="the arguments of process"):
                    assert_nowhere(pids=[parent.pid])
            else:
                assert assert_nowhere(texts={"log": "x"}, folders=[tmp_path], pids=[parent.pid]) >= 3
        finally:
            parent.communicate(b"\n", timeout=20)
    with pytest.raises(AssertionError, match="in the log of w1"):
        assert_nowhere(texts={"the log of w1": f"key={KEY}"})
    (tmp_path / "deep" / "log.zst").write_bytes(zstandard.ZstdCompressor().compress(KEY.encode()))
    with pytest.raises(AssertionError, match=r"deep/log\.zst"):
        assert_nowhere(folders=[tmp_path])


def test_the_canary_password_is_what_a_client_sends() -> None:
    """Escaped in the URL, whole in the connection."""
    for url in ("redis://127.0.0.1:6379/0", "unix:///tmp/r.sock?db=0"):
        with connect(with_password(url)) as client:
            assert client.connection_pool.connection_kwargs["password"] == REDIS_PASSWORD


LEAKS = f"""
from tests.harness.processes import start

CANARY = {CANARY["CANARY_HUB_TOKEN"]!r}

def test_redis(client):
    client.set("x", CANARY)

def test_arguments():
    start(["true", CANARY]).wait(10)

def test_log():
    start(["env"]).wait(10)

def test_folder(tmp_path):
    start(["true"]).wait(10)
    (tmp_path / "file").write_text(CANARY)

def test_innocent(client, tmp_path):
    client.set("x", 1)
    start(["echo", "innocent"]).wait(10)
"""


def test_every_test_is_searched(tmp_path: Path) -> None:
    """P28: The fixture that all tests have fails one that leaves a canary in Redis, in an argument, in what a process said, or in its folder."""
    tests = processes.ROOT / "tests"
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "test_leak.py").write_text(LEAKS)
    command: list[str | Path] = [
        "-m",
        "pytest",
        "-q",
        "--rootdir",
        tmp_path,
        "-c",
        processes.ROOT / "pyproject.toml",
        tmp_path,
    ]
    done = subprocess.run([sys.executable, *command], cwd=processes.ROOT, capture_output=True, text=True, timeout=60)
    assert re.findall(r"ERROR .*::test_(\w+)", done.stdout) == ["redis", "arguments", "log", "folder"], done.stdout
    assert len(re.findall("^E .*secrets leaked: .*hub token in ", done.stdout, re.MULTILINE)) == 4
    assert "5 passed, 4 errors" in done.stdout
