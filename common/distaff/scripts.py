"""Loads the Lua scripts of `distaff/lua` by name.

Invariant: a script is read from the installed package, whole, and its KEYS and ARGV are documented on top of its file.
"""

from __future__ import annotations

from importlib.resources import files

import redis
import redis.asyncio
from redis.commands.core import AsyncScript, Script


def load(name: str) -> str:
    """Source of `distaff/lua/<name>.lua`. Raises FileNotFoundError for a name that is not there."""
    return files("distaff").joinpath("lua", f"{name}.lua").read_text(encoding="utf-8")


def register(client: redis.Redis, name: str) -> Script:
    """The script as a callable `(keys=..., args=..., client=...)`; sends EVALSHA, and SCRIPT LOAD when the server forgot it."""
    return client.register_script(load(name))


def register_async(client: redis.asyncio.Redis, name: str) -> AsyncScript:
    """As `register`, awaitable."""
    return client.register_script(load(name))
