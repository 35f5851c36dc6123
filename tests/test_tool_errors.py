"""Malformed tool calls, from sampled tokens through a real ToolEnv and back: the model is told, nothing is evaluated, tokens stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from distaff.config import SamplingSection
from distaff.environments.protocol import ModelFactory
from distaff_worker.chat_models import TokenChatModel
from distaff_worker.engines.protocol import Generation
from distaff_worker.samples import steps_to_samples
from distaff_worker.sampling import Limits
from tests.environments_support import load_env, only
from tests.families_support import FAMILIES, end_of, renderer, tokenizer, written
from tests.matrix_support import ScriptedTokens, check_invariants
from tests.tokens_support import assistant

WITH_TOOLS = [name for name, family in FAMILIES.items() if family.calls != "none"]
BROKEN = {
    "hermes": '<tool_call>\n{{"name": "add", "arguments": {}}}\n</tool_call>',
    "json": '{{"name": "add", "parameters": {}}}',
    "harmony": " to=functions.add<|channel|>commentary json<|message|>{}",
}


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.mark.parametrize("name", WITH_TOOLS)
async def test_a_malformed_call_comes_back_as_an_error_and_is_never_evaluated(
    name: str, tmp_path: Path, executor: Executor
) -> None:
    """Arguments that would be Python, and JSON with a mistake: each answered by the tool's error, then a good call and the result."""
    planted = tmp_path / "planted"
    broken = BROKEN[FAMILIES[name].calls]
    call = assistant("", calls=[("add", '{"a": 1, "b": 2}')])
    texts = [
        (broken.format(f"__import__('pathlib').Path('{planted}').touch()"), end_of(name, call)),
        (broken.format('{"a": 1, "b": 2,}'), end_of(name, call)),
        (written(name, call), end_of(name, call)),
        (written(name, assistant("3")), end_of(name, assistant("3"))),
    ]
    engine = ScriptedTokens({"r0": [_generation(name, text, end) for text, end in texts]})
    chosen = renderer(name)
    model = TokenChatModel(
        engine,
        chosen,
        sampling=SamplingSection(),
        rollout_seed=None,
        session="r0",
        limits=Limits(),
        executor=executor,
    )
    factory: ModelFactory = lambda seat: model  # noqa: E731
    environment = load_env("calculator_tool", max_turns=6)
    try:
        play = only(await environment.play(environment.row("train", 0), factory))
    finally:
        await environment.close()
    assert play.error is None
    results = [str(message["content"]) for message in play.messages if message["role"] == "tool"]
    assert len(results) == 3, play.messages
    assert results[-1] == "3"
    assert all("rror" in result or "xpect" in result for result in results[:2]), results
    assert not planted.exists()
    told = chosen.decode(engine.given["r0"][1].prompt_ids[len(engine.given["r0"][0].prompt_ids) :])
    assert "rror" in told or "xpect" in told
    check_invariants(steps_to_samples(model.steps), engine.given["r0"], decode=chosen.decode, last="3")
    assert model.prefix_share == 1.0


def _generation(name: str, text: str, end: str) -> Generation:
    made = tokenizer(name)
    ids = [*made.encode(text, add_special_tokens=False), made.convert_tokens_to_ids(end)]
    return Generation(token_ids=ids, logprobs=[-0.01 * n for n in range(len(ids))], finish_reason="stop")
