"""Hypothesis strategies of everything that is encoded: JSON of any kind, items, dead letters, groups, run configurations."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import annotated_types
import numpy as np
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from distaff.config import RunConfig
from distaff.keys import RUN_NAME, job_id
from distaff.types import (
    DeadLetter,
    Mode,
    Rollout,
    RolloutFailure,
    RolloutItem,
    SampleArrays,
    ScoredGroup,
    TrainingSample,
)
from tests.group_support import make_group

# Text of any kind; a high surrogate directly before a low one is left out, because JSON knows that pair as one character.
TEXT = st.text(st.characters(exclude_categories=[]), max_size=20).filter(
    lambda text: text == text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
)
UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
INT64 = st.integers(-(2**63), 2**63 - 1)
HUGE = st.integers() | st.integers(0, 900).map(lambda digits: -(10**digits) - 7)


def json_of(text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """JSON values with text of that kind."""
    return st.recursive(
        st.none() | st.booleans() | HUGE | NUMBER | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
        max_leaves=8,
    )


OBJECT = st.dictionaries(TEXT, json_of(TEXT), max_size=4)
ROW = st.dictionaries(UNICODE, json_of(UNICODE), max_size=4)
PLAIN = make_group(rollouts=2, failed=1, tokens=4)


@st.composite
def items(draw: st.DrawFn) -> RolloutItem:
    return RolloutItem(
        run=draw(st.from_regex(RUN_NAME, fullmatch=True)),
        seq=draw(st.integers(0, 2**32 - 1)),
        key=draw(UNICODE),
        epoch=draw(st.integers(0, 2**31)),
        split=draw(st.sampled_from(["train", "eval"])),
        task=draw(ROW),
        seed=draw(INT64),
        priority=draw(st.integers(-9, 9)),
        trace=draw(st.dictionaries(UNICODE, UNICODE, max_size=2)),
    )


@st.composite
def letters(draw: st.DrawFn) -> DeadLetter:
    return DeadLetter(
        item=draw(items()),
        kind=draw(st.sampled_from(["environment_error", "dropped", "lost", "rejected"])),
        boundary=draw(TEXT),
        message=draw(TEXT),
        attempts=draw(st.integers(0, 99)),
        first=draw(st.floats(0, 1e10)),
        last=draw(st.floats(0, 1e10)),
        worker=draw(TEXT),
    )


@st.composite
def rollouts(draw: st.DrawFn, index: int) -> Rollout:
    failure = RolloutFailure(
        kind="engine_error", boundary=draw(TEXT), message=draw(TEXT), retryable=draw(st.booleans())
    )
    changed: Rollout = replace(
        draw(st.sampled_from(PLAIN.rollouts)),
        index=index,
        reward=draw(st.none() | NUMBER),
        error=draw(st.none() | st.just(failure)),
        metrics=draw(st.dictionaries(TEXT, NUMBER, max_size=4)),
        timings=draw(st.dictionaries(TEXT, NUMBER, max_size=2)),
        turns=draw(st.integers(0, 100)),
        prompt_tokens=draw(INT64),
        truncated=draw(st.booleans()),
        stop_condition=draw(TEXT),
        messages=draw(st.lists(OBJECT, max_size=3)),
        tools=draw(st.sampled_from([[], [{"a": 1}], [{"b": [None]}, {}]])),
        answer=draw(st.none() | TEXT),
        seat=draw(TEXT),
    )
    return changed


@st.composite
def samples(draw: st.DrawFn, *, rollout_count: int, vocab_size: int, with_logprobs: bool) -> TrainingSample:
    length = draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = rng.random(length) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    logprobs = -rng.exponential(draw(st.sampled_from([0.0, 1e-6, 1.0, 1e30])), length).astype(np.float32)
    return TrainingSample(
        token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, np.float32(0)) if with_logprobs else None,
        advantage=draw(st.floats(width=32, allow_nan=False, allow_infinity=False)),
        rollout=draw(st.integers(0, rollout_count - 1)),
        branch=draw(st.integers(0, 2**31 - 1)),
    )


@st.composite
def groups(draw: st.DrawFn) -> ScoredGroup:
    """Of every mode; without rollouts, without samples, with many branches."""
    mode: Mode = draw(st.sampled_from(["rl", "sft", "eval"]))
    count = draw(st.integers(0, 4))
    vocab_size = draw(st.sampled_from([1, 2, 32_000, 2**31 - 1]))
    one = samples(rollout_count=count, vocab_size=vocab_size, with_logprobs=mode == "rl")
    some = draw(st.lists(one, max_size=draw(st.sampled_from([2, 40])))) if mode != "eval" and count else []
    seq = draw(st.integers(0, 2**32 - 1))
    run = draw(st.from_regex(RUN_NAME, fullmatch=True))
    group: ScoredGroup = replace(
        PLAIN,
        run=run,
        seq=seq,
        group_id=job_id(run, seq),
        mode=mode,
        vocab_size=vocab_size,
        seed=draw(INT64),
        task=draw(OBJECT),
        temperature=draw(st.floats(0, 10)),
        worker=draw(TEXT),
        rollouts=[draw(rollouts(index)) for index in range(count)],
        samples=SampleArrays.concatenate(some, with_logprobs=mode == "rl"),
    )
    return group


SETTINGS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | NUMBER | UNICODE
_SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "run.name": st.from_regex(RUN_NAME, fullmatch=True),
    "run.pool": st.from_regex(RUN_NAME, fullmatch=True),
    "engine.base_urls": st.lists(st.sampled_from(["http://a", "https://b:1/v1/", "http://[::1]:8"]), min_size=1),
    "engine.api_key_var": st.sampled_from(["", "MY_API_KEY", "X_TOKEN"]),
    "environment.args": st.dictionaries(UNICODE, st.recursive(SETTINGS, st.lists, max_leaves=3), max_size=3),
    "sampling.extra": st.dictionaries(UNICODE, st.recursive(SETTINGS, st.lists, max_leaves=3), max_size=3),
    "rollouts.min_rollouts": st.just(0),
}


def _field(path: str, info: FieldInfo) -> st.SearchStrategy[Any]:
    if path in _SPECIAL:
        return _SPECIAL[path]
    if info.annotation is str:
        return UNICODE
    bounds = [bound for bound in info.metadata if isinstance(bound, annotated_types.BaseMetadata)]
    kind: Any = info.annotation
    bounded: Any = Annotated[(kind, *bounds)] if bounds else kind
    found: st.SearchStrategy[Any] = st.from_type(bounded)
    return found.filter(lambda value: not isinstance(value, float) or value - value == 0)


def _section(name: str, kind: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {field: _field(f"{name}.{field}", info) for field, info in kind.model_fields.items()}
    return st.fixed_dictionaries({}, optional=fields)


def configs() -> st.SearchStrategy[dict[str, Any]]:
    """Valid sections of a RunConfig, as the producer's settings give them."""
    sections: dict[str, Any] = {name: info.annotation for name, info in RunConfig.model_fields.items()}
    return st.fixed_dictionaries({name: _section(name, kind) for name, kind in sections.items()})
