"""Traces, by OpenTelemetry: a span for a request to the S3 port, and one for each try of a request to the origin.

The SDK comes with the extra `otel`, and is imported where traces are configured only. A request is traced where its
client says so (`traceparent`, W3C Trace Context), and one in so many of those whose clients say nothing. The origin is
told of the span that asks it, in the same header, which no signature covers.

`TRACE` is the span of the request that is answered here and now. What a request begins and others go on with, as a
fetch that several wait for, belongs to the span of the one that began it.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from gateway import metrics
from gateway.rate_limited_log import RateLimitedLog
from gateway.recent_requests import FinishedRequest, is_error, shown

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

AFTER_SECONDS = 10.0
"""So long after its end a request may ask the origin in its span still. Later it is another's errand: tasks that go on
for ever have the context of the request that began them."""

CLOSING_SECONDS = 2.0
"""So long a worker that ends waits for its last spans to be taken."""

WAITING_MAX = 2048
"""Spans of one process that the collector has not taken yet."""

_AT_ONCE = 512
"""Spans in one request to the collector."""

_NAME_BYTES_MAX = 1024
_EXPORT_SECONDS = 5.0
_STATE_CHARACTERS_MAX = 512

_log = RateLimitedLog(structlog.get_logger("forebay.tracing"))

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_TRACEPARENT_LINE = re.compile(rb"\r\ntraceparent:([^\r\n]*)", re.IGNORECASE)


class RemoteSpan(NamedTuple):
    """The client's, as it says. `state` is its `tracestate`."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str


def remote_span(headers: Iterable[tuple[bytes, bytes]]) -> RemoteSpan | None:
    """What a request says of the span that it belongs to; None: nothing, or nothing that could be."""
    parents, states = list[str](), list[str]()
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value.decode("latin-1"))
        elif name == b"tracestate":
            states.append(value.decode("latin-1"))
    found = _TRACEPARENT.fullmatch(parents[0].strip()) if len(parents) == 1 else None
    state = ",".join(states)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    is_short = len(state) <= _STATE_CHARACTERS_MAX and state.isascii() and state.isprintable()
    return RemoteSpan(trace_id, span_id, bool(int(found[4], 16) & 1), state if is_short else "")


class Tracer:
    """Of one process. Event loop only; `close` at the end."""

    def __init__(self, exporter: SpanExporter, service_name: str, version: str, process: str, ratio: float) -> None:
        """`ratio` is the share of requests to trace of those whose clients say nothing."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        of_service = {"service.name": service_name, "service.version": version, "service.instance.id": process}
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(of_service), shutdown_on_exit=False)
        self._exporter = _BoundedExporter(exporter)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=2 * WAITING_MAX, max_export_batch_size=_AT_ONCE
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("forebay", version)
        self._ratio = ratio
        self._dice = random.Random()
        self._drawn = 0

    def draws(self, head: bytes) -> bool:
        """Whether a request with this head is to be traced. If so, it is the next one that begins."""
        parent = remote_span([(b"traceparent", said) for said in _TRACEPARENT_LINE.findall(head)])
        if parent is not None:
            return parent.is_sampled
        if self._dice.random() >= self._ratio:
            return False
        self._drawn += 1
        return True

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> RequestSpan | None:
        """The span of a request with these headers, which is that of this context now; None: it is not traced."""
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
        """Send what is left, as far as that is taken within CLOSING_SECONDS. Blocks."""
        # The SDK knows no bound here: it tries again for each batch, with a collector that does not answer.
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSING_SECONDS)
        if closing.is_alive():
            self._exporter.shutdown()


class RequestSpan:
    """A request to the S3 port."""

    def __init__(self, tracer: Any, exporter: _BoundedExporter, parent: RemoteSpan | None) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._tracer, self._exporter = tracer, exporter
        context = set_span_in_context(_remote(parent)) if parent is not None else _no_context()
        self._span: Span = tracer.start_span("S3 request", context, SpanKind.SERVER)
        self._context = set_span_in_context(self._span)
        self._state = parent.state if parent is not None else ""
        self._ended_at: float | None = None

    def end(self, request: FinishedRequest) -> None:
        """It is over."""
        span, status = self._span, request.status
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
                    "error.type": request.error_code if request.error_code is not None else _error_type(status),
                    "forebay.status": status,
                    "forebay.slot": request.slot,
                    "forebay.caller": shown(request.caller),
                    "forebay.cache": request.cache,
                    "forebay.miss_reason": request.reason,
                }
            )
        )
        if is_error(status):
            _fail(span, request.error_code or status)
        self._exporter.end(span)
        self._ended_at = time.monotonic()

    def ask_origin(
        self, method: str, host: str, bucket: str | None, key: str | None, slot: str, purpose: str, attempt: int
    ) -> OriginSpan | None:
        """The span of one try of a request to the origin; None: this request is over for long."""
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
    """One try of a request to the origin, up to the head of its answer. `headers` tell the origin of it."""

    def __init__(self, span: Span, exporter: _BoundedExporter, state: str) -> None:
        self._span, self._exporter = span, exporter
        context = span.get_span_context()
        self.headers: Mapping[str, str] = {
            "traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}",
            **({"tracestate": state} if state else {}),
        }

    def answered(self, status: int) -> None:
        """With this status."""
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500 or status == 429:
            self._span.set_attribute("error.type", str(status))
            _fail(self._span, str(status))
        self._exporter.end(self._span)

    def failed(self, error: BaseException) -> None:
        """There was no answer."""
        self._span.set_attribute("error.type", type(error).__name__)
        _fail(self._span, type(error).__name__)
        self._exporter.end(self._span)


TRACE: ContextVar[RequestSpan | None] = ContextVar("trace", default=None)


def open_tracer(endpoint_url: str, service_name: str, version: str, process: str, ratio: float) -> Tracer | None:
    """One that sends its spans to a collector, as OTLP over HTTP. None where the SDK's own variables forbid that, or
    say what it does not understand: requests are answered without."""
    log = structlog.get_logger("forebay.tracing")
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        log.warning("nothing is traced: OTEL_SDK_DISABLED is set")
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it tells of each try
        exporter = OTLPSpanExporter(endpoint_url, timeout=_EXPORT_SECONDS, session=_session())
        return Tracer(exporter, service_name, version, process, ratio)
    except Exception as error:  # noqa: BLE001 - of code of others, which reads variables as it is imported
        log.error("nothing is traced: OpenTelemetry does not start", error=f"{type(error).__name__}: {error}")
        return None


def _session() -> Any:
    """What asks the collector. Where it is sent elsewhere that is a failure: the SDK takes it for a success."""
    import requests

    def judge(answer: Any, **_: Any) -> None:
        if 300 <= answer.status_code < 400:
            answer.close()
            raise requests.TooManyRedirects(f"the collector says {answer.status_code}", response=answer)

    session = requests.Session()
    session.hooks["response"].append(judge)
    return session


class _BoundedExporter:
    """An exporter with no more than WAITING_MAX spans before it; what becomes of them is counted.

    Spans end on the event loop, and are exported by a thread of the SDK's: each counts in a number of its own.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._ended = self._exported = 0

    def end(self, span: Span) -> None:
        """Have a span exported, where there is room."""
        if self._ended - self._exported >= WAITING_MAX:
            metrics.TRACE_SPANS.add(1, "dropped")
            _log.warning("the collector of traces is too slow: spans are dropped", "dropped")
            return
        self._ended += 1
        span.end()

    # As SpanExporter

    def export(self, spans: Sequence[Any]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - of code of others; the thread goes on
            result = SpanExportResult.FAILURE
            _log.warning("spans of traces cannot be sent", "failed", reason=str(error))
        is_sent = result is SpanExportResult.SUCCESS
        metrics.TRACE_SPANS.add(len(spans), "sent" if is_sent else "failed")
        self._exported += len(spans)
        if not is_sent:
            _log.warning("the collector of traces does not take spans: they are lost", "refused")
        return result

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


def _no_context() -> Any:
    """One without a span in it."""
    from opentelemetry.context import Context

    return Context()


def _fail(span: Span, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, why))


def _error_type(status: str) -> str | None:
    return status if is_error(status) or status == "client-left" else None


def _told(attributes: Mapping[str, str | int | None]) -> dict[str, str | int]:
    """Those that there are."""
    return {name: value for name, value in attributes.items() if value is not None}
