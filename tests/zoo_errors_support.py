"""Errors that the zoo's environments raise on demand, by name; for both APIs, so nothing of verifiers is imported here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("boom"),
    "SystemExit": lambda: SystemExit("boom"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("boom"),
    "CancelledError": lambda: asyncio.CancelledError("boom"),
}
