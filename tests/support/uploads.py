"""An application that receives bodies into sinks, and sinks that notice what is done to them."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.core.errors import S3Error
from gateway.edge.receiving import RECEIVE_INTO, AsgiRequestBody
from gateway.edge.s3_server import Receive, Scope, Send
from gateway.operations.context import Sink


class Collector:
    """A sink that keeps what it gets, and says when it is called from two threads at once."""

    def __init__(self, before: Callable[[memoryview], None] | None = None) -> None:
        self.content = bytearray()
        self.sizes: list[int] = []
        self.threads: set[str] = set()
        self.direct = False
        self._before = before
        self._one = threading.Lock()

    def __call__(self, data: memoryview) -> None:
        assert self._one.acquire(blocking=False), "two calls at once"
        try:
            if self._before is not None:
                self._before(data)
            self.content += data
            self.sizes.append(len(data))
            self.threads.add(threading.current_thread().name)
            self.direct |= isinstance(data.obj, bytearray)
        finally:
            self._one.release()

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._one.locked()


@dataclass
class Uploads:
    """Receives each body into a sink of its own; answers with the body's MD5, or the code of the error.

    `ends` tells how each receiving ended: None, or the exception. With `read_first`, some of the body is read before.
    """

    sink: Callable[[], Sink] = Collector
    read_first: bool = False
    sinks: list[Sink] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    bodies: list[AsgiRequestBody] = field(default_factory=list)
    ends: list[BaseException | None] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body = AsgiRequestBody(receive, headers, receive_into=scope.get(RECEIVE_INTO))
        sink, task = self.sink(), asyncio.current_task()
        assert task is not None
        self.sinks.append(sink)
        self.tasks.append(task)
        self.bodies.append(body)
        try:
            if self.read_first:
                sink(memoryview(await body.read()))
            await body.receive(sink)
        except S3Error as error:
            self.ends.append(error)
            await _respond(send, error.code.encode(), error.status)
            return
        except BaseException as error:
            self.ends.append(error)
            raise
        self.ends.append(None)
        content = sink.content if isinstance(sink, Collector) else b""
        await _respond(send, md5(content))

    def collector(self, number: int = -1) -> Collector:
        """The sink of one request."""
        sink = self.sinks[number]
        assert isinstance(sink, Collector)
        return sink


def md5(content: bytes | bytearray) -> bytes:
    return hashlib.md5(content, usedforsecurity=False).hexdigest().encode()


async def _respond(send: Send, body: bytes, status: int = 200) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
