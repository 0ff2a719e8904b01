"""OpenTelemetry traces: a span for a request to the S3 port, and one for each try of a request to the origin.

The SDK comes with the extra `otel`, and is imported only if traces are configured. A request is traced if its client
asks for it (`traceparent`, W3C Trace Context); of other requests a share is. The same header, which no signature
covers, gives the origin the span that asks it.

`TRACE` is the span of the current request. A fetch that several requests wait for belongs to the one that began it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import structlog

from gateway.s3.trace_context import RemoteSpan, remote_span
from gateway.shared.recent_requests import FinishedRequest, is_error, shown
from gateway.telemetry import metrics
from gateway.telemetry.logs import RateLimitedLog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

AFTER_SECONDS = 10.0
"""A request may ask the origin in its span this long after its end. Tasks that run for ever keep the context of the
request that began them: what they ask later is not its work."""

CLOSING_SECONDS = 2.0
"""A worker that ends waits this long for the collector to take its last spans."""

WAITING_MAX = 2048
"""Spans of one process that the collector has not taken yet."""

_AT_ONCE = 512
"""Spans in one request to the collector."""

EXPORT_SECONDS = 5.0
"""The collector has this long for a batch, from the look-up of its name to its answer."""

_ANSWER_BYTES_MAX = 64 * 1024
_NAME_BYTES_MAX = 1024

_log = RateLimitedLog(structlog.get_logger("forebay.tracing"))

_TRACEPARENT_LINE = re.compile(rb"\r\ntraceparent:([^\r\n]*)", re.IGNORECASE)


class Tracer:
    """One process's tracer. Event loop only; `close` it at the end."""

    def __init__(
        self,
        exporter: SpanExporter,
        service_name: str,
        version: str,
        process: str,
        ratio: float,
        break_off: Callable[[], None] = lambda: None,
    ) -> None:
        """`ratio` is the share of requests to trace without a `traceparent`; `break_off` ends the exporter's wait."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        of_service = {"service.name": service_name, "service.version": version, "service.instance.id": process}
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(of_service), shutdown_on_exit=False)
        self._exporter = _BoundedExporter(exporter, break_off)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=2 * WAITING_MAX, max_export_batch_size=_AT_ONCE
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("forebay", version)
        self._ratio = ratio
        self._dice = random.Random()
        self._drawn = 0

    def draws(self, head: bytes) -> bool:
        """Return True to trace the request with this head, which is the next one to begin."""
        parent = remote_span([(b"traceparent", said) for said in _TRACEPARENT_LINE.findall(head)])
        if parent is not None:
            return parent.is_sampled
        if self._dice.random() >= self._ratio:
            return False
        self._drawn += 1
        return True

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan | None:
        """Begin the span of a request in this context; return None for one that is not traced."""
        parent = remote_span(headers)
        if parent is not None:
            is_traced = parent.is_sampled
        elif self._drawn:
            self._drawn -= 1
            is_traced = True
        else:
            is_traced = self._dice.random() < self._ratio
        span = RequestSpan(self._tracer, self._exporter, parent) if is_traced else None
        TRACE.set(span)
        return span

    def close(self) -> None:
        """Send the last spans, for CLOSING_SECONDS at most. Blocks."""
        # The SDK knows no bound here: it tries again for each batch, with a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)
        if closing.is_alive():
            self._exporter.give_up()


class RequestSpan:
    """The span of a request to the S3 port."""

    def __init__(self, tracer: Any, exporter: _BoundedExporter, parent: RemoteSpan | None) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._tracer, self._exporter = tracer, exporter
        context = set_span_in_context(_remote(parent)) if parent is not None else Context()
        self._span: Span = tracer.start_span("S3 request", context, SpanKind.SERVER)
        self._context = set_span_in_context(self._span)
        self._state = parent.state if parent is not None else ""
        self._ended_at: float | None = None

    def end(self, request: FinishedRequest) -> None:
        span, status = self._span, request.status
        is_failure = is_error(status)
        of_status = status if is_failure or status == "client-left" else None
        span.update_name(str(request.operation))
        span.set_attributes(
            _told(
                {
                    "rpc.system": "aws-api",
                    "rpc.service": "S3",
                    "rpc.method": str(request.operation),
                    "aws.s3.bucket": shown(request.bucket),
                    "aws.s3.key": shown(request.key, _NAME_BYTES_MAX),
                    "aws.request_id": request.request_id,
                    "client.address": request.remote,
                    "http.response.status_code": int(status) if status.isdigit() else None,
                    "http.response.body.size": request.sent_bytes,
                    "http.request.body.size": request.received_bytes,
                    "error.type": of_status if request.error_code is None else request.error_code,
                    "forebay.status": status,
                    "forebay.slot": request.slot,
                    "forebay.caller": shown(request.caller),
                    "forebay.cache": request.cache,
                    "forebay.miss_reason": request.reason,
                }
            )
        )
        if is_failure:
            _fail(span, request.error_code or status)
        self._exporter.end(span)
        self._ended_at = time.monotonic()

    def ask_origin(
        self, method: str, host: str, bucket: str | None, key: str | None, slot: str, purpose: str, attempt: int
    ) -> OriginSpan | None:
        """Begin the span of one try of a request to the origin; return None long after this request has ended."""
        if self._ended_at is not None and time.monotonic() - self._ended_at > AFTER_SECONDS:
            return None
        from opentelemetry.trace import SpanKind

        name, _, port = host.rpartition(":")
        attributes = {
            "http.request.method": method,
            "server.address": name if port.isdigit() else host,
            "server.port": int(port) if port.isdigit() and name else None,
            "aws.s3.bucket": shown(bucket),
            "aws.s3.key": shown(key, _NAME_BYTES_MAX),
            "forebay.slot": slot,
            "forebay.purpose": purpose,
            "http.request.resend_count": attempt - 1 if attempt > 1 else None,
        }
        of_kind = self._context, SpanKind.CLIENT
        span = self._tracer.start_span(f"origin {method}", *of_kind, attributes=_told(attributes))
        return OriginSpan(span, self._exporter, self._state)


class OriginSpan:
    """The span of one try of a request to the origin, up to the head of its answer."""

    def __init__(self, span: Span, exporter: _BoundedExporter, state: str) -> None:
        self._span, self._exporter, self._state = span, exporter, state

    def told(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers with this span as parent, in place of the client's own."""
        context = self._span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        others = {name: value for name, value in headers.items() if name != "tracestate"}
        return others | {"traceparent": parent} | ({"tracestate": self._state} if self._state else {})

    def answered(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500 or status == 429:
            self._span.set_attribute("error.type", str(status))
            _fail(self._span, str(status))
        self._exporter.end(self._span)

    def failed(self, error: BaseException) -> None:
        """End the span without an answer."""
        self._span.set_attribute("error.type", type(error).__name__)
        _fail(self._span, type(error).__name__)
        self._exporter.end(self._span)


TRACE: ContextVar[RequestSpan | None] = ContextVar("trace", default=None)


def open_tracer(endpoint_url: str, service_name: str, version: str, process: str, ratio: float) -> Tracer | None:
    """Return a tracer that sends OTLP over HTTP; None if the SDK's own variables forbid it or are wrong."""
    log = structlog.get_logger("forebay.tracing")
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        log.warning("nothing is traced: OTEL_SDK_DISABLED is set")
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it tells of each try
        session, break_off = _session()
        exporter = OTLPSpanExporter(endpoint_url, timeout=EXPORT_SECONDS, session=session)
        return Tracer(exporter, service_name, version, process, ratio, break_off)
    except Exception as error:  # noqa: BLE001 - of code of others, which reads variables as it is imported
        log.error("nothing is traced: OpenTelemetry does not start", error=f"{type(error).__name__}: {error}")
        return None


def _session() -> tuple[Any, Callable[[], None]]:
    """Return a session, and a function that breaks off its connections: a time-out bounds one read, not many.

    The session takes a redirection for a failure, which the SDK does not, and reads no more of an answer than it needs.
    """
    import requests
    from requests.adapters import HTTPAdapter

    connections: WeakSet[Any] = WeakSet()

    def watched(pool: Any) -> Any:
        class ExporterConnection(pool.ConnectionCls):  # type: ignore[misc]
            def connect(self) -> None:
                connections.add(self)
                super().connect()

        return type(pool.__name__, (pool,), {"ConnectionCls": ExporterConnection})

    @functools.cache  # a pool manager for each proxy is asked for again and again
    def watch(manager: Any) -> None:
        of_schemes = manager.pool_classes_by_scheme.items()
        manager.pool_classes_by_scheme = {scheme: watched(pool) for scheme, pool in of_schemes}

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **keywords: Any) -> None:
            super().init_poolmanager(*arguments, **keywords)
            watch(self.poolmanager)

        def proxy_manager_for(self, *arguments: Any, **keywords: Any) -> Any:
            manager = super().proxy_manager_for(*arguments, **keywords)
            watch(manager)
            return manager

    def judge(answer: Any, **_: Any) -> None:
        read = answer.raw.read(_ANSWER_BYTES_MAX + 1, decode_content=False)
        if len(read) > _ANSWER_BYTES_MAX:
            answer.close()
        answer._content, answer._content_consumed = b"", True  # the SDK would read on for its log
        if 300 <= answer.status_code < 400:
            raise requests.TooManyRedirects(f"the collector says {answer.status_code}", response=answer)

    def break_off() -> None:
        for connection in list(connections):
            with contextlib.suppress(OSError, AttributeError):  # it has no socket, or none any more
                connection.sock.shutdown(socket.SHUT_RDWR)

    session = requests.Session()
    session.hooks["response"].append(judge)
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter())
    return session, break_off


class _BoundedExporter:
    """Gives an exporter EXPORT_SECONDS for each batch, lets WAITING_MAX spans wait for it, and counts all spans.

    Spans end on the event loop, and a thread of the SDK exports them: each has a number of its own. Each batch has a
    thread, one at a time, which is left behind if it hangs: nothing else bounds the look-up of a name.
    """

    def __init__(self, exporter: SpanExporter, break_off: Callable[[], None]) -> None:
        self._exporter = exporter
        self._break_off = break_off
        self._exporting: threading.Thread | None = None
        self._lock = threading.Lock()
        self._ended = self._exported = 0
        self._is_over = False

    def end(self, span: Span) -> None:
        if self._ended - self._exported >= WAITING_MAX:
            metrics.TRACE_SPANS.add(1, "dropped")
            _log.warning("the collector of traces is too slow: spans are dropped", "dropped")
            return
        self._ended += 1
        span.end()

    def give_up(self) -> None:
        with self._lock:
            self._is_over = True
            lost, self._exported = self._ended - self._exported, self._ended
        if lost:
            metrics.TRACE_SPANS.add(lost, "failed")
        self._exporter.shutdown()
        self._break_off()

    # As SpanExporter

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        is_sent = self._send(spans, time.monotonic() + EXPORT_SECONDS)
        with self._lock:
            if self._is_over:
                return SpanExportResult.FAILURE
            self._exported += len(spans)
        metrics.TRACE_SPANS.add(len(spans), "sent" if is_sent else "failed")
        if not is_sent:
            _log.warning("the collector of traces does not take spans: they are lost", "refused")
        return SpanExportResult.SUCCESS if is_sent else SpanExportResult.FAILURE

    def _send(self, spans: Sequence[Any], due: float) -> bool:
        """Return True if the collector has taken the spans in time."""
        if not self._is_exporting(due):
            taken = threading.Event()
            self._exporting = threading.Thread(target=self._export, args=(spans, taken), name="spans", daemon=True)
            self._exporting.start()
            if not self._is_exporting(due):
                return taken.is_set()
        _log.warning("the collector of traces does not answer in time: its connection is closed", "late")
        self._break_off()
        return False

    def _is_exporting(self, due: float) -> bool:
        if self._exporting is not None:
            self._exporting.join(max(0.0, due - time.monotonic()))
        return self._exporting is not None and self._exporting.is_alive()

    def _export(self, spans: Sequence[Any], taken: threading.Event) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                taken.set()
        except Exception as error:  # noqa: BLE001 - of code of others; the next batch is tried
            _log.warning("spans of traces cannot be sent", "failed", reason=str(error))

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def _remote(parent: RemoteSpan) -> Any:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
    from opentelemetry.trace.span import TraceState

    state = TraceState.from_header([parent.state]) if parent.state else None
    context = SpanContext(parent.trace_id, parent.span_id, True, TraceFlags(TraceFlags.SAMPLED), state)
    return NonRecordingSpan(context)


def _fail(span: Span, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, why))


def _told(attributes: Mapping[str, str | int | None]) -> dict[str, str | int]:
    return {name: value for name, value in attributes.items() if value is not None}
