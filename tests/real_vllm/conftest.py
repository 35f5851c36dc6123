"""The real vLLM, started once for all these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real_vllm.support import Server, running_server


@pytest.fixture(scope="session")
def vllm() -> Iterator[Server]:
    with running_server() as server:
        yield server
