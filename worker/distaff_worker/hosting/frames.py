"""What worker and host process say to each other: JSON, each frame with its length in front.

Invariant: values cross as JSON and nothing else, so neither side can make the other run anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from distaff import errors
from distaff.environments.protocol import ChatTurn, Play, Score
from distaff.errors import DistaffError
from distaff.types import JSON, RolloutFailure

Frame = dict[str, Any]
_LENGTH_BYTES = 4
LIMIT_BYTES = 1 << 30


def encode(frame: Mapping[str, Any]) -> bytes:
    """Raises TypeError or ValueError for what is not JSON."""
    body = json.dumps(frame, separators=(",", ":")).encode()
    if len(body) > LIMIT_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is larger than {LIMIT_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None when the other side is gone, also in the middle of one."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        frame: Frame = json.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return frame


def flat(value: Any) -> dict[str, JSON]:
    """The fields of a dataclass, one level deep."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def turn_of(data: Mapping[str, Any]) -> ChatTurn:
    return ChatTurn(**data)


def play_to_json(play: Play) -> dict[str, JSON]:
    return {**flat(play), "error": play.error and flat(play.error)}


def play_of(data: Mapping[str, Any]) -> Play:
    return Play(**{**data, "error": _failure(data["error"])})


def scores_to_json(scores: Sequence[Sequence[Score]]) -> JSON:
    return [[{**flat(score), "error": score.error and flat(score.error)} for score in seats] for seats in scores]


def scores_of(data: Any) -> list[list[Score]]:
    return [[Score(**{**score, "error": _failure(score["error"])}) for score in seats] for seats in data]


def _failure(data: Mapping[str, Any] | None) -> RolloutFailure | None:
    return None if data is None else RolloutFailure(**data)


def error_to_json(error: Exception) -> dict[str, JSON]:
    """Its class by name, and its text."""
    return {"type": type(error).__name__, "message": str(error)}


def error_of(data: Mapping[str, Any]) -> Exception:
    """One of our errors as it was; anything else as a RuntimeError that names it."""
    kind = getattr(errors, data["type"], None)
    if isinstance(kind, type) and issubclass(kind, DistaffError):
        return kind(data["message"])
    return RuntimeError(f"{data['type']}: {data['message']}")
