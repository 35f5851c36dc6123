"""`distaff acl`: the users of docs/acl.md as a file for Redis' `aclfile`.

Invariant: passwords come from environment variables and leave as SHA-256; none is an argument. Needs no Redis.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping

from distaff.acl import ROLES, Names, acl_lines
from distaff.cli.screen import complain, say
from distaff.errors import ConfigurationError
from distaff.keys import RUN_NAME, rq_prefix

ADMIN_VARIABLE = "REDIS_PASSWORD"
_HASH = re.compile(r"#[0-9a-f]{64}")


def declare(parser: argparse.ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "--runs", metavar="PREFIX", default="", help="only runs whose name begins so; those of any name unless given"
    )


def show(*, pool: str, runs: str, environ: Mapping[str, str] = os.environ) -> int:
    """Print the file, and what is still to do on standard error. Raises ConfigurationError for a prefix or a hash that is none."""
    if runs and not RUN_NAME.fullmatch(runs):
        raise ConfigurationError(f"--runs {runs!r}: use 1 to 64 letters, digits, '_' or '-'")
    passwords = _passwords(environ)
    names = Names(rq=rq_prefix(), pool=pool, runs=runs)
    say("\n".join(acl_lines(names, passwords)))
    for variable, user in _variables().items():
        if user not in passwords:
            complain(f"{variable} is not set: the user {user} cannot log in")
    return 0


def _variables() -> dict[str, str]:
    """Environment variable -> user."""
    return {ADMIN_VARIABLE: "default", **{role.variable: role.user for role in ROLES}}


def _passwords(environ: Mapping[str, str]) -> dict[str, str]:
    """By user."""
    found = {user: environ[variable] for variable, user in _variables().items() if environ.get(variable)}
    for variable, user in _variables().items():
        if found.get(user, "").startswith("#") and not _HASH.fullmatch(found[user]):
            raise ConfigurationError(
                f"{variable} begins with '#' and is no hash: give the password, or '#' and the 64 lower-case hex digits of its SHA-256"
            )
    return found
