"""Structured logs on standard error: JSON lines, or colours on a terminal; secrets never."""

from __future__ import annotations

import atexit
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TextIO, cast

import orjson
import structlog
from pydantic import SecretBytes, SecretStr

from gateway.telemetry.log_file import LogSink

HIDDEN = "(hidden)"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_SECRET_NAME = re.compile(r"secret|password|token|authorization|signature|cookie|customer.key", re.IGNORECASE)
_SECRET_TEXT = re.compile(
    r"(?i)((?:signature|token|credential|password|secret)=|AWSAccessKeyId=|authorization:?\s+)[^&\s\"'@,]+"
)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)")
_PLAIN = (bool, int, float, type(None))


def configure_logs(level: str, format: str, process: str, stream: TextIO | None = None) -> None:
    """Send structlog's and the standard library's events to `stream`, from `level` up.

    None is standard error, without waiting for its reader (log_file.py). `format` is auto, json or console. `process`
    (`supervisor`, `worker0`, …) goes into every event.
    """
    shown = stream or sys.stderr
    console = is_console(format, shown)

    def add_process(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("process", process)
        return event

    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
        structlog.processors.format_exc_info,
        redact,
        structlog.dev.ConsoleRenderer(colors=shown.isatty()) if console else _render_json,
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(_stream(stream, processors)),
        cache_logger_on_first_use=True,
    )
    _adopt_standard_logging(level)


def _stream(stream: TextIO | None, processors: list[structlog.typing.Processor]) -> TextIO:
    if stream is not None or sys.stderr is not sys.__stderr__:  # whoever has put another there reads it
        return stream or sys.stderr

    def told_lost(count: int) -> str:
        event: Any = {"event": "log lines were lost: standard error has taken nothing for a while", "lines": count}
        for one in processors:
            event = one(None, "warning", event)
        return f"{event}\n"

    sink = LogSink(2, told_lost)
    atexit.register(sink.close)
    return cast(TextIO, sink)


def is_console(format: str, stream: TextIO) -> bool:
    return format == "console" or (format == "auto" and stream.isatty())


def _render_json(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    return orjson.dumps(dict(event), default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def redact(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Hide values whose name says that they are secret, and secrets within text (URLs, headers, tracebacks)."""
    for name, value in event.items():
        event[name] = HIDDEN if _SECRET_NAME.search(name) and value is not None else harmless(value)
    return event


def harmless(value: Any) -> Any:
    """Return a value with the secrets within it hidden."""
    if isinstance(value, str):
        return _URL_PASSWORD.sub(rf"\1{HIDDEN}", _SECRET_TEXT.sub(rf"\1{HIDDEN}", value))
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, SecretStr | SecretBytes):
        return HIDDEN
    if isinstance(value, Mapping):
        return redact(None, "", {str(name): inner for name, inner in value.items()})
    if isinstance(value, list | tuple | set | frozenset):
        return [harmless(inner) for inner in value]
    return harmless(str(value))


class _StructlogHandler(logging.Handler):
    """Passes on the events of libraries that use the standard library's logging."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            structlog.get_logger(record.name).log(
                record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info
            )
        except Exception:  # noqa: BLE001  the standard library's own way to tell of a handler that fails
            self.handleError(record)


def _adopt_standard_logging(level: str) -> None:
    """Take libraries' events from `warning` up: at `debug` some of them log what they sign with."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.addHandler(_StructlogHandler())
    root.setLevel(max(_LEVELS[level], logging.WARNING))
    logging.captureWarnings(True)


_TOLD_AGAIN_SECONDS = 60.0

_KINDS_MAX = 1024
"""With more kinds, all are forgotten, and told again: some are named by clients, as buckets are."""


class RateLimitedLog:
    """Logs each kind of event once a minute, with the number of events left out since."""

    def __init__(self, log: Any, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._monotonic = monotonic
        self._told: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, message: str, kind: str, **fields: Any) -> None:
        """Log an event, the first of its `kind` in a minute."""
        self._tell("warning", message, kind, fields)

    def error(self, message: str, kind: str, **fields: Any) -> None:
        """Log an event, as `warning` does."""
        self._tell("error", message, kind, fields)

    def _tell(self, level: str, message: str, kind: str, fields: dict[str, Any]) -> None:
        now = self._monotonic()
        if kind in self._told and now - self._told[kind] < _TOLD_AGAIN_SECONDS:
            self._left_out[kind] += 1
            return
        if len(self._told) >= _KINDS_MAX:
            self._told.clear()
            self._left_out.clear()
        self._told[kind] = now
        left_out = self._left_out.pop(kind, 0)
        getattr(self._log, level)(message, **fields, **({"not_told_since": left_out} if left_out else {}))
