"""What the synchronous and the asyncio consumer have in common: the core, its counters, the batch being collected."""

from __future__ import annotations

from typing import Any

from distaff.consuming import ConsumerCore, require
from distaff.consuming_steps import ConsumerOptions, Delivery


class ConsumerBase:
    """What the synchronous and the asyncio consumer have in common."""

    def __init__(self, run: str, client: Any, options: ConsumerOptions) -> None:
        require(
            not client.get_connection_kwargs().get("decode_responses"),
            "the redis client has decode_responses=True; groups are bytes: make one without",
        )
        self._core = ConsumerCore(run, **options)
        self._core.user = f"user {client.get_connection_kwargs().get('username') or 'default'!r}"
        self._partial: list[Delivery] = []

    @property
    def name(self) -> str:
        """Of this member of the consumer group."""
        return self._core.name

    @property
    def parked(self) -> int:
        """Deliveries this consumer gave up: undecodable, or delivered too often."""
        return self._core.parked

    @property
    def duplicates(self) -> int:
        """Entries acknowledged unseen because this consumer had yielded their group before."""
        return self._core.duplicates

    def _take_partial(self) -> list[Delivery]:
        batch, self._partial = self._partial, []
        return batch
