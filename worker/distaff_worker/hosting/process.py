"""One host process, from the worker's side: what is asked of it, what it asks, and how it ends.

Invariant: every question is answered: by the host, by its deadline, or by the end of the host. When the host died or had to be killed, the
groups whose code ran at that moment are to blame, and all others have only lost their work.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from distaff.environments.protocol import ChatModel, Episode, ModelFactory, Score, failed_episode
from distaff.errors import DeadlineExceeded, EnvironmentFailure, EnvironmentLoadError
from distaff.types import JSON, RolloutFailure, RolloutVerdict, Split
from distaff_worker.hosting import frames
from distaff_worker.hosting.board import PLAY, SCORE, Board, Slot
from distaff_worker.hosting.frames import Frame
from distaff_worker.hosting.launcher import Launcher
from distaff_worker.hosting.stacks import StackFile
from distaff_worker.hosting.watchdog import PING_S, Watchdog

log = structlog.get_logger(__name__)
UNWIND_S = 2.0
"""How long cancelled code may take to clean up; less than what the caller waits for us."""
CLOSE_S = 7.0
_SAMPLES, _SAMPLE_S = 5, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """What a host may do; see WorkerSection and RolloutSection in `distaff.settings`."""

    block_timeout_s: float = 60.0
    load_timeout_s: float = 600.0
    memory_bytes: int = 1 << 34
    log: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a host is gone."""

    blamed: frozenset[int]
    """Groups whose code ran when it ended; empty when nobody's did."""
    failure: RolloutFailure
    """What that is for those groups."""
    reason: str
    """blocked, crashed, or closed."""


@dataclass(slots=True, eq=False)
class _Rollout:
    """One play in progress."""

    model_for: ModelFactory
    answer: asyncio.Future[Frame]
    models: dict[str, ChatModel] = field(default_factory=dict)
    calls: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class HostProcess:
    """Made by `start`. Used on one loop."""

    def __init__(self, launcher: Launcher, options: HostOptions, *, on_end: Callable[[HostProcess], None]) -> None:
        self._launcher, self._options, self._on_end = launcher, options, on_end
        self._numbers = itertools.count(1)
        self._rollouts: dict[int, _Rollout] = {}
        self._scores: dict[int, asyncio.Future[Frame]] = {}
        """What else waits for an answer: scores, and rows."""
        self._verdict: Loss | None = None
        self._how = "unknown"
        self._watching: asyncio.Task[None] | None = None
        self.pid = 0
        self.loss: Loss | None = None
        """Set when the process is gone."""
        self.strays = 0
        """Pieces of code that ignored their cancellation and still run there."""

    async def start(self, environment: Mapping[str, JSON]) -> Frame:
        """Fork the process and load the environment: its id, version and api. Raises EnvironmentLoadError, ConfigurationError."""
        ours, theirs = socket.socketpair()
        self._board, board_fd = Board.create()
        self._stacks = StackFile()
        try:
            self.pid = await self._launcher.fork([theirs.fileno(), board_fd, self._stacks.file.fileno()])
        except BaseException:
            ours.close()
            self._stacks.close()
            self._board.close()
            raise
        finally:
            theirs.close()
            os.close(board_fd)
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 20)
        options = self._options
        self._send({"environment": environment, "log": options.log, "memory_bytes": options.memory_bytes})
        opened: Frame | None = {"op": "late"}
        try:
            async with asyncio.timeout(options.load_timeout_s):
                opened = await frames.read(reader)
        except TimeoutError:
            pass
        finally:
            if opened is None or opened["op"] != "loaded":
                self._verdict = None if opened is None else _closed("it could not be loaded")
                await self._ended()
        if opened is None or opened["op"] != "loaded":
            raise self._refusal(opened)
        self._reader = asyncio.create_task(self._read(reader), name=f"host {self.pid}")
        self._watchdog = Watchdog(
            self.pid,
            self._board,
            self._stacks,
            ping=lambda: self._send({"op": "ping"}),
            on_stuck=self._blocked,
            limit_s=options.block_timeout_s,
        )
        self._watching = asyncio.create_task(self._watchdog.run(), name=f"watch host {self.pid}")
        return opened

    def _refusal(self, opened: Frame | None) -> Exception:
        if opened is None:
            what = self.loss.failure.message if self.loss else self._how
            return EnvironmentLoadError(f"{what}, while it was loaded")
        if opened["op"] == "late":
            limit_s = self._options.load_timeout_s
            return EnvironmentLoadError(
                f"the environment took longer than {limit_s:g} s to load. Raise environment.load_timeout_s, or have it load less"
            )
        return frames.error_of(opened["error"])

    async def close(self) -> None:
        """Let the environment clean up, then end the process and all it has started."""
        if self.loss is None and self._verdict is None:
            self._verdict = _closed("the worker stops")
            self._send({"op": "close"})
            await asyncio.wait({self._reader}, timeout=CLOSE_S)
            self._kill()
        await asyncio.gather(self._reader, return_exceptions=True)

    @property
    def usage(self) -> Mapping[str, int]:
        """rss_bytes, fds, tasks at its last answer."""
        return self._watchdog.usage

    # -- what is asked ---------------------------------------------------------------------------------------------------

    async def play(self, group: int, task: Mapping[str, JSON], model_for: ModelFactory) -> Episode:
        """As `Environment.play`; the episode's handle is the rollout's number here."""
        if self.loss is not None:
            return _lost_episode()
        number = next(self._numbers)
        rollout = self._rollouts[number] = _Rollout(model_for, asyncio.get_running_loop().create_future())
        try:
            self._send({"op": "play", "id": number, "group": group, "task": task})
            return self._episode(number, await rollout.answer)
        except asyncio.CancelledError:
            await self._cancel(number, group, rollout.answer)
            raise
        finally:
            del self._rollouts[number]
            for call in rollout.calls.values():
                call.cancel()

    def _episode(self, number: int, answer: Frame) -> Episode:
        if answer["op"] == "played":
            return Episode(plays=[frames.play_of(play) for play in answer["plays"]], handle=number)
        if answer["op"] == "lost":
            return _lost_episode()
        return failed_episode(_failure("process", _WHAT_HAPPENED[answer["op"]].format(**answer)))

    async def score(self, group: int, rollouts: Sequence[int], *, timeout_s: float) -> list[list[Score]]:
        """As `Environment.score`, of rollouts by number. Raises DeadlineExceeded; EnvironmentFailure when the host is gone."""
        if self.loss is not None:
            raise EnvironmentFailure(_WHAT_HAPPENED["lost"])
        number = next(self._numbers)
        answer = self._scores[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"op": "score", "id": number, "group": group, "episodes": list(rollouts)})
            if not await _within(answer, timeout_s):
                await self._past_deadline(number, group, answer, timeout_s)
        finally:
            del self._scores[number]
            if not answer.done():
                self._send({"op": "cancel", "id": number})
        found = answer.result()
        if found["op"] == "scored":
            return frames.scores_of(found["scores"])
        raise EnvironmentFailure(_WHAT_HAPPENED[found["op"]].format(**found))

    async def row(self, split: Split, index: int) -> tuple[int | None, dict[str, JSON] | None]:
        """Rows of the split (None: no end), and row `index` (None past the end). Raises EnvironmentFailure."""
        if self.loss is not None:
            raise EnvironmentFailure(_WHAT_HAPPENED["lost"])
        number = next(self._numbers)
        answer = self._scores[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"op": "row", "id": number, "split": split, "index": index})
            found = await answer
        finally:
            del self._scores[number]
        if found["op"] != "row":
            raise EnvironmentFailure(_WHAT_HAPPENED[found["op"]].format(**found))
        return found["size"], found["row"]

    async def _past_deadline(self, number: int, group: int, answer: asyncio.Future[Frame], timeout_s: float) -> None:
        """Returns with an answer after all. Code of ours that blocks is killed; behind another group's, we wait for that one's end."""
        message = f"scoring took longer than {timeout_s:g} s"
        if await self._holder(SCORE) not in (0, group):
            await _within(answer, timeout_s + UNWIND_S)
        if not answer.done():
            self._send({"op": "cancel", "id": number})
            if not await _within(answer, UNWIND_S):
                await self._end_or_leave(
                    SCORE, group, "timeout", f"scoring blocked its process for longer than {timeout_s:g} s"
                )
                await _within(answer, UNWIND_S)
        if not answer.done() or answer.result()["op"] == "ended":
            raise DeadlineExceeded(message)

    async def _cancel(self, number: int, group: int, answer: asyncio.Future[Frame]) -> None:
        self._send({"op": "cancel", "id": number})
        if not await _within(answer, UNWIND_S):
            await self._end_or_leave(PLAY, group, "timeout", "it blocked its process past its deadline")

    async def _end_or_leave(self, slot: Slot, group: int, kind: RolloutVerdict, message: str) -> None:
        """Code of `group` does not react to its cancellation: kill the host if it blocks the loop, else leave it behind there."""
        if await self._holder(slot) == group:
            await self._blocked(slot, group, message)
        else:
            self.strays += 1
            log.error("rollout.left_behind", host=self.pid, strays=self.strays)

    async def verdict(self) -> None:
        """Returns when the host answers, or is gone."""
        while self.loss is None and self._watchdog.silent_s > PING_S:  # noqa: ASYNC110 - a clock, not an event
            await asyncio.sleep(0.1)

    async def _holder(self, slot: Slot) -> int:
        """The group whose code keeps the loop from turning; 0: it turns."""
        holder = self._board.running(slot)
        for _ in range(_SAMPLES):
            await asyncio.sleep(_SAMPLE_S)
            if self._board.running(slot) != holder:
                return 0
        return holder

    def forget(self, rollouts: Sequence[int]) -> None:
        """The rollouts will not be scored any more."""
        self._send({"op": "forget", "ids": list(rollouts)})

    def _send(self, frame: Frame) -> None:
        if self.loss is None:
            self._writer.write(frames.encode(frame))

    # -- what it says ----------------------------------------------------------------------------------------------------

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (frame := await frames.read(reader)) is not None:
                self._handle(frame)
        except (ValueError, KeyError, TypeError) as error:
            log.error("host.spoke_nonsense", host=self.pid, error=f"{type(error).__name__}: {error}")
        finally:
            await self._ended()

    def _handle(self, frame: Frame) -> None:
        op, number = frame["op"], frame.get("id", 0)
        rollout = self._rollouts.get(number)
        if op == "pong":
            self._watchdog.answered(frame)
        elif number in self._scores:
            _settle(self._scores[number], frame)
        elif rollout is None:
            return
        elif op == "seat":
            rollout.models[frame["seat"]] = rollout.model_for(frame["seat"])
        elif op == "complete":
            call = asyncio.get_running_loop().create_task(self._complete(rollout, frame))
            rollout.calls[frame["call"]] = call
            call.add_done_callback(lambda _: rollout.calls.pop(frame["call"], None))
        elif op == "drop" and frame["call"] in rollout.calls:
            rollout.calls[frame["call"]].cancel()
        elif op in _WHAT_HAPPENED or op == "played":
            _settle(rollout.answer, frame)

    async def _complete(self, rollout: _Rollout, frame: Frame) -> None:
        reply: Frame = {"op": "turn", "call": frame["call"]}
        try:
            model = rollout.models[frame["seat"]]
            reply["turn"] = frames.flat(await model.complete(frame["messages"], frame["tools"], frame["sampling"]))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, which is in another process
            reply["error"] = frames.error_to_json(error)
        self._send(reply)

    # -- how it ends -----------------------------------------------------------------------------------------------------

    async def _blocked(self, slot: Slot, group: int, message: str) -> None:
        """Kill the process: code of `group` (0: nobody knows whose) keeps a loop of it from turning."""
        if self.loss is not None:
            return
        await self._stacks.refresh(self.pid)
        frames_now = self._stacks.frames(self._board.ident(slot))
        log.error("environment.killed", host=self.pid, reason=message, frames=frames_now)
        boundary = "reward" if slot == SCORE else "step"
        failure = RolloutFailure(kind="timeout", boundary=boundary, message=message + self._at(self._board.ident(slot)))
        if self._verdict is None and self.loss is None:
            self._verdict = Loss(blamed=frozenset({group} - {0}), failure=failure, reason="blocked")
            self._kill()

    def _kill(self) -> None:
        """The process and what it has started, which is in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _ended(self) -> None:
        """Its socket is closed, or nobody will read it: see that the process is gone, and tell all who wait."""
        self._kill()
        status = await self._launcher.status(self.pid)
        self._how = _words(status)
        self.loss = self._verdict or self._crash(known=status is not None)
        self._writer.close()
        for rollout in self._rollouts.values():
            _settle(rollout.answer, {"op": "lost"})
        for answer in self._scores.values():
            _settle(answer, {"op": "lost"})
        self._stacks.close()
        self._board.close()
        if self._watching is not None:
            self._watching.cancel()
        self._on_end(self)

    def _crash(self, *, known: bool) -> Loss:
        """known: how it ended. It is not when the zygote was killed, and its hosts with it, which is nobody's fault."""
        running = self._ran_at_the_end() if known else frozenset()
        log.error(
            "environment.crashed", host=self.pid, how=self._how, groups=len(running), frames=self._stacks.frames()
        )
        failure = _failure("process", f"environment code ended its process ({self._how}){self._at(0)}")
        return Loss(blamed=running, failure=failure, reason="crashed")

    def _ran_at_the_end(self) -> frozenset[int]:
        """The group whose code ended the process, where the crash says on which thread; else all whose code ran."""
        crashed = self._stacks.crashed_thread
        slots = [slot for slot in (PLAY, SCORE) if crashed == self._board.ident(slot)] or [PLAY, SCORE]
        return frozenset({self._board.running(slot) for slot in slots} - {0})

    def _at(self, thread: int) -> str:
        place = self._stacks.where(thread)
        return f", at {place}" if place else ""


_WHAT_HAPPENED = {
    "lost": "the process of the environment has ended",
    "ended": "the environment's adapter broke; its error is in the log",
    "broken": "{message}",
}


def _failure(boundary: str, message: str) -> RolloutFailure:
    return RolloutFailure(kind="environment_error", boundary=boundary, message=message)


def _closed(why: str) -> Loss:
    return Loss(blamed=frozenset(), failure=_failure("process", why), reason="closed")


def _lost_episode() -> Episode:
    failure = RolloutFailure(
        kind="environment_error", boundary="process", message=_WHAT_HAPPENED["lost"], retryable=False
    )
    return failed_episode(failure)


def _words(status: int | None) -> str:
    """What waitpid said, for people."""
    if status is None:
        return "its exit status is unknown"
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit code {os.WEXITSTATUS(status)}"


def _settle(answer: asyncio.Future[Frame], frame: Frame) -> None:
    if not answer.done():
        answer.set_result(frame)


async def _within(answer: asyncio.Future[Frame], seconds: float) -> bool:
    done, _ = await asyncio.wait({answer}, timeout=seconds)
    return bool(done)
