"""The demo model's tokenizer as a Hugging Face folder, made from its GGUF file without torch.

Invariant: a folder appears whole or not at all, and gives the ids that the server's own tokenizer gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distaff.errors import ConfigurationError
from distaff.types import JSON
from distaff_worker.demo_engine import MODEL_NAME, model_path
from distaff_worker.demo_engine.gguf import read_metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REVISION = 1
"""Raised whenever the folder's content changes."""
_CONTROL, _USER_DEFINED = 3, 4
"""Token types of GGUF."""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def demo_tokenizer_dir(cache: Path) -> Path:
    """Folder inside `cache` with tokenizer.json, tokenizer_config.json and chat_template.jinja; made at the first call.

    Raises ConfigurationError when the model's package is not installed.
    """
    model = model_path()
    stamp = hashlib.sha256(f"{_REVISION} {model.name} {model.stat().st_size}".encode()).hexdigest()[:12]
    folder = cache / f"{MODEL_NAME}-tokenizer-{stamp}"
    if not folder.is_dir():
        write_tokenizer(read_metadata(model), folder)
    return folder


def write_tokenizer(metadata: Mapping[str, JSON], folder: Path) -> None:
    """Write the tokenizer that `metadata` (of a GGUF file) describes; a folder another process made meanwhile is kept.

    Raises ConfigurationError for any but SmolLM2's kind: byte-level BPE, digits apart, no beginning-of-sequence token added.
    """
    tokenizer = _tokenizer(metadata)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tokenizer.save(str(draft / "tokenizer.json"))
        (draft / "tokenizer_config.json").write_text(json.dumps(_config(metadata), indent=1), "utf-8")
        (draft / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], "utf-8")
        draft.chmod(0o755)
        os.rename(draft, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _tokenizer(metadata: Mapping[str, JSON]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm") or metadata.get("tokenizer.ggml.add_bos_token"):
        raise ConfigurationError(
            f"no tokenizer for GGUF kind {kind}: only SmolLM2's is known here; give tokenizer.name"
        )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for kind_of_token, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, found in zip(tokens, types, strict=True) if found == kind_of_token]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special) for token in chosen])
    return tokenizer


def _config(metadata: Mapping[str, JSON]) -> dict[str, JSON]:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {
        name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in _SPECIAL.items()
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    context = metadata.get(f"{metadata['general.architecture']}.context_length", 2048)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        **names,
    }
