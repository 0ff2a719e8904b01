"""What HeadObject says of an object (S3 API, "HeadObject")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import OriginBodyError
from gateway.objects import ByteRange, ObjectKey, ObjectVersion
from gateway.s3.http_dates import parse_http_date
from gateway.s3.ranges import parse_content_range


@dataclass(frozen=True, slots=True)
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
