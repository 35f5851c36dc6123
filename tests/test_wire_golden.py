"""Groups written by a released schema decode for ever: `tests/golden/group-<schema>-<kind>.bin`, never to be rewritten.

A file is the msgpack map of one stream entry's fields; beside it, as JSON, what has to be read from it. A new schema adds files:
`python -m tests.test_wire_golden` writes those that are missing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgpack
import pytest

from distaff.types import SampleArrays, ScoredGroup
from distaff.wire import SCHEMA, decode_group, encode_group
from tests.group_support import as_read, make_group

FOLDER = Path(__file__).parent / "golden"
FILES = sorted(FOLDER.glob("group-*.bin"))


def _content(group: ScoredGroup) -> dict[str, Any]:
    """Everything in the group as JSON; arrays by dtype, length and digest."""
    content = {field.name: getattr(group, field.name) for field in fields(ScoredGroup) if field.name != "samples"}
    for name in ("environment", "policy", "statistics"):
        content[name] = asdict(content[name])
    content["rollouts"] = [asdict(rollout) for rollout in group.rollouts]
    arrays = {field.name: getattr(group.samples, field.name) for field in fields(SampleArrays)}
    content["samples"] = {
        name: None if array is None else [str(array.dtype), len(array), hashlib.sha256(array.tobytes()).hexdigest()]
        for name, array in arrays.items()
    }
    read: dict[str, Any] = json.loads(json.dumps(content))
    return read


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_groups_decode_for_ever(path: Path) -> None:
    """P25: Whatever was released is read by every later version, to the last bit."""
    group = decode_group(msgpack.unpackb(path.read_bytes()))
    assert _content(group) == json.loads(path.with_suffix(".json").read_text())


def test_there_are_golden_groups_of_the_current_schema() -> None:
    """Each kind of group has a file; a schema is not released without them."""
    names = {path.name for path in FILES}
    assert {f"group-{SCHEMA[0]}.{SCHEMA[1]}-{kind}.bin" for kind in ("rl", "sft", "zstd", "eval")} <= names


def _write() -> None:
    groups = {
        "rl": make_group(seq=11, rollouts=3, tokens=24, branches=2, failed=1),
        "sft": make_group(seq=12, mode="sft", rollouts=2, tokens=24),
        "zstd": make_group(seq=13, rollouts=2, tokens=64),
        "eval": make_group(seq=14, mode="eval", rollouts=2),
    }
    for kind, group in groups.items():
        path = FOLDER / f"group-{SCHEMA[0]}.{SCHEMA[1]}-{kind}.bin"
        if not path.exists():
            path.write_bytes(
                msgpack.packb(as_read(encode_group(group, compression="zstd" if kind == "zstd" else "none")))
            )
            path.with_suffix(".json").write_text(json.dumps(_content(group), indent=1) + "\n")


if __name__ == "__main__":
    _write()
