"""The life of a host process: load one environment, then play and score what the worker asks for.

Invariant: the environment's own code runs here and nowhere in the worker. Rollouts are played on the main thread's loop and groups scored on
another's, so that a reward that computes for long does not hold up the play. Ends when the worker is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TextIO

import structlog

from distaff.config import EnvironmentSection
from distaff.environments.load import load
from distaff.environments.protocol import ChatModel, Environment, Episode, Score
from distaff.errors import DistaffError
from distaff.logs import adopt_loggers, configure_logging
from distaff.settings import LogSection
from distaff_worker import collector
from distaff_worker.hosting import frames
from distaff_worker.hosting.board import PLAY, SCORE, Board
from distaff_worker.hosting.frames import Frame
from distaff_worker.hosting.remote import Calls, RemoteModel
from distaff_worker.hosting.stacks import STACK_SIGNAL
from distaff_worker.hosting.watched import GROUP, watch
from distaff_worker.memory import rss_bytes

log = structlog.get_logger(__name__)
SWITCH_INTERVAL_S = 0.001
CLOSE_S = 5.0
"""How long the environment's own clean-up may take at the end."""


def run(worker: socket.socket, board_fd: int, stacks: TextIO) -> None:
    """Serve the worker at the other end of the socket until it closes. stacks: a file for stacks, also of a crash."""
    faulthandler.enable(file=stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _volunteer_for_the_oom_killer()
    board = Board(board_fd)
    os.close(board_fd)
    board.enlist(PLAY)
    _note_exits(board)
    asyncio.run(_serve(worker, board))


async def _serve(worker: socket.socket, board: Board) -> None:
    loop = asyncio.get_running_loop()
    watch(loop, board, PLAY)
    reader, writer = await asyncio.open_connection(sock=worker, limit=1 << 20)
    opening = await frames.read(reader)
    if opening is None:
        return
    pipe = configure_logging(LogSection.model_validate(opening["log"]))
    try:
        environment = _load(opening, writer)
        if environment is not None:
            host = Host(environment, board, lambda frame: writer.write(frames.encode(frame)))
            await host.serve(reader)
        await writer.drain()
    finally:
        writer.close()
        pipe.close()


def _load(opening: Frame, writer: asyncio.StreamWriter) -> Environment | None:
    try:
        environment = load(EnvironmentSection.model_validate(opening["environment"]))
    except DistaffError as error:
        writer.write(frames.encode({"op": "failed", "error": frames.error_to_json(error)}))
        return None
    adopt_loggers()
    collector.settle()
    _limit_memory(opening["memory_bytes"])
    identity = {"id": environment.id, "version": environment.version, "api": environment.api}
    writer.write(frames.encode({"op": "loaded", "rss_bytes": rss_bytes(), **identity}))
    return environment


class ScoreLoop:
    """A thread with an event loop on which groups are scored."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        watch(self._loop, board, SCORE)
        threading.Thread(target=self._run, name="distaff-score", daemon=True).start()

    def _run(self) -> None:
        self._board.enlist(SCORE)
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, number: int, group: int, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run `coroutine` there in the name of `group`; the future is done when it has really ended. `cancel` reaches it from now on."""
        ended: Future[Any] = Future()
        context = contextvars.copy_context()
        context.run(GROUP.set, group)

        def begin() -> None:
            task = self._tasks[number] = self._loop.create_task(coroutine, context=context)
            task.add_done_callback(lambda task: self._ended(number, task, ended))

        self._loop.call_soon_threadsafe(begin)
        return ended

    def _ended(self, number: int, task: asyncio.Task[Any], ended: Future[Any]) -> None:
        del self._tasks[number]
        if task.cancelled():
            ended.cancel()
        elif error := task.exception():
            ended.set_exception(error)
        else:
            ended.set_result(task.result())

    def cancel(self, number: int) -> None:
        def cancel() -> None:
            if number in self._tasks:
                self._tasks[number].cancel()

        self._loop.call_soon_threadsafe(cancel)


class Host:
    """Plays, scores, and keeps what was played until it is forgotten. Used on the main thread's loop."""

    def __init__(self, environment: Environment, board: Board, send: Callable[[Frame], None]) -> None:
        self._environment, self._send = environment, send
        self._calls = Calls(send)
        self._scoring = ScoreLoop(board)
        self._plays: dict[int, asyncio.Task[None]] = {}
        self._replies: set[asyncio.Task[None]] = set()
        self._episodes: dict[int, Episode] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Do what the worker asks until it says `close` or is gone."""
        while (frame := await frames.read(reader)) is not None and frame["op"] != "close":
            self._handle(frame)
        for play in self._plays.values():
            play.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*self._plays.values(), return_exceptions=True)
                await self._environment.close()

    def _handle(self, frame: Frame) -> None:
        match frame["op"]:
            case "play":
                self._start(frame)
            case "turn":
                self._calls.answered(frame)
            case "row":
                self._row(frame)
            case "cancel":
                self._cancel(frame["id"])
            case "score":
                # Begun now, not in the task: a worker that was stopped past its deadline says score, cancel and forget in one breath.
                judging = self._judge([self._episodes[known] for known in frame["episodes"]])
                scoring = self._scoring.start(frame["id"], frame["group"], judging)
                reply = asyncio.get_running_loop().create_task(self._score(frame["id"], scoring))
                self._replies.add(reply)
                reply.add_done_callback(self._replies.discard)
            case "forget":
                for number in frame["ids"]:
                    self._episodes.pop(number, None)
            case "ping":
                self._send({"op": "pong", **_usage()})

    def _cancel(self, number: int) -> None:
        if number in self._plays:
            self._plays[number].cancel()
        else:
            self._scoring.cancel(number)

    # -- play --------------------------------------------------------------------------------------------------------

    def _start(self, frame: Frame) -> None:
        number = frame["id"]
        token = GROUP.set(frame["group"])
        play = self._plays[number] = asyncio.get_running_loop().create_task(self._play(number, frame["task"]))
        GROUP.reset(token)
        play.add_done_callback(lambda task: self._ended(number, task))

    def _ended(self, number: int, play: asyncio.Task[None]) -> None:
        del self._plays[number]
        if play.cancelled() or play.exception():
            self._send({"op": "ended", "id": number})
        if not play.cancelled() and (error := play.exception()):
            log.error("play.broke", exc_info=error)

    async def _play(self, number: int, task: dict[str, Any]) -> None:
        seats: set[str] = set()

        def model_for(seat: str) -> ChatModel:
            if seat in seats:
                raise ValueError(f"a second model was asked for seat {seat!r} of one rollout")
            seats.add(seat)
            self._send({"op": "seat", "id": number, "seat": seat})
            return RemoteModel(self._calls, number, seat)

        episode = await self._environment.play(task, model_for)
        self._episodes[number] = episode
        self._answer(number, "played", plays=[frames.play_to_json(play) for play in episode.plays])

    def _row(self, frame: Frame) -> None:
        """A row of a split, and how many there are."""
        number, split = frame["id"], frame["split"]
        try:
            size = self._environment.size(split)
            row = next(self._environment.rows(split, frame["index"]), None) if size is None else None
            if size:
                row = self._environment.row(split, frame["index"])
            self._answer(number, "row", size=size, row=row)
        except Exception as error:  # noqa: BLE001 - the boundary around the dataset's own code
            self._send({"op": "broken", "id": number, "message": f"{type(error).__name__}: {error}"})

    # -- score -------------------------------------------------------------------------------------------------------

    async def _score(self, number: int, scoring: Future[list[list[Score]]]) -> None:
        await asyncio.wait({asyncio.wrap_future(scoring)})
        if scoring.cancelled():
            self._send({"op": "ended", "id": number})
        elif error := scoring.exception():
            log.error("score.broke", exc_info=error)
            self._send({"op": "ended", "id": number})
        else:
            self._answer(number, "scored", scores=frames.scores_to_json(scoring.result()))

    async def _judge(self, episodes: Sequence[Episode]) -> list[list[Score]]:
        return await self._environment.score(episodes)

    def _answer(self, number: int, op: str, **content: Any) -> None:
        try:
            self._send({"op": op, "id": number, **content})
        except (TypeError, ValueError) as error:
            self._send({"op": "broken", "id": number, "message": f"the environment left what is not JSON: {error}"})


def _usage() -> dict[str, int]:
    return {"rss_bytes": rss_bytes(), "fds": _open_files(), "tasks": len(asyncio.all_tasks())}


def _open_files() -> int:
    with os.scandir("/dev/fd") as entries:
        return sum(1 for _ in entries)


def _limit_memory(more_bytes: int) -> None:
    """Let the process allocate `more_bytes` beyond what it has; then its code gets a MemoryError. Linux."""
    try:
        with open("/proc/self/status") as status:
            data_kib = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data_kib * 1024 + more_bytes, hard))
    except (OSError, ValueError, StopIteration) as error:
        logging.getLogger(__name__).warning("memory.unlimited reason=%s", error)


def _note_exits(board: Board) -> None:
    """Code that calls os._exit is noted as the one that ran, also when code of another group was running beside it."""
    leave = os._exit

    def leave_noted(status: int) -> NoReturn:
        board.only_mine()
        leave(status)

    os._exit = leave_noted


def _volunteer_for_the_oom_killer() -> None:
    """When the machine is out of memory the kernel ends this process and not the worker. Linux."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("500")
