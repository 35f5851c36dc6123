"""The process tree: everything it started is gone at its end, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distaff.cli.embedded import start_redis
from distaff.cli.signals import StopSignal
from distaff.cli.tree import Tree
from distaff.clients import connect

SLEEPER = "import time; print('ready', flush=True); time.sleep(300)"
STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], stdout=subprocess.DEVNULL)\n"
    "print('ready', child.pid, flush=True); time.sleep(300)"
)
ROOT_PROGRAM = f"""
import sys, time
from distaff.cli.embedded import start_redis
from distaff.cli.signals import StopSignal
from distaff.cli.tree import Tree
with StopSignal(raise_on_second=False) as stop, Tree(lambda name, line: print(line, flush=True)) as tree:
    server, url = start_redis(tree)
    print("redis", server.process.pid, tree.folder, flush=True)
    for name in ("one", "two"):
        tree.start(name, [sys.executable, "-c", {STUBBORN!r}])
    while not stop.event.is_set():
        time.sleep(0.05)
    print("interrupted", flush=True)
"""


def alive(pid: int) -> bool:
    """It exists and is no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(condition: Callable[[], bool], *, seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def root() -> Iterator[tuple[subprocess.Popen[str], list[int], Path]]:
    """A program with a tree of Redis and two stubborn children with a child each: (it, all their pids, its folder)."""
    process = subprocess.Popen(
        [sys.executable, "-c", ROOT_PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    pids: list[int] = []
    folder = Path()
    try:
        assert process.stdout is not None
        while len(pids) < 3:
            match process.stdout.readline().split():
                case ["redis", pid, path]:
                    pids.append(int(pid))
                    folder = Path(path)
                case ["ready", pid]:
                    pids.append(int(pid))
                case other:
                    pytest.fail(f"unexpected output: {other}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield process, [*pids, *(int(pid) for pid in children)], folder
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        for left in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_after(how: str, root: tuple[subprocess.Popen[str], list[int], Path]) -> None:
    """Ctrl-C reaches the whole foreground group, SIGTERM and SIGKILL the root only; children ignore SIGTERM and have children."""
    process, pids, folder = root
    assert len(pids) == 7  # Redis, two grandchildren, and again Redis, the two children and the guard
    assert all(alive(pid) for pid in pids)
    assert folder.stat().st_mode & 0o777 == 0o700
    match how:
        case "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        case "SIGTERM":
            process.terminate()
        case _:
            process.kill()
    process.wait(15)
    wait_for(lambda: not any(alive(pid) for pid in pids))
    wait_for(lambda: not folder.exists())


def test_a_child_that_obeys_is_not_killed(tmp_path: Path) -> None:
    """SIGTERM first; what it writes on its way out is still read."""
    code = (
        "import signal, sys, time\n"
        "def end(*_): print('cleaned up', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); time.sleep(300)"
    )
    lines: list[str] = []
    with Tree(lambda name, line: lines.append(f"{name} {line}")) as tree:
        child = tree.start("worker", [sys.executable, "-c", code])
        wait_for(lambda: "worker ready" in lines)
        tree.stop([child], grace_s=10)
        assert child.code == 0
        assert lines == ["worker ready", "worker cleaned up"]
        assert tree.children == []


def test_grace_ends_when_somebody_is_in_a_hurry() -> None:
    """A second Ctrl-C does not wait for stubborn children."""
    lines: list[str] = []
    with Tree(lambda name, line: lines.append(line)) as tree:
        child = tree.start("worker", [sys.executable, "-c", STUBBORN])
        wait_for(lambda: bool(lines))
        hurry = threading.Event()
        threading.Timer(0.3, hurry.set).start()
        started = time.monotonic()
        tree.stop([child], grace_s=60, hurry=hurry.is_set)
        assert time.monotonic() - started < 30
        assert child.code == -signal.SIGKILL
        wait_for(lambda: not alive(int(lines[0].split()[1])))


def test_the_last_lines_and_the_exit_code_of_a_failed_child_are_kept() -> None:
    """For the message that ends the run."""
    with Tree(lambda name, line: None) as tree:
        code = "import sys; print('out'); print('it is broken', file=sys.stderr); sys.exit(7)"
        child = tree.start("producer", [sys.executable, "-c", code])
        wait_for(lambda: child.code is not None)
        child.drained()
        assert child.code == 7
        assert sorted(child.tail) == ["it is broken", "out"]


def test_the_embedded_redis_answers_on_a_private_socket_only() -> None:
    """No TCP port, a socket that only this user can open, gone with the tree."""
    with Tree(lambda name, line: None) as tree:
        server, url = start_redis(tree)
        with connect(url) as client:
            assert client.ping()
            assert client.config_get("port") == {"port": "0"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        socket = tree.folder / "redis.sock"
        assert socket.stat().st_mode & 0o777 == 0o700
        pid, folder = server.process.pid, tree.folder
    assert not alive(pid)
    assert not folder.exists()


def test_a_signal_sets_the_event_and_the_old_handlers_come_back() -> None:
    """The first signal is an event, the second an interrupt, afterwards all is as before."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.event.wait(5)
        assert stop.exit_code == 0
        with pytest.raises(KeyboardInterrupt):
            _send(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.event.wait(5)
        assert stop.exit_code == 130


def _send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(1)
