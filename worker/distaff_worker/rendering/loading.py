"""Opens the training tokenizer and picks the renderer for it.

Invariant: a tokenizer that cannot serve the run is refused here, with the mend, before anything is played. Never runs code that comes with a
tokenizer, never reaches for the network when the files are on the disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import structlog

from distaff.config import TokenizerSection
from distaff.errors import ConfigurationError, TokenizationError
from distaff.types import JSON, Message, Mode, Tool
from distaff_worker.rendering.protocol import Renderer
from distaff_worker.rendering.renderers_backend import PackageRenderer, formats, known_formats
from distaff_worker.rendering.template_backend import TemplateRenderer

log = structlog.get_logger(__name__)

_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
_CHAT: list[Message] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
]
_CALL: JSON = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
_TOOL_CHAT: list[Message] = [
    *_CHAT,
    {"role": "assistant", "content": "", "reasoning_content": "Easy.", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "6"},
]
_MEND = (
    "give tokenizer.name: a folder with tokenizer.json and tokenizer_config.json, or a hub id "
    "(downloaded once, then read from the cache; without a network it must be there already)"
)


def open_renderer(section: TokenizerSection, fallback_name: str, *, mode: Mode = "rl") -> Renderer:
    """The renderer of a run. Reads files; call it off the event loop, and use the result from one thread at a time.

    fallback_name: the model's name on the engine, taken where the section names no tokenizer. Outside RL "auto" is the template: nothing has to be
    bridged there. Raises ConfigurationError.
    """
    name = section.name or fallback_name
    if not name:
        raise ConfigurationError(f"no tokenizer: {_MEND}")
    tokenizer = load_tokenizer(name)
    if section.chat_template:
        tokenizer.chat_template = section.chat_template
    common: dict[str, Any] = {
        "name": name,
        "vocab_size": _vocab_size(tokenizer, name),
        "stop_ids": _generation_ends(name),
    }
    known = known_formats(name, fallback_name) if mode == "rl" or not tokenizer.chat_template else []
    renderer = _choose(section, tokenizer, known, common)
    log.info("renderer.opened", tokenizer=name, kind=renderer.kind, vocab_size=renderer.vocab_size)
    return renderer


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or hub id. Raises ConfigurationError."""
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")):
        raise ConfigurationError(f"the folder {name} holds no tokenizer (no tokenizer.json): {_MEND}")
    if not folder.is_dir() and (folder.is_absolute() or name.startswith(".")):
        raise ConfigurationError(f"the tokenizer's folder {name} does not exist: {_MEND}")
    from transformers import AutoTokenizer

    failure: Exception | None = None
    for local_only in (True,) if folder.is_dir() else (True, False):
        try:
            return AutoTokenizer.from_pretrained(name, local_files_only=local_only, trust_remote_code=False)
        except (OSError, ValueError, LookupError, TypeError, ImportError, AttributeError) as error:
            failure = error
    raise ConfigurationError(
        f"the tokenizer {name!r} cannot be loaded ({type(failure).__name__}: {_first_line(failure)}): {_MEND}"
    )


def _choose(section: TokenizerSection, tokenizer: Any, known: list[str], common: dict[str, Any]) -> Renderer:
    if section.renderer not in ("auto", "template"):
        if section.renderer not in formats():
            raise ConfigurationError(
                f"tokenizer.renderer {section.renderer!r} is unknown: auto, template, or one of {', '.join(formats())}"
            )
        return PackageRenderer(tokenizer, format_name=section.renderer, **common)
    if section.renderer == "auto" and not section.chat_template:
        package = _matching(tokenizer, known, common)
        if package is not None:
            return package
    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"the tokenizer {common['name']} has no chat template: give tokenizer.chat_template (@FILE), or "
            "tokenizer.renderer, or the tokenizer of an instruction-tuned model"
        )
    return TemplateRenderer(tokenizer, **common)


def _matching(tokenizer: Any, known: list[str], common: dict[str, Any]) -> Renderer | None:
    """The first of the known formats that gives the tokens of the tokenizer's own template: a fine-tune can carry its base's name and not its template."""
    for format_name in known:
        try:
            package = PackageRenderer(tokenizer, format_name=format_name, **common)
        except ConfigurationError:
            continue
        if not tokenizer.chat_template or _same_format(package, TemplateRenderer(tokenizer, **common)):
            return package
        log.warning("renderer.refused", tokenizer=common["name"], kind=package.kind, reason="the template differs")
    return None


def _same_format(package: Renderer, template: Renderer) -> bool:
    try:
        return package.render(_CHAT, []) == template.render(_CHAT, []) and (
            package.render(_TOOL_CHAT, [_TOOL]) == template.render(_TOOL_CHAT, [_TOOL])
        )
    except TokenizationError:
        return False


def _vocab_size(tokenizer: Any, name: str) -> int:
    """Rows of the model's embedding where its config.json is at hand (padding included), else ids of the tokenizer."""
    largest = max(tokenizer.get_vocab().values(), default=-1) + 1
    if largest == 0:
        raise ConfigurationError(f"the tokenizer {name} has an empty vocabulary: {_MEND}")
    config = _json_file(name, "config.json")
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or largest
    if rows < len(tokenizer.get_vocab()) - len(tokenizer.added_tokens_decoder):
        raise ConfigurationError(
            f"the tokenizer {name} has {largest} tokens but the model beside it only {rows}: they do not belong together"
        )
    return max(int(rows), largest)


def _generation_ends(name: str) -> list[int]:
    """End tokens that the model's generation_config.json names."""
    ends = _json_file(name, "generation_config.json").get("eos_token_id")
    return [int(end) for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]


def _json_file(name: str, file: str) -> dict[str, Any]:
    from transformers.utils import cached_file

    path = cached_file(
        name,
        file,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    if path is None:
        return {}
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): repair or remove it") from None
    return value if isinstance(value, dict) else {}


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
