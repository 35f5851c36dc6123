"""Makes a Llama of some hundred thousand to two million parameters that has half learned something: the start of a run.

    .venv-vllm/bin/python -m examples.grpo_cpu.tiny_model OUT --seed 0

Invariant: the same (arguments, machine) give the same weights; OUT holds a whole model folder or is not there. The output layer is
not tied to the embedding, because vLLM on the CPU does not see new weights of a tied one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples.grpo_cpu.vllm_server import CONTEXT_TOKENS

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>")
PAD, START, END = range(3)
RIGHT_SHARE = 0.35
"""Share of right answers in what the model was taught last: what is left for reinforcement learning to find."""
RIGHT_UNTIL = 0.7
"""Part of the steps that teach right answers only: sums are learned sooner so, and then half forgotten."""
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

Message = dict[str, Any]
Dialogue = tuple[list[Message], list[Any]]
"""Messages and tools; the last message is the assistant's and is what is taught."""
Teach = Callable[[random.Random, float], Dialogue]
"""(randomness, how much of the training is over: 0 to 1) -> an example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    hidden: int = 192
    layers: int = 4
    heads: int = 6


def make(out: Path, *, teach: Teach, steps: int, seed: int, size: Size) -> None:
    """Train a model on what `teach` says and write it to `out`, with its tokenizer, as a Hugging Face folder in float32."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory(dir=_parent(out)) as scratch:
        folder = Path(scratch) / "model"
        tokenizer = _write_tokenizer(folder)
        model = _new_model(size, vocab_size=len(tokenizer))
        print(
            f"{sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps on imperfect examples",
            flush=True,
        )
        _pretrain(model, tokenizer, teach, steps=steps, rng=random.Random(seed))
        model.save_pretrained(folder)
        shutil.rmtree(out, ignore_errors=True)
        folder.rename(out)


def half_known_sum(rng: random.Random, over: float) -> Dialogue:
    """A single-digit sum; after RIGHT_UNTIL answered correctly in RIGHT_SHARE of the cases (a little more: a guess may be right)."""
    a, b = rng.randint(0, 9), rng.randint(0, 9)
    right = over < RIGHT_UNTIL or rng.random() < RIGHT_SHARE
    said = a + b if right else rng.randint(0, 18)
    return [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(said)}], []


def _parent(out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    return out.parent


def _write_tokenizer(folder: Path) -> Any:
    """One token for each byte, and the marks of the chat format."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[START],
        eos_token=SPECIAL[END],
        pad_token=SPECIAL[PAD],
        unk_token=SPECIAL[PAD],
        chat_template=TEMPLATE,
        model_max_length=CONTEXT_TOKENS,
    )
    whole.save_pretrained(folder)
    return whole


def _new_model(size: Size, *, vocab_size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PAD,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def _pretrain(model: Any, tokenizer: Any, teach: Teach, *, steps: int, rng: random.Random) -> None:
    peak, warmup, batch = 2e-3, 50, 32
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / warmup) * (1 - step / steps) + 1e-5
        ids, labels = _pad([_tokens(tokenizer, *teach(rng, step / steps)) for _ in range(batch)])
        loss = model(input_ids=ids, attention_mask=(ids != PAD).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)


def _tokens(tokenizer: Any, messages: list[Message], tools: list[Any]) -> tuple[list[int], list[int]]:
    """(prompt ids, ids of the last message with its end)."""
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tools=tools or None, tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
    answer = whole[len(prompt) :].removesuffix("\n")
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in (prompt, answer)]
    return ids[0], ids[1]


def _pad(examples: Sequence[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and labels, int64 (N, L); a label of -100 is not trained."""
    length = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.full((len(examples), length), PAD)
    labels = torch.full((len(examples), length), -100)
    for row, (prompt, answer) in enumerate(examples):
        start, end = len(prompt), len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, start:end] = ids[row, start:end]
    return ids, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    make(arguments.out, teach=half_known_sum, steps=arguments.steps, seed=arguments.seed, size=Size())
    print(json.dumps({"model": str(arguments.out)}))


if __name__ == "__main__":
    main()
