"""The worker as RQ's tools see it: registered, heart-beating, obeying stop and shutdown commands.

Invariant: this is the only use of RQ's worker class. It never dequeues, forks or runs maintenance; those are `claim`, `service`
and `sweep`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import redis
import structlog
from rq import worker_registration
from rq.command import parse_payload
from rq.serializers import JSONSerializer
from rq.utils import utcformat
from rq.worker.base import BaseWorker, WorkerStatus

from distaff_worker.rq_schema import JSONQueue

log = structlog.get_logger(__name__)


class Registration(BaseWorker):
    """One registered worker on one queue.

    beats: the heartbeats' client, which does the announcements too: they must not wait for a connection that went silent.
    on_stop: called on RQ's pubsub thread with (job id, execution id or None) for stop-job and stop-execution commands.
    on_shutdown: called there for a shutdown command.
    """

    queue_class = JSONQueue

    def __init__(
        self,
        client: redis.Redis,
        *,
        pool: str,
        name: str,
        ttl_s: int,
        beats: redis.Redis,
        on_stop: Callable[[str, str | None], None],
        on_shutdown: Callable[[], None],
    ) -> None:
        self._ttl_s = ttl_s
        self._ahead_s: float | None = None
        """The server's clock minus time.monotonic(); None until it was asked."""
        self._on_stop, self._on_shutdown = on_stop, on_shutdown
        self._beats = beats
        super().__init__([pool], name=name, connection=client, serializer=JSONSerializer, worker_ttl=ttl_s)

    @property
    def connection_timeout(self) -> int:
        """RQ raises a client's time-out to this one; ours are chosen with care."""
        return 1

    def birth(self) -> None:
        """Register and subscribe; may be repeated after redis.RedisError. Raises ValueError when a live worker has this name."""
        try:
            self.register_birth()  # type: ignore[no-untyped-call]
        except ValueError:
            if self.birth_date is None:
                raise
            self._register_again()  # the one who has our name is us: an earlier try whose reply was lost
        self.connection.expire(self.key, self._ttl_s)
        if self.pubsub_thread is None:
            self.subscribe()
        self.set_state(WorkerStatus.IDLE)

    def death(self) -> None:
        """Raises redis.RedisError; the thread that listens for commands is ended all the same."""
        try:
            self.register_death()  # type: ignore[no-untyped-call]
        finally:
            self.unsubscribe()  # type: ignore[no-untyped-call]

    def announce(self, extra: Mapping[str, Any]) -> None:
        """Refresh the heartbeat and our own fields; register again when the hash had expired. Raises redis.RedisError."""
        self.last_heartbeat = self._server_time()
        with self._beats.pipeline(transaction=False) as pipeline:
            pipeline.hexists(self.key, "birth")
            fields: dict[Any, Any] = {"last_heartbeat": utcformat(self.last_heartbeat), **extra}
            pipeline.hset(self.key, mapping=fields)
            pipeline.expire(self.key, self._ttl_s)
            pipeline.time()
            known, *_, (seconds, micros) = pipeline.execute()
        self._ahead_s = seconds + micros / 1e6 - time.monotonic()
        if not known:
            self._register_again()

    def _server_time(self) -> datetime:
        """Now on the server's clock: whoever reads the heartbeat compares it with that, and ours may be hours off."""
        if self._ahead_s is None:
            seconds, micros = self._beats.time()
            self._ahead_s = seconds + micros / 1e6 - time.monotonic()
        return datetime.fromtimestamp(time.monotonic() + self._ahead_s, UTC)

    def _register_again(self) -> None:
        with self._beats.pipeline() as pipeline:
            pipeline.hset(self.key, mapping={**self.serialize(), "state": self.get_state()})
            worker_registration.register(self, pipeline)
            pipeline.expire(self.key, self._ttl_s)
            pipeline.execute()

    def subscribe(self) -> None:
        """As RQ's, but the thread looks up every second, so that it ends when it is told to."""
        commands: Any = self.connection.pubsub()  # type: ignore[no-untyped-call]
        commands.subscribe(**{self.pubsub_channel_name: self.handle_payload})
        self.pubsub, handler = commands, self._pubsub_exception_handler
        self.pubsub_thread = commands.run_in_thread(sleep_time=0.5, daemon=True, exception_handler=handler)

    def handle_payload(self, message: dict[Any, Any]) -> None:
        payload = parse_payload(message)
        match payload.get("command"):
            case "stop-job":
                self._on_stop(payload["job_id"], None)
            case "stop-execution":
                self._on_stop(payload["job_id"], payload["execution_id"])
            case "shutdown":
                self._on_shutdown()
            case other:
                log.warning("command.ignored", command=other)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        log.warning("commands.interrupted", error=type(exc).__name__)
        time.sleep(1.0)
