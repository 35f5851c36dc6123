"""The head of an encoded group: everything but the token arrays and the conversations, as nested msgpack.

Invariant: what is written passes the same type check as what is read, so a head that was written can be read. Rollouts
are columns (one list per field, one per metric). Unknown keys are ignored; the size is bounded on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import msgpack

from distaff.errors import GroupTooLarge, WireError
from distaff.types import (
    EnvironmentRef,
    GroupStatistics,
    Message,
    PolicySpan,
    Rollout,
    RolloutFailure,
    ScoredGroup,
    Tool,
)

MAX_HEAD_BYTES = 1 << 20
MAX_ROLLOUTS = 4096
_MAX_KEYS = 1024
"""Of one map: names of metrics in a group."""

Kinds: TypeAlias = frozenset[type]
_STR, _INT, _FLOAT, _BOOL, _MAP = (frozenset({kind}) for kind in (str, int, float, bool, dict))
_NONE = frozenset({type(None)})
_NUMBER = _FLOAT | _NONE

_GROUP: dict[str, Kinds] = {
    "run": _STR,
    "seq": _INT,
    "group_id": _STR,
    "key": _STR,
    "mode": _STR,
    "model": _STR,
    "tokenizer": _STR,
    "vocab_size": _INT,
    "temperature": _FLOAT,
    "epoch": _INT,
    "seed": _INT,
    "verdict": _STR,
    "execution": _STR,
    "worker": _STR,
    "attempt": _INT,
    "created": _FLOAT,
}
_ENVIRONMENT: dict[str, Kinds] = {"id": _STR, "version": _STR, "api": _STR, "split": _STR, "args_hash": _STR}
_POLICY: dict[str, Kinds] = {"start": _INT, "end": _INT}
_STATISTICS: dict[str, Kinds] = {
    "rollouts": _INT,
    "scored": _INT,
    "reward_mean": _FLOAT,
    "reward_std": _FLOAT,
    "reward_min": _FLOAT,
    "reward_max": _FLOAT,
    "tokens": _INT,
    "trained_tokens": _INT,
    "seconds": _FLOAT,
}
_ERROR: dict[str, Kinds] = {"kind": _STR, "boundary": _STR, "message": _STR, "retryable": _BOOL}
_ROLLOUT: dict[str, Kinds] = {
    "index": _INT,
    "verdict": _STR,
    "reward": _FLOAT | _NONE,
    "turns": _INT,
    "finish_reason": _STR,
    "stop_condition": _STR,
    "truncated": _BOOL,
    "error": _MAP | _NONE,
    "prompt_tokens": _INT,
    "completion_tokens": _INT,
    "answer": _STR | _NONE,
    "seat": _STR,
}
_NUMBERS = ("metrics", "timings")
_CLOSED = {
    "mode": frozenset({"rl", "sft", "eval"}),
    "api": frozenset({"classic", "v1"}),
    "split": frozenset({"train", "eval"}),
}
_EMPTY: dict[str, list[Any]] = {name: [] for name in _ROLLOUT}
_values_of = attrgetter(*_ROLLOUT)


def pack_head(group: ScoredGroup, tools: Sequence[int]) -> bytes:
    """The head of `group`; tools[i] is the place of rollout i's tools in the table that travels beside it.

    Raises WireError for a value of a wrong type, GroupTooLarge beyond MAX_HEAD_BYTES or MAX_ROLLOUTS.
    """
    if len(group.rollouts) > MAX_ROLLOUTS:
        raise GroupTooLarge(
            f"group {group.group_id} has {len(group.rollouts)} rollouts; at most {MAX_ROLLOUTS} fit in one"
        )
    try:
        head = _head(group, tools)
        _check_head(head)
        packed: bytes = msgpack.packb(head, unicode_errors="surrogatepass")
    except (TypeError, ValueError, OverflowError) as error:  # not a number where one belongs; an integer beyond 64 bits
        raise WireError(f"group {group.group_id} has a value without a place in the wire format: {error}") from None
    if len(packed) > MAX_HEAD_BYTES:
        raise GroupTooLarge(
            f"group {group.group_id}: its metrics, answers and error messages take {len(packed)} bytes, "
            f"the limit is {MAX_HEAD_BYTES}; shorten them, or make the group smaller"
        )
    return packed


def unpack_head(data: bytes) -> dict[str, Any]:
    """The checked head as nested dicts. Raises WireError; memory is bounded by MAX_HEAD_BYTES, not by what `data` claims."""
    if len(data) > MAX_HEAD_BYTES:
        raise GroupTooLarge(f"the head of a group has {len(data)} bytes, the limit is {MAX_HEAD_BYTES}")
    head = msgpack.unpackb(
        data, unicode_errors="surrogatepass", max_array_len=MAX_ROLLOUTS, max_map_len=_MAX_KEYS, max_ext_len=0
    )
    if type(head) is not dict:
        raise WireError("the head of a group is not a map")
    _check_head(head)
    return head


def environment_of(head: Mapping[str, Any]) -> EnvironmentRef:
    return EnvironmentRef(**{name: head["environment"][name] for name in _ENVIRONMENT})


def policy_of(head: Mapping[str, Any]) -> PolicySpan:
    return PolicySpan(start=head["policy"]["start"], end=head["policy"]["end"])


def statistics_of(head: Mapping[str, Any]) -> GroupStatistics:
    return GroupStatistics(**{name: head["statistics"][name] for name in _STATISTICS})


def rollouts_of(
    head: Mapping[str, Any], messages: Sequence[list[Message]], tools: Sequence[list[Tool]]
) -> list[Rollout]:
    """The rollouts; messages[i] belongs to rollout i, `tools` is the table of distinct tool lists (empty: none)."""
    columns = head["rollouts"]
    count = len(columns["index"])
    rows = zip(
        *(columns[name] for name in _ROLLOUT),
        columns["tools"],
        *(_number_rows(columns[name], count) for name in _NUMBERS),
        messages,
        strict=True,
    )
    return [
        Rollout(
            index=index,
            verdict=verdict,
            reward=reward,
            metrics=metrics,
            turns=turns,
            finish_reason=finish_reason,
            stop_condition=stop_condition,
            truncated=truncated,
            error=None if error is None else RolloutFailure(**{name: error[name] for name in _ERROR}),
            timings=timings,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            messages=conversation,
            tools=tools[place] if tools else [],
            answer=answer,
            seat=seat,
        )
        for (
            index,
            verdict,
            reward,
            turns,
            finish_reason,
            stop_condition,
            truncated,
            error,
            prompt_tokens,
            completion_tokens,
            answer,
            seat,
            place,
            metrics,
            timings,
            conversation,
        ) in rows
    ]


def _head(group: ScoredGroup, tools: Sequence[int]) -> dict[str, Any]:
    head = _fields(group, _GROUP)
    head["environment"] = _fields(group.environment, _ENVIRONMENT)
    head["policy"] = _fields(group.policy, _POLICY)
    head["statistics"] = _fields(group.statistics, _STATISTICS)
    head["rollouts"] = {**_columns(group.rollouts), "tools": list(tools)}
    return head


def _fields(value: object, kinds: Mapping[str, Kinds]) -> dict[str, Any]:
    return {
        name: float(getattr(value, name)) if kind is _FLOAT else getattr(value, name) for name, kind in kinds.items()
    }


def _columns(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    rows = list(map(_values_of, rollouts))
    columns: dict[str, Any] = dict(zip(_ROLLOUT, map(list, zip(*rows, strict=True)), strict=True)) if rows else _EMPTY
    return {
        **columns,
        "reward": _floats(columns["reward"]),
        "error": [None if error is None else _fields(error, _ERROR) for error in columns["error"]],
        "metrics": _number_columns([rollout.metrics for rollout in rollouts]),
        "timings": _number_columns([rollout.timings for rollout in rollouts]),
    }


def _number_columns(maps: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """One column for each name, nil where a rollout does not have it."""
    names = dict.fromkeys(chain.from_iterable(maps))
    return {name: _floats([values.get(name) for values in maps]) for name in names}


def _number_rows(columns: Mapping[str, list[float | None]], count: int) -> list[dict[str, Any]]:
    if not columns:
        return [{} for _ in range(count)]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if not any(None in column for column in columns.values()):
        return rows
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def _floats(values: Sequence[float | None]) -> list[float | None]:
    if _FLOAT.issuperset(map(type, values)):
        return list(values)
    return [None if value is None else float(value) for value in values]


def _check_head(head: Mapping[str, Any]) -> None:
    _check_fields(head, _GROUP, "group")
    for name, kinds in (("environment", _ENVIRONMENT), ("policy", _POLICY), ("statistics", _STATISTICS)):
        _check_fields(head.get(name), kinds, name)
    for name, allowed in _CLOSED.items():
        value = head[name] if name == "mode" else head["environment"][name]
        if value not in allowed:
            raise WireError(f"{name} of a group is {value!r:.80}, not one of {', '.join(sorted(allowed))}")
    _check_columns(head.get("rollouts"))


def _check_columns(columns: Any) -> None:
    if type(columns) is not dict:
        raise WireError("rollouts of a group is not a map of columns")
    for name, kinds in _ROLLOUT.items():
        column = columns.get(name)
        if type(column) is not list or not kinds.issuperset(map(type, column)):
            raise _wrong_column(name, kinds)
    tools = columns.get("tools")
    if type(tools) is not list or not _INT.issuperset(map(type, tools)):
        raise _wrong_column("tools", _INT)
    if min(columns["tools"], default=0) < 0:
        raise WireError("rollouts.tools of a group has a negative index")
    for error in columns["error"]:
        if error is not None:
            _check_fields(error, _ERROR, "rollouts.error")
    for name in _NUMBERS:
        numbers = columns.get(name)
        if type(numbers) is not dict or not _STR.issuperset(map(type, numbers)):
            raise WireError(f"rollouts.{name} of a group is not a map of columns")
        for column in numbers.values():
            if type(column) is not list or not _NUMBER.issuperset(map(type, column)):
                raise _wrong_column(name, _NUMBER)


def _wrong_column(name: str, kinds: Kinds) -> WireError:
    return WireError(f"rollouts.{name} of a group is not a list of {_names(kinds)}")


def _check_fields(value: Any, kinds: Mapping[str, Kinds], where: str) -> None:
    if type(value) is not dict:
        raise WireError(f"{where} is missing or not a map")
    for name, allowed in kinds.items():
        if type(value.get(name)) not in allowed:
            raise WireError(f"{name} of {where} is missing or not {_names(allowed)}")


def _names(kinds: Kinds) -> str:
    return " or ".join(sorted("nil" if kind is type(None) else kind.__name__ for kind in kinds))
