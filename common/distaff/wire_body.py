"""The msgpack map inside a stream entry: token arrays as raw little-endian buffers beside the head and the conversations.

Invariant: the map is flat, so that a reader's memory is bounded by the bytes it was given; arrays are read by
numpy.frombuffer and never copied. Conversations are JSON in ASCII: any text survives, lone surrogates included.
What is written is put together from pieces: one call that copies or renders a hundred megabytes would hold the interpreter, and
with it the writer's event loop, for a second, whichever thread it is made on.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from distaff.errors import GroupTooLarge, WireError
from distaff.types import Message, SampleArrays, ScoredGroup, Tool
from distaff.wire_head import environment_of, pack_head, policy_of, rollouts_of, statistics_of, unpack_head

_MAX_KEYS = 64
_FREE_CONTAINERS = 500_000
_BYTES_PER_CONTAINER = 8
_PIECE_BYTES = 256 << 10
"""Beyond _FREE_CONTAINERS a JSON text may open one list or object in so many bytes: real conversations need thirty."""


def encode_body(group: ScoredGroup, *, schema: str, max_bytes: int) -> bytes:
    """The body of a checked group. Raises GroupTooLarge before anything large is built, WireError."""
    samples = group.samples
    tools, places = _tool_table([rollout.tools for rollout in group.rollouts])
    content: dict[str, str | list[bytes] | None] = {
        "schema": schema,
        "head": [pack_head(group, places)],
        "task": _dump(group.task, group, "task"),
        "messages": _dump_lists([rollout.messages for rollout in group.rollouts], group, "messages"),
        "tools": _dump_lists(tools, group, "tools"),
        "token_ids": _pieces(samples.token_ids, "<i4"),
        "offsets": _pieces(samples.offsets, "<i8"),
        "loss_mask": _pieces(np.packbits(samples.loss_mask, bitorder="little"), "u1"),
        "logprobs": None if samples.logprobs is None else _pieces(samples.logprobs, "<f4"),
        "advantages": _pieces(samples.advantages, "<f4"),
        "rollouts": _pieces(samples.rollouts, "<i4"),
        "branches": _pieces(samples.branches, "<i4"),
    }
    size = sum(map(_size, content.values()))
    if size > max_bytes:
        raise GroupTooLarge(
            f"group {group.group_id} takes {size} bytes, the limit is {max_bytes}: raise wire.max_group_bytes, or make it "
            "smaller (rollouts.group_size, sampling.max_tokens, wire.messages)"
        )
    return b"".join(_packed(content))


def _packed(content: Mapping[str, str | list[bytes] | None]) -> list[bytes]:
    """The map in msgpack, in pieces; joining bytes is the one large copy that lets other threads run."""
    packer = msgpack.Packer()
    parts: list[bytes] = [packer.pack_map_header(len(content))]
    for name, value in content.items():
        parts.append(packer.pack(name))
        if isinstance(value, list):
            parts += [_bin_header(_size(value)), *value]
        else:
            parts.append(packer.pack(value))
    return parts


def _bin_header(size: int) -> bytes:
    """What precedes `size` bytes in msgpack."""
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    return struct.pack(">BH", 0xC5, size) if size < 1 << 16 else struct.pack(">BI", 0xC6, size)


def decode_body(body: bytes, *, schema: tuple[int, int], messages: bool) -> ScoredGroup:
    """The group, unchecked. Raises WireError and what msgpack, json and numpy raise for damaged bytes."""
    content = _unpack_flat(body)
    if content["schema"] != f"{schema[0]}.{schema[1]}":
        raise WireError(f"a group says schema {content['schema']!r:.40} inside and {schema[0]}.{schema[1]} outside")
    head = unpack_head(_bytes(content, "head"))
    count = len(head["rollouts"]["index"])
    return ScoredGroup(
        schema=schema,
        run=head["run"],
        seq=head["seq"],
        group_id=head["group_id"],
        key=head["key"],
        environment=environment_of(head),
        mode=head["mode"],
        model=head["model"],
        tokenizer=head["tokenizer"],
        vocab_size=head["vocab_size"],
        temperature=head["temperature"],
        policy=policy_of(head),
        epoch=head["epoch"],
        seed=head["seed"],
        task=_task(content) if messages else {},
        verdict=head["verdict"],
        rollouts=rollouts_of(
            head,
            _messages(content, count) if messages else [[] for _ in range(count)],
            _tools(content) if messages else [],
        ),
        samples=_samples(content),
        statistics=statistics_of(head),
        execution=head["execution"],
        worker=head["worker"],
        attempt=head["attempt"],
        created=head["created"],
    )


def _unpack_flat(body: bytes) -> dict[str, Any]:
    """The map. One that holds a list or another map is refused as soon as that is met, before it can grow."""
    closed: list[None] = []

    def only_once(value: dict[str, Any]) -> dict[str, Any]:
        closed.append(None)
        if len(closed) > 1:
            raise WireError("the map of a group is not flat")
        return value

    content = msgpack.unpackb(body, object_hook=only_once, max_array_len=0, max_map_len=_MAX_KEYS, max_ext_len=0)
    if type(content) is not dict:
        raise WireError("a group is not a map")
    return content


def _samples(content: Mapping[str, Any]) -> SampleArrays:
    token_ids = np.frombuffer(_bytes(content, "token_ids"), "<i4")
    return SampleArrays(
        token_ids=token_ids,
        offsets=np.frombuffer(_bytes(content, "offsets"), "<i8"),
        loss_mask=_mask(_bytes(content, "loss_mask"), len(token_ids)),
        logprobs=None if content["logprobs"] is None else np.frombuffer(_bytes(content, "logprobs"), "<f4"),
        advantages=np.frombuffer(_bytes(content, "advantages"), "<f4"),
        rollouts=np.frombuffer(_bytes(content, "rollouts"), "<i4"),
        branches=np.frombuffer(_bytes(content, "branches"), "<i4"),
    )


def _mask(packed: bytes, tokens: int) -> NDArray[np.bool_]:
    if len(packed) != (tokens + 7) // 8:
        raise WireError(f"a loss mask of {len(packed)} bytes does not fit {tokens} tokens")
    mask = np.unpackbits(np.frombuffer(packed, np.uint8), count=tokens, bitorder="little").view(np.bool_)
    mask.flags.writeable = False
    return mask


def _bytes(content: Mapping[str, Any], name: str) -> bytes:
    value = content[name]
    if type(value) is not bytes:
        raise WireError(f"{name} of a group is not bytes")
    return value


def _pieces(array: NDArray[Any], dtype: str) -> list[bytes]:
    flat = np.ascontiguousarray(array, dtype)
    step = _PIECE_BYTES // flat.itemsize
    return [flat[start : start + step].tobytes() for start in range(0, len(flat), step)]


def _size(value: str | list[bytes] | None) -> int:
    return sum(map(len, value)) if isinstance(value, list) else len(value or "")


def _tool_table(lists: Sequence[list[Tool]]) -> tuple[list[list[Tool]], list[int]]:
    """The distinct lists, and the place of each among them: the rollouts of a group nearly always share theirs."""
    table: list[list[Tool]] = []
    places = []
    for tools in lists:
        if tools not in table:
            table.append(tools)
        places.append(table.index(tools))
    return table, places


def _task(content: Mapping[str, Any]) -> dict[str, Any]:
    task = _load(content, "task", default={})
    if type(task) is not dict:
        raise WireError("the task of a group is not an object")
    return task


def _messages(content: Mapping[str, Any], count: int) -> list[list[Message]]:
    conversations = _lists_of_objects("messages", _load(content, "messages", default=[]))
    return conversations or [[] for _ in range(count)]


def _tools(content: Mapping[str, Any]) -> list[list[Tool]]:
    return _lists_of_objects("tools", _load(content, "tools", default=[]))


def _lists_of_objects(name: str, value: Any) -> list[list[dict[str, Any]]]:
    if type(value) is not list or not all(
        type(inner) is list and all(type(item) is dict for item in inner) for inner in value
    ):
        raise WireError(f"{name} of a group is not a list of lists of objects")
    return value


def _dump(value: Any, group: ScoredGroup, name: str) -> list[bytes]:
    """JSON, in one piece; nothing for an empty value."""
    if not value:
        return []
    text = _dumped(value, group, name)
    _check_density([text], name)
    return [text]


def _dump_lists(lists: Sequence[Sequence[Any]], group: ScoredGroup, name: str) -> list[bytes]:
    """JSON of lists in a list, rendered element by element; nothing when all of them are empty."""
    if not any(lists):
        return []
    parts: list[bytes] = []
    for place, inner in enumerate(lists):
        parts.append(b",[" if place else b"[[")
        for number, value in enumerate(inner):
            parts += [b",", _dumped(value, group, name)] if number else [_dumped(value, group, name)]
        parts.append(b"]")
    parts.append(b"]")
    _check_density(parts, name)
    return parts


def _dumped(value: Any, group: ScoredGroup, name: str) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"{name} of group {group.group_id} is not JSON ({error}): the environment has to return plain data"
        ) from None


def _load(content: Mapping[str, Any], name: str, *, default: Any) -> Any:
    text = _bytes(content, name)
    if not text:
        return default
    _check_density([text], name)
    return json.loads(text.decode("ascii"))


def _check_density(parts: Sequence[bytes], name: str) -> None:
    """Refuse a text of little but brackets, which would grow thirtyfold in memory."""
    containers = sum(part.count(b"[") + part.count(b"{") for part in parts)
    size = sum(map(len, parts))
    if containers > _FREE_CONTAINERS and containers > size // _BYTES_PER_CONTAINER:
        raise GroupTooLarge(f"{name} of a group opens {containers} lists and objects in {size} bytes")
