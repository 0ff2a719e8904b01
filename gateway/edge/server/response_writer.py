"""A response on its way to the transport: head, bytes, files, the count of what the head has promised, and the watch
over clients that take nothing of it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.edge.server.response_head import ResponseFraming
from gateway.edge.server.senders import FileSender, LentSender, Sender
from gateway.errors import ClientDisconnected
from gateway.objects import FileSpan, LentBytes

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl

_JOINED_BODY_BYTES = 64 * 1024
"""A piece of the body up to this size is copied behind the head: cheaper than a packet of its own."""


class ResponseWriter:
    """Writes one response. The head waits for the first piece of the body and leaves with it.

    Files and lent bytes need a transport that has nothing queued (its write buffer limit is 0 and the caller has
    drained it), and `wire`, the transport's own socket; there is none where the connection is encrypted.
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
        """Whether something is on its way past the transport."""
        return self._sender is not None

    @property
    def on_the_wire(self) -> bool:
        """Has the client seen any of it?"""
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
        """A piece of the body; RuntimeError when the Content-Length says otherwise."""
        framing = self._checked_framing(len(body), more_body=more_body)
        if framing.bodiless:
            body = b""
        prefix, suffix = self._take_head(), b""
        if framing.chunked and body:
            prefix, suffix = prefix + b"%x\r\n" % len(body), b"\r\n"
        if framing.chunked and not more_body:
            suffix += b"0\r\n\r\n"
        self._write(prefix, body, suffix)

    async def write_file(self, span: FileSpan, *, more_body: bool, is_fresh: bool) -> None:
        """Bytes of a file, without copying. `is_fresh` is of FileSender. Raises as `write_bytes` and its `send` do."""
        rest = self.begin_file(span, more_body=more_body, is_fresh=is_fresh)
        if rest is not None:
            await self.finish(rest)
        if self._framing is not None and self._framing.chunked and span.count:
            self._transport.write(b"\r\n" if more_body else b"\r\n0\r\n\r\n")

    def begin_file(self, span: FileSpan, *, more_body: bool, is_fresh: bool) -> Sender | None:
        """Give the kernel what it takes of a file now; what is left is for `finish`. `is_fresh` is of FileSender.

        Raises as `write_bytes` and `FileSender.push` do.
        """
        count = span.count
        if not count or (self._framing is not None and self._framing.bodiless):
            self.write_bytes(b"", more_body=more_body)
            return None
        wire = self._wire
        if wire is None:
            raise RuntimeError("this connection is encrypted: it cannot send a file without copying")
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
            if self._flow.write_paused:
                await self._flow.drain()
            if self._transport.is_closing():
                raise ClientDisconnected("the client left before its answer could be sent")
            await sender.send()
        finally:
            self._sender = None
            self._sent_bytes += sender.sent_bytes

    async def write_lent(self, lent: LentBytes) -> None:
        """As many of the bytes as the kernel takes now; returns when it can take more. More of the body must follow.

        Raises as `write_bytes`, and ClientDisconnected.
        """
        framing = self._framing
        if self._wire is None or framing is None or framing.chunked or framing.bodiless:
            self.write_bytes(lent.content, more_body=True)
            return
        if framing.left_bytes is not None and len(lent.content) > framing.left_bytes:
            raise RuntimeError("the response body is longer than its Content-Length")
        self._sender = sender = LentSender(self._wire.fileno(), self._take_head(), lent)
        await self.finish(sender)
        framing.account(lent.taken)

    def abandon(self) -> None:
        """The connection is lost: what is on its way stops."""
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

    def _write(self, prefix: bytes, body: bytes | memoryview, suffix: bytes) -> None:
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
    """Looks now and then whether a connection takes what is sent. Pure but for what it looks at."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._progress: tuple[int, int] | None = None
        self._progress_at = 0.0

    def stalled(self, transport: asyncio.WriteTransport, writer: ResponseWriter | None, now: float) -> bool:
        """Whether something waits to be taken, and nothing has been for longer than allowed."""
        unsent_bytes = transport.get_write_buffer_size()
        if not unsent_bytes and (writer is None or not writer.sending):
            self._progress = None
            return False
        progress = (unsent_bytes, writer.sent_bytes if writer is not None else 0)
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        return now - self._progress_at >= self._timeout_seconds
