"""A response on its way to the client: its head and framing, then bytes, or files that never pass through memory.

A `EncodedResponse` is what the application gives. `response_head` makes its first lines and says how its end is told
(RFC 9112, 6.3). A `ResponseWriter` gives all of it to the transport, or past it straight to the socket: files as they
lie, and bytes that are lent from memory. A `WriteWatch` finds clients that take nothing of it.

Files go by way of a pipe, and no byte of them that has not been looked at. `sendfile(2)` takes whatever is in the page
cache at that moment: between the last look at a page and the call the kernel may take the page away and read it from
the device again, while this thread waits for its turn on a processor, say. So the pages are moved into a pipe first
(`splice(2)`), which holds them, then looked at once more, and only then moved on to the socket. sendfile does the same
with a pipe of its own, and looks at nothing in between. Both cost the same (100 KiB 20 to 24 µs, 8 MiB 2.5 to 3.4 ms,
with the other side's reading, loopback); the second look is the extra cost. `loop.sendfile` costs twice as much,
stops reading from the client meanwhile, and moves the file position of a descriptor that others share. What a socket
does not take of lent bytes is given back at once, not copied.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.core.errors import BlockDamaged, ClientDisconnected, S3Error
from gateway.core.model import BorrowedBuffer, FileSpan
from gateway.s3.error_codes import error_document, s3_error

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl

_OURS = frozenset((b"connection", b"content-length", b"transfer-encoding"))
_WITHOUT_BODY = frozenset((204, 304))

Header = tuple[bytes, bytes]


@dataclass(slots=True)
class EncodedResponse:
    """A response that the server writes as it is, in one message of the application (`RESPONSE` in cycle.py).

    `headers` are treated as those of ASGI are; `lines` are sent without another check: their maker has checked that
    each is one line (`EncodedHeaders.of`). `length_bytes` is the Content-Length, where it is not among the headers.
    Where `body` is None, it follows in messages of its own.
    """

    status: int
    headers: Sequence[Header]
    lines: bytes
    body: bytes | memoryview | FileSpan | None
    length_bytes: int | None = None
    sent_bytes: int = 0
    """Bytes of the body that have been sent; the server sets it."""


@dataclass(slots=True)
class ResponseFraming:
    """How the end of a response body is told (RFC 9112, 6.3)."""

    left_bytes: int | None
    """Bytes of the Content-Length still to be sent; None where there is none."""
    chunked: bool
    bodiless: bool
    """An answer to HEAD, 204 or 304: whatever the application sends as a body stays here."""
    keep_alive: bool

    def account(self, size_bytes: int) -> None:
        """Count bytes of the body; RuntimeError when they are more than the head said."""
        if self.left_bytes is not None:
            if size_bytes > self.left_bytes:
                raise RuntimeError("the response body is longer than its Content-Length")
            self.left_bytes -= size_bytes

    @property
    def ends_with_connection(self) -> bool:
        return self.left_bytes is None and not self.chunked and not self.bodiless


def plain_head(status: int, lines: bytes, length_bytes: int | None) -> bytes:
    """Return the head of an answer that has no other fields, on a connection that stays open."""
    length = b"content-length: %d\r\n" % length_bytes if length_bytes is not None else b""
    return b"%b%b%b\r\n" % (STATUS_LINE[status], lines, length)


def response_head(
    status: int,
    headers: Iterable[Header],
    *,
    method: str,
    http_version: str,
    keep_alive: bool,
    lines: bytes = b"",
    length_bytes: int | None = None,
) -> tuple[bytes, ResponseFraming]:
    """Return the head's bytes and the framing of the body.

    `lines` and `length_bytes` are as those of an `EncodedResponse`. The application's `connection` and
    `transfer-encoding` fields are taken as wishes. Raises RuntimeError when a field would break out of its line, so
    that no value from an origin can forge a response.
    """
    fields = []
    length = length_bytes
    for name, value in headers:
        lowered = name.lower()
        if lowered not in _OURS:
            fields.append(b"%b: %b\r\n" % (lowered, value))
        elif lowered == b"content-length":
            if length is not None or not value.isdigit():
                raise RuntimeError(f"not a Content-Length: {value!r}")
            length = int(value)
        elif lowered == b"connection" and b"close" in value.lower():
            keep_alive = False
    framing = _framing(status, length, method, http_version, keep_alive)
    if length is not None:
        fields.append(b"content-length: %d\r\n" % length)
    if framing.chunked:
        fields.append(b"transfer-encoding: chunked\r\n")
    if not framing.keep_alive:
        fields.append(b"connection: close\r\n")
    return b"%b%b%b\r\n" % (STATUS_LINE[status], lines, _checked(fields)), framing


def _framing(status: int, length: int | None, method: str, http_version: str, keep_alive: bool) -> ResponseFraming:
    bodiless = method == "HEAD" or status in _WITHOUT_BODY
    chunked = length is None and not bodiless and http_version == "1.1"
    framing = ResponseFraming(None if bodiless else length, chunked, bodiless, keep_alive)
    if framing.ends_with_connection:
        framing.keep_alive = False
    return framing


def _checked(fields: list[bytes]) -> bytes:
    """Join the fields; each ends its line, and has no other line break in it."""
    lines = b"".join(fields)
    if lines.count(b"\r") != len(fields) or lines.count(b"\n") != len(fields) or 0 in lines:
        raise RuntimeError("a response header field has a line break or NUL in it")
    return lines


Refusal = tuple[int, list[Header], bytes]
"""Status, header fields and body of an error answer that ends its connection."""


def refusal(error: S3Error) -> Refusal:
    request_id = os.urandom(8).hex().upper()
    body = error_document(error, resource="", request_id=request_id, host_id=f"forebay/{request_id}")
    headers = [
        (b"content-type", b"application/xml"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-amz-request-id", request_id.encode()),
        *((name.encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()),
    ]
    return error.status, headers, body


def too_many_connections() -> S3Error:
    return s3_error("SlowDown", "Too many connections are open. Please reduce your request rate.")


def not_encrypted() -> S3Error:
    return s3_error("InvalidRequest", "The plain HTTP request was sent to HTTPS port. Please use https://.")


def refusal_bytes(refused: Refusal, default_headers: Iterable[Header], *, without_body: bool) -> bytes:
    """Return the whole answer as it goes over the wire; `without_body` for HEAD."""
    status, headers, body = refused
    lines = [b"%s: %s\r\n" % field for field in (*default_headers, *headers)]
    return b"".join((STATUS_LINE[status], *lines, b"\r\n", b"" if without_body else body))


class Sender(ABC):
    """Sends something to a connected, non-blocking socket whose own queue, the transport's, is empty.

    The socket stays the caller's. `sent_bytes` tells how far it has got with the body. A sender that `needs_bytes`
    cannot go on before `fetch` has got them.
    """

    def __init__(self, socket_descriptor: int) -> None:
        self._socket = socket_descriptor
        self._finished: asyncio.Future[None] | None = None
        self._is_abandoned = False
        self.sent_bytes = 0
        self.needs_bytes = False

    @abstractmethod
    def push(self) -> bool:
        """One step, as much as the kernel takes now; true when all is done. Raises as `send` does."""

    async def fetch(self) -> None:
        """Get the bytes that `push` lacks. Raises what kept them away."""
        raise NotImplementedError

    async def send(self) -> None:
        """Return when all is done; ClientDisconnected when the peer is gone."""
        while not self.push():
            if self.needs_bytes:
                await self.fetch()
                self.needs_bytes = False
            elif await self._push_when_writable():
                return
            if self._is_abandoned:
                raise gone()

    async def _push_when_writable(self) -> bool:
        """Push until all is done, or bytes are needed; whether all is done."""
        loop = asyncio.get_running_loop()
        # The loop allows no second waiter on a transport's descriptor: a duplicate of the descriptor is allowed.
        watched = os.dup(self._socket)
        self._finished = loop.create_future()
        loop.add_writer(watched, self._on_writable)
        try:
            await self._finished
        finally:
            loop.remove_writer(watched)
            os.close(watched)
        return not self.needs_bytes

    def abandon(self) -> None:
        """Stop, as the connection is lost, before the descriptor's number means another socket."""
        self._is_abandoned = True
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(gone())

    def _on_writable(self) -> None:
        if self._finished is None or self._finished.done():
            return
        try:
            if self.push() or self.needs_bytes:
                self._finished.set_result(None)
        except Exception as error:  # noqa: BLE001 - it is raised in the task that waits in `send`
            self._finished.set_exception(error)


def gone() -> ClientDisconnected:
    return ClientDisconnected("the client left while its answer was sent")


_IDENTITY = b"%bserver: Forebay\r\nx-amz-request-id: %b\r\nx-amz-id-2: forebay/%b\r\n%b"


def answer_lines(fields: bytes, request_id: str, cache: bytes) -> bytes:
    """Return lines of an answer's head: fields, server and ids (S3 API, "Common Response Headers"), `cache`."""
    encoded_id = request_id.encode()
    return _IDENTITY % (fields, encoded_id, encoded_id, cache)


_numbers = itertools.count()


def _begin_anywhere() -> None:
    """Begin to number requests from a place of this process's own."""
    global _numbers
    _numbers = itertools.count(int.from_bytes(os.urandom(8), "big"))


_begin_anywhere()
os.register_at_fork(after_in_child=_begin_anywhere)
_SPREAD = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, odd: multiplied by it, no two of 2**64 numbers in a row give the same id."""


def next_request_id() -> str:
    """16 hexadecimal digits, another for every request: a system call for each would cost more than all the rest."""
    return "%016X" % (next(_numbers) * _SPREAD & 0xFFFFFFFFFFFFFFFF)


STEP_BYTES = 1024 * 1024
"""Most that one call hands to the kernel: it bounds how long the loop serves a single client (about 0.1 ms).

What a pipe may hold without a privilege (/proc/sys/fs/pipe-max-size), too."""


def send_span(socket_descriptor: int, span: FileSpan, offset: int, count: int) -> int | None:
    """Give a socket that never blocks up to STEP_BYTES of a span's file from `offset`; return how many it has taken.

    None if they are no longer the bytes that were checked: then none of them has been sent. The caller has checked that
    they are in memory, as this thread waits for those that are not. BlockDamaged when the file ends before, OSError
    when it cannot be read, and as the socket raises it.
    """
    done, count = 0, min(count, STEP_BYTES)
    while done < count:
        try:
            sent, held = _send_once(_pipe_of_this_thread(), socket_descriptor, span, offset + done, count - done)
        except (OSError, BlockDamaged):
            if done:
                break  # it comes again with the next call
            raise
        if sent is None:
            return done or None
        done += sent
        if sent < held:
            break
    return done


def _send_once(pipe: _Pipe, socket_descriptor: int, span: FileSpan, offset: int, count: int) -> tuple[int | None, int]:
    """`send_span` for what the pipe has room for, and how much that is."""
    held, sent = pipe.take(span.descriptor, offset, count), 0
    try:
        if span.file is not None and not span.file.stayed(offset, held):
            return None, held
        sent = pipe.give(socket_descriptor, held)
        return sent, held
    finally:
        pipe.throw_away(held - sent)


class _Pipe:
    """A pipe that is empty outside `send_span`: left-over bytes of one file would be sent as another's."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.is_empty = True
        with suppress(OSError):  # this user has many pipes: then a step is more rounds, of fewer bytes
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, STEP_BYTES)

    def __del__(self) -> None:
        os.close(self._out)
        os.close(self._in)

    def take(self, descriptor: int, offset: int, count: int) -> int:
        """Hold pages of a file; how many bytes there was room for."""
        self.is_empty = False
        held = os.splice(descriptor, self._in, count, offset_src=offset)
        if not held:
            raise BlockDamaged(f"the file ends {count} bytes early, at {offset}")
        return held

    def give(self, socket_descriptor: int, count: int) -> int:
        return os.splice(self._out, socket_descriptor, count, flags=os.SPLICE_F_NONBLOCK)

    def throw_away(self, count: int) -> None:
        while count:
            count -= os.splice(self._out, _null(), count)
        self.is_empty = True


_of_thread = threading.local()
os.register_at_fork(after_in_child=_of_thread.__dict__.clear)  # the parent goes on with its own


def _pipe_of_this_thread() -> _Pipe:
    pipe: _Pipe | None = getattr(_of_thread, "pipe", None)
    if pipe is None or not pipe.is_empty:  # an exception came in between
        pipe = _of_thread.pipe = _Pipe()
    return pipe


@cache
def _null() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class FileSender(Sender):
    """The bytes of a span, whose descriptor stays the caller's.

    Bytes that have left memory while the client took its time are checked again before they are sent, and sent from a
    buffer if they do not stay there. `is_fresh`: the span is new, so that no byte can have left.

    BlockDamaged when the file ends early or holds other bytes than it should, OSError when it cannot be read.
    """

    def __init__(self, socket_descriptor: int, span: FileSpan, *, is_fresh: bool) -> None:
        super().__init__(socket_descriptor)
        self._span = span
        self._offset = span.offset
        self._left = span.count
        self._is_fresh = is_fresh
        self._restored: memoryview | None = None

    def push(self) -> bool:
        left = self._left
        if not left:
            return True
        step_bytes = left if left < STEP_BYTES else STEP_BYTES
        restored = self._restored
        if self._is_fresh:
            self._is_fresh = False
        elif not restored and self._span.file is not None and not self._span.file.intact(self._offset, step_bytes):
            self.needs_bytes = True
            return False
        try:
            sent = (
                self._send_restored(restored)
                if restored
                else send_span(self._socket, self._span, self._offset, step_bytes)
            )
        except (BlockingIOError, InterruptedError):
            return False
        except (ConnectionError, TimeoutError) as error:
            raise gone() from error
        if sent is None:
            self.needs_bytes = True
            return False
        self._offset += sent
        self._left = left - sent
        self.sent_bytes += sent
        return sent == left

    async def fetch(self) -> None:
        file = self._span.file
        if file is not None:
            self._restored = await file.restore(self._offset, min(self._left, STEP_BYTES))

    def _send_restored(self, restored: memoryview) -> int:
        sent = os.write(self._socket, restored)
        self._restored = restored[sent:]
        return sent


class BorrowedBufferSender(Sender):
    """`prefix`, and behind it as much of lent bytes as the kernel takes in one step.

    `send` returns when the kernel can take more, and all of the prefix is out. Meanwhile it does not hold the bytes: a
    client that reads slowly keeps nothing in memory.
    """

    def __init__(self, socket_descriptor: int, prefix: bytes, lent: BorrowedBuffer) -> None:
        super().__init__(socket_descriptor)
        self._prefix = prefix
        self._lent: BorrowedBuffer | None = lent

    def push(self) -> bool:
        lent, self._lent = self._lent, None
        if lent is None:
            self._prefix = self._prefix[self._give(self._prefix) :]
            return not self._prefix
        content = lent.content[:STEP_BYTES]
        sent = self._give(self._prefix, content)
        self.sent_bytes = lent.taken = max(0, sent - len(self._prefix))
        self._prefix = self._prefix[sent:]
        all_taken = lent.taken == len(content)
        content.release()
        lent.content.release()
        return all_taken

    def _give(self, *buffers: bytes | memoryview) -> int:
        try:
            return os.writev(self._socket, buffers)
        except (BlockingIOError, InterruptedError):
            return 0
        except (ConnectionError, TimeoutError) as error:
            raise gone() from error


class CopyingSender(Sender):
    """The bytes of a span by way of memory, where the connection is encrypted; its writer counts them."""

    def __init__(self, writer: ResponseWriter, span: FileSpan, *, more_body: bool) -> None:
        super().__init__(-1)
        self._writer = writer
        self._span = span
        self._more_body = more_body

    def push(self) -> bool:
        raise NotImplementedError

    async def send(self) -> None:
        async with aclosing(self._span.read()) as pieces:
            async for data in pieces:
                self._writer.write_bytes(data, more_body=True)
                await self._writer.drained()
        if not self._more_body:
            self._writer.write_bytes(b"", more_body=False)


COPIED_BYTES = 64 * 1024
"""Bytes of a lent body that are copied at once where they cannot be lent to the kernel: a client that reads slowly
keeps them in memory."""


def copy_of(lent: BorrowedBuffer) -> bytes:
    copied = bytes(lent.content[:COPIED_BYTES])
    lent.taken = len(copied)
    lent.content.release()
    return copied


_JOINED_BODY_BYTES = 64 * 1024
"""A piece of the body up to this size is copied behind the head: cheaper than a packet of its own."""


class ResponseWriter:
    """Writes one response. The head waits for the first piece of the body and leaves with it.

    Files and lent bytes need a transport that has nothing queued (its write buffer limit is 0 and the caller has
    drained it), and `wire`, the transport's own socket. There is none where the connection is encrypted: they are
    copied there.
    """

    _head = b""
    _framing: ResponseFraming | None = None
    _sender: Sender | None = None
    _sent_bytes = 0

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, wire: socket.socket | None) -> None:
        self._transport = transport
        self._wire = wire
        self._flow = flow

    @property
    def sent_bytes(self) -> int:
        """Bytes of the body that the transport or the kernel has taken; grows while a `Sender` is at work."""
        return self._sent_bytes + (self._sender.sent_bytes if self._sender is not None else 0)

    @property
    def sending(self) -> bool:
        return self._sender is not None

    @property
    def on_the_wire(self) -> bool:
        return self._framing is not None and not self._head

    @property
    def ends_with_connection(self) -> bool:
        return self._framing is not None and self._framing.ends_with_connection

    def start(self, head: bytes, framing: ResponseFraming) -> None:
        self._head, self._framing = head, framing

    def write_whole(self, body: bytes | memoryview) -> None:
        """All of a body; nothing of it where the response has none."""
        if self._framing is not None and self._framing.bodiless:
            self._transport.write(self._take_head())
        else:
            self.write_bytes(body, more_body=False)

    def write_bytes(self, body: bytes | memoryview, *, more_body: bool) -> None:
        """Write a piece of the body; RuntimeError when the Content-Length says otherwise."""
        framing = self._checked_framing(len(body), more_body=more_body)
        if framing.bodiless:
            body = b""
        prefix, suffix = self._take_head(), b""
        if framing.chunked and body:
            prefix, suffix = prefix + b"%x\r\n" % len(body), b"\r\n"
        if framing.chunked and not more_body:
            suffix += b"0\r\n\r\n"
        self.write(prefix, body, suffix)

    async def write_file(self, span: FileSpan, *, more_body: bool, is_fresh: bool) -> None:
        """Bytes of a file. `is_fresh` is of FileSender. Raises as `write_bytes` and its `send` do."""
        rest = self.begin_file(span, more_body=more_body, is_fresh=is_fresh)
        if rest is not None:
            await self.finish(rest)
        if self._wire is not None and self._framing is not None and self._framing.chunked and span.count:
            self._transport.write(b"\r\n" if more_body else b"\r\n0\r\n\r\n")

    def begin_file(self, span: FileSpan, *, more_body: bool, is_fresh: bool) -> Sender | None:
        """Give the kernel as much of a file as it takes now, and return a sender of the rest for `finish`.

        `is_fresh` is that of FileSender. Raises as `write_bytes` and `FileSender.push` do.
        """
        count = span.count
        if not count or (self._framing is not None and self._framing.bodiless):
            self.write_bytes(b"", more_body=more_body)
            return None
        wire = self._wire
        if wire is None:
            self._sender = CopyingSender(self, span, more_body=more_body)
            return self._sender
        framing = self._checked_framing(count, more_body=more_body)
        prefix = self._take_head()
        if framing.chunked:
            prefix += b"%x\r\n" % count
        is_begun = not prefix or self._write_ahead(wire, prefix)
        sender = FileSender(wire.fileno(), span, is_fresh=is_fresh and is_begun)
        if not is_begun:
            self._sender = sender
        elif sender.push():
            self._sent_bytes += count
        else:
            self._sender = sender
        return self._sender

    async def finish(self, sender: Sender) -> None:
        """Wait until a sender is done. Raises as its `send` does."""
        try:
            await self.drained()
            await sender.send()
        finally:
            self._sender = None
            self._sent_bytes += sender.sent_bytes

    async def drained(self) -> None:
        """Wait until the transport takes more; ClientDisconnected once it is closing."""
        if self._flow.write_paused:
            await self._flow.drain()
        if self._transport.is_closing():
            raise ClientDisconnected("the client left before its answer could be sent")

    async def write_lent(self, lent: BorrowedBuffer) -> None:
        """As many of the bytes as the kernel takes now; returns when it can take more. More of the body must follow.

        Raises as `write_bytes`, and ClientDisconnected.
        """
        framing = self._framing
        if self._wire is None or framing is None or framing.chunked or framing.bodiless:
            self.write_bytes(copy_of(lent), more_body=True)
            return
        if framing.left_bytes is not None and len(lent.content) > framing.left_bytes:
            raise RuntimeError("the response body is longer than its Content-Length")
        self._sender = sender = BorrowedBufferSender(self._wire.fileno(), self._take_head(), lent)
        await self.finish(sender)
        framing.account(lent.taken)

    def abandon(self) -> None:
        """Stop what is on its way, as the connection is lost."""
        if self._sender is not None:
            self._sender.abandon()

    def _checked_framing(self, size_bytes: int, *, more_body: bool) -> ResponseFraming:
        if self._framing is None:
            raise RuntimeError("a response starts with http.response.start")
        self._framing.account(size_bytes)
        if self._framing.left_bytes and not more_body:
            raise RuntimeError("the response body is shorter than its Content-Length")
        return self._framing

    def _write_ahead(self, wire: socket.socket, prefix: bytes) -> bool:
        """Give the kernel what goes before a file: it waits for the file's first bytes and leaves with them.

        False when it does not take all of it now.
        """
        try:
            sent = wire.send(prefix, socket.MSG_MORE)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except (ConnectionError, TimeoutError) as error:
            raise ClientDisconnected("the client left before a file could be sent to it") from error
        if sent == len(prefix):
            return True
        self._transport.write(prefix[sent:])
        return False

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        return head

    def write(self, prefix: bytes, body: bytes | memoryview, suffix: bytes = b"") -> None:
        """Write a piece of the body and what goes around it: a whole answer, too, whose length is right."""
        self._sent_bytes += len(body)
        if len(body) <= _JOINED_BODY_BYTES:
            self._transport.write(b"".join((prefix, body, suffix)))
            return
        sent = self._send_now((prefix, body, suffix))
        for part in (prefix, body, suffix):
            if sent < len(part):
                self._transport.write(memoryview(part)[sent:] if sent else part)
            sent = max(0, sent - len(part))

    def _send_now(self, parts: Sequence[bytes | memoryview]) -> int:
        """Give the kernel what it takes of all parts at once, where nothing waits before them; how many bytes."""
        if self._wire is None or self._transport.is_closing() or self._transport.get_write_buffer_size():
            return 0
        try:
            return self._wire.sendmsg(parts)
        except OSError:  # full, or broken: the transport finds out, and knows what to do
            return 0


class WriteWatch:
    """Watches whether a connection takes sent bytes. Pure, except that it reads the connection's state."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._progress: tuple[int, int] | None = None
        self._progress_at = 0.0

    def stalled(self, transport: asyncio.WriteTransport, writer: ResponseWriter | None, now: float) -> bool:
        """Return True if bytes wait to be taken, and none were for longer than allowed."""
        unsent_bytes = transport.get_write_buffer_size()
        if not unsent_bytes and (writer is None or not writer.sending):
            self._progress = None
            return False
        progress = (unsent_bytes, writer.sent_bytes if writer is not None else 0)
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        return now - self._progress_at >= self._timeout_seconds
