"""What is not exactly one HTTP request is refused with an S3 error, and the connection closed."""

from __future__ import annotations

import asyncio

import pytest

from gateway.edge.s3_server import Receive, Scope, Send
from gateway.edge.server_state import ServerLimits
from tests.edge.apps import respond
from tests.support.serving import request, talking

HOST = b"Host: s3.local\r\n"


class Recorder:
    """An application that remembers the targets it was asked for."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["raw_path"])
        await respond(send)


def refusal_of(data: bytes, limits: ServerLimits | None = None) -> tuple[int, bytes]:
    """Status and body of the one answer to `data`, which is told; no part of it may have reached the application."""

    async def scenario() -> tuple[int, bytes]:
        app, told = Recorder(), list[int]()
        async with talking(app, data, limits=limits, on_refused=told.append) as (_, wire):
            answer = await wire.answer(to_head=data.startswith(b"HEAD "))
            assert await wire.rest() == b"", "more than one answer"
            assert answer.headers["connection"] == "close"
            assert answer.headers["content-type"] == "application/xml"
            assert answer.headers["x-amz-request-id"]
            await wire.close()
        assert app.asked == []
        assert told == [answer.status]
        return answer.status, answer.body

    return asyncio.run(scenario())


MALFORMED = {
    "length and chunks": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
    "chunks and length": b"PUT /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
    "equal lengths": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "different lengths": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "a list of lengths": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3, 3\r\n\r\nabc",
    "a length with a plus": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: +3\r\n\r\nabc",
    "a negative length": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: -3\r\n\r\nabc",
    "a hexadecimal length": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: 0x3\r\n\r\nabc",
    "an empty length": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length:\r\n\r\nabc",
    "a length above all": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: 18446744073709551615\r\n\r\nabc",
    "a length with spaces": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3 3\r\n\r\nabc",
    "chunked before identity": b"PUT /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "identity before chunked": b"PUT /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "gzip before chunked": b"PUT /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"PUT /a HTTP/1.1\r\n"
    + HOST
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "another coding": b"PUT /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a vertical tab": b"PUT /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"PUT /a HTTP/1.0\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before the colon": b"PUT /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "tab before the colon": b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length\t: 3\r\n\r\nabc",
    "a folded line": b"GET /a HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n",
    "two empty lines before it": b"\r\n\r\nGET /a HTTP/1.1\r\n" + HOST + b"\r\n",
    "empty lines and nothing else": b"\r\n" * 100_000,
    "a leading space": b"GET /a HTTP/1.1\r\n Host: s3.local\r\n\r\n",
    "a NUL in a value": b"GET /a HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n",
    "a NUL in a name": b"GET /a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding\x00: chunked\r\n\r\n",
    "a bare CR": b"GET /a HTTP/1.1\r\n" + HOST + b"X: a\rY: b\r\n\r\n",
    "a bare LF": b"GET /a HTTP/1.1\r\n" + HOST + b"X: a\nY: b\r\n\r\n",
    "line feeds only": b"GET /a HTTP/1.1\nHost: s3.local\n\n",
    "a line without colon": b"GET /a HTTP/1.1\r\n" + HOST + b"nothing\r\n\r\n",
    "a nameless header": b"GET /a HTTP/1.1\r\n" + HOST + b": value\r\n\r\n",
    "an odd header name": b"GET /a HTTP/1.1\r\n" + HOST + b"a(b: c\r\n\r\n",
    "no Host": b"GET /a HTTP/1.1\r\nX: y\r\n\r\n",
    "two Hosts": b"GET /a HTTP/1.1\r\n" + HOST + HOST + b"\r\n",
    "two spaces": b"GET  /a HTTP/1.1\r\n" + HOST + b"\r\n",
    "two spaces before the version": b"GET /a  HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tab in the request line": b"GET\t/a HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/0.9": b"GET /a\r\n",
    "HTTP/0.9, two lines": b"GET /a\r\n\r\n",
    "HTTP/1.2": b"GET /a HTTP/1.2\r\n" + HOST + b"\r\n",
    "HTTP/2.0": b"GET /a HTTP/2.0\r\n" + HOST + b"\r\n",
    "the HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "lower-case HTTP": b"GET /a http/1.1\r\n" + HOST + b"\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(64),
    "nothing but noise": b"\x00\xff\xfe\r\n\r\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_two_parsers_could_read_differently_is_refused(data: bytes) -> None:
    """400 with an S3 document, at once, and nothing reaches the application (RFC 9112, 11)."""
    status, body = refusal_of(data)
    assert status in (400, 405)
    assert b"<Error><Code>" in body


@pytest.mark.parametrize(
    "target",
    [
        b"/a\xc3\xa9",
        b"/a\x7f",
        b"/a#b",
        b"http://h/a#b",
        b"http://u:p@h/a",
        b"http:///a",
        b"ftp://h/a",
        b"*",
        b"a",
        b"h:80",
    ],
)
def test_an_unusable_target_is_an_invalid_uri(target: bytes) -> None:
    """Nothing of a target is dropped silently: no fragment, no user information."""
    status, body = refusal_of(b"GET " + target + b" HTTP/1.1\r\n" + HOST + b"\r\n")
    assert status == 400
    assert b"<Code>InvalidURI</Code>" in body


@pytest.mark.parametrize("line", [b"CONNECT h:80 HTTP/1.1", b"CONNECT /a HTTP/1.1", b"BREW /a HTTP/1.1"])
def test_methods_that_are_none_of_ours_are_not_allowed(line: bytes) -> None:
    """No tunnels, no inventions."""
    status, body = refusal_of(line + b"\r\n" + HOST + b"\r\n")
    assert status == 405
    assert b"<Code>MethodNotAllowed</Code>" in body


@pytest.mark.parametrize(
    "data",
    [
        request("GET", "/", b"", "X-Long: " + "x" * 5000),
        b"GET / HTTP/1.1\r\nX-Endless: " + b"x" * 5000,
        b"GET /" + b"x" * 5000,
        request("GET", "/", b"", *[f"X-{number}: y" for number in range(40)]),
    ],
    ids=["value", "unfinished value", "unfinished target", "many"],
)
def test_a_large_head_is_refused(data: bytes) -> None:
    """Also one that never ends."""
    status, body = refusal_of(data, ServerLimits(max_header_bytes=4096, max_headers=32))
    assert status == 400
    assert b"<Code>RequestHeaderSectionTooLarge</Code>" in body


def test_a_refusal_of_head_has_no_body() -> None:
    """RFC 9110, 9.3.2."""
    assert refusal_of(b"HEAD /a#b HTTP/1.1\r\n" + HOST + b"\r\n") == (400, b"")


async def test_a_bad_successor_does_not_disturb_the_answer_before_it() -> None:
    """The refusal comes behind the whole first response; then the connection is over."""
    may_answer = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await may_answer.wait()
        await send({"type": "http.response.body", "body": b"two"})

    async with talking(app, request("GET")) as (_, wire):
        await wire.head()
        await wire.say(b"GET /no-host HTTP/1.1\r\n\r\n" + request("GET"))
        assert await wire.reader.readexactly(3) == b"one"
        may_answer.set()
        assert await wire.reader.readexactly(3) == b"two"
        assert (await wire.answer()).status == 400
        assert await wire.rest() == b""
        await wire.close()


async def test_a_refused_client_that_goes_on_sending_gets_to_read_why() -> None:
    """The rest is thrown away for a while: closing at once would reset the connection, and the answer with it."""
    async with talking(
        Recorder(), b"PUT /a HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n"
    ) as (_, wire):
        await wire.say_repeatedly(bytes(65536), 64)
        assert (await wire.answer()).status == 400
        assert await wire.rest() == b""
        await wire.close()


async def test_lingering_is_bounded() -> None:
    """A refused client that sends for ever is cut off."""
    async with talking(Recorder(), b"NONSENSE\r\n\r\n", limits=ServerLimits(linger_bytes=1024 * 1024)) as (_, wire):
        with pytest.raises(ConnectionError):
            await wire.say_repeatedly(bytes(65536), 1024)
