"""What HeadObject says of an object (S3 API, "HeadObject")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gateway.errors import OriginBodyError
from gateway.objects import ByteRange, ObjectKey, ObjectVersion
from gateway.s3.forwarding import EncodedHeaders, towards_client
from gateway.s3.http_dates import parse_http_date
from gateway.s3.ranges import parse_content_range

_OF_THE_ANSWER = frozenset({"content-length", "content-range", "accept-ranges"})


@dataclass(frozen=True)
class ObjectHead:
    """An object's metadata as HeadObject answers it.

    `headers` are the origin's, lower case. `part` is the part's place in the object where a part number was asked for.
    `last_modified` is in seconds since 1970, None when the origin sent none that can be read. `remembered` says that
    the catalog answered, and not the origin just now.
    """

    version: ObjectVersion
    headers: Mapping[str, str]
    last_modified: float | None
    part: ByteRange | None = None
    remembered: bool = False

    @cached_property
    def of_whole(self) -> EncodedHeaders:
        """What an answer with all of its bytes says of the object, encoded once for all of them."""
        onward = [(name, value) for name, value in towards_client(self.headers) if name not in _OF_THE_ANSWER]
        onward.append(("accept-ranges", "bytes"))
        return EncodedHeaders.of(onward)

    @cached_property
    def of_range(self) -> EncodedHeaders:
        """The same for a part of its bytes: clients would check a checksum of the whole against what they got."""
        onward = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.of_whole.pairs]
        return EncodedHeaders.of((name, value) for name, value in onward if not name.startswith("x-amz-checksum-"))


def object_head_of_get(key: ObjectKey, status: int, headers: Mapping[str, str]) -> tuple[ObjectHead, ByteRange | None]:
    """The same from an answer to GetObject, 200 or 206, and which bytes its body holds; None: it is empty.

    OriginBodyError when lengths do not fit together.
    """
    head = object_head(key, headers, is_part=status == 206)
    body, size_bytes = head.part, head.version.size_bytes
    if body is None:
        if "content-range" in headers or status == 206:
            raise OriginBodyError("the origin's Content-Range is missing, or where none belongs")
        return head, ByteRange(0, size_bytes - 1) if size_bytes else None
    if headers["content-length"] != str(body.length):
        raise OriginBodyError("the origin's Content-Length is not that of its Content-Range")
    whole = dict(headers)
    del whole["content-range"]
    whole["content-length"] = str(size_bytes)
    return ObjectHead(head.version, whole, head.last_modified), body


def object_head(key: ObjectKey, headers: Mapping[str, str], *, is_part: bool = False) -> ObjectHead:
    """The answer's meaning; OriginBodyError when it gives no length."""
    length = headers.get("content-length", "")
    if not length.isdecimal():
        raise OriginBodyError(f"the origin's HEAD of {key} has no usable Content-Length")
    size_bytes, part = int(length), None
    if is_part and "content-range" in headers:
        part, size_bytes = parse_content_range(headers["content-range"])
    version = ObjectVersion(key, headers.get("etag", ""), size_bytes)
    return ObjectHead(version, headers, parse_http_date(headers.get("last-modified", "")), part)
