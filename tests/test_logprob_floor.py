"""Log-probabilities that are minus infinity or no number: floored, counted and flagged; never silent, never guessed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import structlog.testing

from distaff.alignment import LOGPROB_FLOOR
from distaff.errors import EngineAnswerError
from distaff_worker.engines import open_token_engine
from distaff_worker.engines.protocol import Generation
from distaff_worker.engines.token_engine import compared
from tests.engines_support import TOKEN_KINDS, ask_tokens, section
from tests.engines_support import short_backoff as short_backoff
from tests.scripted_engine import Answer, Ask, Reply, ScriptedEngine

pytestmark = pytest.mark.usefixtures("short_backoff")

LOWEST = -3.4028234663852886e38
"""float32's: what llama.cpp and SGLang send for minus infinity."""


async def generate(kind: str, *logprobs: Any, route: str = "") -> tuple[Generation, list[Any]]:
    answer = Answer(token_ids=[5] * len(logprobs), logprobs=list(logprobs))
    refused = {"/inference/v1/generate": 404} if route == "completions" else {}

    def script(ask: Ask) -> Reply:
        return Answer(token_ids=[5]) if ask.prompt_ids == [1] else answer

    async with ScriptedEngine(script=script, refused=refused) as server:
        engine = open_token_engine(section(server, kind=kind), vocab_size=100)
        try:
            if route:
                await engine.check()
            with structlog.testing.capture_logs() as logs:
                return await ask_tokens(engine), logs
        finally:
            await engine.close()


KINDS_AND_ROUTES = [*[(kind, "") for kind in TOKEN_KINDS], ("vllm", "completions")]


@pytest.mark.parametrize(("kind", "route"), KINDS_AND_ROUTES)
@pytest.mark.parametrize("spelling", [None, -9999.0, LOWEST, -1e30], ids=["null", "vLLM", "lowest float32", "bf16"])
async def test_a_logprob_that_is_no_number_is_floored_counted_and_logged(kind: str, route: str, spelling: Any) -> None:
    """P12: in each of the spellings that engines have for it; the others keep their place and value."""
    got, logs = await generate(kind, -0.5, spelling, -1.25, spelling, route=route)
    assert got.logprobs == [-0.5, LOGPROB_FLOOR, -1.25, LOGPROB_FLOOR]
    assert got.floored == 2
    events = [event for event in logs if event["event"] == "completion.logprobs_floored"]
    assert [(event["floored"], event["tokens"]) for event in events] == [(2, 4)]


@pytest.mark.parametrize(("kind", "route"), KINDS_AND_ROUTES)
async def test_ordinary_logprobs_are_not_floored(kind: str, route: str) -> None:
    """Very unlikely is not impossible."""
    got, logs = await generate(kind, -9998.5, 0.0, -1e-30, route=route)
    assert (got.logprobs, got.floored) == ([-9998.5, 0.0, -1e-30], 0)
    assert not [event for event in logs if event["event"] == "completion.logprobs_floored"]


@pytest.mark.parametrize(("kind", "route"), KINDS_AND_ROUTES)
@pytest.mark.parametrize("spelling", [None, -9999.0, LOWEST])
async def test_an_answer_without_any_finite_logprob_is_an_error(kind: str, route: str, spelling: Any) -> None:
    """A model that gives nothing but NaN is broken, and a server that returns none is none for RL: nothing to train on."""
    with pytest.raises(EngineAnswerError, match="no finite log-probability for any of 2 tokens"):
        await generate(kind, spelling, spelling, route=route)


@pytest.mark.parametrize("kind", TOKEN_KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5, "-0.1", True])
async def test_everything_else_stays_an_error(kind: str, value: Any) -> None:
    """P12: NaN and infinities are not JSON; positive ones, texts and booleans are no log-probabilities."""
    with pytest.raises(EngineAnswerError):
        await generate(kind, -0.5, value, -0.5)


# -- what log-probabilities are of


def _script(greedy: float, cold: float, ordinary: float = -1.0) -> Any:
    def script(ask: Ask) -> Reply:
        logprob = {0.0: greedy, 1.0: ordinary}.get(ask.sampling["temperature"], cold)
        return Answer(token_ids=[5], logprobs=[logprob])

    return script


@pytest.mark.parametrize("kind", TOKEN_KINDS)
@pytest.mark.parametrize(
    ("greedy", "cold", "mode"),
    [(-1.5, -1.51, "model"), (-1.5, -0.001, "sampling"), (-0.01, -0.0, "unknown"), (-1.5, -0.9, "unknown")],
)
async def test_the_check_measures_what_logprobs_are_of(kind: str, greedy: float, cold: float, mode: str) -> None:
    """The same token greedily and near temperature 0: of the model both are alike, after temperature the second is certain."""
    async with ScriptedEngine(script=_script(greedy, cold)) as server:
        engine = open_token_engine(section(server, kind=kind), vocab_size=100)
        with structlog.testing.capture_logs() as logs:
            info = await engine.check()
            await engine.check()
        await engine.close()
    assert info.logprobs == mode
    assert [event["logprobs"] for event in logs if event["event"] == "engine.checked"] == [mode, mode]


async def test_a_measurement_that_fails_does_not_fail_the_check() -> None:
    """It is a fact worth having, not a condition."""
    async with ScriptedEngine(script=_script(-1.5, 0.5)) as server:
        engine = open_token_engine(section(server), vocab_size=100)
        assert (await engine.check()).logprobs == "unknown"
        await engine.close()


def test_nothing_is_concluded_from_other_than_one_token() -> None:
    """An aborted probe is empty."""
    assert compared([], [-0.5]) == compared([-0.5], []) == "unknown"
