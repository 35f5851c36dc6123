"""The msgpack map inside a stream entry: token arrays as raw little-endian buffers beside the head and the conversations.

Invariant: the map is flat, so that a reader's memory is bounded by the bytes it was given; arrays are read by
numpy.frombuffer and never copied. Conversations are JSON in ASCII: any text survives, lone surrogates included.
"""

from __future__ import annotations

import json
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
"""Beyond _FREE_CONTAINERS a JSON text may open one list or object in so many bytes: real conversations need thirty."""


def encode_body(group: ScoredGroup, *, schema: str, max_bytes: int) -> bytes:
    """The body of a checked group. Raises GroupTooLarge before anything large is built, WireError."""
    samples = group.samples
    tools, places = _tool_table([rollout.tools for rollout in group.rollouts])
    content = {
        "schema": schema,
        "head": pack_head(group, places),
        "task": _dump(group.task, group, "task"),
        "messages": _dump([rollout.messages for rollout in group.rollouts], group, "messages"),
        "tools": _dump(tools, group, "tools"),
        "token_ids": _buffer(samples.token_ids, "<i4"),
        "offsets": _buffer(samples.offsets, "<i8"),
        "loss_mask": np.packbits(samples.loss_mask, bitorder="little").data,
        "logprobs": None if samples.logprobs is None else _buffer(samples.logprobs, "<f4"),
        "advantages": _buffer(samples.advantages, "<f4"),
        "rollouts": _buffer(samples.rollouts, "<i4"),
        "branches": _buffer(samples.branches, "<i4"),
    }
    size = sum(map(_size, content.values()))
    if size > max_bytes:
        raise GroupTooLarge(
            f"group {group.group_id} takes {size} bytes, the limit is {max_bytes}: raise wire.max_group_bytes, or make it "
            "smaller (rollouts.group_size, sampling.max_tokens, wire.messages)"
        )
    packed: bytes = msgpack.Packer(buf_size=size + 1024).pack(content)
    return packed


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


def _buffer(array: NDArray[Any], dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype).data


def _size(value: str | bytes | memoryview | None) -> int:
    if value is None:
        return 0
    return value.nbytes if isinstance(value, memoryview) else len(value)


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


def _dump(value: Any, group: ScoredGroup, name: str) -> bytes:
    if not (any(value) if isinstance(value, list) else value):
        return b""
    try:
        text = json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(
            f"{name} of group {group.group_id} is not JSON ({error}): the environment has to return plain data"
        ) from None
    _check_density(text, name)
    return text.encode("ascii")


def _load(content: Mapping[str, Any], name: str, *, default: Any) -> Any:
    text = _bytes(content, name).decode("ascii")
    if not text:
        return default
    _check_density(text, name)
    return json.loads(text)


def _check_density(text: str, name: str) -> None:
    """Refuse a text of little but brackets, which would grow thirtyfold in memory."""
    containers = text.count("[") + text.count("{")
    if containers > _FREE_CONTAINERS and containers > len(text) // _BYTES_PER_CONTAINER:
        raise GroupTooLarge(f"{name} of a group opens {containers} lists and objects in {len(text)} bytes")
