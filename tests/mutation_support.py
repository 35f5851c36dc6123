"""Damage to valid bytes, as hypothesis strategies: in the bytes, and in the structure of what they encode.

Invariant: a damaged value is made from drawn numbers only, so that hypothesis can shrink it and print how to make it again.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

SPLICES = [
    b"\xdd\xff\xff\xff\xff",  # msgpack: a list, a map, bytes, text, an extension that claim four billion
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\x91" * 2000,
    b"\x81\xa0" * 2000,
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # nan, inf
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"\xcf" + b"\xff" * 8,
    b"\xc1",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 3000,
    b'{"a":' * 3000,
    b'"\\ud800"',
    b'"a":1,"a":2,',
    b"\x00",
    b"\xff\xfe",
    b"}",
    b"\\u0000",
]
JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**63),
    10**30,
    0.5,
    1e308,
    "",
    "x",
    "é\u2028",
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    [1, "x"],
    {"error": {}},
    {"": []},
]
NOT_JSON: list[Any] = [float("nan"), float("inf"), -float("inf")]
_OPERATIONS = ("replace", "delete", "double", "wrap", "rename", "swap", "grow")

positions = st.integers(0, 2**20)


@st.composite
def damaged_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """`valid` with up to four places flipped, cut out, filled in, repeated or cut off."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(positions) % (len(data) + 1)
        match draw(st.sampled_from(["flip", "delete", "splice", "repeat", "cut", "random"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "delete":
                del data[at : at + draw(st.integers(1, 40))]
            case "splice":
                data[at:at] = draw(st.sampled_from(SPLICES))
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 200))]
            case "random":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "cut":
                del data[at:]
    return bytes(data)


@st.composite
def damaged_value(draw: st.DrawFn, valid: Any, junk: list[Any] = JUNK) -> Any:
    """A copy of a structure of lists and dicts with one to three nodes, anywhere, changed in kind, number or name."""
    value = valid
    for _ in range(draw(st.integers(1, 3))):
        value = _damage(draw, value, junk, depth=0)
    return value


def _damage(draw: st.DrawFn, value: Any, junk: list[Any], *, depth: int) -> Any:
    if isinstance(value, (dict, list)) and value and (depth == 0 or draw(st.integers(0, 5))):
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        keys = list(copy) if isinstance(copy, dict) else list(range(len(copy)))
        key = keys[draw(st.integers(0, len(keys) - 1))]
        if draw(st.integers(0, 3)):
            copy[key] = _damage(draw, copy[key], junk, depth=depth + 1)
            return copy
        return _operate(draw, copy, key, keys, junk)
    return draw(st.sampled_from(junk))


def _operate(draw: st.DrawFn, copy: Any, key: Any, keys: list[Any], junk: list[Any]) -> Any:
    other = keys[draw(st.integers(0, len(keys) - 1))]
    match draw(st.sampled_from(_OPERATIONS)):
        case "replace":
            copy[key] = draw(st.sampled_from(junk))
        case "delete":
            del copy[key]
        case "double" if isinstance(copy, list):
            copy.insert(key, copy[key])
        case "wrap":
            copy[key] = [copy[key]] if draw(st.booleans()) else {"x": copy[key]}
        case "rename" if isinstance(copy, dict):
            copy[f"{key}x"] = copy.pop(key)
        case "swap":
            copy[key], copy[other] = copy[other], copy[key]
        case _ if isinstance(copy, list):
            copy.extend([copy[key]] * draw(st.sampled_from([1, 7, 8, 100])))
    return copy
