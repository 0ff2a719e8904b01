"""An origin of numbered keys that stores nothing: LIST of millions of keys, and PUT, after a latency, in raw asyncio.

    python -m loadtests.harness.numbered_server PORT COUNT LATENCY_SECONDS

Key number n is in class n // 10,000, and 55 bytes long. A page is made up when it is asked for, in a millisecond, and
sooner when it was before. No signature is verified. Every other request is answered 404. Started by
`numbered.NumberedOrigin`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import cast
from urllib.parse import parse_qs

PREFIX = "train/"
_PER_CLASS = 10_000
_BLOCK = 50
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_MULTIPLIER = 0x9E3779B97F4A7C15F39CC0605CEDC835
_EMPTY_MD5 = "d41d8cd98f00b204e9800998ecf8427e"


def key_of(number: int) -> str:
    return f"{PREFIX}class-{number // _PER_CLASS:06d}/image-of-the-set-{number:014d}.JPEG"


class _Keys:
    """All keys as a sequence, none of them kept."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> str:
        return key_of(number)


class Pages:
    """ListObjectsV2 of the first `count` numbers, without delimiter."""

    def __init__(self, count: int) -> None:
        self._keys = _Keys(count)
        self._count = count

    def page(self, query: str) -> bytes:
        """The continuation token is the last key of the page before."""
        asked = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        prefix, after = asked.get("prefix", ""), asked.get("continuation-token") or asked.get("start-after", "")
        first = max(bisect_right(self._keys, after), bisect_left(self._keys, prefix))
        end = bisect_left(self._keys, prefix + "\U0010ffff")
        numbers = range(first, min(end, first + int(asked.get("max-keys", "1000"))))
        more = numbers.stop < end and len(numbers) > 0
        token = f"<NextContinuationToken>{key_of(numbers[-1])}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>load</Name><Prefix>{prefix}</Prefix><KeyCount>{len(numbers)}</KeyCount><MaxKeys>1000</MaxKeys>"
            "<EncodingType>url</EncodingType>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}"
            f"{_entries(numbers)}</ListBucketResult>"
        ).encode()


def _entries(numbers: range) -> str:
    """Whole blocks as they were made up before, so that a busy origin delays nothing else that is asked of it."""
    first, end = -(-numbers.start // _BLOCK), numbers.stop // _BLOCK
    if first >= end:
        return "".join(map(_entry, numbers))
    before = map(_entry, range(numbers.start, first * _BLOCK))
    behind = map(_entry, range(end * _BLOCK, numbers.stop))
    return "".join([*before, *map(_block, range(first, end)), *behind])


@lru_cache(maxsize=20_000)
def _block(number: int) -> str:
    return "".join(map(_entry, range(number * _BLOCK, (number + 1) * _BLOCK)))


def _entry(number: int) -> str:
    seconds = number * 7 % 86400
    return (
        f"<Contents><Key>{key_of(number)}</Key><LastModified>2026-11-20T{seconds // 3600:02}:{seconds // 60 % 60:02}:"
        f"{seconds % 60:02}.000Z</LastModified><ETag>&quot;{number * _MULTIPLIER % 2**128:032x}&quot;</ETag>"
        f"<Size>{number}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


class NumberedConnection(asyncio.Protocol):
    """One connection: a request at a time, each answered after the latency."""

    def __init__(self, pages: Pages, latency_seconds: float) -> None:
        self._pages = pages
        self._latency_seconds = latency_seconds
        self._buffer = b""
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def _next(self) -> None:
        end = self._buffer.find(b"\r\n\r\n") + 4
        if self._busy or end < 4:
            return
        head = self._buffer[:end]
        length = _LENGTH.search(head)
        if len(self._buffer) < end + int(length[1] if length else 0):
            return
        self._buffer = self._buffer[end + int(length[1] if length else 0) :]
        self._busy = True
        method, target, _ = head[: head.index(b"\r\n")].decode("latin-1").split(" ")
        asyncio.get_running_loop().call_later(self._latency_seconds, self._answer, method, target)

    def _answer(self, method: str, target: str) -> None:
        path, _, query = target.partition("?")
        if self._transport.is_closing():
            return
        if method == "PUT":
            self._say("200 OK", b"", f'ETag: "{_EMPTY_MD5}"\r\n')
        elif method == "GET" and path.rstrip("/") == "/load":
            self._say("200 OK", self._pages.page(query))
        else:
            self._say("404 Not Found", b"" if method == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>")
        self._busy = False
        self._next()

    def _say(self, status: str, body: bytes, more: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}Content-Type: application/xml\r\n\r\n"
        self._transport.write(head.encode() + body)


async def serve(port: int, count: int, latency_seconds: float) -> None:
    """Until the process is told to end."""
    pages = Pages(count)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: NumberedConnection(pages, latency_seconds), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
