"""docs/promises.md and the tests agree: thirty promises, each with tests that are there, are collected and say what they prove."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutations.catalogue import MUTATIONS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "promises.md"
ROW = re.compile(r"^\| (P\d+) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"`(test_\w+)`")
PROMISES = [f"P{number}" for number in range(1, 31)]
AREAS = ["tokens", "environments", "evaluation", "doctor"]
"""What mechanisms that no promise names belong to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One test function."""

    file: str
    text: str
    """Its docstring, and its module's."""


@cache
def collected() -> dict[str, list[Found]]:
    """Test functions by name, as pytest collects them: at the top of a test file, not made impossible by a skip without a condition."""
    found: dict[str, list[Found]] = {}
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        module = ast.parse(path.read_text())
        about = ast.get_docstring(module) or ""
        for node in module.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                if any(ast.unparse(mark).startswith("pytest.mark.skip(") for mark in node.decorator_list):
                    continue
                text = f"{ast.get_docstring(node) or ''}\n{about}"
                found.setdefault(node.name, []).append(Found(file=path.name, text=text))
    return found


def promised() -> dict[str, list[str]]:
    """The first table: promise -> its tests."""
    table = PAGE.read_text().partition("## Seen to fail")[0]
    return {name: TEST.findall(tests) for name, tests in ROW.findall(table)}


def seen_to_fail() -> list[str]:
    """The lines of the second table, as the catalogue of mutations has them."""
    return [
        f"| {mutation.promise} | {mutation.what} | `{mutation.test.split()[0].partition('::')[2].partition('[')[0]}` |"
        for mutation in sorted(MUTATIONS, key=lambda mutation: [*PROMISES, *AREAS].index(mutation.promise))
    ]


def test_every_promise_names_tests_that_are_there() -> None:
    """No promise is left out, and a renamed or deleted test shows here."""
    assert list(promised()) == PROMISES
    for name, tests in promised().items():
        assert tests, f"{name} names no test"
        assert len(set(tests)) == len(tests), f"{name} names a test twice"
        assert set(tests) <= set(collected()), f"{name}: {sorted(set(tests) - set(collected()))}"


def test_a_test_says_which_promise_it_proves() -> None:
    """In its docstring, or in that of its module."""
    silent = [
        f"{name}: {test} ({found.file})"
        for name, tests in promised().items()
        for test in tests
        for found in collected()[test]
        if not any(re.search(rf"\b{name}\b", other.text) for other in collected()[test])
    ]
    assert not silent, silent


def test_a_promise_is_proven_by_default() -> None:
    """At least one of its tests is not left out of `make test`."""
    sources = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}

    def is_exhaustive(test: str, found: Found) -> bool:
        before = sources[found.file].partition(f"def {test}(")[0].rpartition("\n\n\n")[2]
        return "\n@pytest.mark.exhaustive" in f"\n{before}"

    for name, tests in promised().items():
        assert any(not is_exhaustive(test, found) for test in tests for found in collected()[test]), name


def test_every_mechanism_was_seen_to_fail() -> None:
    """The second table is the catalogue of mutations (`python -m tests.test_promises` writes it anew), and leaves no promise out."""
    table = PAGE.read_text().partition("## Seen to fail")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert rows == seen_to_fail()
    assert {mutation.promise for mutation in MUTATIONS} == {*PROMISES, *AREAS}


def test_what_broke_elsewhere_names_tests_that_are_there() -> None:
    """Every row has a test, or says why it needs none."""
    text = PAGE.read_text().partition("## What broke elsewhere")[2]
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| reference", "| process"))
    ]
    assert len(rows) > 40
    for row in rows:
        names = TEST.findall(row)
        assert set(names) <= set(collected()), f"{sorted(set(names) - set(collected()))}"
        assert names or len(row.split("|")[3].split()) > 1, row


def write() -> None:
    """Bring the second table of the page up to date."""
    before, rest = PAGE.read_text().split("| promise | switched off | test that failed |\n|---|---|---|\n")
    after = rest[rest.index("\n\n") :] if not rest.startswith("\n") else rest
    PAGE.write_text(
        f"{before}| promise | switched off | test that failed |\n|---|---|---|\n" + "\n".join(seen_to_fail()) + after
    )


if __name__ == "__main__":
    write()
