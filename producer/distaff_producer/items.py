"""Which item is number n of a run, and what is in it.

Invariant: item n is a function of the run's configuration, the dataset and n, so that a producer can stop anywhere and
another go on. Every column of the row is kept. Knows nothing of Redis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from distaff.config import RunConfig
from distaff.environments.protocol import Environment
from distaff.errors import ConfigurationError, EnvironmentFailure
from distaff.types import JSON, RolloutItem, Split
from distaff_producer.permutation import digest, permuted
from distaff_producer.rows import check_row

SEED_BITS = 53
"""The largest whole numbers that every JSON reader keeps exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the dataset an item comes from."""

    epoch: int
    row: int


class Walk:
    """Rows of an infinite taskset, which can only be walked: forward, with the last `keep` rows at hand."""

    def __init__(self, environment: Environment, split: Split, *, keep: int) -> None:
        self._environment = environment
        self._split = split
        self._rows: Iterator[dict[str, JSON]] | None = None
        self._recent: deque[dict[str, JSON]] = deque(maxlen=keep)
        self._at = 0
        self.end: int | None = None
        """Number of rows, once the walk came to an end after all."""

    def row(self, index: int) -> dict[str, JSON] | None:
        """Row `index`, None past the end. Going back by more than `keep` rows begins the walk anew."""
        back = self._at - index
        if 0 < back <= len(self._recent):
            return self._recent[-back]
        if self._rows is None or back > 0:
            self._rows, self._at = self._environment.rows(self._split, index), index
            self._recent.clear()
        while self._at <= index:
            found = next(self._rows, None)
            if found is None:
                self.end = self._at
                return None
            self._recent.append(found)
            self._at += 1
        return self._recent[-1]


class ItemSource:
    """The items of a run by number. Not thread-safe: an infinite taskset is walked with one iterator."""

    def __init__(self, config: RunConfig, environment: Environment) -> None:
        self._config = config
        self._environment = environment
        self._split = config.environment.split
        self._size = environment.size(self._split)
        if self._size == 0:
            raise ConfigurationError(
                f"the {self._split} split of environment {environment.id!r} has no rows. Choose the other split "
                "(environment.split), or check the arguments that select its data (environment.args)"
            )
        self._walk = Walk(environment, self._split, keep=config.producer.batch)

    @property
    def total(self) -> int | None:
        """Items the configuration asks for; None when there is no end, or none is known yet."""
        limit = self._config.producer.limit
        if self._size is None:
            ends = [end for end in (limit or None, self._walk.end) if end is not None]
            return min(ends, default=None)
        return limit or self._size * self._config.producer.epochs

    @property
    def available(self) -> int | None:
        """Items there can be at most: None (no end) unless a taskset that said it was infinite came to its end."""
        return self._walk.end

    def place(self, seq: int) -> Place:
        """Epoch and row of item `seq`; numbers past the last epoch go on into further ones (replacements of dropped groups)."""
        if self._size is None:
            return Place(epoch=0, row=seq)
        epoch, index = divmod(seq, self._size)
        settings = self._config.producer
        row = permuted(index, size=self._size, seed=settings.seed, epoch=epoch) if settings.shuffle else index
        return Place(epoch=epoch, row=row)

    def item(self, seq: int) -> RolloutItem | None:
        """Item `seq`, None past the end of a taskset that has one after all.

        Raises ConfigurationError when the row is not JSON, EnvironmentFailure when the dataset's own code raises.
        """
        place = self.place(seq)
        row = self._row(place)
        if row is None:
            return None
        check_row(row, place=self.describe(seq))
        return RolloutItem(
            run=self._config.run.name,
            seq=seq,
            key=self._key(place),
            epoch=place.epoch,
            split=self._split,
            task=row,
            seed=digest("item", self._config.producer.seed, seq) >> (64 - SEED_BITS),
        )

    def describe(self, seq: int) -> str:
        """Names the row of an item in a message."""
        return f"row {self.place(seq).row} of the {self._split} split of environment {self._environment.id!r}"

    def _key(self, place: Place) -> str:
        environment, args_hash = self._environment, self._config.environment.args_hash()
        return f"{environment.id}@{environment.version}/{args_hash}/{self._split}/{place.row}"

    def _row(self, place: Place) -> dict[str, JSON] | None:
        try:
            if self._size is None:
                return self._walk.row(place.row)
            return self._environment.row(self._split, place.row)
        except Exception as error:
            raise EnvironmentFailure(
                f"row {place.row} of the {self._split} split of environment {self._environment.id!r} cannot be read: "
                f"{type(error).__name__}: {error}"
            ) from error
