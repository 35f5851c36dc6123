"""How a role speaks with the benchmark that started it: JSON lines."""

from __future__ import annotations

import json
import sys
from typing import Any


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def listen() -> dict[str, Any]:
    """The next order; SystemExit when the benchmark is gone."""
    line = sys.stdin.readline()
    if not line:
        raise SystemExit(1)
    order: dict[str, Any] = json.loads(line)
    return order
