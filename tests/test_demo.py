"""`distaff demo`: what it shows is what is in its archives, and it leaves nothing running."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distaff.cli.demo_report import marked, pieces, read_groups, summarize, table
from distaff.types import JSON
from tests.process_support import leftovers, wait_until

DEMO = [sys.executable, "-m", "distaff", "demo", "--quick"]


def record(seq: int, rewards: list[float | None], *, turns: int = 2) -> dict[str, JSON]:
    """A group as the archive writes it, as far as the report reads it; U+2028 is no end of a line."""
    rollouts = [
        {"reward": reward, "turns": turns, "timings": {"engine": 2.0, "total": 3.0}, "text": "a\u2028b"}
        for reward in rewards
    ]
    samples = [
        {"rollout": index, "token_ids": [1, 2, 3, 4], "trained": [[1, 3]], "advantage": 0.0}
        for index in range(len(rewards))
    ]
    times: dict[str, Any] = {"created": 100.0 + 10 * seq, "statistics": {"seconds": 5.0}}
    return {"group_id": f"g{seq}", "rollouts": rollouts, "samples": samples, **times}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    for number, records in enumerate(([record(0, [0.0, 1.0]), record(1, [None, 0.5])], [record(2, [1.0], turns=1)])):
        lines = [json.dumps(one, ensure_ascii=False) for one in records]
        (tmp_path / f"groups-00000{number + 1}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return tmp_path


def test_the_figures_are_counted_from_the_files(archive: Path) -> None:
    """Groups, rollouts, tokens, rewards without failed rollouts, the span from first dispatch to last completion, stages."""
    summary = summarize(read_groups(archive), archive)
    assert (summary.groups, summary.rollouts, summary.samples) == (3, 5, 5)
    assert (summary.tokens, summary.trained_tokens) == (20, 10)
    assert summary.mean_reward == pytest.approx(0.625)
    assert summary.seconds == 25
    assert summary.tokens_per_s == pytest.approx(0.8)
    assert summary.stage_seconds == {"engine": 2.0, "total": 3.0}
    assert summary.best is not None
    assert (summary.best["group_id"], summary.best["rollout"]) == ("g0", 1)


def test_the_table_shows_an_empty_archive_too(archive: Path, tmp_path: Path) -> None:
    """Nothing is divided by zero."""
    empty = summarize([], tmp_path / "none")
    console = Console(file=io.StringIO(), width=100)
    console.print(table({"rl": summarize(read_groups(archive), archive), "sft": empty}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"rollouts\W+5\W+0", text)
    assert re.search(r"mean reward\W+0\.625\W+-", text)


def test_trained_tokens_are_marked_and_the_others_are_not() -> None:
    """In colours on a terminal, in brackets in a pipe; the parts are the whole sample."""
    from tests.farm_support import tokenizer_dir

    tokenizer = Path(tokenizer_dir())
    sample = {"token_ids": [1, 504, 260, 2, 1, 504], "trained": [[1, 3], [4, 5]]}
    parts = pieces(sample, tokenizer)
    assert [trained for _, trained in parts] == [False, True, False, True, False]
    plain = marked(parts, colours=False).plain
    assert plain.count("[[") == 2
    assert plain.replace("[[", "").replace("]]", "") == "".join(text for text, _ in parts)
    coloured = marked(parts, colours=True)
    assert "[[" not in coloured.plain
    assert [coloured.plain[span.start : span.end] for span in coloured.spans if span.style] == [
        text for text, trained in parts if trained
    ]


@pytest.fixture
def place() -> Iterator[tuple[Path, dict[str, str]]]:
    """A working folder, and an environment whose temporary folder, unique to the test, marks its processes."""
    with tempfile.TemporaryDirectory(prefix="dd") as folder:
        (Path(folder) / "tmp").mkdir()
        yield Path(folder), {**os.environ, "TMPDIR": f"{folder}/tmp"}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_plays_both_modes_and_leaves_only_its_files(place: tuple[Path, dict[str, str]]) -> None:
    """A real model through the real queue; the archives named at the end hold what the table says."""
    folder, environment = place
    done = subprocess.run(DEMO, cwd=folder, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr
    paths = dict(re.findall(r"^(rl|sft): (\S+\.jsonl)$", done.stdout, re.MULTILINE))
    assert sorted(paths) == ["rl", "sft"]
    for mode, path in paths.items():
        groups = [json.loads(line) for line in (folder / path).read_text("utf-8").split("\n") if line]
        assert len(groups) == 2
        assert all(group["mode"] == mode and len(group["rollouts"]) == 4 for group in groups)
        logprobs = [sample["logprobs"] for group in groups for sample in group["samples"]]
        assert logprobs
        assert all((values is not None) == (mode == "rl") for values in logprobs)
    assert re.search(r"groups\W+2\W+2", done.stdout)
    assert "[[" in done.stdout
    assert leftovers(str(folder)) == []
    assert list((folder / "tmp").iterdir()) == []


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_demo_with_its_engine(place: tuple[Path, dict[str, str]]) -> None:
    """As soon as the model is served and workers start."""
    folder, environment = place
    process = subprocess.Popen(
        DEMO,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        everybody = 6  # itself, guard, Redis, engine, worker, producer
        wait_until(lambda: len(leftovers(str(folder))) >= everybody, process, seconds=200)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert leftovers(str(folder)) == []
