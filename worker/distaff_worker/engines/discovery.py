"""What the servers of an engine say of themselves before the first rollout: who answers, which model, how much context.

Invariant: returns only when at least one server answered and serves the model; every other outcome is an error that
names the URL and the mend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pydantic_core
import structlog

from distaff.clients import redact_url
from distaff.errors import EngineAnswerError, EngineError, EngineRefused, EngineUnavailable
from distaff.types import JSON
from distaff_worker.engines.http import HttpPool, read_json

log = structlog.get_logger(__name__)

ASK_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

_NO_ENGINE = "Is it an inference engine? Correct engine.base_urls"

Encode = Callable[[str], Sequence[int]]
"""Text to ids, no special tokens added."""
PROBE_TEXT = "def add(a, b):\n    return a + b  # 12 + 30\nIt's only a test, isn't it?"
"""Free of what tokenizers of one model are known to disagree on (combining characters, exotic digits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One entry of a server's /v1/models."""

    names: tuple[str, ...]
    """The id first, then aliases."""
    max_context_tokens: int | None
    vocab_size: int | None
    """Rows of the output layer; None when the server does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    model: str
    """The name to send."""
    urls: list[str]
    """The servers that answered."""
    served: list[str]
    """Names of all models of the first server that answered."""
    card: Card | None
    """Of the model there; None when the server lists none."""
    max_context_tokens: int | None
    """The smallest of all servers that say."""


async def discover(pool: HttpPool, *, must_list: bool) -> Discovery:
    """Ask every server for its models, waiting up to start_timeout_s for one to answer.

    must_list: False accepts a server without /v1/models when the configuration names the model.
    Raises EngineUnavailable, EngineRefused.
    """
    listings = await _wait_for_listings(pool, must_list=must_list)
    found = {url: _card_of(cards, pool.section.model, url=url) for url, cards in listings.items()}
    first, card = next(iter(found.items()))
    contexts = [c.max_context_tokens for c in found.values() if c and c.max_context_tokens]
    names = {c.names[0] for c in found.values() if c}
    if not pool.section.model and len(names) > 1:
        raise EngineRefused(f"the engines serve different models ({', '.join(sorted(names))}); set engine.model to one")
    return Discovery(
        model=pool.section.model or (card.names[0] if card else ""),
        urls=list(found),
        served=[c.names[0] for c in listings[first]],
        card=card,
        max_context_tokens=min(contexts, default=None),
    )


async def _wait_for_listings(pool: HttpPool, *, must_list: bool) -> dict[str, list[Card]]:
    loop = asyncio.get_running_loop()
    end = loop.time() + pool.section.start_timeout_s
    pause = FIRST_PAUSE_S
    while True:
        answers = await asyncio.gather(*(_listing(pool, url, must_list=must_list) for url in pool.urls))
        listings = {url: cards for url, cards in zip(pool.urls, answers, strict=True) if isinstance(cards, list)}
        failures = [answer for answer in answers if isinstance(answer, EngineUnavailable)]
        if listings:
            for failure in failures:
                log.warning("engine.server_unreachable", error=str(failure))
            return listings
        if loop.time() + pause > end:
            raise EngineUnavailable(
                f"{'; '.join(map(str, failures))}. Waited {pool.section.start_timeout_s:g} s (engine.start_timeout_s). "
                "Start the server, or correct engine.base_urls"
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def _listing(pool: HttpPool, url: str, *, must_list: bool) -> list[Card] | EngineUnavailable:
    timeout_s = min(ASK_TIMEOUT_S, max(pool.section.start_timeout_s, 0.1))
    try:
        document = await pool.get(url, "/v1/models", timeout_s=timeout_s)
    except EngineUnavailable as error:
        return error
    except EngineRefused as error:
        if "(404)" not in str(error):
            raise
        if not must_list and pool.section.model:
            return []
        raise EngineRefused(f"{error}. {_NO_ENGINE}") from None
    except EngineAnswerError as error:
        raise EngineRefused(f"{error}. {_NO_ENGINE}") from None
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise EngineRefused(f"{redact_url(url)} does not answer like an inference engine on /v1/models. {_NO_ENGINE}")
    return [card for card in map(_card, entries) if card is not None]


def _card(entry: JSON) -> Card | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
        return None
    meta, aliases = entry.get("meta"), entry.get("aliases")
    meta = meta if isinstance(meta, dict) else {}
    aliases = aliases if isinstance(aliases, list) else []
    return Card(
        names=(entry["id"], *(alias for alias in aliases if isinstance(alias, str))),
        max_context_tokens=_count(entry.get("max_model_len")) or _count(meta.get("n_ctx")),
        vocab_size=_count(meta.get("n_vocab")),
    )


def _count(value: JSON) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _card_of(cards: Sequence[Card], model: str, *, url: str) -> Card | None:
    """The card of the configured model, or of the only one."""
    served = ", ".join(card.names[0] for card in cards[:20]) or "none"
    if model:
        for card in cards:
            if model in card.names or card.names[0].endswith(f"/{model}"):
                return card
        if not cards:
            return None
        raise EngineRefused(
            f"engine at {redact_url(url)} does not serve {model!r}; it serves: {served}. Correct engine.model"
        )
    if len(cards) != 1:
        raise EngineRefused(
            f"engine at {redact_url(url)} serves {len(cards)} models ({served}); name one with engine.model"
        )
    return cards[0]


def check_vocabulary(found: Discovery, vocab_size: int | None) -> None:
    """Raise EngineRefused when the tokenizer has more ids than the served model has outputs."""
    rows = found.card.vocab_size if found.card else None
    if rows is not None and vocab_size is not None and rows < vocab_size:
        raise EngineRefused(
            f"the tokenizer has {vocab_size} ids but {found.model!r} at {redact_url(found.urls[0])} has {rows}: "
            "they do not belong together. Set tokenizer.name to the served model's tokenizer"
        )


async def check_tokenizer(pool: HttpPool, url: str, request: dict[str, JSON], encode: Encode | None) -> None:
    """Raise EngineRefused when the server and `encode` disagree on PROBE_TEXT. A server without /tokenize passes.

    request: the body for /tokenize, whose wording differs between engines.
    """
    if encode is None:
        return
    body = pydantic_core.to_json(request)
    try:
        document = await pool.post_to(url, "/tokenize", body, read=read_json, timeout_s=ASK_TIMEOUT_S)
    except EngineRefused:
        return
    theirs = document.get("tokens") if isinstance(document, dict) else None
    ours = list(encode(PROBE_TEXT))
    if isinstance(theirs, list) and theirs != ours:
        raise EngineRefused(
            f"the tokenizer does not fit the model at {redact_url(url)}: it gives {ours[:6]}... for {PROBE_TEXT[:20]!r}, "
            f"the server {theirs[:6]}... Set tokenizer.name to the served model's tokenizer"
        )


def without_tokens(error: EngineError, *, kind: str, mend: str) -> EngineError:
    """The same kind of error for a server that fails the one-token probe of an RL run."""
    return type(error)(
        f"{error}. An RL run needs token ids with log-probabilities from the engine (engine.kind {kind!r}): {mend}"
    )
