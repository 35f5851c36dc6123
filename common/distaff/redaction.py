"""Takes secrets out of text that leaves the process: logs, error messages, dead letters.

Invariant: idempotent, never raises, and may mask too much but not the shapes it knows. It never looks at anything but its
arguments and the environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote, urlsplit

MASK = "***"

NAMES_OF_SECRETS = "KEY, TOKEN, SECRET, PASSWORD or AUTH"
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|AUTH)(_?[0-9]+)?$", re.IGNORECASE)
_MIN_SECRET_CHARS = 6
"""Shorter values are words that occur everywhere; masking them would make logs unreadable."""

_QUOTE = r"(?:b?\\?[\"'])?"
_PATTERNS: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    (("://",), re.compile(r"\b((?:rediss?|unix)://[^\s:/@\"]*):(?!PASSWORD@)[^\s\"]+@"), rf"\1:{MASK}@"),
    (("://",), re.compile(r"(://[^\s:/@\"]*):(?!PASSWORD@)[^\s/\"<>]+@"), rf"\1:{MASK}@"),
    (
        ("authorization",),
        re.compile(
            rf"(?i)(authorization{_QUOTE}\s*[:=,]\s*{_QUOTE})(?:(bearer|basic|token)\s+)?(?!bearer\b|basic\b)[^\s\"',;}}\\]+"
        ),
        rf"\1{MASK}",
    ),
    (("bearer",), re.compile(r"(?i)\b(bearer)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {MASK}"),
    (
        ("key", "token", "secret", "passw"),
        re.compile(
            r"(?i)((?:api[_-]?key|(?:access|auth|refresh|session)[_-]?token|client[_-]?secret|secret[_-]?key|passw(?:or)?d)"
            rf"{_QUOTE}\s*[:=]\s*{_QUOTE})[^\s\"',;&}}\\]+"
        ),
        rf"\1{MASK}",
    ),
    (
        ("sk-", "hf_", "gh", "gsk_", "nvapi-", "aiza"),
        re.compile(
            r"(?<![A-Za-z0-9_])(?:sk-[A-Za-z0-9_-]{6,}|hf_[A-Za-z0-9]{12,}|gh[pousr]_[A-Za-z0-9]{12,}|gsk_[A-Za-z0-9]{12,}"
            r"|nvapi-[A-Za-z0-9_-]{12,}|AIza[A-Za-z0-9_-]{20,})"
        ),
        MASK,
    ),
)
"""(what the lower-case text must contain for the pattern to be worth trying, pattern, replacement)."""


def redact(text: str, *, secrets: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> str:
    """`text` with every secret replaced by ***.

    A secret is: the password in a URL; what follows Authorization, Bearer, api_key, password and their like; a token with a
    well-known prefix (sk-, hf_, ghp_, ...); the value of an environment variable whose name ends in KEY, TOKEN, SECRET,
    PASSWORD or AUTH (and perhaps a number), or the password inside a URL in one, if longer than five characters; and each of
    `secrets`.
    """
    for value in environment_secrets(os.environ if environ is None else environ, extra=secrets):
        text = text.replace(value, MASK)
    return redact_shapes(text)


def redact_shapes(text: str) -> str:
    """`redact` by shape alone, without known values."""
    lower = text.lower()
    for marks, pattern, replacement in _PATTERNS:
        if any(mark in lower for mark in marks):
            text = pattern.sub(replacement, text)
    return text


def is_secret_name(name: str) -> bool:
    """Whether the value of an environment variable of this name is masked."""
    return bool(_SECRET_NAME.search(name))


def environment_secrets(environ: Mapping[str, str], *, extra: Iterable[str] = ()) -> list[str]:
    """Secret values to look for, longest first: as they are, percent-encoded, and as JSON and `repr` write them."""
    values = {value for name, value in environ.items() if is_secret_name(name)}
    for value in environ.values():
        values |= _url_passwords(value)
    values |= set(extra)
    found = {value.strip() for value in values}
    found |= {spelled for value in found for spelled in _spellings(value)}
    return sorted((value for value in found if len(value) >= _MIN_SECRET_CHARS), key=lambda v: (-len(v), v))


def _spellings(value: str) -> tuple[str, ...]:
    json_ascii, json_text = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    return quote(value, safe=""), repr(value)[1:-1], json_ascii, json_text


def _url_passwords(value: str) -> set[str]:
    if "://" not in value or "@" not in value:
        return set()
    try:
        password = urlsplit(value).password
    except ValueError:
        return set()
    return {password, unquote(password)} if password else set()
