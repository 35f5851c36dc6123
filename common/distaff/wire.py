"""The wire format of a scored group: what a worker appends to the group stream and a consumer reads from it.

Invariant: decode_group(encode_group(g)) is g; bytes that are not a group end in a WireError within bounded memory, whatever
they are. Never executes, guesses or repairs. `docs/wire-format.md` is the specification; a change that an old reader cannot
skip needs a new major in SCHEMA.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgpack
from redis.typing import EncodableT, FieldT

from distaff.alignment import check_group
from distaff.errors import CodecMissing, GroupTooLarge, SchemaVersionError, WireError
from distaff.types import ScoredGroup
from distaff.wire_body import decode_body, encode_body

__all__ = ["MAX_GROUP_BYTES", "SCHEMA", "Compression", "check_group", "decode_group", "encode_group"]

SCHEMA = (1, 0)
"""(major, minor). A minor adds keys, which an old reader ignores; a newer major is refused."""
MAX_GROUP_BYTES = 64 << 20
"""Of an encoded group before compression, unless the caller says otherwise."""

Compression = Literal["none", "zstd"]

_SCHEMA_TEXT = re.compile(r"(\d{1,6})\.(\d{1,6})", re.ASCII)
_ENCODINGS = {"none": "msgpack", "zstd": "msgpack+zstd"}
_ZSTD_LEVEL = 1


def encode_group(
    group: ScoredGroup, *, compression: Compression = "none", max_bytes: int = MAX_GROUP_BYTES
) -> dict[FieldT, EncodableT]:
    """The fields of one stream entry, ready for XADD: plain text all but `group`, which is bytes. Writes SCHEMA.

    Raises AlignmentError (the arrays do not fit each other), GroupTooLarge (more than `max_bytes` before compression),
    WireError (a value that has no place in the format), CodecMissing (zstandard is not installed).
    """
    check_group(group)
    schema = f"{SCHEMA[0]}.{SCHEMA[1]}"
    body = encode_body(group, schema=schema, max_bytes=max_bytes)
    return {
        "schema": schema,
        "run": group.run,
        "seq": group.seq,
        "mode": group.mode,
        "policy": f"{group.policy.start}:{group.policy.end}",
        "samples": len(group.samples),
        "tokens": len(group.samples.token_ids),
        "encoding": _ENCODINGS[compression],
        "group": _zstd().ZstdCompressor(level=_ZSTD_LEVEL).compress(body) if compression == "zstd" else body,
    }


def decode_group(
    fields: Mapping[Any, Any], *, max_bytes: int = MAX_GROUP_BYTES, check: bool = True, messages: bool = True
) -> ScoredGroup:
    """The group of a stream entry as redis-py gives it (keys bytes or str; a client without decode_responses).

    Token ids and log-probabilities are views of the entry's bytes; every array is read-only.
    check: run `check_group` on the result. messages: False leaves conversations, tools and the item's row empty, which saves a
    trainer that needs only tokens their parsing.
    Raises SchemaVersionError, CodecMissing, GroupTooLarge, AlignmentError, and WireError for everything else that is wrong.
    """
    schema = _read_schema(_text(fields, "schema"))
    body = _read_body(fields, max_bytes)
    try:
        group = decode_body(body, schema=schema, messages=messages)
    except (ValueError, KeyError, IndexError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(
            f"an entry of the group stream is not a scored group ({type(error).__name__}: {error!s:.200})"
        ) from None
    if _text(fields, "run") != group.run or _text(fields, "seq") != str(group.seq):
        raise WireError(
            f"an entry of the group stream is labelled otherwise than the group in it, {group.group_id!r:.99}"
        )
    if check:
        check_group(group)
    return group


def _text(fields: Mapping[Any, Any], name: str) -> str:
    value = fields.get(name.encode())
    if value is None:
        value = fields.get(name)
    if isinstance(value, bytes):
        return value.decode("ascii", "replace")
    if isinstance(value, (str, int)):
        return str(value)
    raise WireError(f"an entry of the group stream has no field {name!r}")


def _read_schema(text: str) -> tuple[int, int]:
    match = _SCHEMA_TEXT.fullmatch(text)
    if match is None:
        raise WireError(f"an entry of the group stream has the schema {text!r:.40}, not <major>.<minor>")
    schema = int(match[1]), int(match[2])
    if schema[0] != SCHEMA[0]:
        raise SchemaVersionError(
            f"a group is written in schema {text}, this distaff reads {SCHEMA[0]}.x: install the version of distaff that "
            "the workers run (pip install --upgrade distaff)"
        )
    return schema


def _read_body(fields: Mapping[Any, Any], max_bytes: int) -> bytes:
    encoding = _text(fields, "encoding")
    body = fields.get(b"group", fields.get("group"))
    if not isinstance(body, bytes):
        raise WireError(
            "an entry of the group stream has no bytes in its field 'group' (read it without decode_responses)"
        )
    if encoding == _ENCODINGS["zstd"]:
        return _decompress(body, max_bytes)
    if encoding != _ENCODINGS["none"]:
        raise WireError(f"a group is encoded as {encoding!r:.40}; this distaff reads {', '.join(_ENCODINGS.values())}")
    return _limited(body, len(body), max_bytes)


def _decompress(body: bytes, max_bytes: int) -> bytes:
    zstandard = _zstd()
    try:
        size = zstandard.frame_content_size(body)
        if size < 0:
            raise WireError("a compressed group does not say how large it is")
        _limited(body, size, max_bytes)
        plain: bytes = zstandard.ZstdDecompressor().decompress(body, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"a compressed group is damaged ({error})") from None
    return plain


def _limited(body: bytes, size: int, max_bytes: int) -> bytes:
    if size > max_bytes:
        raise GroupTooLarge(
            f"a group of {size} bytes is refused, the limit is {max_bytes}: raise max_bytes here to at least the workers' "
            "wire.max_group_bytes"
        )
    return body


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        raise CodecMissing(
            "the groups of this run are compressed with zstd and zstandard is not installed: pip install 'distaff[zstd]'"
        ) from None
    return zstandard
