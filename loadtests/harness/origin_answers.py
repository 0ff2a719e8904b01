"""What the load origin answers, as head and range of an object: pure, no socket."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from loadtests.harness.content import LoadObject

LAST_MODIFIED = "Sat, 21 Nov 2026 00:00:00 GMT"
_DATE = "Sun, 22 Nov 2026 00:00:00 GMT"
"""Long enough after it that nothing is taken for just written."""
_LAST_MODIFIED_ISO = "2026-11-21T00:00:00.000Z"
_RANGE = re.compile(rb"\r\nrange: *bytes=(\d*)-(\d*)\r\n", re.IGNORECASE)
_IF_MATCH = re.compile(rb"\r\nif-match: *([^\r]*)\r\n", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """A head, and the bytes that follow it: literally, or of an object from `first` up to `end`."""

    head: bytes
    body: bytes = b""
    of: LoadObject | None = None
    first: int = 0
    end: int = 0


def object_answer(found: LoadObject | None, method: str, head: bytes) -> Answer:
    """GET or HEAD of an object; `head` is the request's, up to and with its empty line."""
    if found is None:
        return plain("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>", method)
    match = _IF_MATCH.search(head)
    if match and match[1].decode("latin-1") not in (found.etag, "*"):
        return plain("412 Precondition Failed", b"<Error><Code>PreconditionFailed</Code></Error>", method)
    asked = _RANGE.search(head)
    first, end = _span(asked[1], asked[2], found.size_bytes) if asked else (0, found.size_bytes)
    if first >= end and asked:
        return plain("416 Range Not Satisfiable", b"<Error><Code>InvalidRange</Code></Error>", method)
    status = "200 OK"
    more = ""
    if asked:
        status = "206 Partial Content"
        more = f"Content-Range: bytes {first}-{end - 1}/{found.size_bytes}\r\n"
    lines = (
        f"HTTP/1.1 {status}\r\nContent-Length: {end - first}\r\n{more}ETag: {found.etag}\r\n"
        f"Date: {_DATE}\r\nLast-Modified: {LAST_MODIFIED}\r\nAccept-Ranges: bytes\r\n"
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    return Answer(lines.encode("ascii"), b"", found if method == "GET" else None, first, end)


def _span(first: bytes, last: bytes, size_bytes: int) -> tuple[int, int]:
    """`bytes=first-last` as first byte and end (RFC 9110, 14.1.2)."""
    if not first:
        return max(0, size_bytes - int(last or 0)), size_bytes
    return int(first), min(size_bytes, int(last) + 1) if last else size_bytes


def plain(status: str, body: bytes, method: str = "GET", content_type: str = "application/xml") -> Answer:
    """A short answer that is no object."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nContent-Type: {content_type}\r\n\r\n"
    return Answer(head.encode("ascii"), b"" if method == "HEAD" else body)


class Listing:
    """ListObjectsV2 over a fixed set of objects (Amazon S3 API reference)."""

    def __init__(self, bucket: str, objects: Iterable[LoadObject]) -> None:
        self._bucket = bucket
        self._objects = {one.path.removeprefix(f"/{bucket}/"): one for one in objects}
        self._keys = sorted(self._objects)

    def answer(self, query: str) -> bytes:
        """One page, as XML; the continuation token is the last key or common prefix of the page before."""
        asked = {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        limit = int(asked.get("max-keys", "1000"))
        after = asked.get("continuation-token") or asked.get("start-after", "")
        parts: list[str] = []
        last = ""
        at = max(bisect.bisect_right(self._keys, after), bisect.bisect_left(self._keys, prefix))
        while at < len(self._keys) and self._keys[at].startswith(prefix) and len(parts) < limit:
            key = self._keys[at]
            folder = _folder(key, prefix, delimiter)
            if folder and folder == after:
                at = bisect.bisect_left(self._keys, folder + "\U0010ffff")
                continue
            parts.append(_common_prefix(folder) if folder else self._entry(key))
            last = folder or key
            at = bisect.bisect_left(self._keys, folder + "\U0010ffff") if folder else at + 1
        more = at < len(self._keys) and self._keys[at].startswith(prefix)
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{self._bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(parts)}</KeyCount>"
            f"<MaxKeys>{limit}</MaxKeys><Delimiter>{escape(delimiter)}</Delimiter>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}{''.join(parts)}</ListBucketResult>"
        ).encode()

    def _entry(self, key: str) -> str:
        one = self._objects[key]
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_LAST_MODIFIED_ISO}</LastModified>"
            f"<ETag>{escape(one.etag)}</ETag><Size>{one.size_bytes}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )


def _common_prefix(folder: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"


def _folder(key: str, prefix: str, delimiter: str) -> str:
    rest = key[len(prefix) :]
    return prefix + rest[: rest.index(delimiter) + len(delimiter)] if delimiter and delimiter in rest else ""
