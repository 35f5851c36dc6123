"""Hostile bytes end in a WireError, soon and within bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import pytest
import zstandard

from distaff.errors import GroupTooLarge, WireError
from distaff.types import Mode
from distaff.wire import decode_group, encode_group
from tests.group_support import as_read, make_group

MIB = 1 << 20
CONTENT: dict[str, Any] = msgpack.unpackb(encode_group(make_group(rollouts=2, tokens=16))["group"])


def _entry(body: bytes, encoding: str = "msgpack") -> dict[bytes, bytes]:
    return {
        b"schema": b"1.0",
        b"run": b"run",
        b"seq": b"0",
        b"encoding": encoding.encode(),
        b"group": body,
    }


def _body(**changes: Any) -> dict[str, Any]:
    return {**CONTENT, **changes}


def _head(change: Callable[[dict[str, Any]], None]) -> bytes:
    content = _body()
    head = msgpack.unpackb(content["head"])
    change(head)
    return bytes(msgpack.packb({**content, "head": msgpack.packb(head)}))


def _decode(entry: dict[Any, Any]) -> None:
    """Decode; the only errors let through are WireErrors, and those are what is expected."""
    with suppress(WireError):
        decode_group(entry)


@pytest.mark.parametrize("mode", ["rl", "sft", "eval"])
def test_flipped_bytes_give_a_group_or_a_wire_error(mode: Mode) -> None:
    """Random damage at every depth: flips, cuts, insertions in the body and in the head inside it."""
    rng = random.Random(5)
    body = bytes(
        msgpack.packb(msgpack.unpackb(encode_group(make_group(mode=mode, rollouts=2, tokens=12, failed=1))["group"]))
    )
    for _ in range(1500):
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged))
            kind = rng.randrange(3)
            if kind == 0:
                damaged[at] = rng.randrange(256)
            elif kind == 1:
                del damaged[at : at + rng.randint(1, 9)]
            else:
                damaged[at:at] = rng.randbytes(rng.randint(1, 9))
        _decode(_entry(bytes(damaged)))


def test_random_bytes_give_a_wire_error() -> None:
    """Bytes that never were a group, in both encodings."""
    rng = random.Random(6)
    for _ in range(500):
        for encoding in ("msgpack", "msgpack+zstd"):
            with pytest.raises(WireError):
                decode_group(_entry(rng.randbytes(rng.randint(0, 60)), encoding))


def test_random_values_in_place_of_every_field_give_a_wire_error() -> None:
    """A wrong type anywhere in the map, the head or its columns is found, never passed on."""
    values: list[Any] = [
        None,
        True,
        -1,
        2**64 - 1,
        1.5,
        float("nan"),
        "x",
        b"x",
        b"",
        msgpack.Timestamp(1),
        msgpack.ExtType(5, b"x"),
    ]
    nested: list[Any] = [*values, [], {}, [[]], {"a": {}}, [None, None], [1, 2], ["a", "b"]]
    for name in _body():
        for value in nested:
            _decode(_entry(msgpack.packb(_body(**{name: value}))))
    head = msgpack.unpackb(_body()["head"])
    for name in head:
        for value in nested:
            _decode(_entry(_head(lambda h, name=name, value=value: h.update({name: value}))))  # type: ignore[misc]
    for name in head["rollouts"]:
        for value in nested:
            _decode(_entry(_head(lambda h, name=name, value=value: h["rollouts"].update({name: value}))))  # type: ignore[misc]
    for name in head:
        with pytest.raises(WireError):
            decode_group(_entry(_head(lambda h, name=name: h.pop(name))))  # type: ignore[misc]


BOMBS: dict[str, bytes] = {
    "ten million empty lists": b"\x81\xa1x\xdd" + struct.pack(">I", 10**7) + b"\x90" * 10**7,
    "ten million empty maps": b"\x81\xa1x\xdd" + struct.pack(">I", 10**7) + b"\x80" * 10**7,
    "maps in maps": b"\x82\xa1x" + b"\x82\xa1a\xc0\xa1b\x80" * 10**6,
    "lists nested without end": b"\x81\xa1x" + b"\x91" * 10**7,
    "maps nested without end": b"\x81\xa0" * 5_000_000,
    "a list that claims four billion": b"\x81\xa1x\xdd\xff\xff\xff\xff",
    "bytes that claim four billion": b"\x81\xa1x\xc6\xff\xff\xff\xff",
    "text that claims four billion": b"\x81\xa1x\xdb\xff\xff\xff\xff",
    "a map that claims four billion": b"\xdf\xff\xff\xff\xff",
    "a map of ten million keys": b"\xdf" + struct.pack(">I", 10**7) + b"\xa0\xc0" * 10**7,
    "a megabyte of maps in the head": msgpack.packb({**_body(), "head": b"\x9a" + b"\x80" * (MIB - 2)}),
    "ten million maps in a head": msgpack.packb(
        {**_body(), "head": b"\xdc\x10\x00" + (b"\xdc\x10\x00" + b"\x80" * 4096) * 4096}
    ),
    "ten million lists in a conversation": msgpack.packb({**_body(), "messages": b"[" + b"[]," * 10**7 + b"[]]"}),
    "ten million objects in the task": msgpack.packb({**_body(), "task": b'{"x":[' + b"{}," * 10**7 + b"{}]}"}),
    "a conversation nested without end": msgpack.packb({**_body(), "messages": b"[" * 400_000}),
    "a number of a million digits": msgpack.packb({**_body(), "task": b'{"x":' + b"9" * MIB + b"}"}),
    "a mask for tokens that are not there": msgpack.packb({**_body(), "loss_mask": b"\xff" * 10 * MIB}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_within_bounded_memory(name: str) -> None:
    """P26: At most four times the input on top, or, for small ones, what a head of one megabyte can hold."""
    body = BOMBS[name]
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode_group(_entry(body))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * max(len(body), 20 * MIB)


def test_a_compression_bomb_is_refused_before_it_grows() -> None:
    """P26: A gigabyte of zeros in a few kilobytes, with and without its size in the frame, costs no memory."""
    honest = zstandard.ZstdCompressor(level=1).compress(bytes(128 * MIB))
    silent = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(128 * MIB))
    lying = zstandard.ZstdCompressor(level=1).compress(bytes(MIB))
    lying = lying[:5] + struct.pack("<I", 100) + lying[9:]
    tracemalloc.start()
    try:
        with pytest.raises(GroupTooLarge):
            decode_group(_entry(honest, "msgpack+zstd"))
        for body in (silent, lying):
            with pytest.raises(WireError):
                decode_group(_entry(body, "msgpack+zstd"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB


def test_an_entry_without_its_fields_is_refused() -> None:
    """Each field that decoding needs is missed by name; labels that belong to another group are noticed."""
    entry = as_read(encode_group(make_group()))
    for name in (b"schema", b"encoding", b"group", b"run", b"seq"):
        with pytest.raises(WireError, match=name.decode()):
            decode_group({key: value for key, value in entry.items() if key != name})
    for change in ({b"seq": b"1"}, {b"run": b"other"}):
        with pytest.raises(WireError, match="labelled"):
            decode_group({**entry, **change})
    with pytest.raises(WireError, match="pickle"):
        decode_group({**entry, b"encoding": b"pickle"})


def test_text_that_is_not_utf8_is_refused_as_text_of_a_client_that_decodes() -> None:
    """A client with decode_responses gives str where bytes belong: the message says which option it is."""
    entry = {key.decode(): value.decode("latin-1") for key, value in as_read(encode_group(make_group())).items()}
    with pytest.raises(WireError, match="decode_responses"):
        decode_group(entry)
