"""Whole connections as fuzzing sees them: bytes in, answers out, and what must hold whatever the bytes are."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11

from gateway.edge.s3_server import ASGIApp
from tests.support.gateway_app import gateway_app
from tests.support.serving import Serving, serving

ANSWER_SECONDS_MAX = 20.0
_STATUS = re.compile(rb"^HTTP/1\.1 (\d{3}) ", re.MULTILINE)


@dataclass(frozen=True)
class Seen:
    """One request, as a parser of connections understands it."""

    method: bytes
    target: bytes
    body: bytes


@dataclass
class Recorder:
    """An application that takes every body to its end, and says so."""

    seen: list[Seen] = field(default_factory=list)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += bytes(message.get("body", b""))
            more = message.get("more_body", False)
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        self.seen.append(Seen(scope["method"].encode(), target, body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


class Connections:
    """A server that runs, to which one input after the other is sent on a connection of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: Serving) -> None:
        self._loop = loop
        self._server = server

    def talk(self, data: bytes) -> bytes:
        """All that is answered to these bytes and the end of them. TimeoutError when neither answer nor end comes."""
        return self._loop.run_until_complete(self._talk(data))

    async def _talk(self, data: bytes) -> bytes:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
            try:
                writer.write(data)
                writer.write_eof()
                answer = await reader.read()
            except ConnectionError:
                answer = b""  # closed at what was wrong, with bytes still on their way
            finally:
                writer.transport.abort()
            while self._server.server.open_connections:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0)
            return answer


@contextmanager
def connections(app: ASGIApp | None = None) -> Iterator[Connections]:
    """To a server of `app`; of a gateway with a bucket `bucket` and an object `key` where none is given."""
    loop = asyncio.new_event_loop()
    stack = AsyncExitStack()

    async def start() -> Serving:
        if app is not None:
            return await stack.enter_async_context(serving(app))
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        gateway = await stack.enter_async_context(gateway_app(Path(directory), allow_unsigned=True))
        gateway.origin.put("bucket", "key", b"content of it " * 100)
        return await stack.enter_async_context(serving(gateway.app))

    try:
        yield Connections(loop, loop.run_until_complete(start()))
    finally:
        loop.run_until_complete(stack.aclose())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def check_answers(answer: bytes) -> None:
    """No failure of the gateway's own, whatever was asked."""
    statuses = [int(status) for status in _STATUS.findall(answer)]
    assert not answer or statuses, answer[:200]
    assert not {status for status in statuses if status in (500, 502, 504)}, answer[:2000]


def as_h11_reads(data: bytes) -> tuple[list[Seen], bool]:
    """The requests in these bytes by another parser, and whether it has understood all of them."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
    connection.receive_data(data)
    connection.receive_data(b"")
    found: list[Seen] = []
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                method, target, body = event.method, event.target, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append(Seen(method, target, body))
                connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return found, False
                connection.start_next_cycle()
            else:
                return found, isinstance(event, h11.ConnectionClosed)
    except h11.RemoteProtocolError:
        return found, False


def check_framing(data: bytes, ours: list[Seen]) -> None:
    """What both parsers take for a request is the same request: method, target, body, and so where the next begins.

    One may be stricter than the other: then it ends the connection there.
    """
    theirs, _ = as_h11_reads(data)
    for mine, other in zip(ours, theirs, strict=False):
        assert (mine.method, _path_of(mine.target), mine.body) == (other.method, _path_of(other.target), other.body)


def _path_of(target: bytes) -> bytes:
    """An absolute target is taken apart by our server, and not by the other; an empty query has no mark there."""
    found = re.fullmatch(rb"(?i:https?)://[^/?#]*(.*)", target, re.DOTALL)
    path = found[1] if found is not None else target
    return (path if path[:1] in (b"/", b"*") else b"/" + path).removesuffix(b"?")
