"""The policy as environment code in a host process sees it: each call is answered by the worker's ChatModel.

Invariant: one call, one answer, by the number of the call. A call that the environment gives up is given up in the worker too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distaff.environments.protocol import ChatTurn
from distaff.types import JSON, Message, Tool
from distaff_worker.hosting.frames import Frame, error_of, turn_of


class Calls:
    """Calls of one host that wait for their answers. send: hands a frame to the worker."""

    def __init__(self, send: Callable[[Frame], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[ChatTurn]] = {}

    async def ask(self, rollout: int, seat: str, question: Mapping[str, Any]) -> ChatTurn:
        """The worker's answer; raises what its model raised. Raises TypeError when the question is not JSON."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"op": "complete", "id": rollout, "seat": seat, "call": number, **question})
            turn: ChatTurn = await answer
        except asyncio.CancelledError:
            self._send({"op": "drop", "id": rollout, "call": number})
            raise
        finally:
            del self._waiting[number]
        return turn

    def answered(self, frame: Frame) -> None:
        waiting = self._waiting.get(frame["call"])
        if waiting is None or waiting.done():
            return
        if "error" in frame:
            waiting.set_exception(error_of(frame["error"]))
        else:
            waiting.set_result(turn_of(frame["turn"]))


class RemoteModel:
    """The ChatModel of one rollout and seat."""

    def __init__(self, calls: Calls, rollout: int, seat: str) -> None:
        self._calls, self._rollout, self._seat = calls, rollout, seat

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Tool], sampling: Mapping[str, JSON]
    ) -> ChatTurn:
        """See `ChatModel.complete`."""
        question = {"messages": list(messages), "tools": list(tools), "sampling": dict(sampling)}
        return await self._calls.ask(self._rollout, self._seat, question)
