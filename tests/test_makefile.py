"""`make demo` and `make test` on machines that lack something, and when everything is installed already."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what `make` looks at."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make(folder: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env={**environment, "PATH": path or os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=30,
    )


def python_that(folder: Path, answers: str) -> Path:
    """A stand-in for a Python: a shell script whose answer to `-c CODE` is decided by `answers`, a shell `case` on the code."""
    folder.mkdir()
    script = folder / "python3"
    script.write_text(
        '#!/bin/sh\n[ "$1" = -V ] && { echo "Python 3.9.2"; exit; }\ncase "$2" in\n' + answers + "\nesac\nexit 0\n"
    )
    script.chmod(0o755)
    return script


def test_a_missing_python_is_named_with_the_command_that_installs_it(clone: Path) -> None:
    """One line, and nothing was made."""
    result = make(clone, "demo", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert "no-such-python is not there" in result.stderr
    assert "apt-get install python3 python3-venv" in result.stderr
    assert not (clone / ".venv").exists()


def test_an_old_python_is_refused_and_a_newer_one_on_the_machine_named(clone: Path, tmp_path: Path) -> None:
    """The message says what to type."""
    old = python_that(tmp_path / "old", "*version_info*) exit 1;;")
    (tmp_path / "old" / "python3.13").symlink_to(sys.executable)
    result = make(clone, "test", f"PYTHON={old}", path=f"{old.parent}:/usr/bin:/bin")
    assert result.returncode != 0
    assert "is Python 3.9.2, 3.11 or newer is needed" in result.stderr
    assert "make PYTHON=python3.13" in result.stderr


def test_a_python_without_venv_is_told_which_package_brings_it(clone: Path, tmp_path: Path) -> None:
    """Debian splits venv off its Python."""
    bare = python_that(tmp_path / "bare", "*ensurepip*) exit 1;;")
    result = make(clone, "demo", f"PYTHON={bare}")
    assert result.returncode != 0
    assert "apt-get install python3-venv" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the wheel brings it")
def test_a_missing_system_library_is_named_before_anything_is_installed(clone: Path, tmp_path: Path) -> None:
    """The demo's engine needs the OpenMP runtime, which slim systems lack."""
    slim = python_that(tmp_path / "slim", "*libgomp*) exit 1;;")
    result = make(clone, "demo", f"PYTHON={slim}")
    assert result.returncode != 0
    assert "apt-get install libgomp1" in result.stderr
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(("target", "stamp"), [("demo", ".demo"), ("test", ".dev")])
def test_an_installed_project_asks_nobody(clone: Path, target: str, stamp: str) -> None:
    """A stamp newer than pyproject.toml and constraints.txt: no pip, so no network."""
    (clone / ".venv").mkdir()
    (clone / ".venv" / stamp).touch()
    assert "pip" not in make(clone, "--dry-run", target).stdout
    os.utime(clone / ".venv" / stamp, (0, 0))
    assert "pip" in make(clone, "--dry-run", target).stdout
