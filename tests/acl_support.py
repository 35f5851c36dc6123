"""Servers with the users of `distaff acl`, and URLs that log in as one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from distaff.acl import ROLES, Names, acl_lines
from distaff.clients import connect
from tests.harness.servers import Kind, RedisServer

ADMIN = "default"
PASSWORDS = {user: f"pw-of-{user}" for user in (ADMIN, *(role.user for role in ROLES))}


def as_user(url: str, user: str) -> str:
    """A Unix-socket URL that logs in as `user` ("worker" or "distaff-worker")."""
    name = user if user == ADMIN or user.startswith("distaff-") else f"distaff-{user}"
    return url.replace("unix://", f"unix://{name}:{PASSWORDS[name]}@")


def acl_rules(role: str, names: Names | None = None) -> list[str]:
    """What ACL SETUSER is given for a role, without user name and password."""
    [line] = [line for line in acl_lines(names or Names(), {}) if line.startswith(f"user distaff-{role} ")]
    return re.findall(r"\([^)]*\)|\S+", line)[3:]


@contextmanager
def guarded_redis(
    folder: Path, *, kind: Kind | None = None, names: Names | None = None, text: str = ""
) -> Iterator[tuple[str, redis.Redis]]:
    """The URL of a server without credentials in it, and an administrator's client. text: of the file, instead of one made of `names`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "users.acl"
    file.write_text(text or "\n".join(acl_lines(names or Names(), PASSWORDS)) + "\n")
    with (
        RedisServer(folder, kind=kind, config={"aclfile": str(file)}) as server,
        connect(as_user(server.url, ADMIN)) as admin,
    ):
        yield server.url, admin
