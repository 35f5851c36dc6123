"""verifiers 0.4, which has no classic API: what it says to a classic id, and that its processes can be forked. `make test-v1next`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from distaff.config import EnvironmentSection
from distaff.environments import releases
from distaff.environments.load import load
from distaff.errors import EnvironmentLoadError, FatalRun
from distaff.keys import RunKeys
from tests.farm_support import make_worker, produce, run_config
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.skipif(releases.has_classic(), reason="the installed verifiers has the classic API as well")
MEND = "pip install 'verifiers>=0.3.1,<0.4'"


def refused(environment_id: str) -> str:
    with pytest.raises(EnvironmentLoadError) as caught:
        load(EnvironmentSection(id=environment_id))
    return str(caught.value)


@pytest.mark.parametrize(
    "environment_id",
    ["guess-number", "calculator-tool", "reasoning-gym", "tests.zoo_classic_support", "tests.marker_env"],
)
def test_a_classic_id_is_answered_with_what_to_install(environment_id: str) -> None:
    """Whether the module fails at verifiers.legacy, at datasets or not at all."""
    message = refused(environment_id)
    assert f"{environment_id!r} is a classic one" in message
    assert MEND in message
    assert releases.version() in message


@pytest.mark.parametrize(
    "source",
    [
        "import verifiers as vf\nclass Mine(vf.MultiTurnEnv): ...\ndef load_environment(): return Mine()\n",
        "import verifiers as vf\ndef load_environment(): return vf.SingleTurnEnv()\n",
        "from datasets import Dataset\ndef load_environment(): ...\n",
        "from verifiers.legacy.envs import x\nfrom json import loads as load_environment\n",
    ],
)
def test_a_classic_environment_of_someone_elses_too(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it reaches for what is no longer there."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "their_env.py").write_text(source)
    assert MEND in refused("their-env")
    sys.modules.pop("their_env", None)


def test_a_module_with_both_apis_is_played_by_the_one_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """v1; and a v1 module that fails for another reason says that reason."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "both_env.py").write_text(
        "from tests.zoo_v1_support import Zoo\n__all__ = ['Zoo']\ndef load_environment(): ...\n"
    )
    assert load(EnvironmentSection(id="both-env")).api == "v1"
    (tmp_path / "poor_env.py").write_text("import not_there_at_all\n__all__ = ['Zoo']\n")
    assert "pip install not-there-at-all" in refused("poor-env")


FORK = """
import os, threading
from distaff.environments.releases import preload
preload()
tasks = lambda: len(os.listdir("/proc/self/task"))
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, str(tasks()).encode())
    os._exit(0)
print(threading.active_count(), tasks(), os.read(read, 9).decode())
"""


def test_what_environments_are_forked_from_has_one_thread() -> None:
    """Forking a process with more of them is not safe. (numpy's BLAS has its own, and ends them before a fork.)"""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["1", "1", "1"]


async def test_a_worker_refuses_a_classic_run_with_what_to_install(redis_url: str, client: redis.Redis) -> None:
    """Admitted by a producer that has the classic API, met by a worker that has not: its items stay for others."""
    async with ScriptedEngine() as engine:
        await produce(redis_url, run_config(engine.url, environment={"id": "word-count"}, producer={"limit": 2}))
        classic = run_config(engine.url, environment={"id": "guess-number"}, producer={"limit": 2})
        client.set(RunKeys("run-1").config, classic.model_dump_json())
        service, _ = make_worker(redis_url)
        with pytest.raises(FatalRun, match=r"verifiers>=0\.3\.1,<0\.4"):
            await asyncio.wait_for(service.run(), 40)
    assert client.llen("rq:queue:default") == 2
