"""A command with a large argument is sent without a copy of it, and is the same command."""

from __future__ import annotations

import pytest
import redis
from redis.connection import HiredisRespSerializer

from distaff.packing import LARGE_BYTES, Packer

BIG = bytes(range(256)) * (LARGE_BYTES // 200)


@pytest.mark.parametrize(
    "command",
    [
        ("PING",),
        ("CONFIG GET", "maxmemory"),
        ("SET", "é", b"\x00\xff", "PX", 5, 0.25),
        ("XADD", b"k", "*", "a", BIG, "b", 7),
        ("EVALSHA", "f" * 40, 1, "key", BIG, BIG, -1.5, ""),
    ],
)
def test_the_bytes_are_redis_pys_own(command: tuple[object, ...]) -> None:
    """Joined, the pieces are what hiredis makes of the command."""
    assert b"".join(Packer().pack(*command)) == b"".join(HiredisRespSerializer().pack(*command))  # type: ignore[arg-type]


def test_a_large_argument_is_not_copied() -> None:
    """It is one of the pieces, itself."""
    assert any(piece is BIG for piece in Packer().pack("XADD", "k", "*", "a", BIG))


def test_a_group_of_any_size_arrives(client: redis.Redis) -> None:
    """Through a real server, in a pipeline and alone."""
    for size in (0, 1, LARGE_BYTES, LARGE_BYTES + 1, 5_000_000):
        client.set("k", b"x" * size)
        with client.pipeline() as pipeline:
            pipeline.get("k")
            pipeline.set("again", b"y" * size)
            assert pipeline.execute()[0] == b"x" * size
        assert client.get("again") == b"y" * size
