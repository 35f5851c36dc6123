"""A large answer parsed in slices is the answer parsed at once, whatever is in it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distaff_worker.engines import gentle
from distaff_worker.engines.gentle import LongList, parse_gently

TRAPS = ["plain", "},{", "}, {", '"},{"', '"content": [{', "}]", "\\", "é\u2028", '{"a": [', "]}"]


def holder(document: Any) -> dict[str, Any]:
    found: dict[str, Any] = document["choices"][0]["logprobs"]
    return found


PLACE = LongList(holder=holder)
LISTS = LongList(holder=lambda document: document["meta_info"], name="output_token_logprobs", brackets="[]")


def answer(entries: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "id": "x",
        **more,
        "choices": [{"token_ids": [1, 2], "logprobs": {"content": entries}, "finish_reason": "stop"}],
    }


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gentle, "SLICE_BYTES", 100)


entry = st.fixed_dictionaries(
    {"token": st.sampled_from(TRAPS) | st.text(max_size=8), "logprob": st.floats(-50, 0)},
    optional={"top_logprobs": st.lists(st.fixed_dictionaries({"token": st.sampled_from(TRAPS)}), max_size=3)},
)


@settings(max_examples=100, deadline=None)
@given(entries=st.lists(entry, max_size=30), compact=st.booleans(), first=st.lists(entry, max_size=5))
def test_slices_give_what_the_whole_gives(entries: list[Any], compact: bool, first: list[Any]) -> None:
    """Texts full of brackets, quotes and separators; another list of the same name before the real one."""
    document = answer(entries, content=first)
    body = json.dumps(document, separators=(",", ":") if compact else None).encode()
    assert parse_gently(body, PLACE) == json.loads(body)


@settings(max_examples=100, deadline=None)
@given(
    entries=st.lists(st.tuples(st.floats(-50, 0), st.integers(0, 9), st.none() | st.sampled_from(TRAPS)), max_size=30),
    compact=st.booleans(),
)
def test_slices_of_a_list_of_lists_give_what_the_whole_gives(entries: list[Any], compact: bool) -> None:
    """SGLang's [log-probability, id, text] entries, with another list of the same name before them."""
    document = {"output_token_logprobs": [[1]], "meta_info": {"output_token_logprobs": entries, "a": [[2], [3]]}}
    body = json.dumps(document, separators=(",", ":") if compact else None).encode()
    assert parse_gently(body, LISTS) == json.loads(body)
    del document["output_token_logprobs"]
    body = json.dumps(document).encode()
    assert parse_gently(body, LISTS) == json.loads(body)


def test_an_ordinary_answer_is_really_cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slice is small: otherwise nothing is won."""
    sizes: list[int] = []
    whole = gentle._whole

    def measured(body: bytes) -> Any:
        sizes.append(len(body))
        return whole(body)

    monkeypatch.setattr(gentle, "_whole", measured)
    monkeypatch.setattr(gentle, "SLICE_BYTES", 4096)
    document = answer([{"token": f"token_id:{n}", "token_id": n, "logprob": -0.25} for n in range(20_000)])
    for separators in ((",", ":"), (", ", ": ")):
        sizes.clear()
        body = json.dumps(document, separators=separators).encode()
        assert parse_gently(body, PLACE) == document
        assert max(sizes) < 5000
        assert len(sizes) > 100


def test_what_is_not_json_is_refused_all_the_same() -> None:
    """P12: Cut, flipped and lengthened bodies: the same verdict as that of one call of the parser."""
    rng = random.Random(7)
    body = json.dumps(answer([{"token": str(n), "logprob": -n / 7} for n in range(200)])).encode()
    for _ in range(1000):
        at = rng.randrange(len(body))
        damaged = [body[:at], body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :], body + b"}"][rng.randrange(3)]
        try:
            expected = gentle._whole(damaged)
        except ValueError:
            with pytest.raises(ValueError, match=r"."):
                parse_gently(damaged, PLACE)
        else:
            assert parse_gently(damaged, PLACE) == expected


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(constant: bytes) -> None:
    """Inside a slice as well."""
    body = json.dumps(answer([{"logprob": -1.0}] * 50)).encode().replace(b"-1.0", constant, 1)
    with pytest.raises(ValueError, match=r"."):
        parse_gently(body, PLACE)
