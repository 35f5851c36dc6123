"""Text to token ids, each stretch between special tokens only once.

Invariant: `encode(text)` equals the tokenizer's own encoding of the whole text, always. A tokenizer cuts a text at its special tokens before
it does anything else, so the stretches between them are independent; tokenizers for which that does not hold are found out
when they are opened, and encoded whole. Never adds special tokens of its own, never truncates.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from distaff_worker.prefixes import common_prefix
from distaff_worker.rendering.decoding import open_decoder

CACHE_CHARACTERS = 2_000_000
"""Text kept with its ids; about 20 MB at most."""
_PROBES = ("a", " a", "\n", "\n\na ", "1 23", "  ", "é漢🙂", "▁a", "a" * 9)


class TextEncoder:
    """Cached encoder and decoder of one tokenizer. For one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode = open_decoder(tokenizer)
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_characters = 0
        self._specials, self._cuts = _special_tokens(tokenizer)
        self._longest = max(map(len, tokenizer.get_added_vocab()), default=0)
        if self._cuts and not self._stretches_are_independent():
            self._specials, self._cuts = None, {}

    @property
    def cuts_at_special_tokens(self) -> bool:
        return bool(self._cuts)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it become special tokens, as in any chat template."""
        text = encodable(text)
        ids: list[int] = []
        start = 0
        for match in self._specials.finditer(text) if self._specials else ():
            special = self._cuts.get(match[0])
            if special is None:
                continue
            ids += self._stretch(text[start : match.start()])
            ids.append(special)
            start = match.end()
        return ids + self._stretch(text[start:])

    def encode_prefixes(self, text: str, cuts: Sequence[tuple[int, str]]) -> list[list[int]]:
        """Ids of `text[:cut] + closing` for each (cut, closing), cuts in ascending order; the text is read once."""
        if self._specials is None or encodable(text) != text:
            return [self.encode(text[:cut] + closing) for cut, closing in cuts]
        found, start = [], 0
        ids: list[int] = []
        matches = self._specials.finditer(text)
        match = next(matches, None)
        for cut, closing in cuts:
            while match is not None and match.start() + self._longest <= cut:
                special = self._cuts.get(match[0])
                if special is not None:
                    ids += [*self._stretch(text[start : match.start()]), special]
                    start = match.end()
                match = next(matches, None)
            found.append([*ids, *self.encode(text[start:cut] + closing)])
        return found

    def encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids of `text`, [begin, end) in ids of each [begin, end) in characters). A token across a beginning belongs to the span."""
        ids = self.encode(text)
        ends = [(at, "") for span in spans for at in span]
        places = [common_prefix(head, ids) for head in self.encode_prefixes(text, ends)]
        return ids, list(zip(places[::2], places[1::2], strict=True))

    def forget(self) -> None:
        """Empty the cache."""
        self._cache.clear()
        self._cached_characters = 0

    def encode_whole(self, text: str) -> list[int]:
        """Ids of `text` in one pass of the tokenizer."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False)) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text with all special tokens and all spaces; incomplete characters become U+FFFD."""
        return self._decode(ids)

    def _stretch(self, text: str) -> list[int]:
        known = self._cache.get(text)
        if known is not None:
            self._cache.move_to_end(text)
            return known
        ids = self.encode_whole(text)
        if len(text) <= CACHE_CHARACTERS // 8:
            self._keep(text, ids)
        return ids

    def _keep(self, text: str, ids: list[int]) -> None:
        self._cache[text] = ids
        self._cached_characters += len(text)
        while self._cached_characters > CACHE_CHARACTERS:
            dropped, _ = self._cache.popitem(last=False)
            self._cached_characters -= len(dropped)

    def _stretches_are_independent(self) -> bool:
        """False for tokenizers that treat the beginning of a text in a way of its own (a prepended space)."""
        special, number = next(iter(self._cuts.items()))
        return all(
            self.encode_whole(f"{left}{special}{right}")
            == [*self.encode_whole(left), number, *self.encode_whole(right)]
            for left in _PROBES
            for right in _PROBES
        )


def encodable(text: str) -> str:
    """`text` with surrogates that stand alone (JSON escapes can make them, UTF-8 cannot hold them) as U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _special_tokens(tokenizer: Any) -> tuple[re.Pattern[str] | None, dict[str, int]]:
    """A pattern of everything the tokenizer cuts at first, and those of them that may be cut at from outside.

    Tokens that swallow the whitespace around them or match whole words only are matched but not cut at.
    """
    added = {token.content: (number, token) for number, token in tokenizer.added_tokens_decoder.items()}
    first = {text: found for text, found in added.items() if not found[1].normalized and text}
    cuts = {
        text: int(number)
        for text, (number, token) in first.items()
        if token.special and not (token.lstrip or token.rstrip or token.single_word)
    }
    if not cuts or not getattr(tokenizer, "is_fast", False):
        return None, {}
    longest_first = sorted(first, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))), cuts
