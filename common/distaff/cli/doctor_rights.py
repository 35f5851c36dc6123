"""What the user of a Redis URL may do of what producer and worker do, found out without changing anything.

Invariant: a command is sent only if it cannot write: it reads, or its key is one that nobody has, on which it does nothing. The server looks
at the rights first, so that a refusal is a refusal whatever the key holds.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import redis

from distaff.acl import ROLES, Names, Role
from distaff.clients import user_of
from distaff.findings import Finding
from distaff.keys import rq_prefix

_READS: Mapping[str, tuple[Any, ...]] = {
    "get": (),
    "exists": (),
    "hget": ("field",),
    "hmget": ("field",),
    "hexists": ("field",),
    "llen": (),
    "lrange": (0, 0),
    "sismember": ("member",),
    "getbit": (0,),
    "zscore": ("member",),
    "xlen": (),
}
"""Command -> what follows the key; allowed on any key."""
_NOTHING_THERE: Mapping[str, tuple[Any, ...]] = {
    "del": (),
    "hdel": ("field",),
    "zrem": ("member",),
    "srem": ("member",),
    "persist": (),
    "expire": (1,),
    "pexpire": (1,),
    "hgetall": (),
    "smembers": (),
    "zrange": (0, 0),
    "xadd": ("NOMKSTREAM", "*", "field", "value"),
}
"""The same, allowed on a key that does not exist, where they change nothing."""
_NO_SCRIPT = "0" * 40
SHOWN = 3

Command = tuple[Any, ...]


def rights(client: redis.Redis, url: str, *, pool: str, run: str) -> Finding:
    """The rights on the keys of the pool and of runs that are called like `run`. Raises redis.RedisError."""
    token = f"doctor-{secrets.token_hex(6)}"
    lacking = {
        role.name: _refused(client, list(_commands(role, pool=pool, run=run, token=token))) for role in _played()
    }
    user = f"user {user_of(url)!r}"
    may = [name for name, refused in lacking.items() if not refused]
    gaps = "; ".join(f"as {name} it lacks {_shown(refused)}" for name, refused in lacking.items() if refused)
    mend = "`distaff acl` prints the rights of each role; docs/acl.md says how they are loaded"
    if not may:
        return Finding(check="redis.rights", status="failed", fact=f"{user}: {gaps}", mend=mend)
    fact = f"{user} may do what {' and '.join(may)} do"
    return Finding(check="redis.rights", status="ok", fact=f"{fact}; {gaps}" if gaps else fact)


def _played() -> list[Role]:
    return [role for role in ROLES if role.name in ("producer", "worker")]


def _commands(role: Role, *, pool: str, run: str, token: str) -> Iterator[Command]:
    """The commands of a role that can be tried."""
    patterns = Names(rq=rq_prefix(), pool=pool, runs=f"{run}-").patterns()
    keys_of_role = [key for grants in role.grants for keys in grants for key in keys.split()]
    concrete = {key: _key(key, patterns, token) for key in dict.fromkeys(keys_of_role)}
    yield ("evalsha", _NO_SCRIPT, len(concrete), *concrete.values())
    for grants in role.grants:
        for keys, commands in grants.items():
            for key in keys.split():
                yield from _tries(concrete[key], commands.split(), nobodys=token in concrete[key])


def _tries(key: str, commands: list[str], *, nobodys: bool) -> Iterator[Command]:
    for command in commands:
        if command in _READS:
            yield (command, key, *_READS[command])
        elif nobodys and command in _NOTHING_THERE:
            yield (command, key, *_NOTHING_THERE[command])


def _key(placeholder: str, patterns: Mapping[str, str], token: str) -> str:
    """A key that a pattern allows, with `token` in place of each star."""
    return placeholder.format_map(patterns).replace("*", token).replace("\\", "")


def _refused(client: redis.Redis, commands: list[Command]) -> list[Command]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
    answers = pipeline.execute(raise_on_error=False)
    return [
        command
        for command, answer in zip(commands, answers, strict=True)
        if isinstance(answer, redis.exceptions.NoPermissionError)
    ]


def _shown(refused: list[Command]) -> str:
    """ "xadd on distaff:run:...", the first few."""
    texts = [f"{name} on {rest[1] if name == 'evalsha' else rest[0]}" for name, *rest in refused[:SHOWN]]
    texts = ["evalsha" if text.startswith("evalsha") else text for text in texts]
    more = len(refused) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")
