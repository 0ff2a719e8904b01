"""Translates between the headers of a blob at Azure and what S3 shows of an object.

A blob's ETag is Azure's, and opaque: two blobs of the same bytes have different ones. Objects that Forebay has written
have S3's: metadata says so, which whatever else writes a blob replaces. `forebay_etag` is

    md5       the ETag is the Content-MD5, which Azure computes of what a Put Blob brings
    HEX-N     the ETag itself, of N parts; `forebay_parts` has their sizes, and such a blob has no Content-MD5

so that a tool which writes other bytes, and keeps the metadata, is found out by Content-MD5 or size.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any
from urllib.parse import unquote
from xml.etree.ElementTree import Element

import orjson

from gateway.core.errors import S3Error
from gateway.core.model import ObjectKey, immutable
from gateway.origin.stores.store import Found, Headers
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import DEFAULT_CONTENT_TYPE, parse_content_range, parse_http_date
from gateway.s3.xml import local_name

META = "x-ms-meta-"
OWN = ".forebay-origin/"
"""Prefix of Forebay's own blobs in a container: records of uploads."""

_PROPERTIES = ("content-type", "cache-control", "content-disposition", "content-encoding", "content-language")
_PLAIN_NAME = re.compile(r"x-amz-meta-(?!forebay)[a-z][a-z0-9]{0,127}")
"""Names that Azure takes, and that every collation puts in the same order among the signed headers."""

_PLAIN_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_ETAG = re.compile(r"[0-9a-f]{32}-\d{1,5}")
_SEGMENTS_MAX = 254


@immutable
class Blob:
    """`found` is what S3 shows of it; `etag` its ETag at Azure; `upload_id` the upload that made it, or empty."""

    found: Found
    etag: str
    upload_id: str


def refusal(key: str) -> S3Error | None:
    """Return why no blob can have the name of this key. Azure, or what is before it, would change such a name."""
    parts = key.split("/")
    why = ""
    if key.startswith(OWN):
        why = f"{OWN} is Forebay's own"
    elif "\\" in key:
        why = "Azure takes a backslash for a slash"
    elif any(part.endswith(".") for part in parts):
        why = "Azure drops a dot at the end of a name"
    elif len(parts) > _SEGMENTS_MAX:
        why = f"Azure has names of up to {_SEGMENTS_MAX} parts"
    elif any(ord(character) < 32 or ord(character) in (0x7F, 0xFFFE, 0xFFFF) for character in key):
        why = "Azure has no control characters in names"
    return s3_error("InvalidArgument", f"The origin cannot have this key: {why}.", ArgumentName="key") if why else None


def blob_of(key: str, headers: Headers) -> Blob:
    """Return the blob that the headers of a GET or HEAD describe, or an entry of a listing.

    A GET must have asked for a range: else it is told of no Content-MD5, or of one that Azure has just computed.
    """
    named = headers.get("content-range")
    size_bytes = parse_content_range(named)[1] if named is not None else int(headers.get("content-length", "0"))
    md5 = headers.get("x-ms-blob-content-md5" if named is not None else "content-md5")
    etag = headers.get("etag", "").strip('"')
    sizes = _sizes(headers.get(f"{META}forebay_parts", ""))
    told = headers.get(f"{META}forebay_etag")
    if told == "md5":
        told, sizes = _hex(md5 or ""), ()
    elif told is None or md5 is not None or not _ETAG.fullmatch(told) or sum(sizes) != size_bytes:
        told, sizes = None, ()
    kept = {name: headers[name] for name in _PROPERTIES if headers.get(name)}
    kept |= {
        f"x-amz-meta-{name.removeprefix(META)}": value
        for name, value in headers.items()
        if name.startswith(META) and not name.startswith(f"{META}forebay_")
    }
    more = unpacked(headers.get(f"{META}forebay_more"))
    found = Found(
        key,
        size_bytes,
        f'"{told or etag}"',
        parse_http_date(headers.get("last-modified", "")) or 0.0,
        {**kept, **more.get("headers", {})},
        more.get("checksums", {}) if told is not None else {},
        sizes,
    )
    return Blob(found, f'"{etag}"', headers.get(f"{META}forebay_upload", ""))


def properties(kept: Headers, checksums: Headers, etag: str, sizes: Sequence[int] = ()) -> dict[str, str]:
    """Return the headers by which a new blob keeps what belongs to an object. `etag` is the value of `forebay_etag`."""
    sent, more = {"x-ms-blob-content-type": DEFAULT_CONTENT_TYPE}, dict[str, str]()
    for name, value in kept.items():
        is_plain = _PLAIN_VALUE.fullmatch(value) is not None
        if is_plain and name in _PROPERTIES:
            sent[f"x-ms-blob-{name}"] = value
        elif is_plain and _PLAIN_NAME.fullmatch(name):
            sent[META + name.removeprefix("x-amz-meta-")] = value
        else:
            more[name] = value
    sent[f"{META}forebay_etag"] = etag
    if more or checksums:
        sent[f"{META}forebay_more"] = packed({"headers": more, "checksums": dict(checksums)})
    if sizes:
        runs = ((size, len(list(run))) for size, run in groupby(sizes))
        sent[f"{META}forebay_parts"] = ",".join(f"{size}x{number}" for size, number in runs)
    return sent


def packed(document: Mapping[str, Any]) -> str:
    """Return a document as a value of metadata."""
    return base64.urlsafe_b64encode(orjson.dumps(document)).decode()


def unpacked(value: str | None) -> dict[str, Any]:
    """Return the document of a value; an empty one if the value is not `packed`."""
    try:
        found = orjson.loads(base64.urlsafe_b64decode(value or "e30="))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _sizes(text: str) -> Sequence[int]:
    runs = [run.partition("x") for run in text.split(",") if text]
    if not all(size.isdecimal() and number.isdecimal() and len(number) <= 5 for size, _, number in runs):
        return ()
    sizes = [int(size) for size, _, number in runs for _ in range(int(number))]
    return tuple(sizes) if len(sizes) <= 10_000 else ()


def _hex(md5: str) -> str | None:
    try:
        digest = base64.b64decode(md5, validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == 16 else None


def entry_of(node: Element) -> Blob | str:
    """Return a blob, or a common prefix, as a listing names it."""
    name = next(child for child in node if local_name(child) == "Name")
    key = unquote(name.text or "") if name.get("Encoded") == "true" else name.text or ""
    if local_name(node) == "BlobPrefix":
        return key
    headers = dict[str, str]()
    for child in node:
        if local_name(child) == "Properties":
            headers |= {local_name(one).lower(): one.text for one in child if one.text}
        elif local_name(child) == "Metadata":
            headers |= {META + local_name(one).lower(): one.text or "" for one in child}
    return blob_of(key, headers)


_CODES = {
    "AccountIsDisabled": "InvalidAccessKeyId",
    "AuthenticationFailed": "SignatureDoesNotMatch",
    "BlobAlreadyExists": "PreconditionFailed",
    "BlobArchived": "InvalidObjectState",
    "BlobNotFound": "NoSuchKey",
    "ConditionNotMet": "PreconditionFailed",
    "ContainerBeingDeleted": "NoSuchBucket",
    "ContainerNotFound": "NoSuchBucket",
    "InvalidAuthenticationInfo": "SignatureDoesNotMatch",
    "InvalidBlockList": "InvalidPart",
    "InvalidRange": "InvalidRange",
    "InvalidResourceName": "InvalidBucketName",
    "LeaseIdMissing": "AccessDenied",
    "Md5Mismatch": "BadDigest",
    "MetadataTooLarge": "MetadataTooLarge",
    "RequestBodyTooLarge": "EntityTooLarge",
    "ResourceNotFound": "NoSuchKey",
    "ServerBusy": "SlowDown",
    "TargetConditionNotMet": "PreconditionFailed",
}
_BY_STATUS = {403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed", 501: "NotImplemented"}


_CODE = re.compile("<Code>([A-Za-z]{1,64})</Code>")


def error_of(status: int, headers: Headers, document: str, key: ObjectKey | None) -> S3Error:
    """Return S3's name for what Azure has answered; its own is in the message."""
    told = _CODE.search(document)
    code = headers.get("x-ms-error-code") or (told[1] if told is not None else "")
    name = _CODES.get(code) or _BY_STATUS.get(status)
    if name == "NoSuchKey" and key is None:
        name = "NoSuchBucket"
    after = {"Retry-After": headers["retry-after"]} if "retry-after" in headers else {}
    if name is not None:
        known = s3_error(name)
        return S3Error(known.code, f"{known.message} (Azure: {code or status})", known.status, headers=after)
    name = "InternalError" if status == 500 else "ServiceUnavailable" if status >= 500 else "InvalidRequest"
    return S3Error(name, f"Azure answers {status} {code}".strip(), status, headers=after)
