"""What a token engine's module provides: how a request is written and an answer read on one route.

Invariant: a wire holds no state; what it reads goes through `answers.generation`. Never sends anything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import aiohttp

from distaff.types import JSON
from distaff_worker.engines.gentle import LARGE_BYTES, LongList, parse_gently
from distaff_worker.engines.http import HttpPool, check_density, not_json, parse_json, read_parts
from distaff_worker.engines.protocol import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request for tokens."""

    model: str
    """"" for whatever the server serves."""
    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: Mapping[str, JSON]
    """temperature, top_p, seed and what the run adds, over the engine's neutral settings."""
    attempt: int = 0
    """1, 2, ... when an answer is asked for again; a seed is to be changed by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What reading an answer needs."""

    pool: HttpPool
    vocab_size: int | None
    where: str
    """Server and route, for error texts."""


class Wire(ABC):
    """One route of one kind of server."""

    path: ClassVar[str]

    @abstractmethod
    def payload(self, ask: Ask) -> dict[str, JSON]:
        """The body. Raises ConfigurationError for sampling that the route cannot do."""

    @abstractmethod
    async def read(self, response: aiohttp.ClientResponse, ask: Ask, reading: Reading) -> Generation:
        """The checked answer. Raises EngineAnswerError."""


class JsonWire(Wire):
    """A route that answers with one JSON document."""

    long_list: ClassVar[LongList | None] = None
    """Where the answer's long list is, which is parsed in slices."""

    @abstractmethod
    def parse(self, document: JSON, ask: Ask, reading: Reading) -> Generation:
        """The checked answer. Raises EngineAnswerError."""

    async def read(self, response: aiohttp.ClientResponse, ask: Ask, reading: Reading) -> Generation:
        parts = await read_parts(response, reading.pool.bulk)
        if sum(map(len, parts)) >= LARGE_BYTES:
            return await reading.pool.off_loop(lambda: self.parse(self._document(parts, reading.where), ask, reading))
        await reading.pool.turnstile.turn()
        return self.parse(parse_json(b"".join(parts), where=reading.where), ask, reading)

    def _document(self, parts: list[bytes], where: str) -> JSON:
        body = b"".join(parts)
        if self.long_list is None:
            return parse_json(body, where=where)
        check_density(body, where=where)
        try:
            return parse_gently(body, self.long_list)
        except ValueError as error:
            raise not_json(error, where=where) from None
