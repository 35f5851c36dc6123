"""The catalogue of mutations stays true: what it switches off is there, and so is the test that has to see it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutations.catalogue import MUTATIONS, Mutation

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.promise}: {mutation.what}")
def test_a_mutation_fits_the_code(mutation: Mutation) -> None:
    """Its text occurs once in its file, and its test exists."""
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    file, _, name = mutation.test.split()[0].partition("::")
    assert re.search(rf"def {name.partition('[')[0]}\(", (ROOT / file).read_text())
