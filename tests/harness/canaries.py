"""Canary secrets: planted in what processes are started with, and searched for in everything that leaves them.

Invariant: a canary that is found anywhere fails the test and names the place; the value itself is never printed. Looks inside what is
compressed or encoded (jobs, groups, results, archives). Changes nothing.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import redis
import zstandard

ENGINE_KEY_VAR = "CANARY_ENGINE_API_KEY"
"""Give it to a run as `engine.api_key_var`."""
REDIS_PASSWORD = "p@ss:canary0redis0Qw7Lk"
"""For `RedisServer(config={"requirepass": REDIS_PASSWORD})`. Has characters that a URL must escape."""
CANARY: Mapping[str, str] = MappingProxyType(
    {
        ENGINE_KEY_VAR: "sk-canary0engine0Zx9Qp",
        "CANARY_HUB_TOKEN": "hf_canary0hub0Vb3Nm8Rt",
        "CANARY_CLOUD_SECRET": "canary0cloud0+Hj5/Wd2=",
        "CANARY_DATABASE_URL": "postgres://app:canary0database0Tg6Yc@127.0.0.1:1/db",
        "CANARY_SERVICE_PASSWORD": 'canary0service0"Mf4\\Xs',
    }
)
"""Environment variables that look like an operator's, by name."""
_CORES = {
    name: core.encode()
    for name, core in {
        "engine key": "canary0engine0",
        "hub token": "canary0hub0",
        "cloud secret": "canary0cloud0",
        "database password": "canary0database0",
        "service password": "canary0service0",
        "redis password": "canary0redis0",
    }.items()
}
"""What no escaping changes: found in every spelling of the value."""
_ZSTD, _ZLIB, _GZIP = b"\x28\xb5\x2f\xfd", b"\x78", b"\x1f\x8b"
_MAX_BYTES = 256 << 20


def environment(base: Mapping[str, str] | None = None, **more: str) -> dict[str, str]:
    """The variables to start a process with: `base` (our own unless given), the canaries, `more`."""
    return {**(os.environ if base is None else base), **CANARY, **more}


def with_password(url: str) -> str:
    """`url` with the canary password."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f":{quote(REDIS_PASSWORD, safe='')}@{host}"))


def assert_nowhere(
    client: redis.Redis | None = None,
    *,
    texts: Mapping[str, str | bytes] | None = None,
    folders: Iterable[Path] = (),
    pids: Iterable[int] = (),
) -> int:
    """Fail if a canary is in a key or value of Redis, one of `texts` (name: text), a file under `folders`, or the arguments of a process.

    pids: of living processes; their descendants are looked at too. Returns how many places were searched, so that a caller can see that
    it was something.
    """
    places = _places(client, texts or {}, folders, pids)
    found, searched = [], 0
    for place, content in places:
        searched += 1
        found += [f"{secret} in {place}" for secret in secrets_in(content)]
    assert not found, "secrets leaked: " + "; ".join(found[:20])
    return searched


def secrets_in(content: bytes) -> list[str]:
    """Names of the canaries in `content`, in whatever it holds compressed or in base64 too."""
    found = {name for plain in _layers(content) for name, core in _CORES.items() if core in plain}
    return sorted(found)


def _places(
    client: redis.Redis | None, texts: Mapping[str, str | bytes], folders: Iterable[Path], pids: Iterable[int]
) -> Iterator[tuple[str, bytes]]:
    if client is not None:
        yield from _values(client)
    for name, text in texts.items():
        yield name, text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            # A server has to have its password.
            if path.is_file() and not path.is_symlink() and path.name not in ("redis.conf", "users.acl"):
                yield str(path), path.read_bytes()
    for pid in pids:
        yield from _arguments(pid)


def _values(client: redis.Redis) -> Iterator[tuple[str, bytes]]:
    """Every key and every part of every value; a stream's consumers too."""
    for key in client.scan_iter(count=1000):
        yield "the name of a key", key
        for part in _parts(client, key):
            yield f"the key {key[:60]!r}", part


def _parts(client: redis.Redis, key: bytes) -> Iterable[bytes]:
    answer: Any
    match client.type(key):
        case b"string":
            answer = [client.get(key)]
        case b"list":
            answer = client.lrange(key, 0, -1)
        case b"set":
            answer = client.smembers(key)
        case b"zset":
            answer = client.zrange(key, 0, -1)
        case b"hash":
            answer = client.hgetall(key)
            return [*answer.keys(), *answer.values()]
        case b"stream":
            answer = client.xrange(key)
            names: Any = [row["name"] for row in client.xinfo_groups(key)]
            return [*names, *(part for _, fields in answer for pair in fields.items() for part in pair)]
        case _:
            return []
    return list(answer)


def _arguments(pid: int) -> Iterator[tuple[str, bytes]]:
    waiting = [pid]
    while waiting:
        at = waiting.pop()
        process = Path("/proc") / str(at)
        try:
            yield f"the arguments of process {at}", (process / "cmdline").read_bytes()
            for task in (process / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it has ended


def _layers(content: bytes) -> Iterator[bytes]:
    """The content, and what is under one or two wrappings of it."""
    yield content
    for inner in _unwrapped(content):
        yield inner
        yield from _unwrapped(inner)


def _unwrapped(content: bytes) -> list[bytes]:
    try:
        if content.startswith(_ZSTD):
            return [zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).read(_MAX_BYTES)]
        if content.startswith(_GZIP):
            return [gzip.decompress(content)]
        if content.startswith(_ZLIB):
            return [zlib.decompressobj().decompress(content, _MAX_BYTES)]
        if 16 <= len(content) < 1 << 20 and len(content) % 4 == 0:
            return [base64.b64decode(content, validate=True)]
    except (zstandard.ZstdError, OSError, EOFError, zlib.error, binascii.Error):
        return []  # it only looked like one
    return []
