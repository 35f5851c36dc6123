"""/healthz, /readyz and /metrics on one port, from a thread of its own.

Invariant: never on the critical path. A taken port is logged and work goes on; a slow scraper holds up nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

log = structlog.get_logger(__name__)


class HealthServer:
    """healthy: the process works (503 asks for a restart). ready: it takes work (503 while Redis is away or it stops)."""

    def __init__(self, *, registry: CollectorRegistry, healthy: Callable[[], bool], ready: Callable[[], bool]) -> None:
        self._registry, self._healthy, self._ready = registry, healthy, ready
        self._server: ThreadingHTTPServer | None = None

    def start(self, host: str, port: int) -> int | None:
        """The port listened on, None when it cannot be had."""
        try:
            self._server = ThreadingHTTPServer((host, port), self._handler())
        except OSError as error:
            log.error("health.unavailable", host=host, port=port, error=str(error))
            return None
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="distaff-health", daemon=True).start()
        log.info("health.listening", host=host, port=self._server.server_port)
        return self._server.server_port

    def stop(self) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        health = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 5

            def do_GET(self) -> None:
                match self.path:
                    case "/healthz":
                        self._plain(health._healthy())
                    case "/readyz":
                        self._plain(health._ready())
                    case "/metrics":
                        self._send(200, generate_latest(health._registry), CONTENT_TYPE_LATEST)
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
