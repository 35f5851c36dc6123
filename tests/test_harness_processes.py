"""The harness's processes and seeds: a group dies as one, what it says is kept, and a seed comes back."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.harness.processes import children, fds, rss_bytes, start
from tests.harness.seeds import VARIABLE, replay, seed, seeded
from tests.worker_support import wait_until

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("family", child.pid, flush=True)
time.sleep(600)
"""


def _python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def _state(pid: int) -> str:
    """The letter of /proc: R, S, T (stopped), Z; X when it is gone."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@pytest.mark.parametrize("first", [False, True])
def test_a_kill_takes_the_whole_group(first: bool) -> None:
    """The child of the child is gone as well, also when its parent died first."""
    with start(_python(FAMILY)) as child:
        child.wait_for("family")
        below = int(child.log.split()[1])
        assert children(child.pid) == [below]
        assert children(os.getpid()).count(below) == 1
        if first:
            os.kill(child.pid, signal.SIGKILL)
            assert child.wait(5) == -signal.SIGKILL
    assert child.code == -signal.SIGKILL
    wait_until(lambda: _state(below) in "XZ")


def test_stop_and_cont_are_the_whole_groups() -> None:
    """Both stand still, both go on."""
    with start(_python(FAMILY)) as child:
        child.wait_for("family")
        pids = (child.pid, int(child.log.split()[1]))
        child.stop()
        wait_until(lambda: all(_state(pid) == "T" for pid in pids))
        child.cont()
        wait_until(lambda: all(_state(pid) in "RS" for pid in pids))


def test_terminate_reaches_the_leader_and_its_code_is_told() -> None:
    """What it does with the signal is its business."""
    program = (
        "import signal,sys,time; signal.signal(15, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(60)"
    )
    with start(_python(program)) as child:
        child.wait_for("ready")
        child.terminate()
        assert child.wait(5) == 7


def test_the_environment_is_ours_and_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output of both kinds is kept."""
    monkeypatch.setenv("OURS", "1")
    program = "import os,sys; print(os.environ['OURS']+os.environ['ADDED']); print('error', file=sys.stderr)"
    with start(_python(program), env={"ADDED": "2"}) as child:
        assert child.wait(10) == 0
        assert sorted(child.log.split()) == ["12", "error"]


def test_more_output_than_a_pipe_holds_stops_nobody() -> None:
    """A megabyte that nobody reads."""
    with start(_python("print('x' * 1_000_000)")) as child:
        assert child.wait(10) == 0
        assert len(child.log) == 1_000_001


def test_waiting_ends_in_time_and_tells_what_was_said() -> None:
    """Both for an end and for a word; a process that ended without the word is not waited for."""
    with start(_python("import time; print('so far', flush=True); time.sleep(60)")) as child:
        child.wait_for("so far")
        with pytest.raises(TimeoutError, match="so far"):
            child.wait(0.05)
        with pytest.raises(TimeoutError, match="so far"):
            child.wait_for("never", seconds=0.05)
    with start(_python("print('done')")) as child, pytest.raises(TimeoutError, match=r"exit code 0.*\n?done"):
        child.wait_for("never", seconds=60)


def test_descriptors_and_memory_are_measured() -> None:
    """Ten files and fifty megabytes more are seen."""
    program = (
        "import os,sys; input_ = os.dup(0); print('small', flush=True)\n"
        "import signal; signal.sigwait([signal.SIGUSR1])\n"
        "kept = [os.dup(0) for _ in range(10)], b'x' * 50_000_000; print('big', flush=True); signal.pause()"
    )
    blocked = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n{program}"
    with start(_python(blocked)) as child:
        child.wait_for("small")
        before = fds(child.pid), rss_bytes(child.pid)
        os.kill(child.pid, signal.SIGUSR1)
        child.wait_for("big")
        assert fds(child.pid) == before[0] + 10
        assert rss_bytes(child.pid) > before[1] + 40_000_000


def test_a_seed_is_new_unless_it_is_given(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed with the name of the test; a failure carries it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    value = seed(request)
    assert f"{request.node.name}: {replay(value)}" in capsys.readouterr().out
    assert len({seed("name") for _ in range(5)}) > 1
    monkeypatch.setenv(VARIABLE, "42")
    assert seed(request) == seed("name") == 42

    def fail() -> None:
        with seeded("name") as value:
            raise ValueError(value)

    with pytest.raises(ValueError, match="42") as caught:
        fail()
    assert caught.value.__notes__ == [replay(42)]
