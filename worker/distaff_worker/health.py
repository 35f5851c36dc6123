"""/healthz, /readyz and /metrics on one port, from a thread of its own.

Invariant: never on the critical path. A taken port is logged and work goes on; a slow scraper holds up nobody, and hundreds of them
cost MAX_CONNECTIONS threads for some seconds: the oldest is cut for the newest, so that a probe is always answered.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

log = structlog.get_logger(__name__)
MAX_CONNECTIONS = 32
IDLE_S = 5.0
RENDER_EVERY_S = 0.5


class _Server(ThreadingHTTPServer):
    """A thread for each connection, but not for more than MAX_CONNECTIONS."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.append(request)
            for oldest in self._open[:-MAX_CONNECTIONS]:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            if request in self._open:
                self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not the traceback on standard error that the library writes, which would wait for whoever reads it."""
        log.debug("health.interrupted", error=type(sys.exception()).__name__)


class HealthServer:
    """healthy: the process works (503 asks for a restart). ready: it takes work (503 while Redis is away or it stops)."""

    def __init__(self, *, registry: CollectorRegistry, healthy: Callable[[], bool], ready: Callable[[], bool]) -> None:
        self._registry, self._healthy, self._ready = registry, healthy, ready
        self._server: _Server | None = None
        self._rendering = threading.Lock()
        self._rendered, self._rendered_at = b"", -RENDER_EVERY_S

    def start(self, host: str, port: int) -> int | None:
        """The port listened on, None when it cannot be had."""
        try:
            self._server = _Server((host, port), self._handler())
        except OSError as error:
            log.error("health.unavailable", host=host, port=port, error=str(error))
            return None
        threading.Thread(target=self._server.serve_forever, name="distaff-health", daemon=True).start()
        log.info("health.listening", host=host, port=self._server.server_port)
        return self._server.server_port

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _metrics(self) -> bytes:
        """Rendered at most every RENDER_EVERY_S: what hundreds ask for at once costs as much as one."""
        with self._rendering:
            if time.monotonic() - self._rendered_at >= RENDER_EVERY_S:
                self._rendered, self._rendered_at = generate_latest(self._registry), time.monotonic()
            return self._rendered

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        health = self

        class Handler(BaseHTTPRequestHandler):
            timeout = IDLE_S

            def do_GET(self) -> None:
                match self.path:
                    case "/healthz":
                        self._plain(health._healthy())
                    case "/readyz":
                        self._plain(health._ready())
                    case "/metrics":
                        self._send(200, health._metrics(), CONTENT_TYPE_LATEST)
                    case _:
                        self._send(404, b"try /healthz, /readyz or /metrics\n", "text/plain")

            def _plain(self, good: bool) -> None:
                self._send(200 if good else 503, b"ok\n" if good else b"not now\n", "text/plain")

            def _send(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Requests are not logged: a probe every few seconds is noise."""

        return Handler
