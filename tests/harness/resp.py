"""Where RESP messages begin and end in a stream of bytes: requests, and replies of RESP2 and RESP3.

Invariant: a message is found when its last byte is there, however the bytes were cut; nothing is copied or decoded.
"""

from __future__ import annotations

_BULK = frozenset(b"$=!")
_LIST = frozenset(b"*~>")
_PAIRS = frozenset(b"%|")
_ARRAY, _ATTRIBUTE = ord("*"), ord("|")
_HEAD_BYTES = 160
"""Enough of a request for its name and first argument."""


class Scanner:
    """Follows one growing buffer. requests: lines that are no arrays are inline commands."""

    __slots__ = ("_attributes", "_missing", "_position", "_requests")

    def __init__(self, *, requests: bool = False) -> None:
        self._requests = requests
        self._position = 0
        self._missing: list[int] = []
        self._attributes: list[bool] = []

    def ends(self, buffer: bytearray) -> list[int]:
        """Offsets behind the messages that have become whole since the last call."""
        found: list[int] = []
        size, missing = len(buffer), self._missing
        position = self._position
        while position < size:
            kind = buffer[position]
            if self._requests and not missing and kind != _ARRAY:
                line_end = buffer.find(b"\n", position)
                if line_end < 0:
                    break
                position = line_end + 1
                found.append(position)
                continue
            line_end = buffer.find(b"\r\n", position)
            if line_end < 0:
                break
            after = line_end + 2
            if kind in _BULK:
                length = int(buffer[position + 1 : line_end])
                if length >= 0:
                    after += length + 2
                    if after > size:
                        break
            elif kind in _LIST or kind in _PAIRS:
                count = int(buffer[position + 1 : line_end]) * (2 if kind in _PAIRS else 1)
                if count > 0:
                    missing.append(count)
                    self._attributes.append(kind == _ATTRIBUTE)
                    position = after
                    continue
            position = after
            if self._one_more():
                found.append(position)
        self._position = position
        return found

    def consumed(self, size: int) -> None:
        """The first `size` bytes were taken off the buffer."""
        self._position -= size

    def _one_more(self) -> bool:
        """A value has ended; whether a whole message has."""
        missing = self._missing
        while missing:
            missing[-1] -= 1
            if missing[-1]:
                return False
            missing.pop()
            if self._attributes.pop():
                return False  # the value it belongs to is still to come
        return True


def words(buffer: bytearray, start: int, end: int) -> list[bytes]:
    """The first words of a request, at most name and first argument; none for an empty line. A long argument is cut short."""
    head = bytes(buffer[start : min(end, start + _HEAD_BYTES)])
    if head[:1] != b"*":
        return head.split()[:2]
    return head.split(b"\r\n", 5)[2:5:2]


def arguments(buffer: bytearray, start: int, end: int) -> list[bytes]:
    """All arguments of a request behind its name, if none of them holds a line break."""
    raw = bytes(buffer[start:end])
    return raw.split(b"\r\n")[4::2] if raw[:1] == b"*" else raw.split()[1:]


def first_word(buffer: bytearray, start: int) -> bytes:
    """The first element of a reply that is an array or a push of strings, else nothing."""
    parts = bytes(buffer[start : start + 80]).split(b"\r\n", 3)
    return parts[2].lower() if len(parts) > 3 and parts[1][:1] == b"$" else b""
