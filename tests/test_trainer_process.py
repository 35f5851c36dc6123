"""What a trainer sees: one slim import that collides with nothing, and an example that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from distaff import publish_policy_version, publish_policy_version_async, read_policy_version, read_policy_version_async
from distaff.clients import connect, connect_async
from distaff.errors import ConfigurationError, RedisUnavailable
from distaff.keys import RunKeys
from tests.group_support import append_groups, make_group

ROOT = Path(__file__).parent.parent
HEAVY = ("rq", "verifiers", "openai", "transformers", "pydantic", "structlog", "zstandard")


def _run(*arguments: str, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=clean, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_distaff_loads_only_the_base_install(tmp_path: Path) -> None:
    """None of the heavy dependencies, nor a codec."""
    code = f"import sys, distaff; print(sorted({{m.split('.')[0] for m in sys.modules}} & set({HEAVY!r})), len(distaff.__all__))"
    assert _run("-c", code, cwd=tmp_path).startswith("[] ")


def test_a_trainer_with_its_own_common_package_reads_the_stream(
    client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """Its `common`, `worker`, `consumer` and `producer` are its own; distaff's names never shadow them."""
    append_groups(client, [make_group(seq=seq, tokens=8) for seq in range(3)])
    for name in ("common", "worker", "consumer", "producer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"NAME = 'the trainer\\'s {name}'\n")
    (tmp_path / "train.py").write_text(
        "import sys, common, worker, consumer, producer\n"
        "from distaff import GroupConsumer\n"
        "with GroupConsumer('run', sys.argv[1], block_s=0.1) as groups:\n"
        "    print([d.group.seq for d in groups], common.NAME, worker.NAME, consumer.NAME, producer.NAME)\n"
    )
    output = _run("train.py", redis_url, cwd=tmp_path)
    assert output.startswith("[0, 1, 2] the trainer's common the trainer's worker")


def test_the_example_trainer_reads_a_run_to_its_end(client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """Batches of four, one line a step, its version published, the stream empty."""
    append_groups(client, [make_group(seq=seq, rollouts=2, tokens=8) for seq in range(6)])
    lines = _run(str(ROOT / "examples" / "trainer.py"), redis_url, "run", cwd=tmp_path).splitlines()
    assert lines[0].startswith("step 1: 4 groups, 8 samples, 64 tokens, 32 trained, mean reward ")
    assert lines[1].startswith("step 2: 2 groups, 4 samples, 32 tokens, 16 trained, mean reward ")
    assert lines[2:] == ["run run is over"]
    assert read_policy_version(client, "run") == 2
    assert client.xlen(RunKeys("run").groups) == 0


async def test_policy_versions_never_go_backwards(client: redis.Redis, redis_url: str) -> None:
    """None is 0; the same again is fine; an older one is refused and changes nothing; the time is Redis's."""
    assert read_policy_version(client, "run") == 0
    assert publish_policy_version(client, "run", 0)
    assert publish_policy_version(client, "run", 7)
    published = client.hget(RunKeys("run").policy, "published")
    assert publish_policy_version(client, "run", 7)
    assert not publish_policy_version(client, "run", 6)
    assert client.hget(RunKeys("run").policy, "published") == published
    async with connect_async(redis_url) as mine:
        assert await read_policy_version_async(mine, "run") == 7
        assert await publish_policy_version_async(mine, "run", 10)
        assert not await publish_policy_version_async(mine, "run", 9)
    assert read_policy_version(client, "run") == 10
    with pytest.raises(ConfigurationError, match="below 0"):
        publish_policy_version(client, "run", -1)


def test_a_redis_that_is_away_is_one_message_of_ours() -> None:
    """A trainer gets RedisUnavailable, which says that calling again is harmless."""
    with connect("redis://:secret@127.0.0.1:9/0") as away:
        with pytest.raises(RedisUnavailable, match="call again") as reading:
            read_policy_version(away, "run")
        with pytest.raises(RedisUnavailable, match="call again") as publishing:
            publish_policy_version(away, "run", 1)
        assert "secret" not in f"{reading.value} {publishing.value}"
