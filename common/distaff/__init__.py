"""distaff, the rollout farm: what a trainer imports.

Invariant: importing this loads the standard library, redis, msgpack and numpy, and nothing else. `errors` is the module of
everything distaff raises.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from distaff import errors
from distaff.aconsumer import AsyncGroupConsumer
from distaff.consumer import GroupConsumer
from distaff.consuming_steps import ConsumerOptions, Delivery
from distaff.policy import (
    publish_policy_version,
    publish_policy_version_async,
    read_policy_version,
    read_policy_version_async,
)
from distaff.types import Rollout, SampleArrays, ScoredGroup, TrainingSample
from distaff.wire import check_group, decode_group, encode_group

try:
    __version__ = version("distaff")
except PackageNotFoundError:  # the source tree on the path, not installed
    __version__ = "0"

__all__ = [
    "AsyncGroupConsumer",
    "ConsumerOptions",
    "Delivery",
    "GroupConsumer",
    "Rollout",
    "SampleArrays",
    "ScoredGroup",
    "TrainingSample",
    "__version__",
    "check_group",
    "decode_group",
    "encode_group",
    "errors",
    "publish_policy_version",
    "publish_policy_version_async",
    "read_policy_version",
    "read_policy_version_async",
]
