"""Tokens per second from a group in one process to its arrays in another, acknowledged: ours, redis-py alone, JSON over HTTP.

Counted from the first encoding in the producer to the last acknowledgement in the consumer, two processes and the server between.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tests.redis_support import running_redis

from benchmarks.processes import Child, role
from benchmarks.results import Figure

TOKENS = 2048
SAMPLES = 8
COUNT = 1600
COUNT_HTTP = 48
ROUNDS = 5
HTTP_GOAL, RAW_GOAL = 200.0, 0.8


def run() -> Sequence[Figure]:
    ours, raw = [], []
    for _ in range(ROUNDS):
        ours.append(_stream())
        raw.append(_stream("--raw"))
    http = _http()
    rate = median(ours)
    against_raw = median(one / other for one, other in zip(ours, raw, strict=True))
    return [
        Figure(
            what="ours : JSON + gzip over HTTP",
            goal=f">= {HTTP_GOAL:g}",
            result=f"{rate / http:.0f}",
            met=rate / http >= HTTP_GOAL,
        ),
        Figure(
            what="ours : redis-py with the same bytes",
            goal=f">= {RAW_GOAL:g}",
            result=f"{against_raw:.2f}",
            met=against_raw >= RAW_GOAL,
        ),
        Figure(what="ours, million tokens/s", result=f"{rate / 1e6:.1f}"),
        Figure(what="redis-py alone, million tokens/s", result=f"{median(raw) / 1e6:.1f}"),
        Figure(what="JSON + gzip over HTTP, million tokens/s", result=f"{http / 1e6:.3f}"),
    ]


def _stream(*flags: str) -> float:
    with running_redis() as url:
        size = (url, COUNT, TOKENS, *flags)
        with role("stream", "consume", *size) as consumer, role("stream", "produce", *size) as producer:
            return _rate(producer, consumer, count=COUNT)


def _http() -> float:
    with role("reference", "serve") as server:
        size = (server.read()["url"], COUNT_HTTP, TOKENS)
        with role("reference", "consume", *size) as consumer, role("reference", "produce", *size) as producer:
            return _rate(producer, consumer, count=COUNT_HTTP)


def _rate(producer: Child, consumer: Child, *, count: int) -> float:
    """Tokens per second."""
    for child in (consumer, producer):
        child.read()
    for child in (consumer, producer):
        child.tell(go=True)
    started, ended = float(producer.read()["started"]), float(consumer.read()["ended"])
    return count * SAMPLES * TOKENS / (ended - started)
