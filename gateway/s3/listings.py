"""Read what clients ask of ListObjectsV2, ListObjects and ListMultipartUploads, and write the answers (S3 API).

A continuation token is a place in the listing, so that any worker, before or after a restart, can go on from there:
"1", and in URL-safe base64 without padding: u32 CRC-32 of the rest, one byte for the kind of place, the place.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

import orjson

from gateway.core.errors import OriginBodyError, S3Error
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import parse_iso_date
from gateway.s3.requests import Operation, S3Request
from gateway.s3.xml import child_text, local_name, parse_bounded
from gateway.s3.xml_writer import NAMESPACE, PROLOG, document, element, encode_list_key, escape

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


# --- multipart uploads ----------------------------------------------------------------------------------------------

UPLOADS_MAX = 1000
UPLOADS_SIZE_BYTES_MAX = 16 * 1024**2

_ELEMENTS_MAX = 32 * UPLOADS_MAX
_MARKER = "fb1."


class UploadPlace(NamedTuple):
    """Among the uploads of one key: the origin's that was listed last, and when and as what ours that was began."""

    origin_upload_id: str = ""
    ours: tuple[float, str] | None = None


class ListedUpload(NamedTuple):
    """One `<Upload>`. `rest` is XML: what is said of it besides key and id. `initiated` in seconds since 1970."""

    key: str
    upload_id: str
    initiated: float
    rest: str


class UploadsPage(NamedTuple):
    """One of the origin's. `following` are key and upload id to go on from; None: it is the last."""

    uploads: Sequence[ListedUpload]
    prefixes: Sequence[str]
    following: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class UploadsQuery:
    """The parameters of a request. `place` is its `upload-id-marker`, which counts only with a `key_marker`."""

    prefix: str
    delimiter: str
    key_marker: str
    id_marker: str
    limit: int
    is_url_encoded: bool

    @property
    def place(self) -> UploadPlace | None:
        """None: all uploads of the marked key have been listed."""
        return _decoded(self.id_marker) if self.key_marker and self.id_marker else None


def uploads_query(request: S3Request) -> UploadsQuery:
    """S3Error InvalidArgument for what cannot be meant."""
    given = {name: value or "" for name, value in request.query}
    limit, encoding = given.get("max-uploads", ""), given.get("encoding-type", "")
    if limit and not (limit.isascii() and limit.isdecimal() and len(limit) < 10):
        raise _invalid("Invalid max-uploads", "max-uploads", limit)
    if encoding not in ("", "url"):
        raise _invalid("Invalid encoding-type", "encoding-type", encoding)
    return UploadsQuery(
        given.get("prefix", ""),
        given.get("delimiter", ""),
        given.get("key-marker", ""),
        given.get("upload-id-marker", ""),
        min(int(limit or UPLOADS_MAX), UPLOADS_MAX),
        encoding == "url",
    )


def encode_place(place: UploadPlace) -> str:
    """Return the `NextUploadIdMarker` for a place."""
    return _MARKER + base64.urlsafe_b64encode(orjson.dumps([place.origin_upload_id, place.ours])).decode().rstrip("=")


def is_place(marker: str) -> bool:
    """Return whether `encode_place` made this `upload-id-marker`."""
    return marker.startswith(_MARKER)


def _decoded(marker: str) -> UploadPlace:
    """Decode a marker. An id that was not made by `encode_place` is one of the origin's."""
    if not is_place(marker):
        return UploadPlace(marker)
    text = marker.removeprefix(_MARKER)
    with suppress(ValueError):  # of base64, and of JSON
        match orjson.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))):
            case [str(origin_upload_id), None]:
                return UploadPlace(origin_upload_id)
            case [str(origin_upload_id), [float() | int() as initiated, str(upload_id)]]:
                return UploadPlace(origin_upload_id, (float(initiated), upload_id))
    raise _invalid("Invalid upload-id-marker", "upload-id-marker", marker)


def parse_uploads_page(body: bytes) -> UploadsPage:
    """OriginBodyError when it is none."""
    root = parse_bounded(body.lstrip(), _ELEMENTS_MAX)
    if root is None or local_name(root) != "ListMultipartUploadsResult":
        raise OriginBodyError("the origin's answer to ListMultipartUploads is no ListMultipartUploadsResult")
    if child_text(root, "Bucket") is None and child_text(root, "IsTruncated") is None:
        raise OriginBodyError("the origin's ListMultipartUploadsResult has neither Bucket nor IsTruncated")
    url = child_text(root, "EncodingType") == "url"
    uploads = [_upload(node, url=url) for node in root if local_name(node) == "Upload"]
    prefixes = [_key(child_text(node, "Prefix"), url=url) for node in root if local_name(node) == "CommonPrefixes"]
    if (child_text(root, "IsTruncated") or "").strip() != "true":
        return UploadsPage(uploads, prefixes, None)
    following = _key(child_text(root, "NextKeyMarker"), url=url), child_text(root, "NextUploadIdMarker") or ""
    return UploadsPage(uploads, prefixes, following)


def _upload(node: Element, *, url: bool) -> ListedUpload:
    rest = "".join(_xml(child) for child in node if local_name(child) not in ("Key", "UploadId"))
    initiated = parse_iso_date((child_text(node, "Initiated") or "").strip()) or 0.0
    return ListedUpload(_key(child_text(node, "Key"), url=url), child_text(node, "UploadId") or "", initiated, rest)


def _key(text: str | None, *, url: bool) -> str:
    if not text:
        raise OriginBodyError("the origin's ListMultipartUploadsResult has an entry without key")
    return unquote_plus(text) if url else text


def _xml(node: Element) -> str:
    name = local_name(node)
    return f"<{name}>{escape((node.text or '').strip())}{''.join(_xml(child) for child in node)}</{name}>"


def uploads_document(
    bucket: str,
    query: UploadsQuery,
    uploads: Sequence[ListedUpload],
    prefixes: Sequence[str],
    following: tuple[str, str] | None,
) -> bytes:
    """Our page; `following` are the markers of the next one."""
    fields = element("Bucket", bucket) + _field(query, "KeyMarker", query.key_marker)
    fields += element("UploadIdMarker", query.id_marker)
    if following is not None:
        fields += _field(query, "NextKeyMarker", following[0]) + element("NextUploadIdMarker", following[1])
    fields += _field(query, "Prefix", query.prefix)
    if query.delimiter:
        fields += _field(query, "Delimiter", query.delimiter)
    if query.is_url_encoded:
        fields += element("EncodingType", "url")
    fields += element("MaxUploads", str(query.limit)) + element("IsTruncated", str(following is not None).lower())
    for one in uploads:
        fields += f"<Upload>{_field(query, 'Key', one.key)}{element('UploadId', one.upload_id)}{one.rest}</Upload>"
    rolled_up = [f"<CommonPrefixes>{_field(query, 'Prefix', prefix)}</CommonPrefixes>" for prefix in prefixes]
    return document("ListMultipartUploadsResult", fields + "".join(rolled_up))


def _field(query: UploadsQuery, name: str, text: str) -> str:
    return f"<{name}>{encode_list_key(text, query.is_url_encoded)}</{name}>"
