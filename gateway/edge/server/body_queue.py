"""A request body between the connection and its reader: the framing is taken off, strictly, and pieces are queued.

The payload of an S3 upload may itself be aws-chunked: that is another layer, `s3.aws_chunked`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from enum import Enum, auto

from gateway.core.errors import S3Error
from gateway.edge.server.request_head import MAX_BODY_BYTES, bad_request

MAX_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 8 * 1024

CHUNK_BYTES_MIN = 256
"""Average size of a chunk at least: some clients send each of their writes as one, also the line of an aws-chunk."""

SMALL_CHUNKS_MAX = 1024
"""Number of chunks that may have any size. The bytes of one read of the socket are parsed at once, and each chunk costs
as much as kilobytes do."""

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class _Expecting(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()
    NOTHING = auto()


class ChunkedDecoder:
    """Takes the chunks apart, however the network has cut them. Extensions and trailer fields are thrown away.

    Raises S3Error (`BadRequest`) on anything but the exact grammar: a sender whose chunks are wrong cannot be trusted
    about where its request ends.
    """

    def __init__(self) -> None:
        self._expecting = _Expecting.SIZE
        self._line = b""
        self._chunk_left = 0
        self._trailer_bytes = 0
        self._missing_bytes = 0

    @property
    def complete(self) -> bool:
        return self._expecting is _Expecting.NOTHING

    def feed(self, data: bytes, emit: Callable[[bytes], None]) -> bytes:
        """Hand the payload in `data` to `emit`, in order; return what lies behind the end of the body."""
        position = 0
        while position < len(data) and not self.complete:
            if self._expecting is _Expecting.DATA:
                position = self._take_data(data, position, emit)
            else:
                position = self._take_line(data, position)
        return data[position:]

    def _take_data(self, data: bytes, position: int, emit: Callable[[bytes], None]) -> int:
        piece = data[position : position + self._chunk_left]
        emit(piece)
        position += len(piece)
        self._chunk_left -= len(piece)
        if not self._chunk_left:
            self._expecting = _Expecting.DATA_END
            if data.startswith(b"\r\n", position):  # nearly always
                self._expecting = _Expecting.SIZE
                return position + 2
        return position

    def _take_line(self, data: bytes, position: int) -> int:
        end = data.find(b"\n", position, position + MAX_LINE_BYTES)
        stop = len(data) if end < 0 else end + 1
        self._line += data[position:stop]
        if len(self._line) > MAX_LINE_BYTES:
            raise bad_request("A line between the chunks of the body is too long.")
        if end >= 0:
            line, self._line = self._line, b""
            self._on_line(line)
        return stop

    def _on_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise bad_request("Lines between the chunks of the body must end with CRLF.")
        content = line[:-2]
        if self._expecting is _Expecting.SIZE:
            self._on_size(content)
        elif self._expecting is _Expecting.DATA_END:
            self._on_data_end(content)
        else:
            self._on_trailer(content)

    def _on_size(self, content: bytes) -> None:
        match = _SIZE_LINE.fullmatch(content)
        if match is None:
            raise bad_request("A chunk size of the body is not valid.")
        self._chunk_left = int(match.group(1), 16)
        if self._chunk_left > MAX_BODY_BYTES:
            raise bad_request("A chunk of the body is too large.")
        # No average over all of the body: a large chunk makes up for those before it, never for those behind it.
        self._missing_bytes = max(0, self._missing_bytes + CHUNK_BYTES_MIN - self._chunk_left)
        if self._missing_bytes > SMALL_CHUNKS_MAX * CHUNK_BYTES_MIN:
            raise bad_request(f"More than {SMALL_CHUNKS_MAX} chunks are smaller than {CHUNK_BYTES_MIN} bytes.")
        self._expecting = _Expecting.DATA if self._chunk_left else _Expecting.TRAILER

    def _on_data_end(self, content: bytes) -> None:
        if content:
            raise bad_request("A chunk of the body is longer than its size says.")
        self._expecting = _Expecting.SIZE

    def _on_trailer(self, content: bytes) -> None:
        self._trailer_bytes += len(content)
        if not content:
            self._expecting = _Expecting.NOTHING
        elif self._trailer_bytes > MAX_TRAILER_BYTES or _TRAILER_LINE.fullmatch(content) is None:
            raise bad_request("The trailer section of the body is not valid.")


_PIECE_OVERHEAD_BYTES = 256
"""Cost of a queued piece beside its bytes, so that many one-byte packets are bounded in memory, too."""

_WORTH_JOINING_BYTES = 64 * 1024


class BodyQueue:
    """The body of one request as it arrives.

    `length_bytes` is the Content-Length, None for a chunked body. `failure` is set once the body can never be
    completed: the reader raises it.
    """

    def __init__(self, length_bytes: int | None) -> None:
        self._decoder = ChunkedDecoder() if length_bytes is None else None
        self._left = length_bytes or 0
        self._pieces: deque[bytes] = deque()
        self.complete = length_bytes == 0
        self.failure: S3Error | None = None
        self.received_bytes = 0
        self.queued_bytes = 0

    @property
    def left_bytes(self) -> int | None:
        """Bytes of the Content-Length that are still to come; None for a chunked body."""
        return self._left if self._decoder is None else None

    def count(self, size_bytes: int) -> None:
        """Count bytes of a body with a Content-Length that were received past the queue."""
        self._left -= size_bytes
        self.received_bytes += size_bytes
        self.complete = not self._left

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; the rest, behind its end, is returned. Raises S3Error on bad chunks."""
        if self._decoder is None:
            return self._feed_counted(data)
        try:
            rest = self._decoder.feed(data, self._append)
        except S3Error as error:
            self.failure = error
            raise
        self.complete = self._decoder.complete
        return rest

    def _feed_counted(self, data: bytes) -> bytes:
        rest = b""
        if len(data) > self._left:
            data, rest = data[: self._left], data[self._left :]
        self._left -= len(data)
        self.complete = not self._left
        if data:
            self._append(data)
        return rest

    def _append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.received_bytes += len(piece)
        self.queued_bytes += len(piece) + _PIECE_OVERHEAD_BYTES

    def __bool__(self) -> bool:
        """Is there something to take?"""
        return bool(self._pieces)

    def take(self) -> bytes:
        """Return the next bytes: a large piece as it came, or all queued bytes where the pieces are small."""
        if self._worth_joining():
            return self.take_all()[0]
        piece = self._pieces.popleft()
        self.queued_bytes -= len(piece) + _PIECE_OVERHEAD_BYTES
        return piece

    def take_all(self) -> list[bytes]:
        """All that is queued, joined where the pieces are small."""
        pieces = [b"".join(self._pieces)] if self._worth_joining() else list(self._pieces)
        self.discard()
        return pieces

    def _worth_joining(self) -> bool:
        count = len(self._pieces)
        return count > 1 and self.queued_bytes < count * _WORTH_JOINING_BYTES

    def discard(self) -> None:
        """Throw away what is queued."""
        self._pieces.clear()
        self.queued_bytes = 0


NO_BODY = BodyQueue(0)
"""The body of all requests without one: it is never fed."""
