"""Records of the archive: a group goes into JSON and comes back the same."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from distaff.types import SampleArrays, ScoredGroup
from distaff_consumer.errors import ArchiveError
from distaff_consumer.lines import encode_line
from distaff_consumer.records import group_to_record, record_to_group, shortest_floats, trained_spans
from tests.group_support import make_group


def same(a: ScoredGroup, b: ScoredGroup) -> bool:
    """Equal in every field, arrays bit for bit and of the same type."""
    plain = [field.name for field in fields(ScoredGroup) if field.name != "samples"]
    return all(getattr(a, name) == getattr(b, name) for name in plain) and all(
        _same_array(getattr(a.samples, field.name), getattr(b.samples, field.name)) for field in fields(SampleArrays)
    )


def _same_array(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "rl", "branches": 2},
        {"mode": "sft"},
        {"mode": "eval"},
        {"mode": "rl", "rollouts": 2, "failed": 2},
        {"mode": "sft", "rollouts": 2, "failed": 2},
        {"mode": "rl", "messages": False},
        {"mode": "rl", "tokens": 0},
    ],
)
def test_a_group_comes_back_from_its_line_as_it_was(options: dict[str, Any]) -> None:
    """Every field, token, mask bit and float32 survives JSON."""
    group = make_group(seq=7, **options)
    line = encode_line(group_to_record(group))
    assert line.startswith(b'{"group_id":"run-000000007",')
    assert same(record_to_group(json.loads(line)), group)


def test_the_comparison_of_groups_can_fail() -> None:
    """One changed bit of one array is seen."""
    group = make_group()
    other = record_to_group(group_to_record(group))
    other.samples.loss_mask[0] ^= True
    assert not same(group, other)


def test_spans_are_the_trained_tokens() -> None:
    """Spans are half open, in order, and cover exactly the mask."""
    cases = {"": [], "0": [], "1": [[0, 1]], "0110": [[1, 3]], "11011": [[0, 2], [3, 5]]}
    for bits, spans in cases.items():
        assert trained_spans(np.array([bit == "1" for bit in bits], np.bool_)) == spans


def test_floats_are_short_and_exact() -> None:
    """The shortest decimal of a float32, exact for random bit patterns and at the edges of the format."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.array([0.0, -0.0, 1e-45, -3.4028235e38, 0.1], np.float32)])
    floats = json.loads(json.dumps(shortest_floats(values)))
    assert np.array(floats, np.float32).tobytes() == values.tobytes()
    assert floats[-1] == 0.1


def test_a_record_of_a_newer_minor_version_is_read_and_a_broken_one_named() -> None:
    """Unknown keys are ignored; a missing one is an error with the group's id."""
    record = json.loads(encode_line(group_to_record(make_group())))
    record["new"] = record["rollouts"][0]["new"] = record["statistics"]["new"] = 1
    assert same(record_to_group(record), make_group())
    del record["rollouts"][0]["reward"]
    with pytest.raises(ArchiveError, match=r"run-000000000.*reward"):
        record_to_group(record)
