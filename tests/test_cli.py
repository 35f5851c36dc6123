"""The command line: exit codes, messages that fit on a screen, and whole runs in one process tree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from distaff.cli import commands
from distaff.cli.main import main
from distaff.cli.roles import FailedLater
from distaff.errors import ConfigurationError, EnvironmentLoadError, FatalRun, RedisUnavailable
from tests.process_support import leftovers, wait_until
from tests.scripted_engine import ScriptedEngine

Capture = pytest.CaptureFixture[str]
DISTAFF = [sys.executable, "-m", "distaff"]
NOBODY = "redis://:canary-password@127.0.0.1:1/0"
GAME = ["--environment.id", "guess-number"]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DISTAFF_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "usage: distaff COMMAND"),
        (["prduce"], "unknown command 'prduce'; did you mean produce?"),
        (["produce", "--enigne.model", "x"], "unknown flag --enigne.model; did you mean --engine.model?"),
        (["produce", "--limit", "x"], "producer.limit = 'x': must be a whole number, at least 0"),
        (["produce", "--limit"], "expected one argument"),
        (["produce", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (["produce", "a.toml", "b.toml"], "unknown argument b.toml"),
        (["work", "--pool", "a b"], "run.pool: use 1 to 64 letters"),
        (["archive", "--redis-url", "http://x"], "the scheme must be one of redis://, rediss://, unix://"),
        (["produce", "--engine.api-key-var", "MY_ENGINE"], "give the NAME of an environment variable, never the key"),
        (
            ["produce", "--engine.api-key-var", "sk-canary-canary"],
            "it must end in KEY, TOKEN, SECRET, PASSWORD or AUTH",
        ),
        (["archive", "--redis-url", "redis://h:99999/0"], "Port out of range 0-65535; for example redis://127.0.0.1"),
        (["archive", "--redis-url", "redis://h?nonsense=1"], "unexpected keyword argument 'nonsense'; for example"),
        (["status", "--redis-url", NOBODY], "cannot be reached"),
        (["runs", "delete", "x", "--redis-url", NOBODY], "cannot be reached"),
        (["runs", "delete", "a/b"], "is no run name"),
        (["runs", "drop", "x"], "invalid choice: 'drop'"),
        (["produce", "--redis-url", NOBODY, *GAME], "cannot be reached"),
        (["work", "--redis-url", NOBODY], "cannot be reached"),
        (["archive", "--redis-url", NOBODY], "cannot be reached"),
        (["evaluate", "--attach", "--redis-url", NOBODY], "cannot be reached"),
        (["run", "--redis-url", NOBODY, *GAME], "cannot be reached"),
    ],
)
def test_what_is_wrong_from_the_start_is_exit_code_2(argv: list[str], said: str, capsys: Capture) -> None:
    """One message, no traceback, no secret."""
    assert main(argv) == 2
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert said in text
    assert "Traceback" not in text
    assert "canary" not in text
    assert len(text.splitlines()) <= 20


def test_libraries_say_nothing_of_their_own() -> None:
    """A worker's process prints the one message and nothing else (transformers would advise installing torch)."""
    command = [sys.executable, "-m", "distaff", "work", "--redis-url", NOBODY]
    ours = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ours)
    assert (ended.returncode, len((ended.stdout + ended.stderr).splitlines())) == (2, 1), ended.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("wrong"), 2),
        (EnvironmentLoadError("wrong"), 2),
        (RedisUnavailable("wrong"), 2),
        (FailedLater(RedisUnavailable("wrong")), 1),
        (FatalRun("wrong"), 1),
        (KeyboardInterrupt(), 130),
        (ValueError("wrong redis://:canary@h"), 1),
    ],
)
def test_exit_codes_tell_before_and_after_apart(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """2 before work began, 1 after, 130 interrupted; a bug shows its traceback, redacted."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(commands, "produce", fail)
    assert main(["produce"]) == code
    said = capsys.readouterr().err
    assert ("Traceback" in said) == isinstance(error, ValueError)
    assert "canary" not in said
    if code in (1, 2):
        assert "wrong" in said


def test_debugging_shows_where_an_error_comes_from(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """--log.level debug adds the traceback."""

    def fail(*_: object) -> int:
        raise ConfigurationError("wrong")

    monkeypatch.setattr(commands, "produce", fail)
    assert main(["produce", "--log.level", "debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_role_that_is_not_installed_is_named_with_its_extra() -> None:
    """`distaff produce` without the producer extra says what to install."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('distaff_producer', 'rq'): raise ModuleNotFoundError(name, name=name.split('.')[0])\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from distaff.cli.main import main\n"
        "print(main(['produce']), main(['work']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "2 2"
    assert 'distaff produce needs the extra "producer": pip install "distaff[producer]"' in done.stderr
    assert 'distaff work needs the extra "worker" (rq is not installed): pip install "distaff[worker]"' in done.stderr


def test_the_base_install_says_what_to_install_instead_of_a_traceback() -> None:
    """The wheel alone has the script `distaff`, and none of what the command line needs."""
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pydantic': raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from distaff.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pydantic is not installed" in done.stderr
    assert 'pip install "distaff[all]"' in done.stderr


def test_settings_in_force_are_printed_and_nothing_is_done(capsys: Capture) -> None:
    """--print-config with an unreachable Redis and no environment is no error, and masks the password."""
    assert main(["run", "--print-config", "--redis-url", NOBODY]) == 0
    assert 'redis_url = "redis://:***@127.0.0.1:1/0"  # --redis-url' in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["run", "produce", "work", "archive", "evaluate", "status", "doctor", "demo", "runs"]
)
def test_every_command_explains_itself(command: str, capsys: Capture) -> None:
    """--help works and shows the command's own keys."""
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: distaff {command}" in shown
    assert ("--pool" in shown) == (command in ("run", "produce", "work", "archive", "evaluate", "status", "doctor"))


def test_items_are_produced_seen_and_deleted(redis_url: str, client: redis.Redis, capsys: Capture) -> None:
    """produce, again, status, runs delete: reports on standard output, progress on standard error."""
    argv = ["produce", "--redis-url", redis_url, "--run", "cli", "--limit", "3", *GAME]
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert "run cli: 3 items admitted" in shown.out
    assert "produce cli 3/3" in shown.err
    assert main(argv) == 0
    assert "3 were there already" in capsys.readouterr().out
    assert main(["status", "--redis-url", redis_url, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["queued"], run["running"], run["status"]) == (3, 0, "closed")
    assert main(["runs", "delete", "cli", "--redis-url", redis_url]) == 0
    assert not client.keys("distaff:*")
    assert main(["runs", "delete", "cli", "--redis-url", redis_url]) == 2


def test_ctrl_c_ends_a_waiting_producer_with_130(redis_url: str, client: redis.Redis) -> None:
    """It waits at the window; the run stays open for the next one."""
    argv = ["produce", "--redis-url", redis_url, "--run", "cli", "--producer.window", "2", *GAME]
    process = subprocess.Popen([*DISTAFF, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: client.hget("distaff:run:cli:state", "admitted") == b"2", process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "stopped; run the same command again to go on" in out
    assert "Traceback" not in err
    assert client.hget("distaff:run:cli:state", "status") == b"open"


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(latency_s=0.05) as running:
        yield running


def tree_arguments(engine_url: str, folder: Path) -> list[str]:
    from tests.farm_support import tokenizer_dir

    return [
        *GAME,
        *("--engine.kind", "vllm", "--engine.base-urls", engine_url, "--tokenizer.name", tokenizer_dir()),
        *("--limit", "4", "--rollouts.group-size", "2", "--sampling.max-tokens", "16", "--directory", str(folder)),
    ]


@pytest.fixture
def marked() -> Iterator[tuple[str, dict[str, str]]]:
    """A mark all processes of a test carry in their environment, and that environment, with a temporary folder of its own."""
    with tempfile.TemporaryDirectory(prefix="dm") as folder:
        yield folder, {**os.environ, "TMPDIR": folder}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_in_one_tree_ends_with_its_archive_and_leaves_nothing(
    engine: ScriptedEngine, tmp_path: Path, marked: tuple[str, dict[str, str]]
) -> None:
    """`distaff run` with an embedded Redis: exit code 0, every group in the archive, summary on standard output."""
    mark, environment = marked
    done = subprocess.run(
        [*DISTAFF, "run", *tree_arguments(engine.url, tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "run run: 4 groups, 8 rollouts" in done.stdout
    assert "run run 4/4" in done.stderr
    lines = (tmp_path / "groups-000001.jsonl").read_text("utf-8").splitlines()
    assert sorted(json.loads(line)["seq"] for line in lines) == [0, 1, 2, 3]
    assert leftovers(mark) == []
    assert list(Path(mark).iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_evaluation_in_one_tree_prints_its_report(
    engine: ScriptedEngine, tmp_path: Path, marked: tuple[str, dict[str, str]]
) -> None:
    """`distaff evaluate`: metrics.json, samples.jsonl and the table on standard output."""
    mark, environment = marked
    done = subprocess.run(
        [*DISTAFF, "evaluate", *tree_arguments(engine.url, tmp_path), "-n", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "4 items x 2 rollouts" in done.stdout
    assert json.loads((tmp_path / "metrics.json").read_text())
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 8
    assert leftovers(mark) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_whole_tree(tmp_path: Path, marked: tuple[str, dict[str, str]]) -> None:
    """SIGINT to the foreground group in the middle of a run: exit code 130, no process and no temporary file left."""
    mark, environment = marked
    with ScriptedEngine(latency_s=60) as engine:
        process = subprocess.Popen(
            [*DISTAFF, "run", *tree_arguments(engine.url, tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            wait_until(lambda: bool(engine.records), process, seconds=200)
            assert len(leftovers(mark)) >= 5  # itself, guard, Redis, worker, archiver
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert leftovers(mark) == []
    assert list(Path(mark).iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_is_replaced(tmp_path: Path, marked: tuple[str, dict[str, str]]) -> None:
    """SIGKILL in the middle of a run: another worker finishes it, and the run is a success."""
    mark, environment = marked
    with ScriptedEngine(latency_s=2) as engine:
        process = subprocess.Popen(
            [*DISTAFF, "run", *tree_arguments(engine.url, tmp_path), "--worker.lease-s", "1"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until(lambda: bool(engine.records), process, seconds=200)
            for pid in leftovers(mark):
                if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3:4] == [b"work"]:
                    os.kill(pid, signal.SIGKILL)
            out, err = process.communicate(timeout=200)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, err
    assert "killed by signal 9; another one is started (1 of at most 10)" in err
    assert "4 groups, 8 rollouts" in out
    assert leftovers(mark) == []


@pytest.mark.timeout(300)
def test_a_child_that_fails_ends_the_run_with_its_code_and_message(marked: tuple[str, dict[str, str]]) -> None:
    """An unknown environment: the producer's message, its exit code, nothing left."""
    mark, environment = marked
    done = subprocess.run(
        [*DISTAFF, "run", "--environment.id", "no-such-thing"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2
    assert "no-such-thing" in done.stderr
    assert "Traceback" not in done.stderr
    assert leftovers(mark) == []
