"""Which version of an object is current, and what S3 says of it.

Every answer is the origin's of this moment (consistency `strict`): one HEAD per look-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.errors import OriginAnswered, OriginBodyError
from gateway.objects import ByteRange, ObjectKey, ObjectVersion
from gateway.origin.client import Origin, OriginRequest, Purpose
from gateway.s3.conditions import parse_http_date
from gateway.s3.ranges import parse_content_range


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """An object's metadata as HeadObject answers it.

    `headers` are the origin's, lower case. `part` is the part's place in the object where a part number was asked for.
    `last_modified` is in seconds since 1970, None when the origin sent none that can be read.
    """

    version: ObjectVersion
    headers: Mapping[str, str]
    last_modified: float | None
    part: ByteRange | None = None


class Catalog:
    """Answers HEAD questions about objects."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    async def current(
        self, key: ObjectKey, *, headers: Mapping[str, str], part_number: str | None = None
    ) -> ObjectHead:
        """The current version of `key`; with `part_number` also where that part lies.

        `headers` go along with the HEAD (`x-amz-checksum-mode`, `x-amz-request-payer`, …). Raises OriginAnswered for
        every error status, without a body as HEAD has none, and OriginUnreachable.
        """
        query = (("partNumber", part_number),) if part_number is not None else ()
        request = OriginRequest("HEAD", key.bucket, key.key, query, headers, purpose=Purpose.LIVE)
        async with await self._origin.send(request) as response:
            if response.status not in (200, 206):
                raise OriginAnswered(response.status, list(response.headers.items()), b"")
            return _object_head(key, response.headers, is_part=part_number is not None)


def _object_head(key: ObjectKey, headers: Mapping[str, str], *, is_part: bool) -> ObjectHead:
    length = headers.get("content-length", "")
    if not length.isdecimal():
        raise OriginBodyError(f"the origin's HEAD of {key} has no usable Content-Length")
    size_bytes, part = int(length), None
    if is_part and "content-range" in headers:
        part, size_bytes = parse_content_range(headers["content-range"])
    version = ObjectVersion(key, headers.get("etag", ""), size_bytes)
    return ObjectHead(version, headers, parse_http_date(headers.get("last-modified", "")), part)
