"""Finding, recognising and building environments, and every way that goes wrong."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distaff.config import EnvironmentSection
from distaff.environments import releases
from distaff.environments.load import environment_ref, examples, find_module, item_key, load, module_name
from distaff.errors import ConfigurationError, EnvironmentLoadError
from tests.environments_support import load_env

CLASSIC = "def load_environment(size=3):\n    import tests.zoo_classic_support as zoo\n    return zoo.single()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def refused(environment_id: str, **fields: Any) -> str:
    """The message load() fails with."""
    with pytest.raises((EnvironmentLoadError, ConfigurationError)) as caught:
        load(EnvironmentSection(id=environment_id, **fields))
    return str(caught.value)


@pytest.mark.parametrize(
    ("environment_id", "name"),
    [("my-env", "my_env"), ("owner/my-env@1.2", "my_env"), ("package.module", "package.module"), ("owner/x", "x")],
)
def test_ids_become_module_names(environment_id: str, name: str) -> None:
    """Hub ids, dashes, dotted modules."""
    assert module_name(environment_id) == name


def test_an_importable_module_comes_before_a_shipped_example(folder: Path) -> None:
    """The user's own guess_number wins; one that is no environment is passed over (reasoning_gym is a package on its own)."""
    (folder / "calculator_tool.py").write_text(CLASSIC)
    assert find_module(EnvironmentSection(id="calculator-tool")).__name__ == "calculator_tool"
    del sys.modules["calculator_tool"]
    assert find_module(EnvironmentSection(id="guess-number")).__name__ == "distaff.environments.examples.guess_number"
    assert find_module(EnvironmentSection(id="reasoning-gym")).__name__ == "distaff.environments.examples.reasoning_gym"


@pytest.mark.parametrize("environment_id", ["", "../x.py", "a b", "x.", "owner/"])
def test_an_id_that_names_no_module_is_refused(environment_id: str) -> None:
    """With an example of what to write."""
    assert "guess-number" in refused(environment_id) or "package.module" in refused(environment_id)


def test_an_unknown_environment_is_answered_with_what_to_do() -> None:
    """The pip line, PYTHONPATH, what ships, and what was probably meant."""
    message = refused("owner/guess-numbr")
    assert "'owner/guess-numbr'" in message
    assert "Did you mean 'guess-number'?" in message
    assert "pip install guess-numbr" in message
    assert "PYTHONPATH" in message
    assert all(name in message for name in examples())
    assert "Did you mean" not in refused("zzz")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import not_there_at_all\n", "pip install not-there-at-all"),
        ("1 +\n", "SyntaxError"),
        ("raise SystemExit('no')\n", "SystemExit: no"),
        ("x = 1\n", "has no `load_environment` (classic) and exports no Taskset"),
        ("def load_environment(): raise KeyError('token')\n", "KeyError: 'token'"),
        ("def load_environment(): raise SystemExit(3)\n", "SystemExit: 3"),
        ("def load_environment(): return 5\n", "returned a int"),
    ],
)
def test_a_module_that_is_no_working_environment_is_named_with_its_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    """Imports, syntax, exits, missing entry points, failing builders, wrong results."""
    (folder / "faulty_env.py").write_text(source)
    monkeypatch.delitem(sys.modules, "faulty_env", raising=False)
    message = refused("faulty-env")
    assert words in message
    assert "faulty" in message
    assert "\n" not in message


def test_wrong_arguments_are_told_in_one_line() -> None:
    """classic: the signature. v1: pydantic's field and message."""
    classic = refused("guess-number", args={"sise": 3})
    assert "unexpected keyword argument 'sise'" in classic
    assert "load_environment takes (train_size=512, eval_size=64" in classic
    invalid = refused("guess-number", args={"low": 5, "high": 5})
    assert "low (5) must be below high (5)" in invalid
    v1 = refused("word-count", args={"tries": "many", "sise": 3})
    assert "taskset.tries" in v1
    assert "taskset.sise" in v1
    assert "\n" not in classic + invalid + v1


def test_api_can_be_set_and_is_checked() -> None:
    """A module without the wanted entry point is refused."""
    assert load(EnvironmentSection(id="word-count", api="v1")).api == "v1"
    assert "has no `load_environment`" in refused("word-count", api="classic")
    assert "exports no Taskset" in refused("guess-number", api="v1")


@pytest.mark.parametrize("environment_id", ["guess-number", "tests.zoo_classic_support"])
def test_a_classic_id_without_the_classic_api_is_answered_with_what_to_install(
    environment_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under verifiers 0.4; the second leg sees the same with the real one (test_environments_v1_only)."""
    monkeypatch.setattr(releases, "has_classic", lambda: False)
    message = refused(environment_id)
    assert f"{environment_id!r} is a classic one" in message
    assert "pip install 'verifiers>=0.3.1,<0.4'" in message
    assert load(EnvironmentSection(id="word-count")).api == "v1"


def test_a_missing_verifiers_is_not_answered_with_its_newest_release(folder: Path) -> None:
    """`pip install verifiers` would bring one without the classic API."""
    (folder / "without.py").write_text("raise ModuleNotFoundError('no verifiers', name='verifiers')\n")
    assert "pip install 'distaff[environments]'" in refused("without")


def test_a_task_that_needs_a_container_is_refused_at_once(folder: Path) -> None:
    """With the setting that gives it one."""
    (folder / "boxed_v1.py").write_text(
        "import verifiers.v1 as vf\n__all__ = ['Boxed']\nclass BoxedTask(vf.Task[vf.TaskData]):\n    NEEDS_CONTAINER = True\n"
        "class Boxed(vf.Taskset[BoxedTask, vf.TasksetConfig]):\n    def load(self): return []\n"
    )
    assert "[environment.args.env.agent.runtime]" in refused("boxed-v1")


def test_the_signal_handlers_are_what_they_were() -> None:
    """verifiers replaces SIGINT and SIGTERM; ours come back, also when loading fails."""

    def handler(*_: Any) -> None: ...

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        load_env("guess-number")
        assert [signal.getsignal(number) for number in before] == [handler, handler]
        refused("guess-number", args={"low": 5, "high": 5})
        assert [signal.getsignal(number) for number in before] == [handler, handler]
    finally:
        for number, old in before.items():
            signal.signal(number, old)


async def test_loading_off_the_main_thread_is_refused() -> None:
    """verifiers itself would fail with a riddle."""
    assert "main thread" in await asyncio.to_thread(refused, "guess-number")


def test_a_row_is_named_by_environment_version_arguments_split_and_row() -> None:
    """item_key and environment_ref."""
    config = EnvironmentSection(id="guess-number", args={"seed": 1})
    env = load(config)
    ref = environment_ref(env, config, "eval")
    assert (ref.id, ref.version, ref.api, ref.split) == ("guess-number", env.version, "classic", "eval")
    assert ref.args_hash == config.args_hash()
    assert item_key(env, config, "train", 7) == f"guess-number@{env.version}/{config.args_hash()}/train/7"
    assert item_key(env, config, "eval", 7) != item_key(env, config, "train", 7)
    seed = EnvironmentSection(id="guess-number", args={"seed": 2})
    assert item_key(env, seed, "train", 7) != item_key(env, config, "train", 7)
    other = EnvironmentSection(id="calculator-tool", args={"seed": 1})
    assert item_key(load(other), other, "train", 7) != item_key(env, config, "train", 7)
    one, two = (item_key(env, config, "train", row) for row in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert one == two
    assert one != item_key(env, config, "train", {"a": 1, "b": 3})


def test_the_version_is_that_of_the_distribution_or_0() -> None:
    """Shipped examples carry distaff's own version, a loose module "0"."""
    assert load_env("guess-number").version[0].isdigit()
    assert load_env("guess-number").version != "0"
    assert load_env("tests.zoo_classic_support").version == "0"


def test_the_protocol_alone_imports_no_verifiers() -> None:
    """Nor does load, before it loads."""
    code = "import sys, distaff.environments.protocol, distaff.environments.load; print('verifiers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
