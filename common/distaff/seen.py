"""A set of item numbers that stays small.

Invariant: numbers cost a bit each where they are dense, and never more than one page each: memory is bounded by how many
were added, not by how large they are.
"""

from __future__ import annotations

_PAGE_BITS = 4096


class SeenNumbers:
    """Non-negative integers, added one by one."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def __contains__(self, number: int) -> bool:
        page, bit = divmod(number, _PAGE_BITS)
        bits = self._pages.get(page)
        return bits is not None and bool(bits[bit >> 3] & (1 << (bit & 7)))

    def add(self, number: int) -> None:
        page, bit = divmod(number, _PAGE_BITS)
        self._pages.setdefault(page, bytearray(_PAGE_BITS // 8))[bit >> 3] |= 1 << (bit & 7)

    def clear(self) -> None:
        self._pages.clear()
