"""P25: what a release wrote into Redis is read by every later one: jobs on the queue, dead letters, the configuration of a run.

Files under `tests/golden`, never to be rewritten; `python -m tests.test_golden_records` writes those that are missing for the current release.
Groups have their own (`test_wire_golden`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest

from distaff import dead
from distaff.config import RunConfig
from distaff.types import DeadLetter, RolloutItem
from distaff_producer.admit import check_same
from distaff_producer.rq_jobs import queued_job
from distaff_worker.rq_schema import decode_job
from tests.test_codec import NOWHERE

FOLDER = Path(__file__).parent / "golden"
KINDS = ("job", "letter", "config")
ITEM = RolloutItem(
    run="golden-1",
    seq=12,
    key="arithmetic/0.1.0/0123456789abcdef/train/12",
    epoch=1,
    split="train",
    task={"question": "Was ist 2 + 2? \u2028 😀", "answer": 4, "info": {"deep": [1, None, True, -1.5, {"": []}]}},
    seed=2**40 + 1,
    priority=1,
    trace={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
)
LETTER = DeadLetter(
    item=ITEM,
    kind="environment_error",
    boundary="tool:calculate",
    message="ZeroDivisionError: 1 / 0 \ud800",
    attempts=3,
    first=1_790_000_000.25,
    last=1_790_000_060.5,
    worker="host-1",
)


def _files(kind: str) -> list[Path]:
    return sorted(FOLDER.glob(f"{kind}-*"))


@pytest.mark.parametrize("path", _files("job"), ids=lambda path: path.name)
def test_golden_jobs_are_played_for_ever(path: Path) -> None:
    """The queue outlives the workers that are upgraded."""
    assert decode_job(path.read_bytes(), job_id="golden-1-000000012") == ITEM


@pytest.mark.parametrize("path", _files("letter"), ids=lambda path: path.name)
def test_golden_letters_are_shown_and_retried_for_ever(path: Path) -> None:
    """Letters stay as long as their run."""
    content = json.loads(path.read_bytes())
    assert DeadLetter(**{**content, "item": RolloutItem(**content["item"])}) == LETTER
    shown = dead.Summary.of(dead.Letter(seq=12, text=path.read_bytes(), content=content))
    assert (shown.kind, shown.boundary, shown.message, shown.attempts) == (
        LETTER.kind,
        LETTER.boundary,
        LETTER.message,
        3,
    )


@pytest.mark.parametrize("path", _files("config"), ids=lambda path: path.name)
def test_golden_configurations_are_read_for_ever(path: Path) -> None:
    """A run goes on with upgraded workers and an upgraded producer: settings that came later have their default."""
    config = RunConfig.model_validate_json(path.read_bytes())
    check_same(config, path.read_text())
    assert (config.run.name, config.run.mode, config.rollouts.group_size) == ("golden-1", "rl", 16)
    assert config.environment.args == {"rows": 3, "deep": {"list": [1, None, "é"]}}


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_a_golden_record_of_this_release(kind: str) -> None:
    """A release is not made without."""
    assert any(path.name.startswith(f"{kind}-{version('distaff')}") for path in _files(kind))


def _config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "golden-1", "pool": "p"},
            "environment": {"id": "arithmetic", "args": {"rows": 3, "deep": {"list": [1, None, "é"]}}},
            "engine": {"kind": "vllm", "base_urls": ["http://127.0.0.1:8000/v1"], "api_key_var": "GOLDEN_API_KEY"},
            "sampling": {"temperature": 0.7, "extra": {"top_k": 20, "stop": ["</s>"]}},
            "rollouts": {"group_size": 16, "timeout_s": 12.5},
            "wire": {"compression": "zstd"},
        }
    )


def _write() -> None:
    job = queued_job(ITEM, pool="p", group_timeout_s=1.0, client=NOWHERE)
    contents = {
        "job": dict(zip(job.fields[::2], job.fields[1::2], strict=True))["data"],
        "letter": json.dumps(asdict(LETTER)).encode(),
        "config": _config().model_dump_json().encode(),
    }
    for kind, content in contents.items():
        path = FOLDER / f"{kind}-{version('distaff')}.{'bin' if kind == 'job' else 'json'}"
        if not path.exists() and isinstance(content, bytes):
            path.write_bytes(content)


if __name__ == "__main__":
    _write()
