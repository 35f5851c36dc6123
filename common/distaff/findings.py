"""What a check has found: the lines of `distaff doctor`.

Invariant: a finding that is not "ok" says how to mend it, or why it could not be looked for. Data only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_ADVICE = re.compile(r": (?=(?:give|set|use|start|install|correct|raise|put|pip) )")
"""Where the mend begins in an error of one sentence."""
Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check with its outcome."""

    check: str
    """What was looked at: "redis.version"."""
    status: Status
    """warning: works, but not as one may expect. skipped: could not be looked at; `fact` says why."""
    fact: str
    mend: str = ""
    seconds: float = 0.0


def failed(check: str, error: Exception, *, mend: str = "", seconds: float = 0.0) -> Finding:
    """The finding of an error of ours, whose text ends with the mend. mend: taken for an error that has none."""
    text = str(error).strip()
    fact, separator, advice = text.rpartition(". ")
    if not separator:
        found = _ADVICE.search(text)
        fact, advice = (text[: found.start()], text[found.end() :]) if found else (text, mend)
    return Finding(check=check, status="failed", fact=fact, mend=advice, seconds=seconds)


def skipped(check: str, reason: str, *, mend: str = "") -> Finding:
    return Finding(check=check, status="skipped", fact=reason, mend=mend)


def healthy(findings: Sequence[Finding]) -> bool:
    """No check failed."""
    return all(finding.status != "failed" for finding in findings)
