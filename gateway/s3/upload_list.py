"""Pages of ListMultipartUploads (S3 API, page of that name): parse the query, read the origin's pages, write ours."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element

import orjson

from gateway.core.errors import OriginBodyError
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import parse_iso_date
from gateway.s3.requests import S3Request
from gateway.s3.xml import child_text, local_name, parse_bounded
from gateway.s3.xml_writer import document, element, encode_list_key, escape

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
        raise _invalid("max-uploads", limit)
    if encoding not in ("", "url"):
        raise _invalid("encoding-type", encoding)
    return UploadsQuery(
        given.get("prefix", ""),
        given.get("delimiter", ""),
        given.get("key-marker", ""),
        given.get("upload-id-marker", ""),
        min(int(limit or UPLOADS_MAX), UPLOADS_MAX),
        encoding == "url",
    )


def _invalid(name: str, value: str) -> Exception:
    return s3_error("InvalidArgument", f"Invalid {name}", ArgumentName=name, ArgumentValue=value)


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
    try:
        match orjson.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))):
            case [str(origin_upload_id), None]:
                return UploadPlace(origin_upload_id)
            case [str(origin_upload_id), [float() | int() as initiated, str(upload_id)]]:
                return UploadPlace(origin_upload_id, (float(initiated), upload_id))
    except (binascii.Error, ValueError):
        pass
    raise _invalid("upload-id-marker", marker)


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
    fields = element("Bucket", bucket) + _encoded(query, "KeyMarker", query.key_marker)
    fields += element("UploadIdMarker", query.id_marker)
    if following is not None:
        fields += _encoded(query, "NextKeyMarker", following[0]) + element("NextUploadIdMarker", following[1])
    fields += _encoded(query, "Prefix", query.prefix)
    if query.delimiter:
        fields += _encoded(query, "Delimiter", query.delimiter)
    if query.is_url_encoded:
        fields += element("EncodingType", "url")
    fields += element("MaxUploads", str(query.limit)) + element("IsTruncated", str(following is not None).lower())
    for one in uploads:
        fields += f"<Upload>{_encoded(query, 'Key', one.key)}{element('UploadId', one.upload_id)}{one.rest}</Upload>"
    rolled_up = [f"<CommonPrefixes>{_encoded(query, 'Prefix', prefix)}</CommonPrefixes>" for prefix in prefixes]
    return document("ListMultipartUploadsResult", fields + "".join(rolled_up))


def _encoded(query: UploadsQuery, name: str, text: str) -> str:
    return f"<{name}>{encode_list_key(text, query.is_url_encoded)}</{name}>"
