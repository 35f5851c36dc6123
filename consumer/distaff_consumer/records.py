"""A scored group as a JSON record of the archive, and back.

Invariant: nothing is lost. `record_to_group(group_to_record(group))` equals the group, float32 values bit for bit.
`docs/archive.md` describes the record for readers that do not use this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from distaff.types import (
    JSON,
    BoolArray,
    EnvironmentRef,
    FloatArray,
    GroupStatistics,
    PolicySpan,
    Rollout,
    RolloutFailure,
    SampleArrays,
    ScoredGroup,
    TrainingSample,
)
from distaff_consumer.errors import ArchiveError

T = TypeVar("T", EnvironmentRef, PolicySpan, GroupStatistics, Rollout, RolloutFailure)


def group_to_record(group: ScoredGroup) -> dict[str, JSON]:
    """The record of a group; `group_id` comes first."""
    record: dict[str, JSON] = {"group_id": group.group_id}
    for field in fields(ScoredGroup):
        record[field.name] = _PLAIN.get(field.name, _same)(getattr(group, field.name))
    return record


def record_to_group(record: Mapping[str, JSON]) -> ScoredGroup:
    """The group of a record. Keys it does not know are ignored; raises ArchiveError where one is missing or ill-formed."""
    try:
        return ScoredGroup(
            **{
                **{field.name: record[field.name] for field in fields(ScoredGroup)},
                "schema": (int(record["schema"][0]), int(record["schema"][1])),
                "environment": _known(EnvironmentRef, record["environment"]),
                "policy": _known(PolicySpan, record["policy"]),
                "statistics": _known(GroupStatistics, record["statistics"]),
                "rollouts": [_rollout(rollout) for rollout in record["rollouts"]],
                "samples": SampleArrays.concatenate(
                    [_sample(sample) for sample in record["samples"]], with_logprobs=_with_logprobs(record)
                ),
            }
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ArchiveError(
            f"the record of group {record.get('group_id', '?')!r} is not one of this version ({type(error).__name__}: {error})"
        ) from error


def trained_spans(mask: BoolArray) -> list[list[int]]:
    """The runs of True in a mask as [start, end) pairs, in order."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    pairs: list[list[int]] = edges.reshape(-1, 2).tolist()
    return pairs


def shortest_floats(values: FloatArray) -> list[float]:
    """Floats whose shortest decimal form, read again and rounded to float32, is exactly the value."""
    short = [0.0] * len(values)
    for i in np.flatnonzero(values.view(np.uint32)).tolist():  # by its bits, so that -0.0 is not 0.0
        short[i] = float(str(values[i]))
    back = np.array(short, np.float64).astype(np.float32)
    if np.array_equal(back, values):
        return short
    return [a if b == value else float(value) for a, b, value in zip(short, back, values, strict=True)]


def _same(value: JSON) -> JSON:
    return value


def _samples(samples: SampleArrays) -> list[JSON]:
    advantages = shortest_floats(samples.advantages)
    return [
        {
            "rollout": sample.rollout,
            "branch": sample.branch,
            "advantage": advantage,
            "token_ids": sample.token_ids.tolist(),
            "trained": trained_spans(sample.loss_mask),
            "logprobs": None if sample.logprobs is None else shortest_floats(sample.logprobs),
        }
        for sample, advantage in zip(samples, advantages, strict=True)
    ]


def _sample(record: Mapping[str, JSON]) -> TrainingSample:
    mask = np.zeros(len(record["token_ids"]), np.bool_)
    for start, end in record["trained"]:
        mask[start:end] = True
    logprobs = record["logprobs"]
    return TrainingSample(
        token_ids=np.array(record["token_ids"], np.int32),
        loss_mask=mask,
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        advantage=record["advantage"],
        rollout=record["rollout"],
        branch=record["branch"],
    )


def _with_logprobs(record: Mapping[str, JSON]) -> bool:
    """A group without samples has an empty array of log-probabilities in RL mode, and none in the others."""
    samples = record["samples"]
    return samples[0]["logprobs"] is not None if samples else record["mode"] == "rl"


def _rollout(record: Mapping[str, JSON]) -> Rollout:
    error = record["error"]
    return _known(Rollout, {**record, "error": None if error is None else _known(RolloutFailure, error)})


def _plain_rollout(rollout: Rollout) -> dict[str, JSON]:
    return {**_flat(rollout), "error": None if rollout.error is None else _flat(rollout.error)}


def _flat(value: Any) -> dict[str, JSON]:
    """The fields of a dataclass, not copied."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _known(cls: type[T], record: Mapping[str, JSON]) -> T:
    """An instance of a dataclass from the keys it has fields for, so that records of newer minor versions can be read."""
    return cls(**{field.name: record[field.name] for field in fields(cls) if field.name in record})


_PLAIN: dict[str, Any] = {
    "schema": list,
    "environment": _flat,
    "policy": _flat,
    "statistics": _flat,
    "rollouts": lambda rollouts: [_plain_rollout(rollout) for rollout in rollouts],
    "samples": _samples,
}
