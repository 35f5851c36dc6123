"""Token ids to text with one lookup an id.

Invariant: `decode(ids)` equals the tokenizer's own decoding, specials and spaces kept. Only for byte-level tokenizers, where the
bytes of a text are the bytes of its tokens laid end to end; that it holds is tried out when a tokenizer is opened, and every other
tokenizer decodes for itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import decoders

_TRIALS, _TRIAL_LENGTH = 64, 48


def open_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Decodes ids of this tokenizer; incomplete characters become U+FFFD."""

    def by_itself(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.decoder, decoders.ByteLevel):
        return by_itself
    spelled = {int(number): _bytes_of(token) for token, number in tokenizer.get_vocab().items()}

    def by_table(ids: Sequence[int]) -> str:
        try:
            return b"".join(map(spelled.__getitem__, ids)).decode("utf-8", "replace")
        except KeyError:  # an id that no token has; models with padded embeddings can sample one
            return by_itself(ids)

    return by_table if _agree(by_table, by_itself, list(spelled)) else by_itself


def _agree(one: Callable[[Sequence[int]], str], other: Callable[[Sequence[int]], str], ids: list[int]) -> bool:
    rng = random.Random(0)  # noqa: S311 - trials
    trials = [rng.choices(ids, k=_TRIAL_LENGTH) for _ in range(_TRIALS)]
    return all(one(trial) == other(trial) for trial in [[], *trials])


def _bytes_of(token: str) -> bytes:
    """A character of the byte alphabet is one byte; a token with any other character stands for itself."""
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:
        return token.encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters are their own bytes, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _alphabet()
