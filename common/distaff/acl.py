"""What each role may do to Redis, as users of an ACL file.

Invariant: a user may run the commands listed here, each on the keys named beside it, and nothing else: no @all, no CONFIG, no FLUSHALL, no
KEYS. No password is written, only its SHA-256. Does no I/O.

A script is checked twice: EVALSHA needs every key it is given, whatever it does to them; then each command inside is checked like any
other. So EVALSHA stands with all keys of a role, and every other command with the keys it is for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from distaff.keys import PREFIX, RUNS

Grants: TypeAlias = Mapping[str, str]
"""Key patterns, parted by spaces -> commands, parted by spaces. A name in braces stands for a pattern of `Names`."""
USER_PREFIX = "distaff-"
_HASHED = re.compile(r"#[0-9a-f]{64}")
# Not CLIENT SETINFO: 7.0 does not know it and would refuse the file, and redis-py goes on without it.
_CONNECTION = "hello ping quit reset select client|setname client|id client|info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One user of the file. `commands` need no key."""

    name: str
    for_: str
    commands: str
    grants: tuple[Grants, ...]
    scripts: bool = True
    channels: str = ""

    @property
    def user(self) -> str:
        return USER_PREFIX + self.name

    @property
    def variable(self) -> str:
        """Environment variable with its password."""
        return f"{self.name.upper()}_PASSWORD"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Which keys there are. pool: the one pool whose queue may be used, "" for any. runs: how names of runs begin, "" for any."""

    rq: str = "rq"
    pool: str = ""
    runs: str = ""

    def patterns(self) -> dict[str, str]:
        """Placeholder -> key pattern."""
        rq, pool = _literal(self.rq), self.pool or "*"
        run = f"{PREFIX}:run:{self.runs}*"
        names = {name: f"{run}:{name}" for name in ("config", "state", "groups", "settled", "dead", "policy")}
        names |= {"parked": f"{run}:groups:parked:*", "runs": RUNS}
        names |= {
            name: f"{rq}:{name}:{self.runs}*" for name in ("job", "execution", "executions", "results", "dependents")
        }
        registries = ("queue", "wip", "finished", "failed", "deferred", "ready", "scheduled", "canceled")
        names |= {name: f"{rq}:{name}:{pool}" for name in registries}
        names |= {"queues": f"{rq}:queues", "workers": f"{rq}:workers", "workers_of": f"{rq}:workers:{pool}"}
        names |= {"worker": f"{rq}:worker:*", "suspended": f"{rq}:suspended", "pubsub": f"{rq}:pubsub:*"}
        return names | {"limits": f"{rq}:rl-keys", "swept": f"{PREFIX}:swept:{pool}"}


def _literal(text: str) -> str:
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)


_LOOKING: Grants = {
    "{runs}": "smembers sismember",
    "{config}": "get",
    "{state}": "hgetall hget hmget exists",
    "{policy}": "hget",
    "{groups}": "xlen xinfo|stream",
    "{dead}": "hget hlen hmget hscan",
    "{queue}": "llen",
    "{wip}": "zscan",
    "{workers}": "smembers",
    "{worker}": "hgetall pttl",
    "{suspended}": "exists",
}
"""What `distaff status` reads."""
_CONSUMING: Grants = {
    "{groups}": "exists xreadgroup xack xclaim xpending xrange xtrim xdel xgroup|create xgroup|delconsumer xinfo|groups",
    "{parked}": "xadd",
    "{state}": "hmget hgetall",
}
"""What GroupConsumer does."""

ROLES = (
    Role(
        name="producer",
        for_="distaff produce",
        commands="info time multi exec discard",
        grants=(
            {
                "{runs}": "sadd",
                "{config} {state}": "exists",
                "{config}": "get set",
                "{state}": "hgetall hmget hget hset del",
                "{groups}": "xlen",
                "{settled}": "get getbit",
                "{queues}": "sadd",
                "{queue}": "lpush rpush lrange lpos",
                "{job}": "hget hmget hset hdel del",
                "{wip}": "zrange zscore",
                "{canceled}": "zrange zadd",
                "{execution}": "exists",
            },
        ),
    ),
    Role(
        name="worker",
        for_="distaff work",
        commands="info time multi exec discard subscribe unsubscribe",
        grants=(
            {
                "{runs}": "smembers",
                "{config}": "get",
                "{state}": "exists hget hgetall hincrby hincrbyfloat",
                "{policy}": "hget",
                "{settled}": "getbit setbit",
                "{groups}": "xadd",
                "{dead}": "hget hset hdel hexists",
                "{suspended}": "exists",
                "{queue}": "llen lpop lpush rpush blmove",
                "{job}": "hmget hset hsetnx hdel hincrby persist expire del",
                "{execution}": "hset hsetnx pexpire exists del",
                "{executions}": "zadd zrem pexpire del",
                "{results}": "xadd expire",
                "{wip}": "zadd zrem zrangebyscore",
                "{swept}": "get set",
                "{finished}": "zadd zremrangebyscore",
                "{failed}": "zadd zremrangebyscore",
                "{canceled}": "zrange zrem",
                "{workers} {workers_of}": "sadd srem smembers",
                "{worker}": "exists hexists hget hset hincrby hincrbyfloat expire pexpire del sadd srem smembers",
            },
        ),
        channels="{pubsub}",
    ),
    Role(
        name="archiver",
        for_="distaff archive, distaff evaluate --attach",
        commands="info",
        grants=(_CONSUMING, {"{runs}": "smembers", "{config}": "get", "{dead}": "hscan"}),
    ),
    Role(
        name="trainer",
        for_="GroupConsumer, AsyncGroupConsumer, publish_policy_version",
        commands="time",
        grants=(_CONSUMING, {"{policy}": "exists hget hset"}),
    ),
    Role(
        name="operator",
        for_="distaff status, dead and runs delete; rq info, suspend, resume, requeue and stop-job",
        commands="info time multi exec discard watch unwatch scan publish",
        grants=(
            _LOOKING,
            {
                "{runs}": "smembers sismember srem",
                "{config} {state} {groups} {parked} {settled} {dead} {policy}": "unlink",
                "{state}": "hincrby",
                "{settled}": "getbit setbit",
                "{dead}": "hdel",
                "{queues}": "smembers sismember sadd srem",
                "{queue}": "llen lrange lpos lrem rpush lpush del",
                "{job}": "hgetall hget hmget hset hdel hexists exists expire persist del",
                "{execution} {executions} {results} {dependents}": "exists hgetall zrange zrem smembers del",
                "{job} {execution} {executions} {results} {dependents}": "unlink",
                "{wip} {finished} {failed} {deferred} {ready} {scheduled} {canceled}": (
                    "zscan zcard zscore zrange zrangebyscore zadd zrem zremrangebyscore"
                ),
                "{queue} {wip} {finished} {failed} {deferred} {ready} {scheduled} {canceled}": "exists",
                "{workers} {workers_of}": "smembers srem",
                "{worker}": "exists hgetall hmget hget scard smembers",
                "{suspended}": "set expire del exists",
                "{limits}": "smembers",
            },
        ),
        channels="{pubsub}",
    ),
    Role(name="monitor", for_="distaff status", commands="time", grants=(_LOOKING,), scripts=False),
)


def acl_lines(names: Names, passwords: Mapping[str, str]) -> list[str]:
    """The file: the default user, then one line a role. passwords: by user, plain or as "#" and 64 hex digits of a SHA-256.

    A user without a password cannot log in; the default user may do everything when it has one, and is off when it has not.
    """
    default = passwords.get("default")
    first = f"user default on {_secret(default)} ~* &* +@all" if default else "user default off resetchannels -@all"
    return [first, *(_line(role, names, passwords.get(role.user, "")) for role in ROLES)]


def _line(role: Role, names: Names, password: str) -> str:
    patterns = names.patterns()
    parts = ["user", role.user, "on", *([_secret(password)] if password else []), "resetchannels", "-@all"]
    parts += [f"&{channel.format_map(patterns)}" for channel in role.channels.split()]
    parts += _plus(f"{_CONNECTION} {role.commands}")
    grants = [(keys.split(), commands) for group in role.grants for keys, commands in group.items()]
    if role.scripts:
        every = sorted({key for keys, _ in grants for key in keys})
        parts += [*_plus("script|load"), _selector(every, "evalsha", patterns)]
    parts += [_selector(keys, commands, patterns) for keys, commands in grants]
    return " ".join(parts)


def _selector(keys: Iterable[str], commands: str, patterns: Mapping[str, str]) -> str:
    return "(" + " ".join([*(f"~{key.format_map(patterns)}" for key in keys), *_plus(commands)]) + ")"


def _plus(commands: str) -> list[str]:
    return [f"+{command}" for command in commands.split()]


def _secret(password: str) -> str:
    return password if _HASHED.fullmatch(password) else "#" + hashlib.sha256(password.encode()).hexdigest()
