"""The codec: what goes in comes out, what does not fit is refused, and versions are told apart."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from distaff.errors import AlignmentError, CodecMissing, GroupTooLarge, SchemaVersionError, WireError
from distaff.types import Mode, ScoredGroup
from distaff.wire import Compression, check_group, decode_group, encode_group
from tests.group_support import as_read, assert_same_group, make_group


@pytest.mark.parametrize("mode", ["rl", "sft", "eval"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_realistic_groups_survive(mode: Mode, compression: Compression) -> None:
    """Branches, failed rollouts and conversations in each mode."""
    group = make_group(mode=mode, rollouts=5, branches=2, failed=1)
    assert_same_group(decode_group(encode_group(group, compression=compression)), group)


def test_the_plain_fields_say_what_is_in_the_group() -> None:
    """A consumer can filter on them without decoding."""
    group = make_group(seq=7, rollouts=4, tokens=10, branches=2)
    fields = encode_group(group)
    assert isinstance(fields.pop("group"), bytes)
    assert fields == {
        "schema": "1.0",
        "run": "run",
        "seq": 7,
        "mode": "rl",
        "policy": "3:4",
        "samples": 8,
        "tokens": 80,
        "encoding": "msgpack",
    }


def test_arrays_are_read_only_views_and_token_ids_are_not_copied() -> None:
    """Token ids and log-probabilities are views of bytes; nothing can be written through any array."""
    arrays = decode_group(as_read(encode_group(make_group()))).samples
    for array in (arrays.token_ids, arrays.logprobs):
        assert array is not None
        assert isinstance(array.base, bytes)
    for name in ("token_ids", "offsets", "loss_mask", "logprobs", "advantages", "rollouts", "branches"):
        assert not getattr(arrays, name).flags.writeable, name


def test_conversations_can_be_left_out_when_reading() -> None:
    """A trainer that wants tokens only gets everything else empty."""
    group = make_group()
    lean = decode_group(encode_group(group), messages=False)
    emptied = [replace(rollout, messages=[], tools=[]) for rollout in group.rollouts]
    assert_same_group(lean, replace(group, rollouts=emptied, task={}))


def test_tools_shared_by_the_rollouts_are_sent_once() -> None:
    """Sixteen rollouts with the same large tool list do not cost sixteen lists."""
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 10_000}}
    shared = make_group(rollouts=16)
    shared = replace(shared, rollouts=[replace(rollout, tools=[tool]) for rollout in shared.rollouts])
    entry = encode_group(shared)
    assert len(str(entry["group"])) < 2 * len(str(encode_group(make_group(rollouts=16))["group"]))
    assert_same_group(decode_group(entry), shared)


def _damaged(group: ScoredGroup, **arrays: Any) -> ScoredGroup:
    return replace(group, samples=replace(group.samples, **arrays))


def _changed(array: np.ndarray[Any, Any], index: int, value: Any) -> np.ndarray[Any, Any]:
    copy = array.copy()
    copy[index] = value
    return copy


GROUP = make_group(rollouts=3, tokens=8, vocab_size=100)
ARRAYS = GROUP.samples
LOGPROBS = ARRAYS.logprobs if ARRAYS.logprobs is not None else np.empty(0, np.float32)
SAMPLED = int(ARRAYS.loss_mask.argmax())
VIOLATIONS: dict[str, tuple[ScoredGroup, str]] = {
    "id of the vocabulary's size": (
        _damaged(GROUP, token_ids=_changed(ARRAYS.token_ids, 9, 100)),
        "token 1 of sample 1",
    ),
    "negative id": (_damaged(GROUP, token_ids=_changed(ARRAYS.token_ids, 3, -1)), "token 3 of sample 0"),
    "ids of another width": (_damaged(GROUP, token_ids=ARRAYS.token_ids.astype(np.int64)), "int64"),
    "ids in two dimensions": (_damaged(GROUP, token_ids=ARRAYS.token_ids.reshape(3, 8)), "shape"),
    "one id too few": (_damaged(GROUP, token_ids=ARRAYS.token_ids[:-1]), "23 token ids"),
    "one logprob too few": (_damaged(GROUP, logprobs=LOGPROBS[:-1]), "23 log-probabilities"),
    "one mask bit too few": (_damaged(GROUP, loss_mask=ARRAYS.loss_mask[:-1]), "loss mask of 23"),
    "nan logprob": (_damaged(GROUP, logprobs=_changed(LOGPROBS, SAMPLED, np.nan)), "nan"),
    "infinite logprob": (_damaged(GROUP, logprobs=_changed(LOGPROBS, SAMPLED, -np.inf)), "-inf"),
    "positive logprob": (_damaged(GROUP, logprobs=_changed(LOGPROBS, SAMPLED, 0.25)), "0.25"),
    "logprob outside the mask": (_damaged(GROUP, logprobs=_changed(LOGPROBS, 0, -0.5)), "token 0 of sample 0"),
    "mask off under a logprob": (
        _damaged(GROUP, loss_mask=_changed(ARRAYS.loss_mask, SAMPLED, False)),
        "outside the loss mask",
    ),
    "offsets from 1": (_damaged(GROUP, offsets=_changed(ARRAYS.offsets, 0, 1)), "offsets run from 1"),
    "offsets to T - 1": (_damaged(GROUP, offsets=_changed(ARRAYS.offsets, 3, 23)), "to 23"),
    "offsets backwards": (_damaged(GROUP, offsets=np.array([0, 16, 8, 24], np.int64)), "backwards"),
    "an offset too few": (_damaged(GROUP, offsets=np.array([0, 8, 24], np.int64)), "need 4 offsets"),
    "a sample without a rollout": (_damaged(GROUP, rollouts=_changed(ARRAYS.rollouts, 2, 3)), "outside 0..2"),
    "a negative rollout index": (_damaged(GROUP, rollouts=_changed(ARRAYS.rollouts, 0, -1)), "outside 0..2"),
    "a rollout index too few": (_damaged(GROUP, rollouts=ARRAYS.rollouts[:-1]), "2 rollout"),
    "a negative branch": (_damaged(GROUP, branches=_changed(ARRAYS.branches, 0, -1)), "branch"),
    "nan advantage": (_damaged(GROUP, advantages=_changed(ARRAYS.advantages, 0, np.nan)), "advantage"),
    "RL without logprobs": (_damaged(GROUP, logprobs=None), "without log-probabilities"),
    "SFT with logprobs": (replace(GROUP, mode="sft"), "mode sft with"),
    "evaluation with samples": (replace(GROUP, mode="eval", samples=replace(ARRAYS, logprobs=None)), "3 samples"),
    "rollouts in another order": (replace(GROUP, rollouts=GROUP.rollouts[::-1]), "carries the index"),
    "nan reward": (
        replace(GROUP, rollouts=[replace(GROUP.rollouts[0], reward=float("nan")), *GROUP.rollouts[1:]]),
        "reward",
    ),
    "infinite metric": (
        replace(GROUP, rollouts=[replace(GROUP.rollouts[0], metrics={"m": float("inf")}), *GROUP.rollouts[1:]]),
        "metric",
    ),
    "another group's id": (replace(GROUP, group_id="run-000000001"), "id"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_an_array_that_does_not_fit_is_refused_and_named(name: str) -> None:
    """Each violation is an AlignmentError where the group is checked, and nothing of it is encoded."""
    group, place = VIOLATIONS[name]
    with pytest.raises(AlignmentError, match=place):
        check_group(group)
    with pytest.raises(AlignmentError):
        encode_group(group)


def test_alignment_is_checked_again_when_a_group_is_read() -> None:
    """Damage on the way is found: a token id outside the vocabulary inside an otherwise valid entry."""
    entry = encode_group(GROUP)
    body = msgpack.unpackb(entry["group"])
    ids = np.frombuffer(body["token_ids"], "<i4")
    entry["group"] = msgpack.packb({**body, "token_ids": _changed(ids, 0, 100).tobytes()})
    with pytest.raises(AlignmentError, match="token 0 of sample 0"):
        decode_group(entry)
    assert decode_group(entry, check=False).samples.token_ids[0] == 100


def test_a_sampled_token_may_have_the_log_probability_zero() -> None:
    """Certain tokens and rounding up to the slack are legal."""
    for value in (0.0, 1e-4, -0.0):
        check_group(_damaged(GROUP, logprobs=_changed(LOGPROBS, SAMPLED, value)))


def _with_schema(text: str, **more: Any) -> dict[Any, Any]:
    entry = dict(encode_group(GROUP))
    body = msgpack.unpackb(entry["group"])
    return {**entry, "schema": text, "group": msgpack.packb({**body, "schema": text, **more}), "news": "x"}


def test_a_newer_minor_is_read() -> None:
    """P25: Keys this version does not know are ignored, in the entry, in the map and in the head."""
    body = msgpack.unpackb(encode_group(GROUP)["group"])
    head = msgpack.unpackb(body["head"])
    head["novelty"], head["rollouts"]["novelty"] = [[1], {"a": None}], [1, 2, 3]
    read = decode_group(_with_schema("1.7", novelty=b"new", head=msgpack.packb(head)))
    assert read.schema == (1, 7)
    assert_same_group(replace(read, schema=(1, 0)), GROUP)


@pytest.mark.parametrize("text", ["2.0", "2.3", "0.9"])
def test_another_major_is_refused_with_the_mend(text: str) -> None:
    """P25: The message names both versions and the command; nothing of the body is looked at."""
    with pytest.raises(SchemaVersionError, match=rf"schema {text}.*reads 1\.x.*pip install --upgrade distaff"):
        decode_group({**_with_schema(text), "group": b"not even msgpack"})


@pytest.mark.parametrize("text", ["", "1", "one.two", "1.0.0", "-1.0", "9" * 5000 + ".0"])
def test_a_schema_that_is_none_is_refused(text: str) -> None:
    """Anything but <major>.<minor> is a WireError."""
    with pytest.raises(WireError, match="schema"):
        decode_group(_with_schema(text))


def test_a_group_beyond_the_limit_is_refused_on_both_sides() -> None:
    """The writer names the settings, the reader the argument; compressed groups count by what they hold."""
    with pytest.raises(GroupTooLarge, match=r"wire\.max_group_bytes"):
        encode_group(GROUP, max_bytes=1000)
    for compression in ("none", "zstd"):
        with pytest.raises(GroupTooLarge, match="max_bytes"):
            decode_group(encode_group(make_group(tokens=4096), compression=compression), max_bytes=20_000)


def test_without_zstandard_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions name the extra; uncompressed groups need nothing."""
    entry = encode_group(GROUP, compression="zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CodecMissing, match=r"pip install 'distaff\[zstd\]'"):
        decode_group(entry)
    with pytest.raises(CodecMissing, match=r"pip install 'distaff\[zstd\]'"):
        encode_group(GROUP, compression="zstd")
    assert_same_group(decode_group(encode_group(GROUP)), GROUP)


@pytest.mark.parametrize(
    "change",
    [
        {"task": {"when": object()}},
        {"task": {"n": 10**5000}},
        {"execution": 7},
        {"attempt": 1.5},
        {"seed": 2**70},
        {"model": None},
    ],
)
def test_a_value_without_a_place_in_the_format_is_refused_when_written(change: dict[str, Any]) -> None:
    """What could not be read again is never put on the stream."""
    with pytest.raises(WireError):
        encode_group(replace(GROUP, **change))


def test_a_message_that_is_not_plain_data_is_refused_when_written() -> None:
    """The message names the part."""
    rollout = replace(GROUP.rollouts[0], messages=[{"role": "user", "content": {1, 2}}])
    with pytest.raises(WireError, match="messages of group run-000000000 is not JSON"):
        encode_group(replace(GROUP, rollouts=[rollout, *GROUP.rollouts[1:]]))
