"""The one place that builds Redis clients.

Invariant: redis-py's own retries are off. Every write we do is an idempotent script or a transaction with a guard, and is
repeated by the code that knows how to read its outcome; a blind resend of a MULTI doubles what is in it.
"""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from distaff.errors import ConfigurationError, RedisUnavailable
from distaff.packing import Packer
from distaff.redaction import redact

SCHEMES = ("redis", "rediss", "unix")
SOCKET_TIMEOUT_S = 30.0
"""Above every blocking read we send (at most 5 s), so that a dead peer is noticed."""
CONNECT_TIMEOUT_S = 5.0
SECOND_TRY_S = 0.1

_PASSING = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.BusyLoadingError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    redis.exceptions.NoScriptError,  # forgotten between loading it and running it, or loaded before a failover
    OSError,
)
_PASSING_REPLIES = ("OOM", "BUSY ", "MISCONF", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "UNBLOCKED", "NOREPLICAS")
"""Beginnings of error replies for which redis-py has no class in every place they occur."""
REFUSALS = (
    redis.exceptions.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.NoPermissionError,
)
"""The server answers, and will not have us."""
_REFUSING_REPLIES = ("ACL failure in script", "The user executing the script can't")
"""Beginnings of what it says when a script of ours may not do what is in it."""


def may_pass(error: Exception) -> bool:
    """The same command may succeed later: no connection, a time-out, a server that is full, loading, or failing over."""
    if isinstance(error, REFUSALS):
        return False
    return isinstance(error, _PASSING) or str(error).startswith(_PASSING_REPLIES)


def is_refusal(error: Exception) -> bool:
    """The server will not have us, or not let us do this: wrong credentials, or an ACL that is too narrow."""
    return isinstance(error, REFUSALS) or str(error).startswith(_REFUSING_REPLIES)


def is_full(error: Exception) -> bool:
    """The server has reached its maxmemory; consumers make room."""
    return isinstance(error, redis.exceptions.OutOfMemoryError) or str(error).startswith("OOM")


def refusal(error: Exception, user: str = "the user of this connection") -> str:
    """What a refused command or login is told as."""
    if isinstance(error, redis.exceptions.AuthenticationError):
        return f"refuses the credentials ({error}): check the user and password in its URL"
    return (
        f"does not let {user} do this ({redact(str(error))}). Give it the rights of its role: `distaff acl` prints them, and docs/acl.md "
        "says how they are loaded"
    )


def explained(error: Exception, url: str) -> RedisUnavailable:
    """Any error of redis-py as a message for whoever started a command: what, where, and the mend."""
    where = f"Redis at {redact_url(url)}"
    if is_refusal(error):
        return RedisUnavailable(f"{where} {refusal(error, f'user {user_of(url)!r}')}")
    if is_full(error):
        return RedisUnavailable(
            f"{where} is full: raise its maxmemory, or let consumers acknowledge groups; then run this again"
        )
    return RedisUnavailable(
        f"{where} failed ({type(error).__name__}: {redact(str(error))}). Run this again when it is back"
    )


def user_of(url: str) -> str:
    """The user a URL logs in as."""
    return unquote(urlsplit(url).username or "default")


def redact_url(url: str) -> str:
    """`url` with the password replaced by ***."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)


def connect(url: str, *, client_name: str = "distaff", socket_timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A synchronous client; bytes in, bytes out. No connection is made yet. Raises ConfigurationError for a bad URL."""
    _check(url)
    return redis.Redis.from_url(
        url,
        client_name=client_name,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        command_packer=Packer(),
        **_tcp(url, socket_keepalive=True),
        health_check_interval=15,
    )


def connect_async(url: str, *, client_name: str = "distaff") -> redis.asyncio.Redis:
    """An asyncio client; otherwise as `connect`."""
    _check(url)
    return redis.asyncio.Redis.from_url(
        url,
        client_name=client_name,
        retry=AsyncRetry(NoBackoff(), 0),
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        **_tcp(url, socket_keepalive=True),
        health_check_interval=15,
    )


def _tcp(url: str, **options: bool) -> dict[str, bool]:
    return {} if url.startswith("unix:") else options


def _check(url: str) -> None:
    """Raise ConfigurationError unless a connection can be made from `url`; makes none."""
    shown = redact_url(url)
    if not url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        raise ConfigurationError(
            f"redis URL {shown!r}: the scheme must be one of redis://, rediss://, unix://; "
            "for example redis://127.0.0.1:6379/0"
        )
    try:
        options: dict[str, Any] = dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]
        make = options.pop("connection_class", redis.Connection)
        make(**options)
    except (ValueError, TypeError) as error:
        reason = redact_url(str(error)).removeprefix("AbstractConnection.__init__() got an ")
        raise ConfigurationError(f"redis URL {shown!r}: {reason}; for example redis://127.0.0.1:6379/0") from None


def ping(client: redis.Redis, url: str) -> None:
    """Raise RedisUnavailable, with the mend, unless the server answers. A connection that breaks off is given a second try."""
    try:
        try:
            client.ping()
        except redis.exceptions.ConnectionError:
            time.sleep(SECOND_TRY_S)
            client.ping()
    except redis.exceptions.AuthenticationError as error:
        raise RedisUnavailable(
            f"Redis at {redact_url(url)} refuses the credentials ({error}). Put the password into the URL: "
            "redis://:PASSWORD@HOST:6379/0"
        ) from None
    except redis.exceptions.NoPermissionError as error:
        raise explained(error, url) from None
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        raise RedisUnavailable(
            f"Redis at {redact_url(url)} cannot be reached ({type(error).__name__}). Start it, or give its URL with "
            "--redis-url or DISTAFF_REDIS_URL"
        ) from None
