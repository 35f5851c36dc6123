"""What an engine's error answers and failed connections mean, as distaff's errors.

Invariant: no text made here holds a key or a password. One place knows the error shapes of vLLM, SGLang, llama.cpp and
the OpenAI-compatible APIs.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Mapping

import pydantic_core

from distaff.errors import ContextOverflow, EngineError, EngineRefused
from distaff.redaction import redact

RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
"""And everything from 500 on but 501."""
MAX_MESSAGE_CHARS = 400

_OVERFLOW = re.compile(
    r"maximum context length|exceed_context_size|context_length_exceeded|exceeds? the available context"
    r"|prompt is too long|longer than the maximum model length|exceeds? the (model's )?(maximum )?context"
    r"|longer than the model's context length|exceeds? the maximum allowed length",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"refuses (?:access|the request) \((\d{3})\):")
_QUOTA = re.compile(r"insufficient_quota|billing_hard_limit", re.IGNORECASE)


class PassingFailure(Exception):
    """One attempt failed for a reason that may pass. Internal to the HTTP layer."""

    def __init__(
        self,
        reason: str,
        *,
        retry_after_s: float | None = None,
        sick: bool = True,
        connection: bool = False,
        unanswered: bool = False,
    ):
        """sick: it counts against the server. connection: no whole HTTP answer came. unanswered: nor the beginning of one, on a connection
        that was closed."""
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.sick = sick
        self.connection = connection
        self.unanswered = unanswered


def is_passing(status: int, body: bytes) -> bool:
    """Whether the same request may succeed later."""
    if status == 429:
        return not _QUOTA.search(body.decode("utf-8", "replace"))
    return status in RETRYABLE_STATUSES or (status >= 500 and status != 501)


def retry_after_s(headers: Mapping[str, str], *, now: float | None = None) -> float | None:
    """Seconds that Retry-After (seconds or an HTTP date) or retry-after-ms ask for; None when absent or unreadable."""
    milliseconds = headers.get("retry-after-ms")
    value = headers.get("Retry-After", "")
    try:
        if milliseconds is not None:
            return max(0.0, float(milliseconds) / 1000)
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    return max(0.0, date.timestamp() - (time.time() if now is None else now))


def refusal(status: int, body: bytes, *, where: str, key_var: str, secrets: list[str]) -> EngineError:
    """The error for an answer that a repetition would not change. `where` names the server and the route."""
    text = error_text(body, secrets=secrets)
    if status in (400, 413, 422) and _OVERFLOW.search(body.decode("utf-8", "replace")):
        return ContextOverflow(f"{where}: the prompt does not fit the context: {text}")
    if status in (401, 403):
        return EngineRefused(f"{where} refuses access ({status}): {text}. {_key_mend(key_var)}")
    return EngineRefused(f"{where} refuses the request ({status}): {text}")


def refused_status(error: EngineRefused) -> int | None:
    """The HTTP status of a refusal made here; None for any other."""
    found = _REFUSED.search(str(error))
    return int(found[1]) if found else None


def _key_mend(key_var: str) -> str:
    if key_var:
        return f"Put a valid API key into the environment variable {key_var}"
    return 'If it wants an API key, name the environment variable that holds it: engine.api_key_var = "NAME"'


def error_text(body: bytes, *, secrets: list[str]) -> str:
    """The message inside an error body, on one line, short and redacted."""
    message = _message(body) or body.decode("utf-8", "replace")
    line = " ".join(redact(message, secrets=secrets).split())
    return line[:MAX_MESSAGE_CHARS] or "no message"


def _message(body: bytes) -> str:
    """OpenAI: error.message; FastAPI: detail; Google: the same in a list; Cloudflare: errors; routers: error.metadata.raw beside it."""
    try:
        document = pydantic_core.from_json(body)
    except ValueError:
        return ""
    if isinstance(document, list) and document:
        document = document[0]
    error = document.get("error", document) if isinstance(document, dict) else document
    if not isinstance(error, dict):
        return error if isinstance(error, str) else str(error)
    text = next((error[key] for key in ("message", "detail", "error", "errors", "msg") if error.get(key)), "")
    metadata = error.get("metadata")
    raw = metadata.get("raw") if isinstance(metadata, dict) else None
    return f"{text}: {raw}" if raw else text if isinstance(text, str) else str(text)
