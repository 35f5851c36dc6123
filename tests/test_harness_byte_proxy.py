"""The TCP proxy of the harness: each fault does what it says to the connections it says, and healing ends it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.harness.byte_proxy import ByteProxy
from tests.worker_support import wait_until


@contextmanager
def echoing() -> Iterator[int]:
    """The port of a server that sends back what it is sent."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_serve, args=(listening,), daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


def _serve(listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        try:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
        except OSError:
            return


@pytest.fixture
def proxy() -> Iterator[ByteProxy]:
    with echoing() as port, ByteProxy("127.0.0.1", port) as started:
        yield started


def opened(proxy: ByteProxy, *, timeout_s: float = 5.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout_s)


def say(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return hear(connection, len(data))


def hear(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            return data
        data += piece
    return data


def test_in_good_weather_everything_passes(proxy: ByteProxy) -> None:
    """A megabyte in a connection that stays open, and open connections are counted."""
    assert proxy.url == f"http://127.0.0.1:{proxy.port}"
    with opened(proxy) as one, opened(proxy) as two:
        sender = threading.Thread(target=one.sendall, args=(b"x" * 1_000_000,))
        sender.start()
        assert len(hear(one, 1_000_000)) == 1_000_000
        sender.join(5)
        assert say(two, b"hello") == b"hello"
        assert (proxy.open_connections, proxy.accepted) == (2, 2)
    wait_until(lambda: proxy.open_connections == 0)


def test_a_reset_is_a_reset_and_new_connections_are_welcome(proxy: ByteProxy) -> None:
    """Not the end of a stream."""
    with opened(proxy) as connection:
        say(connection, b"a")
        proxy.reset()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with opened(proxy) as connection:
        assert say(connection, b"b") == b"b"


def test_a_black_hole_takes_everything_and_says_nothing(proxy: ByteProxy) -> None:
    """Old and new connections; what was said is answered when it ends."""
    with opened(proxy, timeout_s=0.1) as old:
        proxy.black_hole()
        with opened(proxy, timeout_s=0.1) as new:
            for connection in (old, new):
                connection.sendall(b"a")
                with pytest.raises(TimeoutError):
                    connection.recv(1)
            proxy.heal()
            for connection in (old, new):
                connection.settimeout(5)
                assert connection.recv(1) == b"a"


def test_a_delay_is_what_a_round_trip_costs_more(proxy: ByteProxy) -> None:
    """Until it is healed."""
    with opened(proxy) as connection:
        proxy.delay(0.3)
        began = time.monotonic()
        assert say(connection, b"a") == b"a"
        assert time.monotonic() - began >= 0.3
        proxy.delay(30)
        connection.sendall(b"b")
        proxy.heal()
        assert connection.recv(1) == b"b"


def test_a_dribble_takes_as_long_as_its_bytes(proxy: ByteProxy) -> None:
    """A kilobyte at five a second, each way."""
    with opened(proxy) as connection:
        proxy.dribble(5000)
        began = time.monotonic()
        assert len(say(connection, b"x" * 1000)) == 1000
        assert time.monotonic() - began >= 0.15
        proxy.dribble(1)
        connection.sendall(b"x" * 1000)
        assert connection.recv(1) == b"x"
        proxy.heal()
        assert len(hear(connection, 999)) == 999


def test_a_cut_comes_after_exactly_so_many_bytes(proxy: ByteProxy) -> None:
    """Of each connection, until it is healed."""
    proxy.cut_after(10)
    for _ in range(2):
        with opened(proxy) as connection:
            assert say(connection, b"12345") == b"12345"
            connection.sendall(b"67890abc")
            with pytest.raises(ConnectionResetError):
                hear(connection, 8)
    proxy.heal()
    with opened(proxy) as connection:
        assert len(say(connection, b"x" * 100)) == 100


def test_a_half_open_connection_is_silent_and_reset_when_healed(proxy: ByteProxy) -> None:
    """The client may write as much as it likes; others are served."""
    with opened(proxy, timeout_s=0.1) as connection:
        say(connection, b"a")
        proxy.half_open()
        connection.sendall(b"b" * 1000)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        with opened(proxy) as other:
            assert say(other, b"c") == b"c"
            proxy.heal()
            assert say(other, b"d") == b"d"
        connection.settimeout(5)
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_a_server_that_is_not_there_is_a_reset() -> None:
    """As close to a refused connection as a proxy comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with ByteProxy("127.0.0.1", port) as proxy, pytest.raises(ConnectionResetError), opened(proxy) as connection:
        connection.recv(1)
