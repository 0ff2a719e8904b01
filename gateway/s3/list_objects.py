"""ListObjectsV2 and ListObjects (S3 API, pages of those names): what a client asks, and the answer.

A continuation token is a place in the listing, so that any worker, before or after a restart, can go on from there:
"1", and in URL-safe base64 without padding: u32 CRC-32 of the rest, one byte for the kind of place, the place.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from gateway.core.errors import S3Error
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation, S3Request
from gateway.s3.xml_writer import NAMESPACE, PROLOG, encode_list_key

_VERSION = "1"
_KEY = b"k"
_PREFIX = b"p"
_LENGTH_MAX = 2048
"""Beyond what a key of 1,024 bytes makes."""


class ListPlace(NamedTuple):
    """The last row of a page: a key, or, with `is_prefix`, a common prefix and so every key under it."""

    last: bytes
    is_prefix: bool = False


def encode_token(place: ListPlace) -> str:
    """Return the token by which a client comes back for the keys behind `place`."""
    content = (_PREFIX if place.is_prefix else _KEY) + place.last
    return _VERSION + base64.urlsafe_b64encode(zlib.crc32(content).to_bytes(4, "big") + content).decode().rstrip("=")


def decode_token(token: str) -> ListPlace:
    """Return the place in a token; S3Error InvalidArgument when this gateway has not made it."""
    with suppress(ValueError):  # of base64, and of UTF-8: anybody can make one
        encoded = token[1:] if token[:1] == _VERSION and len(token) <= _LENGTH_MAX else ""
        raw = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        content = raw[4:]
        content.decode()
        if raw[:4] == zlib.crc32(content).to_bytes(4, "big") and content[:1] in (_KEY, _PREFIX):
            return ListPlace(content[1:], content[:1] == _PREFIX)
    raise s3_error("InvalidArgument", "The continuation token provided is incorrect", ArgumentName="continuation-token")


def _invalid(message: str, name: str, value: str) -> S3Error:
    return s3_error("InvalidArgument", message, ArgumentName=name, ArgumentValue=value)


PAGE_KEYS_MAX = 1000

_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
_NUMBER_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ListQuery:
    """The parameters of ListObjectsV2, or of ListObjects when not `is_v2`. None: not given.

    `limit` counts keys and common prefixes. `start_after` is V1's marker too. `place` is what the token encodes.
    """

    is_v2: bool
    prefix: str
    delimiter: str
    limit: int
    is_url_encoded: bool
    with_owner: bool
    start_after: str
    token: str | None = None
    place: ListPlace | None = None


def list_query(request: S3Request) -> ListQuery:
    """S3Error InvalidArgument for what cannot be meant."""
    is_v2 = request.operation is Operation.LIST_OBJECTS_V2
    given = {name: value or "" for name, value in request.query}
    token = given.get("continuation-token") if is_v2 else None
    encoding = given.get("encoding-type", "")
    if encoding not in ("", "url"):
        raise _invalid("Invalid Encoding Method specified in Request", "encoding-type", encoding)
    return ListQuery(
        is_v2,
        given.get("prefix", ""),
        given.get("delimiter", ""),
        _limit(given.get("max-keys", "")),
        encoding == "url",
        not is_v2 or given.get("fetch-owner", "").lower() == "true",
        given.get("start-after" if is_v2 else "marker", ""),
        token,
        decode_token(token) if token else None,
    )


def _limit(text: str) -> int:
    if not text:
        return PAGE_KEYS_MAX
    if not _NUMBER.fullmatch(text) or int(text) > _NUMBER_MAX:
        raise _invalid("Provided max-keys not an integer or within integer range", "max-keys", text)
    return min(int(text), PAGE_KEYS_MAX)


def list_document(
    bucket: str, query: ListQuery, contents: str, prefixes: Iterable[str], *, count: int, following: ListPlace | None
) -> bytes:
    """`contents` is XML, `prefixes` are encoded as it is; `count` is the number of both together.

    `following` is the place from which the listing goes on; None: this is all.
    """
    fields = _of_v2(query, count, following) if query.is_v2 else _of_v1(query, following)
    fields += f"<MaxKeys>{query.limit}</MaxKeys>"
    if query.delimiter:
        fields += f"<Delimiter>{_encoded(query, query.delimiter)}</Delimiter>"
    if query.is_url_encoded:
        fields += "<EncodingType>url</EncodingType>"
    rolled_up = "".join([f"<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>" for prefix in prefixes])
    return (
        f'{PROLOG}<ListBucketResult xmlns="{NAMESPACE}"><Name>{bucket}</Name>'
        f"<Prefix>{_encoded(query, query.prefix)}</Prefix>{fields}"
        f"<IsTruncated>{'false' if following is None else 'true'}</IsTruncated>{contents}{rolled_up}</ListBucketResult>"
    ).encode()


def _of_v2(query: ListQuery, count: int, following: ListPlace | None) -> str:
    fields = ""
    if query.start_after:
        fields += f"<StartAfter>{_encoded(query, query.start_after)}</StartAfter>"
    if query.token is not None:
        fields += f"<ContinuationToken>{query.token}</ContinuationToken>"
    if following is not None:
        fields += f"<NextContinuationToken>{encode_token(following)}</NextContinuationToken>"
    return fields + f"<KeyCount>{count}</KeyCount>"


def _of_v1(query: ListQuery, following: ListPlace | None) -> str:
    """NextMarker comes only with a delimiter: without, the last key is the marker."""
    fields = f"<Marker>{_encoded(query, query.start_after)}</Marker>"
    if following is not None and query.delimiter:
        fields += f"<NextMarker>{_encoded(query, following.last.decode())}</NextMarker>"
    return fields


def _encoded(query: ListQuery, text: str) -> str:
    return encode_list_key(text, query.is_url_encoded)
