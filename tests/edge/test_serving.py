"""The S3 port's server over real sockets: requests, responses, keep-alive, pipelining, files without copying."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from gateway.core.model import FileSpan
from gateway.edge.cycle import RESPONSE, SPAN
from gateway.edge.response import EncodedResponse
from gateway.edge.s3_server import ASGIApp, Receive, Scope, Send
from tests.edge.apps import echo, file_app, mirror, respond, unread
from tests.support.manual_clock import ManualClock
from tests.support.serving import Answer, request, talking


async def ask(app: ASGIApp, *requests: bytes) -> list[Answer]:
    """The answers to requests sent at once over one connection."""
    async with talking(app, b"".join(requests)) as (_, wire):
        answers = [await wire.answer(to_head=one.startswith(b"HEAD ")) for one in requests]
        await wire.close()
        return answers


def shown(target: str, *headers: str, method: str = "GET", host: str = "s3.local") -> dict[str, Any]:
    """What the application sees of a request."""
    [answer] = asyncio.run(ask(mirror, request(method, target, b"", *headers, host=host)))
    assert answer.status == 200, answer
    seen: dict[str, Any] = json.loads(answer.body)
    return seen


@pytest.fixture
def content(tmp_path: Path) -> Path:
    """3 MiB and a bit: more than a socket's buffers take at once."""
    path = tmp_path / "content"
    path.write_bytes(os.urandom(3 * 1024 * 1024 + 17))
    return path


@pytest.mark.parametrize(
    "target", ["/b/k", "//b//k", "/b/../k", "/b/a+b", "/b/a%2Fb%20c", "/b/%E2%82%AC", "/", "/b/k%23", '/b/"<>|^`']
)
def test_the_path_reaches_the_application_as_it_was_on_the_wire(target: str) -> None:
    """Keys are bytes: nothing is decoded or normalised on the way."""
    assert shown(target)["raw_path"] == target


def test_the_query_is_what_follows_the_first_question_mark() -> None:
    """The query is undecoded, and may have more question marks."""
    seen = shown("/b/k?prefix=a%2Fb&x?y=+")
    assert (seen["raw_path"], seen["query_string"]) == ("/b/k", "prefix=a%2Fb&x?y=+")


def test_an_absolute_target_loses_its_authority_to_the_host_header() -> None:
    """RFC 9112, 3.2.2: the authority of the target replaces the Host header."""
    seen = shown("http://other.example:81/b/k?uploads", host="s3.local")
    assert (seen["raw_path"], seen["query_string"]) == ("/b/k", "uploads")
    assert seen["authority"] == "other.example:81"
    assert ["host", "other.example:81"] in seen["headers"]


def test_an_absolute_target_without_path_is_the_root() -> None:
    """RFC 9112, 3.2.1: an empty path is sent as `/`."""
    assert shown("http://other.example")["raw_path"] == "/"


def test_the_asterisk_form_is_for_options() -> None:
    """RFC 9112, 3.2.4."""
    assert shown("*", method="OPTIONS")["raw_path"] == "*"


def test_header_names_are_lower_case_and_values_trimmed() -> None:
    """Repeated fields stay apart and in order; inner spaces stay."""
    seen = shown("/", "X-Amz-Meta-A:  one  two \t", "x-amz-meta-a: three")
    assert [pair for pair in seen["headers"] if pair[0] == "x-amz-meta-a"] == [
        ["x-amz-meta-a", "one  two"],
        ["x-amz-meta-a", "three"],
    ]


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_is_an_offer_that_is_not_taken_up(protocol: str) -> None:
    """RFC 9110, 7.8: the request is answered as if the Upgrade field were not there, and the connection goes on."""
    offer = request("PUT", "/b/k", b"body", f"Upgrade: {protocol}", "Connection: upgrade")
    first, second = asyncio.run(ask(echo, offer, request("PUT", "/", b"more")))
    assert (first.status, first.body, second.body) == (200, b"body", b"more")


def test_pipelined_requests_are_answered_in_order() -> None:
    """Bodies, counted or in chunks, end exactly where the next request begins."""
    chunked = request("PUT", "/", b"3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n", "Transfer-Encoding: chunked")
    answers = asyncio.run(
        ask(echo, request("PUT", "/", b"first"), request("GET"), chunked, b"\r\n" + request("PUT", "/", b"last"))
    )
    assert [answer.body for answer in answers] == [b"first", b"", b"abcde", b"last"]


async def test_a_thousand_pipelined_requests_wait_unparsed() -> None:
    """A client that pipelines far ahead costs bytes, not one task or object per request."""
    running = most = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        await respond(send, scope["raw_path"])

    async with talking(app, b"".join(request("GET", f"/{number}") for number in range(1000))) as (_, wire):
        for number in range(1000):
            assert (await wire.answer()).body == f"/{number}".encode()
        await wire.close()
    assert most == 1


async def test_a_request_that_arrives_byte_by_byte_is_the_same_request() -> None:
    """The network may cut anywhere."""
    async with talking(echo) as (_, wire):
        chunked = request("PUT", "/", b"5\r\nhello\r\n0\r\n\r\n", "Transfer-Encoding: chunked")
        for byte in b"\r\n" + request("PUT", "/", b"abc") + chunked:
            await wire.say(bytes([byte]))
            await asyncio.sleep(0)
        assert (await wire.answer()).body == b"abc"
        assert (await wire.answer()).body == b"hello"
        await wire.close()


def test_a_large_body_arrives_whole() -> None:
    """More than the receive buffer holds: reading pauses and resumes."""
    body = os.urandom(5 * 1024 * 1024)
    [answer] = asyncio.run(ask(echo, request("PUT", "/", body)))
    assert answer.body == body


def test_a_head_answer_has_length_but_no_body() -> None:
    """And the connection carries the next request."""
    head, get = asyncio.run(ask(unread, request("HEAD"), request("GET")))
    assert (head.headers["content-length"], get.body) == ("6", b"unread")


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_body_have_none(status: int) -> None:
    """A 304 may tell the length of what it does not send."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, b"never sent", status)

    first, second = asyncio.run(ask(app, request("GET"), request("GET")))
    assert (first.status, second.status) == (status, status)


def test_a_body_of_unknown_length_comes_in_chunks() -> None:
    """And in no more packets than pieces: the head waits for the first."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": memoryview(b"two"), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    first, second = asyncio.run(ask(app, request("GET"), request("GET")))
    assert (first.body, second.body) == (b"onetwo", b"onetwo")
    assert first.headers["transfer-encoding"] == "chunked"


async def test_http_1_0_gets_no_chunks_and_no_second_answer() -> None:
    """The end of the body is the end of the connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"all"})

    async with talking(app, b"GET / HTTP/1.0\r\n\r\n") as (_, wire):
        answer = await wire.answer()
        assert (answer.body, answer.headers["connection"]) == (b"all", "close")
        assert "transfer-encoding" not in answer.headers
        await wire.close()


async def test_connection_close_is_kept_to() -> None:
    """A request behind one that said close is not run."""
    async with talking(unread, request("GET", "/", b"", "Connection: close") + request("GET")) as (_, wire):
        assert (await wire.answer()).headers["connection"] == "close"
        assert await wire.rest() == b""
        await wire.close()


def test_every_answer_has_a_date_and_names_no_software() -> None:
    """SDKs correct their clocks by it."""
    [answer] = asyncio.run(ask(unread, request("GET")))
    assert answer.headers["date"].endswith(" GMT")
    assert "server" not in answer.headers


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_file_leaves_whole_and_the_connection_goes_on(content: Path, pieces: int) -> None:
    """Zero-copy bodies count as any others: Content-Length, HEAD, pipelining."""
    requests = [request("GET"), request("HEAD"), request("GET")]
    first, head, second = asyncio.run(ask(file_app(content, pieces=pieces), *requests))
    assert first.body == second.body == content.read_bytes()
    assert head.headers["content-length"] == str(content.stat().st_size)


def test_a_file_can_follow_bytes_and_precede_them(content: Path) -> None:
    """Pieces in memory and pieces of files make one body, also in chunks."""
    size = content.stat().st_size

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"before", "more_body": True})
        with content.open("rb") as file:
            await send({"type": SPAN, "span": FileSpan(file.fileno(), 100, size - 100), "more_body": True})
        await send({"type": "http.response.body", "body": b"after"})

    [answer] = asyncio.run(ask(app, request("GET")))
    assert answer.body == b"before" + content.read_bytes()[100:] + b"after"


async def test_a_file_that_is_too_short_ends_the_connection(content: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is padded: a short body is how the client learns of it."""

    expected = await asyncio.to_thread(content.read_bytes)
    size = len(expected)
    async with talking(file_app(content, length=size + 1), request("GET")) as (_, wire):
        _, headers = await wire.head()
        assert headers["content-length"] == str(size + 1)
        assert await wire.rest() == expected
        await wire.close()
    assert "the file ends 1 bytes early" in caplog.text


def test_small_answers_take_one_packet(tmp_path: Path) -> None:
    """Head and body leave together, from memory or from a file."""
    small = tmp_path / "small"
    small.write_bytes(b"small")

    async def scenario(app: ASGIApp, body: bytes) -> None:
        async with talking(app, request("GET")) as (_, wire):
            received = await wire.reader.read(65536)
            assert received.endswith(b"\r\n\r\n" + body)
            await wire.close()

    asyncio.run(scenario(unread, b"unread"))
    asyncio.run(scenario(file_app(small), b"small"))


def test_the_body_must_agree_with_its_content_length(caplog: pytest.LogCaptureFixture) -> None:
    """Too long is refused before it is sent, too short breaks the connection."""

    def app(claimed: int) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(b"content-length", str(claimed).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"12345", "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        return answer

    async def short() -> None:
        async with talking(app(6), request("GET")) as (_, wire):
            assert (await wire.rest()).endswith(b"\r\n\r\n12345")
            await wire.close()

    [too_long] = asyncio.run(ask(app(4), request("GET")))
    assert too_long.status == 500
    asyncio.run(short())
    assert "longer than its Content-Length" in caplog.text
    assert "shorter than its Content-Length" in caplog.text


def test_lines_that_are_ready_go_along() -> None:
    """As they are, behind them what the server says itself."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert RESPONSE in scope["extensions"]
        await send({"type": RESPONSE, "response": EncodedResponse(200, [], b'etag: "e"\r\n', None, 2)})
        await send({"type": "http.response.body", "body": b"ok"})

    [whole] = asyncio.run(ask(app, request("GET")))
    assert (whole.status, whole.headers["etag"], whole.body) == (200, '"e"', b"ok")


@pytest.mark.parametrize("value", [b"a\r\n\r\nHTTP/1.1 200 OK\r\n", b"a\r\nx-amz-meta-b: c", b"a\nb: c", b"a\0"])
def test_a_header_value_cannot_forge_a_response(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Line breaks from an origin's metadata never reach the wire."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, b"", 200, (b"x-amz-meta-a", value))

    [answer] = asyncio.run(ask(app, request("GET")))
    assert answer.status == 500
    assert "line break" in caplog.text


def test_a_failing_application_becomes_an_internal_error(caplog: pytest.LogCaptureFixture) -> None:
    """S3 XML as long as nothing was sent, even when the head was on its way; the reason stays in the log."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        raise ValueError("the secret reason")

    [answer] = asyncio.run(ask(app, request("GET")))
    assert (answer.status, answer.headers["connection"]) == (500, "close")
    assert b"<Code>InternalError</Code>" in answer.body
    assert b"secret" not in answer.body
    assert "the secret reason" in caplog.text


def test_a_response_can_be_started_again_until_some_of_it_is_out() -> None:
    """Whole, with the second head and body, on a connection that goes on; afterwards it is refused."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-first", b"1")]})
        await send({"type": RESPONSE, "response": EncodedResponse(503, [], b"", b"second", 6)})
        with pytest.raises(RuntimeError):
            await send({"type": RESPONSE, "response": EncodedResponse(503, [], b"", b"third", 5)})

    answers = asyncio.run(ask(app, request("GET"), request("GET")))
    assert [(answer.status, answer.body) for answer in answers] == [(503, b"second")] * 2
    assert "x-first" not in answers[0].headers

    async def too_late(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        with pytest.raises(RuntimeError):
            await send({"type": RESPONSE, "response": EncodedResponse(503, [], b"", b"second", 6)})
        await send({"type": "http.response.body", "body": b"whole"})

    [answer] = asyncio.run(ask(too_late, request("GET")))
    assert (answer.status, answer.body) == (200, b"halfwhole")


async def test_an_application_that_stops_halfway_breaks_the_connection() -> None:
    """A chunked body without its last chunk cannot be taken for a whole one."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async with talking(app, request("GET")) as (_, wire):
        assert (await wire.rest()).endswith(b"\r\n4\r\nhalf\r\n")
        await wire.close()


async def test_a_cut_body_that_ends_with_its_connection_is_reset() -> None:
    """For HTTP/1.0 without a length, an orderly close would say "complete"."""
    half_way = asyncio.Event()

    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await half_way.wait()

    async with talking(cut, b"GET / HTTP/1.0\r\n\r\n") as (_, wire):
        await wire.head()
        assert await wire.reader.readexactly(4) == b"half"
        half_way.set()
        with pytest.raises(ConnectionResetError):
            await wire.rest()
        await wire.close()


async def test_the_date_moves_with_the_clock() -> None:
    """The Date header is kept by the sweep, not computed for every answer."""
    clock = ManualClock()
    async with talking(echo, request("GET"), clock=clock) as (_, wire):
        assert (await wire.answer()).headers["date"] == "Thu, 01 Jan 2026 00:00:00 GMT"
        await clock.advance(2)
        await wire.say(request("GET"))
        assert (await wire.answer()).headers["date"] == "Thu, 01 Jan 2026 00:00:02 GMT"
        await wire.close()


async def test_pieces_of_a_body_leave_at_once() -> None:
    """Nagle's algorithm is off, also for connections from a listener whose protocol number is 0."""
    async with talking(unread, request("GET")) as (port, wire):
        await wire.answer()
        [connection] = port.server._state.connections
        connected = connection.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
