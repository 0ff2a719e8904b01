"""The HTTP chunked transfer coding, strictly (RFC 9112, 7.1). Pure: bytes in, payload out.

The payload of an S3 upload may itself be aws-chunked: that is another layer, `s3.aws_chunked`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from gateway.edge.server.request_head import MAX_BODY_BYTES, bad_request

MAX_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 8 * 1024

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

    Raises S3Error (`BadRequest`) on anything but the exact grammar: a sender whose chunks are wrong is not to be
    trusted about where its request ends.
    """

    def __init__(self) -> None:
        self._expecting = _Expecting.SIZE
        self._line = b""
        self._chunk_left = 0
        self._trailer_bytes = 0

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
        self._chunk_left -= len(piece)
        if not self._chunk_left:
            self._expecting = _Expecting.DATA_END
        return position + len(piece)

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
