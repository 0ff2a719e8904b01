"""One connection to the origin: a request at a time, and its answer received where it is to stay."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

from gateway.disk.file_lease import FileLease, SharedFile
from gateway.origin.http1_client.response_stream import MalformedResponse, ResponseStream
from gateway.origin.traffic_meter import AnswerKind, Moved

RECEIVED_AT_ONCE_BYTES = 256 * 1024

_AWAITED_BYTES_MAX = 256 * 1024
"""Limit of what has to wait in the socket before a thread takes it: less than what a connection has room for."""


@dataclass(slots=True)
class Supervision:
    """Limits of the origin's time for one request, in seconds.

    `head_seconds`: until the answer begins, from the last byte of the request on; also until it takes a byte of the
    request. `progress_seconds`: while the reader takes the body, `progress_bytes` of it have to come in that time.
    While the origin is silent, `on_silence` gets the seconds of silence again and again.
    """

    head_seconds: float
    progress_seconds: float
    progress_bytes: int = 1
    on_silence: Callable[[Any, float], None] | None = None
    """Gets the receiver of the answer, too."""


class Receiver(Protocol):
    """The destination of an answer: a `ResponseStream`, or first a `ShortAnswer`."""

    received_bytes: int
    longest_gap_seconds: float

    @property
    def has_head(self) -> bool: ...

    @property
    def destination(self) -> memoryview | None:
        """The buffer that must receive the next bytes, if any."""

    @property
    def landing_bytes(self) -> int:
        """Bytes that a thread has received, and that are not counted yet."""

    @property
    def is_much(self) -> bool: ...

    @property
    def is_little(self) -> bool: ...

    def asked(self) -> None:
        """Note that the request is complete only now."""

    def received_there(self, count: int) -> None:
        """Bytes were received at `destination`."""

    def received(self, buffer: bytearray, count: int) -> None:
        """Take the first `count` bytes of a buffer. MalformedResponse."""

    def ended(self, reason: str, *, orderly: bool, silent: bool) -> None:
        """End: the connection has ended, or is of no use any more; `orderly`: the origin has closed it."""


class Connection(asyncio.BufferedProtocol):
    """`buffer` may be shared by all connections of one event loop: what has come is taken before anything else is read.

    `on_free` is called when it can take another request, `on_lost` when it has ended. Its owner calls `check` now and
    then while a request is on it: it ends by itself where the origin takes longer than it may.
    """

    def __init__(
        self,
        buffer: bytearray,
        on_free: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
        moved: Moved | None = None,
    ) -> None:
        self._moved = moved if moved is not None else Moved()
        self._buffer = buffer
        self._view = memoryview(buffer)
        self._on_free = on_free
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._socket: socket.socket
        self._supervision: Supervision
        self._stream: Receiver | None = None
        self._kind: AnswerKind | None = None
        self._paused = False
        self._paused_at = 0.0
        self._is_sending = False
        self._blocked_since: float | None = None
        self._writable: asyncio.Future[None] | None = None
        self._asked_at = 0.0
        self._heard_at = 0.0
        self._progress_at = 0.0
        self._progress_bytes = 0
        self._wire: FileLease[SharedFile] | None = None
        self._wakes_at_bytes = 1
        self._awaits_bytes = False
        self._unread_bytes = 0
        self.idle_since = 0.0
        self.usable = False

    def ask(
        self,
        request: bytes,
        supervision: Supervision,
        *,
        bodiless: bool,
        body_follows: bool = False,
        kind: AnswerKind | None = None,
    ) -> ResponseStream:
        """Send a request; `bodiless`: its answer has no body, whatever its head says of one (HEAD).

        `body_follows`: by `write`, up to `sent`. `kind`: what the time of its answer can be compared with.
        """
        stream = ResponseStream(self, self._loop, bodiless=bodiless)
        self._is_sending = body_follows
        self.begin(request, stream, supervision, kind)
        return stream

    def begin(self, request: bytes, receiver: Receiver, supervision: Supervision, kind: AnswerKind | None) -> None:
        """Send a request as `ask` does; `receiver` gets its answer."""
        self._kind = kind
        self._asked_at = self._heard_at = self._loop.time()
        self._supervision, self._stream = supervision, receiver
        self._moved.handed_bytes += len(request)
        self._transport.write(request)

    def go_on(self, received: memoryview, *, bodiless: bool) -> ResponseStream:
        """Make a stream the receiver of the answer, beginning with the bytes that have come."""
        stream = self._stream = ResponseStream(self, self._loop, bodiless=bodiless, asked_at=self._asked_at)
        if received:
            self._receive(stream, bytearray(received), len(received))
        return stream

    def supervise(self, stream: ResponseStream, supervision: Supervision) -> None:
        """Replace the limits of a request, if it is under way: after a complete answer another one may be."""
        if self._stream is stream:
            self._supervision = supervision

    @property
    def head_seconds(self) -> float:
        """Seconds from the request to the last bytes that came."""
        return self._heard_at - self._asked_at

    async def write(self, data: bytes | memoryview) -> None:
        """Send a piece of the request's body; return when the kernel has all of it. ConnectionResetError."""
        if not self.usable:
            raise ConnectionResetError("the connection has ended")
        self._moved.handed_bytes += len(data)
        self._transport.write(data)
        if self._blocked_since is not None:
            self._writable = self._loop.create_future()
            await self._writable

    def sent(self) -> None:
        """Note that the body is complete: from now on the origin is waited for."""
        self._is_sending = False
        self._asked_at = self._heard_at = self._loop.time()
        if self._stream is not None:
            self._stream.asked()

    def break_off(self) -> None:
        """Leave the body unfinished; the answer may still come. Nothing else is ever sent here."""
        self._is_sending = self.usable = False

    def close(self) -> None:
        """At once, whatever is on its way. Idempotent."""
        self.usable = False
        self._transport.abort()

    def excuse(self, now: float, seconds: float) -> None:
        """Excuse a silence in which this process, not the origin, stood still, unless it heard the origin."""
        if self._paused:
            self._paused_at += seconds
        if self._heard_at > now - seconds:
            return
        self._put_off(seconds)
        self._asked_at += seconds
        if self._blocked_since is not None:
            self._blocked_since += seconds

    def _put_off(self, seconds: float) -> None:
        self._heard_at += seconds
        if self._progress_at >= self._asked_at:
            self._progress_at += seconds

    def check(self, now: float) -> None:
        """End the request if the origin has taken too long over it."""
        stream, limits = self._stream, self._supervision
        if stream is None or self._paused:
            return
        if self._awaits_bytes and (unread_bytes := self.unread_bytes()) != self._unread_bytes:
            self._unread_bytes = unread_bytes
            self._note_heard(stream, now)
        if self._is_sending:
            silent_since, allowed, what = self._blocked_since, limits.head_seconds, "the origin took nothing"
        elif not stream.has_head:
            silent_since, allowed, what = self._asked_at, limits.head_seconds, "nothing came"
        else:
            silent_since, allowed, what = self._progress_since(stream), limits.progress_seconds, "nothing came"
        if silent_since is None:
            return  # the sender has nothing to send
        if now - silent_since >= allowed:
            self._fail(f"{what} for {allowed:g} seconds", silent=not stream.has_head)
        elif limits.on_silence is not None:
            since = silent_since if self._is_sending else self._heard_at
            limits.on_silence(stream, now - since)

    def _progress_since(self, stream: Receiver) -> float:
        """When the body had last come forward by as much as it has to."""
        if self._progress_at < self._asked_at or (
            stream.received_bytes - self._progress_bytes >= self._supervision.progress_bytes
        ):
            self._progress_at, self._progress_bytes = self._heard_at, stream.received_bytes
        return self._progress_at

    # For who finds out what the link bears.

    def waiting(self, now: float) -> tuple[AnswerKind, float] | None:
        """For what kind of an answer it waits, and for how long; None: it is not known, or for none."""
        stream = self._stream
        if stream is None or self._kind is None or stream.has_head or self._is_sending:
            return None
        return self._kind, now - self._asked_at

    @property
    def has_body(self) -> bool:
        """An answer's body is under way to it."""
        return self._stream is not None and self._stream.has_head

    @property
    def is_starved(self) -> bool:
        """Its reader waits for bytes of a body that have not arrived."""
        return self.has_body and not self._paused and (self._awaits_bytes or not self.unread_bytes())

    def limit_window(self, size_bytes: int) -> None:
        """Let no more than this be on its way here. The kernel forgets it when it makes the window larger by itself."""
        with suppress(OSError):  # it has just ended
            self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, size_bytes)

    def unread_bytes(self) -> int:
        """Return the bytes that have arrived and are not counted as received."""
        landing_bytes = self._stream.landing_bytes if self._stream is not None else 0
        return landing_bytes + self._queued(termios.FIONREAD)

    def unacknowledged_bytes(self) -> int:
        """Return the bytes handed over for sending that the other machine has not acknowledged."""
        return self._transport.get_write_buffer_size() + self._queued(termios.TIOCOUTQ)

    def _queued(self, which: int) -> int:
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return 0
        try:
            return int.from_bytes(fcntl.ioctl(descriptor, which, b"\0\0\0\0"), sys.byteorder)
        except OSError:  # it has just ended
            return 0

    # For the stream of the answer.

    def answered(self, *, keep_alive: bool) -> None:
        """Note that the last byte has come."""
        self._stream = None
        self._wake_at(1)
        if keep_alive and self.usable and not self._is_sending:
            self.resume()
            self.idle_since = self._heard_at
            self._on_free(self)
        else:
            self.close()

    def hold(self) -> None:
        self._stop_awaiting()
        if not self._paused:
            self._paused, self._paused_at = True, self._loop.time()
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading after the reader has taken bytes. The pause does not count as the origin's silence."""
        if self._paused and (self._stream is None or self._stream.is_little):
            self._go_on()
            self._transport.resume_reading()

    def _go_on(self) -> None:
        if self._paused:
            self._paused = False
            self._put_off(self._loop.time() - self._paused_at)

    def wire(self) -> FileLease[SharedFile] | None:
        """Return the socket for a thread to receive from; None if its bytes are encrypted, or no descriptor is left."""
        if self._wire is None and self.usable and self._transport.get_extra_info("sslcontext") is None:
            with suppress(OSError):
                self._wire = FileLease(SharedFile(os.dup(self._transport.get_extra_info("socket").fileno())))
        return None if self._wire is None else self._wire.share()

    def await_bytes(self, count: int) -> bool:
        """Return True if `count` bytes wait in the socket.

        If not, tell the stream when about so many do, or the end of all; then the connection is held.
        """
        if self._wire is None:
            return False  # it has just ended, and the stream knows
        if self._paused and self.unread_bytes() >= count:
            self._heard_at = self._loop.time()
            return True
        self._transport.pause_reading()
        self._go_on()
        self._unread_bytes = 0
        self._wake_at(min(count, _AWAITED_BYTES_MAX))
        if not self._awaits_bytes:
            self._awaits_bytes = True
            self._loop.add_reader(self._wire.descriptor, self._bytes_wait)
        return False

    def _wake_at(self, count: int) -> None:
        if count != self._wakes_at_bytes:
            self._wakes_at_bytes = count
            with suppress(OSError):  # it has just ended
                wire = self._transport.get_extra_info("socket")
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _stop_awaiting(self) -> None:
        if self._awaits_bytes and self._wire is not None:
            self._awaits_bytes = False
            self._loop.remove_reader(self._wire.descriptor)

    def _bytes_wait(self) -> None:
        self.hold()
        stream = self._stream
        if isinstance(stream, ResponseStream):
            self._note_heard(stream, self._paused_at)
            stream.bytes_wait()

    def landed(self, count: int) -> None:
        """Count what a thread has received."""
        self._moved.received_bytes += count

    def give_up(self, reason: str, *, silent: bool, orderly: bool = False) -> None:
        """End the request that is on it, without an answer or with a body that broke off."""
        self._fail(reason, silent=silent, orderly=orderly)

    # For the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")
        # A piece of a body is asked for when the one before has left, so that its memory may be used again.
        # (TLS takes "nothing is left" for too much where nothing is the limit.)
        self._transport.set_write_buffer_limits(high=1, low=0)
        self.usable = True

    def pause_writing(self) -> None:
        self._blocked_since = self._loop.time()

    def resume_writing(self) -> None:
        self._blocked_since = None
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        destination = self._stream.destination if self._stream is not None else None
        return self._view if destination is None else destination

    def buffer_updated(self, nbytes: int) -> None:
        stream = self._stream
        self._moved.received_bytes += nbytes
        if stream is None:
            self.close()  # nothing was asked
            return
        self._note_heard(stream, self._loop.time())
        if stream.destination is not None:
            stream.received_there(nbytes)
        else:
            self._receive(stream, self._buffer, nbytes)
        if self._stream is stream and stream.is_much:
            self.hold()

    def _note_heard(self, stream: Receiver, now: float) -> None:
        if stream.has_head and now - self._heard_at > stream.longest_gap_seconds:
            stream.longest_gap_seconds = now - self._heard_at
        self._heard_at = now

    def _receive(self, stream: Receiver, buffer: bytearray, count: int) -> None:
        try:
            stream.received(buffer, count)
        except MalformedResponse as error:
            self._fail(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._stop_awaiting()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_exception(ConnectionResetError("the connection has ended"))
        reason = "the origin closed the connection" if exc is None else f"{type(exc).__name__}: {exc}"
        self._fail(reason, orderly=exc is None)
        self._on_lost(self)

    def _fail(self, reason: str, *, orderly: bool = False, silent: bool = False) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.ended(reason, orderly=orderly, silent=silent)
        self.close()
