"""The version of the policy that is being trained: published by the trainer, stamped on groups by the workers.

Invariant: the version of a run never goes backwards, whoever publishes and in whatever order the calls arrive.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import SupportsIndex

import redis
import redis.asyncio

from distaff.clients import is_refusal, redact_url, refusal
from distaff.errors import ConfigurationError, RedisUnavailable
from distaff.keys import RunKeys
from distaff.scripts import register, register_async

_SCRIPT = "publish_policy"
MAX_VERSION = 2**63 - 1
"""What the wire format holds."""


def publish_policy_version(client: redis.Redis, run: str, version: SupportsIndex) -> bool:
    """Say that the engines serve `version` (an integer >= 0) from now on.

    False when a later version stands already, which then stays. Publishing the same version again is harmless.
    Raises ConfigurationError for a version that is no integer >= 0, RedisUnavailable when Redis does not answer (call it again).
    """
    args = [_checked(version)]
    with _answering():
        return bool(register(client, _SCRIPT)(keys=[RunKeys(run).policy], args=args))


async def publish_policy_version_async(client: redis.asyncio.Redis, run: str, version: SupportsIndex) -> bool:
    """As `publish_policy_version`."""
    args = [_checked(version)]
    with _answering():
        return bool(await register_async(client, _SCRIPT)(keys=[RunKeys(run).policy], args=args))


def read_policy_version(client: redis.Redis, run: str) -> int:
    """The version that stands; 0 when none was published. Raises RedisUnavailable when Redis does not answer."""
    with _answering():
        return int(client.hget(RunKeys(run).policy, "version") or 0)


async def read_policy_version_async(client: redis.asyncio.Redis, run: str) -> int:
    """As `read_policy_version`."""
    with _answering():
        return int(await client.hget(RunKeys(run).policy, "version") or 0)


@contextmanager
def _answering() -> Iterator[None]:
    """Redis errors as one message of ours."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        if is_refusal(error):
            raise RedisUnavailable(f"Redis {refusal(error)}") from None
        raise RedisUnavailable(
            f"Redis did not take or give the policy version ({type(error).__name__}: {redact_url(str(error))[:200]}). "
            "Start it or correct its URL, and call again: publishing a version twice is harmless"
        ) from None


def _checked(version: SupportsIndex) -> int:
    try:
        number = operator.index(version)  # a trainer's counter may be numpy's or torch's
    except TypeError:
        raise ConfigurationError(f"the policy version {version!r} is not an integer: count training steps") from None
    if not 0 <= number <= MAX_VERSION:
        raise ConfigurationError(
            f"the policy version {number} is below 0 or above {MAX_VERSION}: count training steps from 0 or 1 upwards"
        )
    return number
