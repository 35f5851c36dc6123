"""The order in which the rows of a dataset are played: a permutation of [0, size) that is computed, not stored.

Invariant: `permuted` is a bijection for every (size, seed, epoch) and depends on nothing else, on no library's generator either,
so a run that is continued years later walks on in the same order.
"""

from __future__ import annotations

import hashlib
import math

_PASSES = 4


def permuted(index: int, *, size: int, seed: int, epoch: int) -> int:
    """The row at place `index` of epoch `epoch`; O(1) time and memory.

    An alternating Feistel network over Z_a x Z_b with a * b >= size, walked until it lands below size (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002); BLAKE2b is the round function. Raises IndexError outside [0, size).
    """
    if not 0 <= index < size:
        raise IndexError(index)
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    key = digest("permutation", seed, epoch).to_bytes(8, "little")
    while True:
        index = _shuffle_once(index, a, b, key)
        if index < size:
            return index


def _shuffle_once(index: int, a: int, b: int, key: bytes) -> int:
    right, left = divmod(index, a)
    for number in range(_PASSES):
        left = (left + _round(key, 2 * number, right)) % a
        right = (right + _round(key, 2 * number + 1, left)) % b
    return left + a * right


def _round(key: bytes, number: int, value: int) -> int:
    data = number.to_bytes(1, "little") + value.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key).digest(), "little")


def digest(*parts: str | int) -> int:
    """A 64-bit number that depends on `parts` and on nothing else."""
    text = "/".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
