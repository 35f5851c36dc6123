"""One host process and one host, without a worker around them: what they hold on to, and what they do with questions in any order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest

from distaff.config import EnvironmentSection
from distaff.environments.protocol import Episode, ModelFactory, Play, Score
from distaff_worker.hosting import frames
from distaff_worker.hosting.board import PLAY, SCORE, Board
from distaff_worker.hosting.frames import Frame
from distaff_worker.hosting.host import Host
from distaff_worker.hosting.process import HostOptions, HostProcess
from tests.farm_support import launcher
from tests.worker_support import until


class Slow:
    """An environment whose scoring takes for ever, and notes that it was cancelled."""

    id, version = "slow", "0"
    api: Literal["classic"] = "classic"

    def __init__(self) -> None:
        self.said: list[str] = []

    async def play(self, task: Mapping[str, Any], model_for: ModelFactory) -> Episode:
        play = Play(seat="", messages=[], tools=[], turns=1, stop_condition="", truncated=False, error=None)
        return Episode(plays=[play])

    async def score(self, episodes: Sequence[Episode]) -> list[list[Score]]:
        self.said.append("begun")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.said.append("cancelled")
            raise
        return []

    async def close(self) -> None: ...


def written(*sent: Frame) -> bytes:
    return b"".join(frames.encode(frame) for frame in sent)


@pytest.fixture
def board() -> Board:
    made, fd = Board.create()
    os.close(fd)
    return made


async def test_score_cancel_and_forget_in_one_breath_end_the_scoring(board: Board) -> None:
    """A worker that was stopped past its deadline says all three at once: the scoring is ended, its episodes go, nothing breaks."""
    environment, answers, reader = Slow(), list[Frame](), asyncio.StreamReader()
    host = Host(environment, board, answers.append)  # type: ignore[arg-type]
    serving = asyncio.create_task(host.serve(reader))
    reader.feed_data(written({"op": "play", "id": 1, "group": 7, "task": {}}))
    await until(lambda: [answer["op"] for answer in answers] == ["played"])
    score = {"op": "score", "id": 2, "group": 7, "episodes": [1]}
    reader.feed_data(written(score, {"op": "cancel", "id": 2}, {"op": "forget", "ids": [1]}, {"op": "ping"}))
    await until(lambda: {answer["op"] for answer in answers} == {"played", "pong", "ended"}, seconds=5)
    assert [answer["id"] for answer in answers if answer["op"] == "ended"] == [2]
    assert environment.said in ([], ["begun", "cancelled"])
    assert host._episodes == {}
    reader.feed_data(written({"op": "close"}))
    await asyncio.wait_for(serving, 10)


def descriptors() -> dict[str, str]:
    """Number -> what it is, of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads /proc")
@pytest.mark.parametrize("end", ["closed", "killed", "refused", "not forked"])
async def test_a_host_that_has_ended_holds_no_descriptor(end: str) -> None:
    """Its socket, board and stack file are given back however it ended, while the object itself is still there."""
    started = launcher()
    started.start()
    started.wait()
    module = "tests.no_such_environment" if end == "refused" else "tests.marker_env"
    environment = EnvironmentSection(id=module).model_dump(mode="json")
    before = descriptors()
    kept = []
    for _ in range(2):
        ended = list[HostProcess]()
        host = HostProcess(started, HostOptions(), on_end=ended.append)
        kept.append(host)
        await _ended(host, end, environment, ended, started._ask)
        await asyncio.sleep(0)
    await until(lambda: not set(descriptors()) - set(before), what=f"left: {set(descriptors().values())}")
    assert all(host._board.running(0) == 0 for host in kept if host.pid)


async def test_two_who_find_a_host_blocked_end_it_once() -> None:
    """P15: the watchdog and a deadline of scoring may come to it together, and one of them when it is gone: nobody fails."""
    started = launcher()
    started.start()
    ended = list[HostProcess]()
    host = HostProcess(started, HostOptions(), on_end=ended.append)
    await host.start(EnvironmentSection(id="tests.marker_env").model_dump(mode="json"))
    await asyncio.gather(host._blocked(SCORE, 7, "first"), host._blocked(PLAY, 7, "second"))
    await until(lambda: ended == [host])
    assert host.loss is not None
    assert (host.loss.reason, host.loss.blamed) == ("blocked", frozenset({7}))
    await host._blocked(SCORE, 8, "late")
    await host._stacks.refresh(host.pid)
    assert host.loss.blamed == frozenset({7})


async def _ended(
    host: HostProcess, end: str, environment: Mapping[str, Any], ended: list[HostProcess], ask: Callable[..., Any]
) -> None:
    if end == "not forked":
        with pytest.raises(ZeroDivisionError):
            await _unforked(host, environment)
        return
    if end == "refused":
        with pytest.raises(Exception, match="no_such_environment"):
            await host.start(environment)
    else:
        await host.start(environment)
        if end == "killed":
            os.kill(host.pid, 9)
        else:
            await host.close()
    await until(lambda: ended == [host])


async def _unforked(host: HostProcess, environment: Mapping[str, Any]) -> None:
    class Broken:
        async def fork(self, descriptors: Sequence[int]) -> int:
            return 1 // 0

    host._launcher = Broken()  # type: ignore[assignment]
    await host.start(environment)
