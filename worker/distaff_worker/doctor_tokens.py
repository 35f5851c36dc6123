"""What `distaff doctor` asks of engine and tokenizer together, for RL.

Invariant: what is found is what an RL run needs: the tokenizer of the served model, ids with finite log-probabilities, prompts that extend the
turn before. Samples a few tokens, by the very clients a worker uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TypeVar

import pydantic_core

from distaff.config import RunConfig
from distaff.errors import EngineAnswerError, EngineRefused, TokenizationError
from distaff.types import JSON, Message
from distaff_worker.chat_models import TokenChatModel
from distaff_worker.doctor_checks import Found, Skip, there
from distaff_worker.engines.discovery import PROBE_TEXT, Discovery
from distaff_worker.engines.http import HttpPool, read_json
from distaff_worker.engines.protocol import Generation, TokenEngine
from distaff_worker.rendering.protocol import Renderer
from distaff_worker.sampling import Limits

T = TypeVar("T")
ASK_S = 5.0
SAMPLED_TOKENS = 8
QUESTION: list[Message] = [{"role": "user", "content": "Name three colours."}]
FOLLOW_UP: Message = {"role": "user", "content": "And two more?"}
PROBES: Mapping[str, str] = {
    "code": PROBE_TEXT,
    "indented code": "\tfor i in range(3):\n\t\tprint(f'{i:>3}')  \n\n\n",
    "unicode": "Grüße, Ελλάδα, 東京, e\u0301 and \u00e9",
    "emoji": "👍🏽 👨‍👩‍👧‍👦 🇪🇺",
    "digits": "3.14159 1,000,000 007 12345678901234567890",
    "spaces": "a  b   c \u00a0 d\r\ne",
}
"""What an engine and a tokenizer of one model agree on. The first one decides; others differ for known reasons (normalization)."""


class TokenChecks:
    """The checks; each returns what it found or raises. tokenizing: the one thread that touches the tokenizer."""

    def __init__(
        self,
        config: RunConfig,
        pool: HttpPool | None,
        engine: TokenEngine | None,
        served: Discovery | None,
        renderer: Renderer | None,
        tokenizing: Executor,
    ) -> None:
        self._config, self._pool, self._engine, self._served = config, pool, engine, served
        self._renderer, self._tokenizing = renderer, tokenizing
        self._sampled: Generation | None = None

    async def tokenizer(self) -> Found[None]:
        renderer, texts = there(self._renderer), {**PROBES, **_special(there(self._renderer))}
        theirs = [await self._tokenize({"prompt": text, "content": text}) for text in texts.values()]
        ours = await self._tokenizing_thread(lambda: [list(renderer.encode(text)) for text in texts.values()])
        differ = [name for name, a, b in zip(texts, ours, theirs, strict=True) if a != b]
        mend = "set tokenizer.name to the served model's tokenizer"
        if next(iter(PROBES)) in differ or len(differ) > len(texts) // 2:
            raise EngineRefused(f"the tokenizer {renderer.name} and the engine disagree on {', '.join(differ)}. {mend}")
        if differ:
            fact = f"engine and tokenizer agree on {len(texts) - len(differ)} texts and not on: {', '.join(differ)}"
            advice = "ids are the engine's and never re-encoded, so samples are exact; still, " + mend
            return Found(value=None, fact=fact, status="warning", mend=advice)
        return Found(value=None, fact=f"engine and tokenizer agree on {len(texts)} texts: {', '.join(texts)}")

    async def template(self) -> Found[None]:
        """A difference harms nobody in RL, where prompts are sent as ids; it would in a chat evaluation of the same model."""
        renderer = there(self._renderer)
        ours = await self._tokenizing_thread(lambda: renderer.render(QUESTION, []))
        theirs = await self._their_prompt()
        if theirs == ours:
            return Found(value=None, fact="the engine's chat template gives the tokenizer's tokens")
        fact = "the engine's chat template differs from the tokenizer's: RL sends ids and is exact, chat requests are not the same"
        return Found(value=None, fact=fact, status="warning", mend="start the engine with the same chat template")

    async def _their_prompt(self) -> JSON:
        if self._config.engine.kind == "llamacpp":
            document = await self._post("/apply-template", {"messages": QUESTION})
            text = document.get("prompt") if isinstance(document, dict) else None
            if not isinstance(text, str):
                raise Skip("the engine does not show its chat template")
            return await self._tokenize({"content": text})
        return await self._tokenize({"messages": QUESTION, "add_generation_prompt": True})

    async def _tokenize(self, request: dict[str, JSON]) -> JSON:
        model = self._served.model if self._served else ""
        if self._config.engine.kind == "llamacpp":
            body: dict[str, JSON] = {"content": request["content"], "add_special": False}
        else:
            body = {"model": model, **request, "add_special_tokens": False}
            body.pop("content", None)
        document = await self._post("/tokenize", body)
        tokens = document.get("tokens") if isinstance(document, dict) else None
        if not isinstance(tokens, list):
            raise Skip("the engine does not show how it tokenizes")
        return tokens

    async def _post(self, path: str, request: dict[str, JSON]) -> JSON:
        pool, body = there(self._pool), pydantic_core.to_json(request)
        url = self._served.urls[0] if self._served else pool.urls[0]
        try:
            return await pool.post_to(url, path, body, read=read_json, timeout_s=ASK_S)
        except EngineRefused:
            raise Skip(f"the engine has no {path}") from None

    async def tokens(self) -> Found[None]:
        renderer, engine = there(self._renderer), there(self._engine)
        prompt = await self._tokenizing_thread(lambda: renderer.render(QUESTION, []))
        sampling = {"temperature": 1.0, "top_p": 1.0, "stop_token_ids": sorted(renderer.stop_ids)}
        got = self._sampled = await engine.generate(
            prompt, max_tokens=SAMPLED_TOKENS, sampling=sampling, session="doctor"
        )
        if not got.token_ids:
            raise EngineAnswerError("the engine sampled nothing. Look into its log")
        fact = f"{len(got.token_ids)} ids, each with a finite log-probability, {sum(got.logprobs) / len(got.logprobs):.2f} on average"
        if not any(got.logprobs):
            mend = "see that the engine does not sample greedily and reports log-probabilities of the model"
            return Found(value=None, fact="every log-probability is 0", status="warning", mend=mend)
        return Found(value=None, fact=fact)

    async def stop(self) -> Found[None]:
        renderer, got = there(self._renderer), there(self._sampled)
        if not renderer.stop_ids:
            raise TokenizationError(
                "the tokenizer names no token that ends a turn, so that rollouts only end by length. Give eos_token in "
                "tokenizer_config.json, or eos_token_id in generation_config.json"
            )
        names = await self._tokenizing_thread(lambda: [renderer.decode([token]) for token in sorted(renderer.stop_ids)])
        fact = f"a turn ends with {', '.join(map(repr, names))}"
        last = got.token_ids[-1]
        if got.finish_reason != "stop" or last in renderer.stop_ids:
            return Found(value=None, fact=fact)
        text = await self._tokenizing_thread(lambda: renderer.decode([last]))
        mend = "give the tokenizer of the served model, with its generation_config.json beside it"
        return Found(value=None, fact=f"{fact}; the engine stopped at {text!r}", status="warning", mend=mend)

    async def bridge(self) -> Found[None]:
        renderer, engine = there(self._renderer), there(self._engine)
        model = TokenChatModel(
            engine,
            renderer,
            sampling=self._config.sampling.model_copy(update={"max_tokens": SAMPLED_TOKENS}),
            rollout_seed=None,
            session="doctor",
            limits=Limits(),
            executor=self._tokenizing,
        )
        first = await model.complete(QUESTION, [], {})
        await model.complete([*QUESTION, first.message, FOLLOW_UP], [], {})
        one, two = model.steps
        before = [*one.prompt_ids, *one.completion_ids]
        if two.prompt_ids[: len(before)] == before:
            return Found(value=None, fact=f"turn 2 begins with the {len(before)} tokens of turn 1, as sampled")
        if two.bridged:
            raise EngineAnswerError(
                "turn 2 was bridged and does not begin with the tokens of turn 1. This is a bug in distaff"
            )
        fact = "turn 2 cannot extend turn 1 in this chat format: each turn becomes a sample of its own"
        return Found(value=None, fact=fact, status="warning", mend="docs/tokens.md says why and what it costs")

    async def _tokenizing_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, call)


def _special(renderer: Renderer) -> dict[str, str]:
    """A text with the token that ends a turn, written out as a user may write it."""
    ends: Sequence[int] = sorted(renderer.stop_ids)[:1]
    return {"special tokens in a text": f"before {renderer.decode(ends)} behind"} if ends else {}
