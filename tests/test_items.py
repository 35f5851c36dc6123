"""Which item is number n: the permutation, the walk over finite and infinite sets, and what a row may hold."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distaff.errors import ConfigurationError, EnvironmentFailure
from distaff.types import JSON, Split
from distaff_producer.items import ItemSource
from distaff_producer.permutation import permuted
from distaff_producer.rows import check_row
from tests.producer_support import Numbers, config


@given(size=st.integers(1, 400), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_is_a_permutation_of_the_rows(size: int, seed: int, epoch: int) -> None:
    """Every row comes exactly once in every epoch, whatever the size and the seed."""
    assert sorted(permuted(i, size=size, seed=seed, epoch=epoch) for i in range(size)) == list(range(size))


def test_every_order_of_a_small_set_occurs_about_equally_often() -> None:
    """Over 2,400 seeds each of the 24 orders of four rows appears between 50 and 150 times."""
    orders = Counter(tuple(permuted(i, size=4, seed=seed, epoch=0) for i in range(4)) for seed in range(2400))
    assert len(orders) == 24
    assert 50 < min(orders.values()) <= max(orders.values()) < 150


def test_the_order_never_changes_between_versions() -> None:
    """A run that was begun with an older version goes on in the same order: these numbers are for ever."""
    assert [permuted(i, size=10, seed=7, epoch=0) for i in range(10)] == [7, 2, 5, 3, 0, 1, 9, 6, 4, 8]
    assert permuted(123_456, size=10_000_000, seed=7, epoch=3) == 9_632_725


@pytest.mark.parametrize("index", [-1, 10])
def test_a_place_outside_the_set_is_refused(index: int) -> None:
    """There is no row before the first or after the last place."""
    with pytest.raises(IndexError):
        permuted(index, size=10, seed=0, epoch=0)


def keys_of(source: ItemSource, start: int, stop: int) -> list[tuple[str, int, int]]:
    items = [source.item(seq) for seq in range(start, stop)]
    return [(item.key, item.epoch, item.seed) for item in items if item is not None]


@pytest.mark.parametrize("rows", [7, None])
def test_a_walk_that_begins_at_any_number_gives_the_same_items(rows: int | None) -> None:
    """Resuming at n gives what an uninterrupted walk gives from n on, in finite and infinite sets."""
    whole = keys_of(ItemSource(config(epochs=3), Numbers(rows=rows)), 0, 21)
    assert len(set(whole)) == 21
    for start in range(22):
        assert keys_of(ItemSource(config(epochs=3), Numbers(rows=rows)), start, 21) == whole[start:]


def test_epochs_have_orders_of_their_own_and_the_seed_changes_them() -> None:
    """Order depends on (seed, epoch); without shuffling it is the dataset's."""
    first = ItemSource(config(epochs=2), Numbers(rows=50))
    assert [first.place(n).row for n in range(50)] != [first.place(n).row for n in range(50, 100)]
    other = ItemSource(config(epochs=2, seed=1), Numbers(rows=50))
    assert [first.place(n).row for n in range(50)] != [other.place(n).row for n in range(50)]
    plain = ItemSource(config(epochs=2, shuffle=False), Numbers(rows=5))
    assert [(p.epoch, p.row) for p in map(plain.place, range(7))] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 0),
        (1, 1),
    ]


def test_an_item_names_its_row_and_keeps_every_column() -> None:
    """Key, seed and task of an item are those of its row."""
    source = ItemSource(config(shuffle=False), Numbers(extra={"unused": [1.5]}))
    item = source.item(3)
    assert item is not None
    assert item.task == {"question": "3?", "answer": 3, "info": {"deep": [1, None, "é"]}, "unused": [1.5]}
    assert item.key == f"numbers@1.2/{config().environment.args_hash()}/train/3"
    assert (item.run, item.seq, item.epoch, item.split, item.priority) == ("r", 3, 0, "train", 0)
    assert 0 <= item.seed < 2**53


@pytest.mark.parametrize(
    ("rows", "producer", "total"),
    [
        (10, {}, 10),
        (10, {"epochs": 3}, 30),
        (10, {"epochs": 3, "limit": 12}, 12),
        (10, {"limit": 25}, 25),
        (None, {}, None),
        (None, {"limit": 4}, 4),
    ],
)
def test_the_number_of_items_follows_from_epochs_and_limit(
    rows: int | None, producer: dict[str, Any], total: int | None
) -> None:
    """A limit wins over epochs times rows; an infinite set without a limit has no number."""
    assert ItemSource(config(**producer), Numbers(rows=rows)).total == total


def test_an_empty_split_is_refused_with_the_mend() -> None:
    """Nothing to play is a wrong configuration, not a run that is done."""
    with pytest.raises(ConfigurationError, match="has no rows"):
        ItemSource(config(), Numbers(rows=0))


def test_an_infinite_set_is_walked_once_and_steps_back_within_a_batch() -> None:
    """Going forward, and going back to a batch that was refused, does not begin the walk anew."""
    environment = Numbers(rows=None)
    source = ItemSource(config(batch=4), environment)
    for seq in [0, 1, 2, 3, 0, 1, 2, 3, 4, 9, 6]:
        item = source.item(seq)
        assert item is not None
        assert item.task["answer"] == seq
    assert environment.walks == [0]
    again = source.item(2)
    assert again is not None
    assert again.task["answer"] == 2
    assert environment.walks == [0, 2]


def test_a_set_that_was_not_infinite_ends_where_it_ends() -> None:
    """The end of the walk becomes the number of items, whatever the limit was."""
    source = ItemSource(config(limit=9), Numbers(rows=None, ends_at=3))
    assert source.total == 9
    assert source.item(2) is not None
    assert source.item(3) is None
    assert (source.total, source.available) == (3, 3)


def nested(depth: int) -> Any:
    """Lists and objects in turn, so many inside one another."""
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"a": datetime.date(2026, 1, 2)}, "column 'a' holds a datetime.date, which is not JSON"),
        ({"a": {"b": [0, b"x"]}}, r"column 'a\.b\[1\]' holds a builtins.bytes"),
        ({"a": [math.nan]}, r"column 'a\[0\]' holds nan"),
        ({"a": math.inf}, "column 'a' holds inf"),
        ({"a": {1: 2}}, "column 'a' holds an object with the key 1"),
        ({"a": (1, 2)}, "column 'a' holds a builtins.tuple"),
        ({"a": "x\ud800"}, "column 'a' holds text that is not Unicode .* character 1"),
        ({3: "x"}, "the column name 3 is not a string"),
        ({"a": {"x\ud800": 1}}, "column 'a' holds text that is not Unicode"),
        ({"x\ud800": 1}, "column .* holds text that is not Unicode"),
        ({"a": [10**5000]}, r"column 'a\[0\]' holds an integer of 16610 bits"),
        ({"a": nested(101)}, "column 'a' is nested more than 100 deep"),
        ({"a": nested(100_000)}, "column 'a' is nested more than 100 deep"),
    ],
)
def test_a_row_that_is_not_json_is_refused_by_column(row: dict[Any, Any], message: str) -> None:
    """What JSON would refuse or silently change is an error that names place and column."""
    with pytest.raises(ConfigurationError, match=rf"^row 5: {message}"):
        check_row(row, place="row 5")


def test_json_rows_pass() -> None:
    """Every kind of JSON value is accepted as it is."""
    check_row({"a": None, "b": True, "c": 2**80, "d": -1.5, "e": "é\u2028", "f": [{}, []], "g": {"": ""}}, place="row")
    check_row({"a": nested(100)}, place="row")


def test_a_dataset_that_raises_is_named() -> None:
    """An exception of the dataset's own code says which row."""

    class Broken(Numbers):
        def row(self, split: Split, index: int) -> dict[str, JSON]:
            raise KeyError("no such file")

    with pytest.raises(EnvironmentFailure, match="of environment 'numbers' cannot be read: KeyError: 'no such file'"):
        ItemSource(config(), Broken()).item(0)
