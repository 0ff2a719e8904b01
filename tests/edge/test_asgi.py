"""The S3 port's application: errors, request ids, broken streams, zero-copy, metrics."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.core.clock import SystemClock
from gateway.core.errors import ClientDisconnected, OriginUnreachable
from gateway.core.model import BodyStream
from gateway.edge.cycle import RESPONSE, SPAN
from gateway.operations.context import Response
from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from gateway.shared.recent_requests import RecentRequests, recent_requests
from gateway.telemetry import metrics
from gateway.telemetry.request_counts import BROKEN_OFF, CLIENT_LEFT
from tests.support.asgi import ACCESS_KEY_ID, call, signed_headers
from tests.support.counting import by_label, counted
from tests.support.descriptors import open_descriptors
from tests.support.gateway_app import gateway_app
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import CutBody, Unreachable, on
from tests.support.memory_origin.response import MemoryResponse
from tests.support.serving import request, talking
from tests.support.slots import Slot

BODY = os.urandom(200_000)


async def test_an_unexpected_failure_is_an_internal_error_with_a_request_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The client gets InternalError and nothing of the failure; the request id finds the log line."""

    async def explode(*_: object) -> None:
        raise ZeroDivisionError("a detail that is nobody's business")

    async with gateway_app(tmp_path) as gateway:
        monkeypatch.setattr("gateway.edge.asgi.perform", explode)
        answer = await call(gateway.app, "GET", "/bucket/k")
    request_id = answer.headers["x-amz-request-id"]
    assert (answer.status, b"<Code>InternalError</Code>" in answer.body) == (500, True)
    assert f"<RequestId>{request_id}</RequestId>".encode() in answer.body
    assert b"nobody's business" not in answer.body
    logged = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert request_id in logged
    assert "ZeroDivisionError" in logged


async def test_a_body_that_fails_before_its_first_byte_is_answered_with_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a fault of ours with InternalError; what the body held is let go of, the metrics have the status."""
    closed: list[bool] = []

    async def fail() -> BodyStream:
        raise OriginUnreachable("the origin is away")
        yield b""

    class Held:
        async def aclose(self) -> None:
            closed.append(True)

    async def perform(_: object) -> Response:
        return Response(200, [("content-length", "7")], fail(), "hit", Held())

    async with gateway_app(tmp_path, allow_unsigned=True) as gateway:
        monkeypatch.setattr("gateway.edge.asgi.perform", perform)
        async with talking(gateway.app) as (_, wire):
            for _ in range(2):
                await wire.say(request("GET", "/bucket/k"))
                answer = await wire.answer()
                assert (answer.status, b"<Code>ServiceUnavailable</Code>" in answer.body) == (503, True)
            await wire.close()
    assert counted(metrics.REQUESTS, status="503", cache="none") == counted(metrics.REQUESTS) == 2
    assert closed == [True] * 2


async def test_an_error_answer_to_head_has_no_body(tmp_path: Path) -> None:
    """RFC 9110, 9.3.2: HEAD errors are a status only, with the length that GET's answer would have."""
    async with gateway_app(tmp_path) as gateway:
        refused = await call(gateway.app, "HEAD", "/bucket/k", secret_access_key="wrong")
        refused, missing = refused, await call(gateway.app, "HEAD", "/bucket/k")
    assert (refused.status, refused.body) == (403, b"")
    assert (missing.status, missing.body) == (404, b"")


async def test_a_refusal_before_the_body_was_read_closes_the_connection(tmp_path: Path) -> None:
    """What is left of the body would be taken for the next request."""
    async with gateway_app(tmp_path) as gateway:
        early = await call(gateway.app, "PUT", "/bucket/k", body=b"x", secret_access_key="wrong")
        early, without_body = early, await call(gateway.app, "GET", "/bucket/k", secret_access_key="wrong")
    assert early.headers["connection"] == "close"
    assert "connection" not in without_body.headers


async def test_an_origin_that_does_not_answer_is_503(tmp_path: Path) -> None:
    """8.1 SDKs retry ServiceUnavailable; the reason stays in the log."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.inject(on(), Unreachable(), times=None)
        answer = await call(gateway.app, "GET", "/bucket/k")
    assert (answer.status, b"<Code>ServiceUnavailable</Code>" in answer.body) == (503, True)


async def test_an_answer_that_fails_behind_its_head_stays_incomplete(tmp_path: Path) -> None:
    """1.3 The end of the body is never announced, so every HTTP server closes the connection."""
    async with gateway_app(tmp_path) as gateway:
        app = gateway.app
        gateway.origin.put("bucket", "k", BODY)
        gateway.origin.inject(on(Operation.GET_OBJECT), CutBody(70_000), times=None)
        answer = await call(app, "GET", "/bucket/k?versionId=null")
        assert not answer.complete
        assert by_label(metrics.REQUESTS, "status") == {BROKEN_OFF: 1}
        assert metrics.REQUESTS_IN_FLIGHT.value() == 0


async def test_requests_are_counted_with_what_they_moved(tmp_path: Path) -> None:
    """Operation, status, cache outcome and body bytes reach the metrics."""
    async with gateway_app(tmp_path) as gateway:
        await call(gateway.app, "PUT", "/bucket/k", body=BODY)
        await call(gateway.app, "GET", "/bucket/k")
        assert by_label(metrics.SENT_BYTES, "operation", slot="default") == {"GetObject": len(BODY)}
        await call(gateway.app, "GET", "/bucket/none")
    assert {labels: number.get() for labels, number in metrics.REQUESTS.kept().items()} == {
        ("PutObject", "default", "200", "forwarded"): 1,
        ("GetObject", "default", "200", "miss"): 1,
        ("GetObject", "default", "404", "bypass"): 1,
    }
    assert by_label(metrics.REQUEST_SECONDS, "operation") == {"PutObject": 1, "GetObject": 2}
    assert by_label(metrics.RECEIVED_BYTES, "operation", slot="default") == {"PutObject": len(BODY)}
    assert by_label(metrics.CALLER_RECEIVED_BYTES, "credential") == {ACCESS_KEY_ID: len(BODY)}
    assert counted(metrics.CALLER_SENT_BYTES, credential=ACCESS_KEY_ID) == counted(metrics.SENT_BYTES)
    assert by_label(metrics.CALLER_REQUESTS, "credential") == {ACCESS_KEY_ID: 3}
    assert metrics.REQUESTS_IN_FLIGHT.value() == 0


class LeavingClient:
    """Takes `pieces` messages and is gone then, as the gateway's own server reports it."""

    def __init__(self, pieces: int) -> None:
        self._left = pieces

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        self._left -= 1
        if self._left < 0:
            raise ClientDisconnected("gone")


@pytest.mark.parametrize("pieces", [0, 1, 2])
async def test_a_client_that_leaves_gives_everything_back(tmp_path: Path, pieces: int) -> None:
    """Whenever the client goes, open files and connections to the origin are given back."""
    async with gateway_app(tmp_path) as gateway:
        app = gateway.app
        gateway.origin.put("bucket", "k", BODY)
        await call(app, "GET", "/bucket/k")
        await gateway.blocks.settle()
        await call(app, "GET", "/bucket/k")  # the segment that it lies in stays open for all who come
        before = open_descriptors()
        for number, target in enumerate(("/bucket/k", "/bucket/k?versionId=null"), 1):
            client = LeavingClient(pieces)
            headers = signed_headers("GET", target, {}, b"")
            path, _, query = target.partition("?")
            scope = {
                "type": "http",
                "method": "GET",
                "raw_path": path.encode(),
                "query_string": query.encode(),
                "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            }
            await app(scope, client.receive, client.send)
            assert counted(metrics.REQUESTS, status=CLIENT_LEFT) == number
            assert metrics.REQUESTS_IN_FLIGHT.value() == 0
        assert open_descriptors() == before


async def test_a_warm_body_leaves_as_spans_of_a_file(tmp_path: Path) -> None:
    """Where the server offers zero-copy sending, the bytes of a hit never pass through this process."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", BODY)
        await call(gateway.app, "GET", "/bucket/k")
        await gateway.blocks.settle()
        await call(gateway.app, "GET", "/bucket/k")
        spans = bytearray()

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == SPAN:
                spans.extend(os.pread(message["span"].descriptor, message["span"].count, message["span"].offset))
            elif message["type"] == "http.response.body":
                assert not message["body"]

        headers = signed_headers("GET", "/bucket/k", {}, b"")
        scope = {
            "type": "http",
            "method": "GET",
            "raw_path": b"/bucket/k",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "extensions": {RESPONSE: {}},
        }
        await gateway.app(scope, receive, send)
        found = bytes(spans)
    assert found == BODY


async def test_every_request_goes_on_the_account_of_a_slot(tmp_path: Path) -> None:
    """By its key, or the prefix that it lists, towards the origin too; what is refused before has none."""
    sent: list[tuple[str, str]] = []

    class Noting(MemoryOrigin):
        async def send(self, request: OriginRequest) -> MemoryResponse:
            sent.append((request.method, request.slot))
            return await super().send(request)

    origin = Noting(SystemClock())
    origin.create_bucket("bucket")
    origin.put("bucket", "train/k", BODY)
    async with gateway_app(
        tmp_path, origin=origin, slots=[Slot("data", Prefix.parse("s3://bucket/train/"))]
    ) as gateway:
        app = gateway.app
        await call(app, "GET", "/bucket/train/k")
        await call(app, "GET", "/bucket?list-type=2&prefix=train%2F")
        await call(app, "PUT", "/bucket/else", body=BODY)
        await call(app, "GET", "/bucket/train/k", secret_access_key="wrong")
    assert by_label(metrics.REQUESTS, "slot") == {"data": 2, "default": 1, "none": 1}
    assert list(dict.fromkeys(sent)) == [("GET", "data"), ("PUT", "default")]


async def test_slow_failed_and_refused_requests_are_kept_with_their_error_codes(tmp_path: Path) -> None:
    """What the gateway said, to whom, about what; an object that is not there is no refusal."""
    shared = tmp_path / "shared"
    shared.mkdir()
    async with gateway_app(tmp_path / "cache") as gateway:
        gateway.origin.put("bucket", "key", BODY)
        gateway.app.recent = RecentRequests(shared, 0)
        gateway.origin.inject(on(Operation.GET_OBJECT, key="away"), Unreachable())
        for target in ("/bucket/key", "/bucket/none", "/bucket/away"):
            await call(gateway.app, "GET", target)
        await call(gateway.app, "PUT", "/bucket/key?acl", {"authorization": "AWS4-HMAC-SHA256 x"}, sign=False)
        wrong = signed_headers("GET", "/bucket/key", {}, b"", secret_access_key="wrong")
        await call(gateway.app, "GET", "/bucket/key", wrong, sign=False)
    found = recent_requests(shared, 100, time.time())
    assert {one["key"] for one in found["slowest"]} == {"key", "none", "away"}
    assert [(one["key"], one["status"], one["error"], one["caller"]) for one in found["errors"]] == [
        ("away", "503", "ServiceUnavailable", ACCESS_KEY_ID)
    ]
    refused = sorted((one["operation"], one["status"], one["error"], one["caller"]) for one in found["refusals"])
    assert refused == [
        ("Forward", "400", "AuthorizationHeaderMalformed", "none"),
        ("GetObject", "403", "SignatureDoesNotMatch", "none"),
    ]
    read = next(one for one in found["slowest"] if one["key"] == "key" and one["status"] == "200")
    assert (read["sent_bytes"], read["cache"], read["reason"]) == (len(BODY), "miss", "first-read")
