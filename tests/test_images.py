"""Images: by reference in the stream, marked on the rollout, refused where only text can be trained."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest

from distaff.config import SamplingSection
from distaff.environments.protocol import Episode, Play
from distaff.errors import TokenizationError
from distaff.types import Message
from distaff_worker.attempt import IMAGES, Attempt, played_rollouts
from distaff_worker.chat_models import ApiChatModel, TokenChatModel
from distaff_worker.engines.protocol import ChatReply
from distaff_worker.images import by_reference, count_images
from distaff_worker.sampling import Limits
from tests.matrix_support import ScriptedTokens
from tests.tokens_support import assistant, renderer

URI = "data:image/png;base64," + "iVBORw0KGgo" * 100


def with_image(url: str = URI) -> Message:
    return {
        "role": "user",
        "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}],
    }


@pytest.fixture
def executor() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as made:
        yield made


class _Api:
    """A chat engine that counts what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def chat(self, messages: Any, **_: Any) -> ChatReply:
        self.asked.append(messages)
        return ChatReply(message=assistant("a cat"), finish_reason="stop", prompt_tokens=1, completion_tokens=1)


def test_image_data_becomes_a_reference_and_urls_stay() -> None:
    """The hash is of the URI as the dataset's row has it, wherever in the JSON it stands; the input is left alone."""
    value = {"a": [with_image()], "b": "data: is a word", "n": 3}
    found: Any = by_reference(value)
    reference = f"sha256:{hashlib.sha256(URI.encode()).hexdigest()};type=image/png;characters={len(URI)}"
    assert found["a"][0]["content"][1]["image_url"]["url"] == reference
    assert value == {"a": [with_image()], "b": "data: is a word", "n": 3}
    assert (found["b"], found["n"]) == ("data: is a word", 3)
    assert by_reference(with_image("https://images/cat.png")) == with_image("https://images/cat.png")
    text = "data: " + "a long text that happens to begin like this " * 20
    assert by_reference(text) == text


def test_the_rollout_is_marked() -> None:
    """The number of images is a metric of the rollout; without any there is none."""

    def metrics(messages: list[Message]) -> Any:
        play = Play(seat="", messages=messages, tools=[], turns=1, stop_condition="", truncated=False, error=None)
        return played_rollouts(Attempt(0, Episode(plays=[play]), {}, 1.0))[0].metrics

    assert count_images([with_image(), with_image("https://x/y.png"), assistant("b")]) == 2
    assert metrics([with_image(), with_image()]) == {IMAGES: 2.0}
    assert metrics([assistant("b")]) == {}


async def test_rl_refuses_images_before_anything_is_sampled(executor: Executor) -> None:
    """The verdict says which mode keeps them."""
    engine = ScriptedTokens({"r0": []})
    model = TokenChatModel(engine, renderer("smollm2"), **_options(executor))
    with pytest.raises(TokenizationError, match=r'text conversations only.*run\.mode = "eval"'):
        await model.complete([with_image()], [], {})
    assert engine.asked == {}


async def test_sft_refuses_images_before_anything_is_paid_for(executor: Executor) -> None:
    """Also when no limit needs the prompt's length."""
    api = _Api()
    model = ApiChatModel(api, renderer("smollm2"), **_options(executor))  # type: ignore[arg-type]
    with pytest.raises(TokenizationError, match="text conversations only"):
        await model.complete([with_image()], [], {})
    assert api.asked == []


async def test_an_evaluation_sends_images_as_they_are(executor: Executor) -> None:
    """No tokenizer, nothing to train."""
    api = _Api()
    model = ApiChatModel(api, None, **_options(executor))  # type: ignore[arg-type]
    await model.complete([with_image()], [], {})
    assert api.asked == [[with_image()]]


def _options(executor: Executor) -> dict[str, Any]:
    return {
        "sampling": SamplingSection(),
        "rollout_seed": None,
        "session": "r0",
        "limits": Limits(),
        "executor": executor,
    }
