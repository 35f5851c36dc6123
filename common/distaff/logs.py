"""Sets up logging: structlog events and everybody else's log records, one line each, redacted, through one pipe.

Invariant: no secret leaves through it (fields, event, tracebacks), and no caller ever waits for the reader of the logs.
Not part of `import distaff`: only commands set up logging, a library leaves it to its program.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from distaff.logpipe import LogPipe
from distaff.redaction import MASK, environment_secrets, redact_shapes
from distaff.settings import LogSection

CHATTY = ("httpx", "httpcore", "openai", "aiohttp", "urllib3", "asyncio", "filelock", "fsspec", "datasets")
"""Libraries whose information is our debugging."""
_SECRET_FIELDS = frozenset({"authorization", "api_key", "apikey", "x-api-key", "password", "secret", "access_token"})
_MAX_DEPTH = 6


class Redactor:
    """Processor that masks secrets in the event and in every field. Known values are read from the environment once."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._values = environment_secrets(os.environ if environ is None else environ)

    def __call__(self, _logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
        return {name: self._field(name, value) for name, value in event_dict.items()}

    def text(self, text: str) -> str:
        """`text` with the secrets masked."""
        for value in self._values:
            text = text.replace(value, MASK)
        return redact_shapes(text)

    def _field(self, name: object, value: Any, depth: int = 0) -> Any:
        if name in ("_record", "_from_structlog"):
            return value
        if str(name).lower() in _SECRET_FIELDS and value:
            return MASK
        return self._value(value, depth)

    def _value(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            return {self.text(k) if isinstance(k, str) else k: self._field(k, v, depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)) and depth < _MAX_DEPTH:
            return [self._value(item, depth + 1) for item in value]
        return self.text(repr(value))


class _PipeHandler(logging.Handler):
    """Formats in the caller's thread (the record is complete there) and hands the line to the pipe."""

    def __init__(self, pipe: LogPipe) -> None:
        super().__init__()
        self.pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.pipe.put(self.format(record))
        except Exception:  # noqa: BLE001 - a field whose repr raises must cost a line, not the work that logged it
            self.pipe.put(f"log.format_failed logger={record.name}")


def configure_logging(section: LogSection, *, stream: TextIO | None = None) -> LogPipe:
    """Send all logs of this process to `stream` (standard error) as the settings say, and return the pipe they go through.

    Also catches what would otherwise print a bare traceback: uncaught exceptions of threads and of the main program.
    """
    target = sys.stderr if stream is None else stream
    console = section.format == "console" or (section.format == "auto" and target.isatty())
    renderer = _renderer(console=console, colors=console and target.isatty() and "NO_COLOR" not in os.environ)
    redactor = Redactor()
    shared = _shared_processors()
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            redactor,
            _in_reading_order,
            renderer,
        ],
    )
    pipe = LogPipe(target, dropped_line=lambda count: _dropped_line(renderer, count))
    handler = _PipeHandler(pipe)
    handler.setFormatter(formatter)
    level = logging.getLevelNamesMapping()[section.level.upper()]
    _install(handler, level)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    _catch_crashes()
    atexit.register(pipe.close)
    return pipe


def adopt_loggers() -> None:
    """Take away the handlers libraries gave their own loggers. Call it again after importing one that does so on import."""
    for name in list(logging.Logger.manager.loggerDict):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler or type(handler).__module__.startswith(("rq.", "rich.")):
                logger.removeHandler(handler)
        if not logger.handlers:
            logger.propagate = True


def _shared_processors() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _in_reading_order(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
    first = {name: event_dict.pop(name) for name in ("timestamp", "level", "event") if name in event_dict}
    return {**first, **event_dict}


def _renderer(*, console: bool, colors: bool) -> Processor:
    if console:
        return structlog.dev.ConsoleRenderer(
            colors=colors, exception_formatter=structlog.dev.plain_traceback, pad_event_to=24
        )
    return structlog.processors.JSONRenderer(ensure_ascii=False)


def _dropped_line(renderer: Processor, count: int) -> str:
    event: EventDict = {"event": "log.lines_dropped", "level": "warning", "count": count}
    stamped = structlog.processors.TimeStamper(fmt="iso", utc=True)(None, "warning", event)
    return str(renderer(None, "warning", stamped))


def _install(handler: logging.Handler, level: int) -> None:
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old, (_PipeHandler, logging.StreamHandler)):
            root.removeHandler(old)
        if isinstance(old, _PipeHandler):
            old.pipe.close()
    handler.setLevel(level)  # some libraries give their own loggers a lower level
    root.addHandler(handler)
    root.setLevel(level)
    for name in CHATTY:
        logging.getLogger(name).setLevel(level if level <= logging.DEBUG else max(level, logging.WARNING))
    adopt_loggers()
    logging.captureWarnings(True)


def _catch_crashes() -> None:
    log = structlog.get_logger("distaff")

    def crashed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            log.critical("process.crashed", exc_info=(kind, error, trace))

    def thread_crashed(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            name = args.thread.name if args.thread else ""
            log.critical("thread.crashed", thread=name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))

    sys.excepthook = crashed
    threading.excepthook = thread_crashed
