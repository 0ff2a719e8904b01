"""Traces: which requests are traced, what the origin is told of them, and what a collector gets."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from threading import enumerate as enumerate_threads
from typing import Any

import boto3
import pytest
import structlog
from botocore.config import Config

from gateway.core.errors import OriginUnreachable
from gateway.edge.asgi import S3App
from gateway.origin.client import OriginRequest, OriginSettings
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from gateway.s3.requests import Operation
from gateway.s3.trace_context import RemoteSpan, passed_on_state, remote_span
from gateway.telemetry import metrics, tracing
from gateway.telemetry.tracing import TRACE, Tracer, open_tracer
from tests.origin.clients import playing
from tests.origin.clocks import JumpingClock
from tests.origin.origins import STRICT_PAIR
from tests.support.asgi import call
from tests.support.counting import counted
from tests.support.finished import FINISHED, finished
from tests.support.gateway_app import gateway_app
from tests.support.gateway_process import GatewayProcess, wait_for_metric
from tests.support.memory_origin.faults import Answer, on
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"
REMOTE = RemoteSpan(int(TRACE_ID, 16), int(SPAN_ID, 16), True, "")


class Spans:
    """What an exporter in memory has got."""

    def __init__(self, ratio: float = 0.0) -> None:
        pytest.importorskip("opentelemetry.sdk")
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        self.tracer = Tracer(self._exporter, "forebay", "1.2.3", "worker0", ratio)

    def all(self) -> Sequence[Any]:
        """In the order in which they ended."""
        self.tracer._processor.force_flush()
        found: Sequence[Any] = self._exporter.get_finished_spans()
        return found


def end_spans(tracer: Tracer, count: int) -> None:
    """Of as many requests."""
    for _ in range(count):
        span = tracer.begin([])
        assert span is not None
        span.end(FINISHED)


def tracer_to(url: str) -> Tracer:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    tracer = open_tracer(url, "forebay", "1.2.3", "worker0", 1.0)
    assert tracer is not None
    return tracer


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    yield
    TRACE.set(None)


@pytest.mark.parametrize(
    ("parents", "states", "expected"),
    [
        ([], [], None),
        ([SAMPLED], [], REMOTE),
        ([NOT_SAMPLED], [], REMOTE._replace(is_sampled=False)),
        ([SAMPLED], ["a=b,c=d"], REMOTE._replace(state="a=b,c=d")),
        ([SAMPLED], ["a=b", "c=d"], REMOTE._replace(state="a=b,c=d")),
        ([SAMPLED], ["a=" + "b" * 600], REMOTE),
        ([SAMPLED], ["a=b", "c"], REMOTE),
        ([f"cc-{TRACE_ID}-{SPAN_ID}-01-more"], [], REMOTE),
        ([f"{SAMPLED}-more"], [], None),
        ([SAMPLED.upper()], [], None),
        ([f"ff-{TRACE_ID}-{SPAN_ID}-01"], [], None),
        ([f"00-{'0' * 32}-{SPAN_ID}-01"], [], None),
        ([f"00-{TRACE_ID}-{'0' * 16}-01"], [], None),
        (["\xff"], [], None),
        ([SAMPLED, NOT_SAMPLED], [], None),
    ],
)
def test_what_clients_say_of_their_spans(parents: list[str], states: list[str], expected: RemoteSpan | None) -> None:
    """By W3C Trace Context; nothing else is believed."""
    headers = [(b"traceparent", one.encode("latin-1")) for one in parents]
    headers[1:1] = [(b"tracestate", one.encode()) for one in states]
    assert remote_span(headers) == expected


def members(count: int, length: int) -> str:
    return ",".join(f"k{number}={'v' * length}" for number in range(count))


_LONG = "l=" + "x" * 254


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("", ""),
        ("a=1", "a=1"),
        (" a=1\t, ,b@v=2,,3c_-*/=a b", "a=1,b@v=2,3c_-*/=a b"),
        ("a=1,a=2,b=3", "a=1,b=3"),
        *(
            (state, "")
            for state in ("a=1,b", "a=1,=2", "a=1,b=", "a=1,b=2=3", "a=1,B=2", "a=1,b =2", "a=1,b=\x7f", "a=ä")
        ),
        *((state, state) for state in (f"a=1,{'b' * 256}=2", f"a={'1' * 256}", members(32, 1))),
        *((state, "") for state in (f"a=1,{'b' * 257}=2", f"a={'1' * 257}", members(33, 1))),
        (members(6, 97), members(5, 97)),
        (f"{_LONG},{_LONG.replace('l', 'm', 1)},a=1", f"{_LONG},a=1"),
    ],
)
def test_what_of_a_tracestate_goes_along(state: str, expected: str) -> None:
    """By its grammar, 32 members and 512 characters: members of more than 128 go first, then the last ones."""
    assert passed_on_state(state) == expected
    assert len(expected) <= 512


async def test_what_a_client_says_of_a_trace_that_is_not_its_requests_is_not_told() -> None:
    """Neither a state that does not parse, nor one beside a `traceparent` that does not, where the gateway traces."""
    spans = Spans(1.0)
    with StrictOrigin() as strict:
        strict.model.put("bucket", "key", b"0123456789")
        async with playing(strict) as client:
            for parent, state in ((SAMPLED, "a=b,c"), ("of nobody", "a=b")):
                said = {"traceparent": parent, "tracestate": state}
                span = spans.tracer.begin([(name.encode(), value.encode()) for name, value in said.items()])
                assert span is not None
                async with await client.origin.send(OriginRequest("GET", "bucket", "key", headers=said)) as response:
                    await response.read(100)
                span.end(FINISHED)
        sent = [dict(one) for one in strict.request_headers]
    assert [b"tracestate" in one for one in sent] == [False, False]
    assert sent[0][b"traceparent"].decode().startswith(f"00-{TRACE_ID}-")
    assert sent[1][b"traceparent"] != b"of nobody"


def test_which_requests_are_traced() -> None:
    """The client decides, where it says something; else the share that is set, whatever way a request takes."""
    never, always = Spans(0.0).tracer, Spans(1.0).tracer
    said = [[(b"traceparent", SAMPLED.encode())], [(b"traceparent", NOT_SAMPLED.encode())], []]
    assert [never.begin(headers) is not None for headers in said] == [True, False, False]
    assert [always.begin(headers) is not None for headers in said] == [True, False, True]
    some = Spans(0.25).tracer
    count = sum(some.begin([]) is not None for _ in range(4000))
    assert 800 < count < 1200
    drawn = sum(some.draws(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n") for _ in range(4000))
    assert 800 < drawn < 1200
    some._ratio = 0.0
    assert sum(some.begin([]) is not None for _ in range(4000)) == drawn
    for parent, is_drawn in ((SAMPLED, True), (NOT_SAMPLED, False), ("x", False)):
        assert some.draws(f"GET / HTTP/1.1\r\nTraceParent: {parent}\r\nHost: h\r\n\r\n".encode()) is is_drawn
    assert some.begin([]) is None, "whose client says something is not drawn"
    some._ratio = 1.0
    for parents in (["x", SAMPLED], [SAMPLED, NOT_SAMPLED]):  # what two say is as if nothing was said, here as there
        lines = "".join(f"traceparent: {parent}\r\n" for parent in parents)
        assert some.draws(f"GET / HTTP/1.1\r\n{lines}Host: h\r\n\r\n".encode())
        assert some.begin([(b"traceparent", parent.encode()) for parent in parents]) is not None
        assert not some._drawn


async def test_a_request_has_a_span_with_what_became_of_it(tmp_path: Path) -> None:
    """Below its client's, and with what is known of it. It fails where the gateway or the origin is to blame."""
    spans = Spans(1.0)
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "key", b"x" * 1000)
        app: S3App = gateway.app
        app.tracer = spans.tracer
        for target, headers in (("/bucket/key", {"traceparent": SAMPLED}), ("/bucket/none", {})):
            await call(app, "GET", target, headers)
        gateway.origin.inject(on(Operation.GET_OBJECT), Answer(500), times=None)
        await call(app, "GET", "/bucket/other")
    one, absent, failed = spans.all()
    assert (one.name, one.kind.name) == ("GetObject", "SERVER")
    assert f"{one.context.trace_id:032x}" == TRACE_ID
    assert f"{one.parent.span_id:016x}" == SPAN_ID
    told = {"aws.s3.bucket": "bucket", "aws.s3.key": "key", "http.response.status_code": 200, "forebay.cache": "miss"}
    told |= {"http.response.body.size": 1000, "forebay.miss_reason": "first-read", "forebay.slot": "default"}
    assert told.items() <= dict(one.attributes).items()
    assert "error.type" not in one.attributes
    assert dict(one.resource.attributes)["service.name"] == "forebay"
    assert dict(one.resource.attributes)["service.instance.id"] == "worker0"
    assert (absent.parent, absent.status.status_code.name) == (None, "UNSET")
    assert "error.type" not in absent.attributes
    assert (failed.status.status_code.name, failed.attributes["http.response.status_code"]) == ("ERROR", 500)


async def test_the_origin_is_told_of_the_span_that_asks_it() -> None:
    """By a header that no signature covers, in place of the client's; each try has a span of its own."""
    spans = Spans()
    with StrictOrigin() as strict:
        strict.model.put("bucket", "key", b"0123456789")
        strict.model.inject(on(Operation.GET_OBJECT), Answer(503, "SlowDown"))
        headers = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "range": "bytes=0-3"}
        async with playing(strict) as client:
            span = spans.tracer.begin([(b"traceparent", SAMPLED.encode()), (b"tracestate", b"a=b")])
            assert span is not None
            async with await client.origin.send(OriginRequest("GET", "bucket", "key", headers=headers)) as response:
                assert await response.read(100) == b"0123"
            span.end(FINISHED)
        sent = [{name.decode(): value.decode() for name, value in one} for one in strict.request_headers]
    refused, answered, request = spans.all()
    for one, got in zip((refused, answered), sent, strict=True):
        assert got["traceparent"] == f"00-{TRACE_ID}-{one.context.span_id:016x}-01"
        assert got["tracestate"] == "a=b"
        assert (one.name, one.kind.name, one.parent.span_id) == ("origin GET", "CLIENT", request.context.span_id)
        assert (one.attributes["server.address"], one.attributes["forebay.purpose"]) == ("127.0.0.1", "live")
    assert [one.attributes["http.response.status_code"] for one in (refused, answered)] == [503, 206]
    assert [one.status.status_code.name for one in (refused, answered)] == ["ERROR", "UNSET"]
    assert answered.attributes["http.request.resend_count"] == 1


async def test_an_origin_that_does_not_answer_is_told() -> None:
    """And a request that is over for long has no part in what is asked later."""
    spans = Spans()
    settings = OriginSettings("http://127.0.0.1:1", max_attempts=1)
    origin = S3Origin(settings, StaticCredentials(STRICT_PAIR), JumpingClock(), instance_id="a")
    span = spans.tracer.begin([(b"traceparent", SAMPLED.encode())])
    assert span is not None
    with pytest.raises(OriginUnreachable):
        await origin.send(OriginRequest("GET", "bucket", "key"))
    span.end(finished(status="503"))
    span._ended_at = time.monotonic() - tracing.AFTER_SECONDS - 1
    with pytest.raises(OriginUnreachable):
        await origin.send(OriginRequest("GET", "bucket", "key"))
    await origin.aclose()
    failed, _ = spans.all()
    assert (failed.status.status_code.name, failed.attributes["error.type"]) == ("ERROR", "OriginUnreachable")


def test_spans_that_the_collector_does_not_take_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request waits for it, a bounded number of them does, and each is counted; a process that ends goes soon."""
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setattr(tracing, "CLOSING_SECONDS", 0.2)
    may_go_on = Event()

    class Stuck:
        def export(self, spans: Sequence[Any]) -> Any:
            may_go_on.wait(60)
            raise OSError("no collector")

        def shutdown(self) -> None:
            may_go_on.set()

    stuck: Any = Stuck()
    tracer = Tracer(stuck, "forebay", "1", "worker0", 1.0)
    told: list[str] = []
    monkeypatch.setattr(tracing._log, "warning", lambda _message, kind, **_: told.append(kind))
    end_spans(tracer, tracing.WAITING_MAX + 500)
    assert told == ["dropped"] * 500
    tracer.close()
    assert may_go_on.is_set()
    eventually(lambda: tracer._exporter._exported >= tracing.WAITING_MAX)
    lost = {outcome: counted(metrics.TRACE_SPANS, outcome=outcome) for outcome in ("failed", "dropped")}
    assert lost == {"failed": tracing.WAITING_MAX, "dropped": 500}


class DrippingCollector:
    """Takes what it is sent, and never comes to the end of its answer: each piece comes in time."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self._head, self._piece = head, piece
        self._over, self.broken_off = Event(), Event()
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1/traces"
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                Thread(target=self._drip, args=(connection,), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        due = time.monotonic() + 30
        with connection:
            connection.recv(1_000_000)
            try:
                connection.sendall(self._head)
                while not self._over.wait(0.02) and time.monotonic() < due:
                    connection.sendall(self._piece)
            except OSError:
                self.broken_off.set()

    def close(self) -> None:
        self._over.set()
        self._listener.close()


DRIPS = {
    "head": (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
    "fields": (b"HTTP/1.1 200 OK\r\n", b"\r"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n", b"z"),
    "refusal": (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 1000000\r\n\r\n", b"z"),
}


@contextlib.contextmanager
def tracing_to(*drip: bytes) -> Iterator[tuple[DrippingCollector, Tracer]]:
    collector = DrippingCollector(*drip)
    tracer = tracer_to(collector.url)
    try:
        yield collector, tracer
    finally:
        collector.close()
        tracer.close()


@pytest.mark.slow
@pytest.mark.parametrize("drip", DRIPS)
def test_a_collector_that_drips_holds_no_export_on(drip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export has a bound as a whole; its spans count as lost, its connection is closed, and the next one begins."""
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.5)
    with tracing_to(*DRIPS[drip]) as (collector, tracer):
        for count in (1, 2):
            begun = time.monotonic()
            end_spans(tracer, 3)
            tracer._processor.force_flush()
            assert time.monotonic() - begun < 10
            assert counted(metrics.TRACE_SPANS, outcome="failed") == 3 * count
            assert collector.broken_off.wait(10)
        assert collector.connections >= 2


def test_what_a_dripping_collector_has_not_taken_when_a_worker_stops_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it, and the stop is not longer than it may be."""
    monkeypatch.setattr(tracing, "CLOSING_SECONDS", 0.5)
    with tracing_to(*DRIPS["body"]) as (collector, tracer):
        end_spans(tracer, 1500)
        begun = time.monotonic()
        tracer.close()
        assert time.monotonic() - begun < tracing.EXPORT_SECONDS
        assert counted(metrics.TRACE_SPANS, outcome="failed") == 1500
        assert collector.broken_off.wait(10)


def test_an_answer_without_an_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither into memory, nor until the time is up: its head has told that the spans were taken."""
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 60.0)
    drip = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n", bytes(100_000)
    with tracing_to(*drip) as (collector, tracer):
        end_spans(tracer, 1)
        begun = time.monotonic()
        tracer._processor.force_flush()
        assert time.monotonic() - begun < 10
        assert counted(metrics.TRACE_SPANS, outcome="sent") == 1
        assert collector.broken_off.wait(10)


def test_what_holds_an_export_on_for_ever_costs_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up of a name, say. Batches fail while it lasts, and are sent again when it is over."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SpanExportResult

    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.1)
    may_go_on = Event()

    class Stuck:
        def export(self, spans: Sequence[Any]) -> Any:
            may_go_on.wait(60)
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            """Nothing ends it."""

    stuck: Any = Stuck()
    tracer = Tracer(stuck, "forebay", "1", "worker0", 1.0)
    for _ in range(3):
        end_spans(tracer, 1)
        tracer._processor.force_flush()
    assert sum(one.name == "spans" for one in enumerate_threads()) == 1
    assert counted(metrics.TRACE_SPANS, outcome="failed") == 3
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 60.0)
    may_go_on.set()
    end_spans(tracer, 1)
    tracer._processor.force_flush()
    assert counted(metrics.TRACE_SPANS, outcome="sent") == 1
    tracer.close()


@pytest.mark.parametrize(
    "variable",
    ["OTEL_SDK_DISABLED=TRUE", "OTEL_BSP_SCHEDULE_DELAY=0", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=1000000", ""],
)
def test_variables_that_forbid_traces_keep_nobody_from_answering(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is anything told of spans that are none. What the gateway bounds itself is not asked for."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    name, _, value = variable.partition("=")
    if name:
        monkeypatch.setenv(name, value)
    with structlog.testing.capture_logs() as logs:
        tracer = open_tracer("http://127.0.0.1:9/v1/traces", "forebay", "1.2.3", "worker0", 1.0)
    is_forbidden = name in ("OTEL_SDK_DISABLED", "OTEL_BSP_SCHEDULE_DELAY")
    assert (tracer is None) is is_forbidden
    assert [one["event"].split(":")[0] for one in logs] == ["nothing is traced"] * is_forbidden
    if tracer is not None:
        tracer.close()


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
        self.spans: list[Any] = []
        self.status = 200
        spans, collector = self.spans, self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = proto.ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                spans.extend(
                    span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans
                )
                self.send_response(collector.status)
                self.send_header("location", "/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.mark.parametrize(("status", "outcome"), [(200, "sent"), (302, "failed"), (308, "failed"), (400, "failed")])
def test_only_what_the_collector_has_taken_counts_as_sent(collector: Collector, status: int, outcome: str) -> None:
    """Not what it sends elsewhere, as one that wants https does."""
    collector.status = status
    tracer = tracer_to(collector.url)
    end_spans(tracer, 1)
    tracer.close()
    assert counted(metrics.TRACE_SPANS, outcome=outcome) == 1


@pytest.mark.slow
def test_a_collector_gets_the_spans_of_a_gateway(collector: Collector) -> None:
    """Those of requests whose answers are prepared, too, and the last ones of a gateway that stops."""
    with StrictOrigin() as origin:
        origin.model.put("bucket", "data/one", os.urandom(10_000))
        slot = {"name": "data", "prefix": "s3://bucket/data/", "mode": "read-only", "consistency": "immutable"}
        config: dict[str, Any] = {"origin": origin.settings, "slots": [slot]}
        traced = {"endpoint_url": collector.url, "sample_ratio": 0.5}
        with GatewayProcess({**config, "tracing": traced}) as gateway:
            s3 = boto3.client(
                "s3",
                endpoint_url=gateway.s3_url,
                aws_access_key_id=ACCESS_KEY_ID,
                aws_secret_access_key=SECRET_ACCESS_KEY,
                region_name="us-east-1",
                config=Config(retries={"total_max_attempts": 1}),
            )
            for _ in range(60):
                s3.get_object(Bucket="bucket", Key="data/one")["Body"].read()
            wait_for_metric(gateway, r"forebay_prepared_requests_total\{[^}]*data[^}]*\} [1-9]")

            def of_client(request: Any, **_: Any) -> None:
                request.headers["traceparent"] = SAMPLED

            s3.meta.events.register("before-send.s3", of_client)
            s3.put_object(Bucket="bucket", Key="other", Body=b"x")
    read = [one for one in collector.spans if one.name == "GetObject"]
    assert 10 <= len(read) <= 50
    put = next(one for one in collector.spans if one.name == "PutObject")
    asked = next(one for one in collector.spans if one.name == "origin PUT")
    assert (put.trace_id.hex(), put.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert (asked.trace_id, asked.parent_span_id) == (put.trace_id, put.span_id)
    told = f"00-{TRACE_ID}-{asked.span_id.hex()}-01".encode()
    assert (b"traceparent", told) in [field for headers in origin.request_headers for field in headers]
