"""A small answer, received into one buffer: its head and all of its body, with one call when it is there.

Most answers are such, and need neither a task nor a future. Any other one (an error, a longer body, one that comes late
or breaks off) goes on as a `ResponseStream`, which gets what has come, so that nothing is asked for twice.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.origin.http1_client.connection import Connection, Supervision
from gateway.origin.http1_client.response_stream import HEAD_END, ResponseStream
from gateway.s3.headers import HOP_BY_HOP

HEAD_BYTES = 8 * 1024

_HEAD = re.compile(
    rb"HTTP/1\.1 (200|206)[ ]?[\t -~\x80-\xff]*(?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~\x80-\xff]*)*\r\n\r\n"
)
_COPIED_BYTES_MAX = 32 * 1024
"""A body up to this size leaves the buffer at once: it would keep a much larger one."""

_KEPT_ALIVE = frozenset({"keep-alive", "Keep-Alive"})


_LOOKED_AT = 3
"""Lent buffers that are looked at, the longest lent ones first, where none is known to be idle; else one."""


class _Names(dict[str, str]):
    """Lower-case names of fields."""

    def __missing__(self, name: str) -> str:
        found = name.lower()
        if len(self) < 1024:
            self[name] = found
        return found


_names = _Names()


class KeptBuffers:
    """Buffers that are used again when nothing has a view of them any more. Event loop only."""

    def __init__(self, size_bytes: int, kept_max: int) -> None:
        self._size_bytes = size_bytes
        self._lent: deque[bytearray] = deque(maxlen=kept_max)
        self._idle: list[bytearray] = []

    def take(self) -> bytearray:
        """Return a buffer that is the caller's until its last view is gone: of the idle ones that used last."""
        for _ in range(min(1 if self._idle else _LOOKED_AT, len(self._lent))):
            buffer = self._lent.popleft()
            (self._lent if _has_view(buffer) else self._idle).append(buffer)
        buffer = self._idle.pop() if self._idle else bytearray(self._size_bytes)
        self._lent.append(buffer)
        return buffer


def _has_view(buffer: bytearray) -> bool:
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return True
    return False


class ShortAnswer:
    """The answer to one request, as `Receiver`. `on_end` is called once, unless it was closed before.

    Then `stream` is None, and the answer is complete: 200 or 206, with no other coding than its Content-Length's. Or
    `stream` has what has come, and goes on. The connection is free for others when `on_end` has returned, so `on_end`
    may still `hand_over` a complete answer.
    """

    __slots__ = (
        "_bodiless",
        "_buffer",
        "_connection",
        "_filled",
        "_length",
        "_on_end",
        "_start",
        "destination",
        "has_head",
        "head_seconds",
        "headers",
        "longest_gap_seconds",
        "received_bytes",
        "status",
        "stream",
    )

    landing_bytes: Final = 0
    is_much: Final = False
    is_little: Final = True

    def __init__(
        self, connection: Connection, buffer: bytearray, on_end: Callable[[], None], *, bodiless: bool
    ) -> None:
        self._connection = connection
        self._buffer = memoryview(buffer)
        self.destination = self._buffer
        self._filled = self._start = self._length = 0
        self._on_end: Callable[[], None] | None = on_end
        self._bodiless = bodiless
        self.status = 0
        self.headers: dict[str, str] = {}
        self.has_head = False
        self.head_seconds = self.longest_gap_seconds = 0.0
        self.received_bytes = 0
        self.stream: ResponseStream | None = None

    # For the one who asked.

    def whole(self) -> memoryview | None:
        """Return the body of a complete answer, as `OriginResponse.whole`."""
        body = self._buffer[self._start : self._start + self._length]
        return memoryview(bytes(body)) if self._length <= _COPIED_BYTES_MAX else body

    @property
    def length_bytes(self) -> int:
        return self._length

    def hand_over(self) -> None:
        """Go on as `stream`. `on_end` is called, unless it was."""
        if self.stream is None:
            self.stream = self._connection.go_on(self._buffer[: self._filled], bodiless=self._bodiless)
            self._over()

    def handed_over(self, supervision: Supervision) -> ResponseStream:
        """Return the stream of an answer that was handed over, with other limits from now on."""
        assert self.stream is not None  # noqa: S101 - it was handed over
        self._connection.supervise(self.stream, supervision)
        return self.stream

    def close(self) -> bool:
        """Want no more of it. Idempotent. Return True if `on_end` will not be called for that."""
        on_end, self._on_end = self._on_end, None
        if self.stream is not None:
            self.stream.close()
        elif on_end is not None:
            self._connection.close()
        return on_end is not None

    # For the connection.

    def asked(self) -> None:
        """Do nothing: a request without a body is complete at once."""

    def received(self, buffer: bytearray, count: int) -> None:
        raise NotImplementedError("there is always a destination")

    def received_there(self, count: int) -> None:
        has_more = count == len(self.destination)  # else the kernel has given all that it had
        self._filled += count
        if not self.has_head and not self._take_head():
            return
        self.received_bytes = self._filled - self._start
        if self.received_bytes < self._length:
            self.destination = self._buffer[self._filled :]
            return
        self._over()
        if self.stream is None:  # what has come behind it must not answer the next request
            is_alone = self.received_bytes == self._length and not (has_more and self._connection.unread_bytes())
            self._connection.answered(keep_alive=is_alone)

    def ended(self, reason: str, *, orderly: bool, silent: bool) -> None:
        if self._on_end is None:
            return
        self.stream = self._connection.go_on(self._buffer[: self._filled], bodiless=self._bodiless)
        self._connection.give_up(reason, silent=silent, orderly=orderly)
        self._over()

    def _take_head(self) -> bool:
        """Return True if the head is there, and is that of a small answer; otherwise wait, or hand over."""
        found = _HEAD.match(self._buffer[: min(self._filled, HEAD_BYTES)])
        if found is None:
            if self._filled >= HEAD_BYTES or HEAD_END in bytes(self._buffer[: self._filled]):
                self.hand_over()
            else:
                self.destination = self._buffer[self._filled :]
            return False
        self.head_seconds = self._connection.head_seconds
        self._start = found.end()
        lines = str(found[0], "latin-1").split("\r\n")
        headers = self.headers
        for line in lines[1:-2]:
            name, _, value = line.partition(":")
            headers[_names[name]] = value.strip(" \t")
        length = headers.get("content-length", "")
        is_distinct = len(headers) == len(lines) - 3
        if headers.get("connection") in _KEPT_ALIVE:
            del headers["connection"]
            headers.pop("keep-alive", None)
        is_plain = is_distinct and length.isdecimal() and len(length) < 10 and HOP_BY_HOP.isdisjoint(headers)
        if not is_plain or (not self._bodiless and int(length) > len(self._buffer) - HEAD_BYTES):
            self.hand_over()
            return False
        self.status, self._length = int(found[1]), 0 if self._bodiless else int(length)
        self.has_head = True
        return True

    def _over(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()
