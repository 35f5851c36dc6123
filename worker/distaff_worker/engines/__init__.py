"""Inference engines: one module for each wire format, one HTTP layer below, one place where answers are checked.

Nothing is imported before an engine is opened: `openai` alone takes a second and a half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distaff.config import EngineSection
from distaff.errors import ConfigurationError
from distaff_worker.engines.protocol import ChatEngine, TokenEngine

if TYPE_CHECKING:
    from distaff_worker.engines.token_engine import HttpTokenEngine

__all__ = ["open_chat_engine", "open_token_engine"]


def open_token_engine(
    section: EngineSection, *, vocab_size: int | None, encode: Callable[[str], Sequence[int]] | None = None
) -> TokenEngine:
    """The engine of an RL run. No connection is made yet; `check` it.

    vocab_size: ids outside [0, vocab_size) are errors. encode: the run's tokenizer without special tokens; `check` compares it
    with the server's own. Raises ConfigurationError for an engine kind without token ids, or
    when the variable with the API key is not set.
    """
    from distaff_worker.engines.http import HttpPool

    engines = _token_engines()
    if section.kind not in engines:
        *first, last = map(repr, engines)
        raise ConfigurationError(
            f"engine.kind {section.kind!r} cannot be used in RL mode: a chat API returns text, and an RL run needs the sampled "
            f"token ids with their log-probabilities. Use engine.kind {', '.join(first)} or {last}, or run.mode 'sft'"
        )
    return engines[section.kind](HttpPool(section), vocab_size=vocab_size, encode=encode)


def _token_engines() -> dict[str, type[HttpTokenEngine]]:
    """By kind. A new engine is a module with its wire, and a place in this list."""
    from distaff_worker.engines.llamacpp import LlamaCppEngine
    from distaff_worker.engines.sglang import SglangEngine
    from distaff_worker.engines.vllm import VllmEngine

    return {engine.kind: engine for engine in (VllmEngine, SglangEngine, LlamaCppEngine)}


def open_chat_engine(section: EngineSection) -> ChatEngine:
    """The engine of an SFT or evaluation run; every kind has the chat API. Otherwise as `open_token_engine`."""
    from distaff_worker.engines.http import HttpPool
    from distaff_worker.engines.openai import OpenAIEngine

    return OpenAIEngine(HttpPool(section))
