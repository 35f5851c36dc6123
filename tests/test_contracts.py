"""The import contracts of pyproject.toml: kept as the sources are, and each seen to catch what it is there for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("common", "producer", "worker", "consumer")
VIOLATIONS = [
    ("the common package imports no role", "common/distaff/cli/main.py", "import distaff_worker.job"),
    ("the common package imports no role", "common/distaff/keys.py", "from distaff_producer import command"),
    ("roles never import each other", "consumer/distaff_consumer/report.py", "from distaff_worker import steps"),
    ("roles never import each other", "producer/distaff_producer/admit.py", "import distaff_worker.rq_schema"),
    ("what a trainer imports", "common/distaff/consumer.py", "import distaff.config"),
    ("what a trainer imports", "common/distaff/types.py", "import pydantic"),
    ("what a trainer imports", "common/distaff/runs.py", "from rq.job import Job"),
    ("stages of the worker never import each other", "worker/distaff_worker/sft.py", "from distaff_worker import rollout"),
    ("stages of the worker never import each other", "worker/distaff_worker/sft.py", "import distaff_worker.rendering.loading"),
]  # fmt: skip


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the source roots and of the contracts, to be spoilt."""
    for name in SOURCES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the sources in `folder`, and not the installed ones."""
    path = os.pathsep.join(str(folder / name) for name in SOURCES)
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_sources_keep_the_contracts(sources: Path) -> None:
    """Nothing is broken as it stands."""
    result = lint_imports(sources)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize(("contract", "file", "line"), VIOLATIONS)
def test_a_violation_breaks_its_contract(sources: Path, contract: str, file: str, line: str) -> None:
    """One import too many is reported under the contract that forbids it."""
    with (sources / file).open("a") as module:
        module.write(f"\n{line}\n")
    result = lint_imports(sources)
    broken = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    assert result.returncode == 1
    assert any(text.startswith(contract) for text in broken), result.stdout
