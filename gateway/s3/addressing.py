"""Names on the wire: buckets and keys out of request targets, and back into them.

A key is the raw path percent-decoded once. `+` stays `+`; `//`, `.` and `..` mean themselves (S3 API, "Object key
names"). Nothing here normalises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

from gateway.errors import S3Error
from gateway.objects import ObjectKey
from gateway.s3.error_codes import s3_error

KEY_SIZE_BYTES_MAX = 1024

_PERCENT = ord("%")
"""A number is found in bytes at a tenth of what looking for bytes costs."""

_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_BUCKET = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:\-]{1,255}")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9\-._~/]*")
_PORT = re.compile(r":\d*\Z")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)


class CopySource(NamedTuple):
    """Which object, and which version of it, `x-amz-copy-source` names."""

    key: ObjectKey
    version_id: str | None


def split_absolute(target: bytes) -> tuple[str | None, bytes]:
    """Authority and path of a request target; no authority in origin form (RFC 9112, 3.2.2)."""
    if target[:1] == b"/":
        return None, target
    found = _ABSOLUTE.match(target)
    if found is None or not found[1]:
        raise s3_error("InvalidURI", "The request target must begin with / or be an absolute http or https URI.")
    authority = found[1].rpartition(b"@")[2]
    return authority.decode("latin-1"), target[found.end() :] or b"/"


def bucket_of_host(host: str, base_domains: tuple[str, ...]) -> str | None:
    """The bucket that `host` names below the longest base domain that fits; None means path style."""
    find = _bucket_of_host if len(host) <= _HOST_CHARACTERS_MAX else _bucket_of_host.__wrapped__
    return find(host, base_domains)


_HOST_CHARACTERS_MAX = 320
"""A name and its port: what is kept of strangers must be short."""


@lru_cache(maxsize=1024)
def _bucket_of_host(host: str, base_domains: tuple[str, ...]) -> str | None:
    name = _PORT.sub("", host).lower().rstrip(".")
    for base in sorted(base_domains, key=len, reverse=True):
        domain = base.lower().strip(".")
        if name == domain:
            return None
        if domain and name.endswith("." + domain):
            return name[: -len(domain) - 1]
    return None


def split_path(raw_path: bytes, host_bucket: str | None) -> tuple[str | None, str | None]:
    """Bucket and key of a path that begins with `/`; checked, decoded. `/bucket/` is the bucket itself."""
    if host_bucket is not None:
        return check_bucket(host_bucket), _key(raw_path[1:])
    raw_bucket, _, raw_key = raw_path[1:].partition(b"/")
    if not raw_bucket:
        if len(raw_path) > 1:
            raise s3_error("InvalidBucketName", "The request path has an empty bucket name.", BucketName="")
        return None, None
    return _bucket(raw_bucket), _key(raw_key)


@lru_cache(maxsize=1024)
def _bucket(raw_bucket: bytes) -> str:
    return check_bucket(decode(raw_bucket))


def _key(raw_key: bytes) -> str | None:
    return check_key(decode(raw_key)) if raw_key else None


def decode(raw: bytes) -> str:
    """`raw` percent-decoded once, as strict UTF-8; raises S3Error InvalidURI."""
    if _PERCENT in raw:
        if _BAD_ESCAPE.search(raw):
            raise s3_error("InvalidURI", "The request target has a % that two hexadecimal digits do not follow.")
        raw = unquote_to_bytes(raw)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise s3_error(
            "InvalidURI", "The request target is not UTF-8 once percent-decoded; S3 keys and parameters are UTF-8."
        ) from None


def check_bucket(name: str) -> str:
    """`name`, if any S3 could have a bucket of that name; raises S3Error InvalidBucketName.

    Lenient on purpose, as old and foreign buckets break AWS's rules: letters, digits, `.`, `_`, `-`, and the `:` of RGW
    tenants, at most 255.
    """
    if not _BUCKET.fullmatch(name):
        raise s3_error("InvalidBucketName", BucketName=name)
    return name


def check_key(key: str) -> str:
    """`key`, if it is at most 1,024 bytes of UTF-8; raises S3Error KeyTooLongError."""
    if len(key) * 4 > KEY_SIZE_BYTES_MAX:
        size_bytes = len(key.encode())
        if size_bytes > KEY_SIZE_BYTES_MAX:
            raise s3_error("KeyTooLongError", Size=str(size_bytes), MaxSizeAllowed=str(KEY_SIZE_BYTES_MAX))
    return key


def parse_query(raw_query: bytes) -> list[tuple[str, str | None]]:
    """Decoded (name, value) pairs in order; value None where there was no `=`.

    A literal `+` is a space, unlike in a path: so does every S3 server read it, and what is checked here must be what
    the origin goes by.
    """
    pairs: list[tuple[str, str | None]] = []
    for part in raw_query.replace(b"+", b" ").split(b"&"):
        if part:
            name, equals, value = part.partition(b"=")
            pairs.append((decode(name), decode(value) if equals else None))
    return pairs


def encode_key(key: str) -> str:
    """A key as S3 percent-encodes it: everything but letters, digits, `-_.~` and `/`."""
    return key if _PLAIN_KEY.fullmatch(key) else quote(key, safe="/-_.~")


def encode_path(bucket: str | None, key: str | None) -> str:
    """The path-style path, in the canonical form that signatures cover. Without a bucket it is `/`.

    For virtual-hosted style use `"/" + encode_key(key)`.
    """
    if bucket is None:
        return "/"
    path = "/" + _encode_bucket(bucket)
    return path if key is None else f"{path}/{encode_key(key)}"


@lru_cache(maxsize=1024)
def _encode_bucket(bucket: str) -> str:
    return quote(bucket, safe="-_.~")


def encode_query(pairs: Iterable[tuple[str, str | None]]) -> str:
    """A query string of decoded pairs; a value of None is written without `=`."""
    return "&".join(
        quote(name, safe="-_.~") if value is None else f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}"
        for name, value in pairs
    )


def parse_copy_source(value: str) -> CopySource:
    """What `x-amz-copy-source` (latin-1 decoded) names: `[/]bucket/key[?versionId=ID]`, percent-encoded.

    Here a literal `+` is a space, as at AWS, unlike in a path. Raises S3Error InvalidArgument for every other form,
    access point ARNs among them.
    """
    path, question, version = value.partition("?versionId=")
    try:
        name = decode(path.replace("+", " ").encode("latin-1")).removeprefix("/")
        version_id = decode(version.encode("latin-1"))
    except (S3Error, UnicodeEncodeError):
        raise _bad_copy_source(value) from None
    bucket, _, key = name.partition("/")
    if not _BUCKET.fullmatch(bucket) or bucket.startswith("arn:") or not key:
        raise _bad_copy_source(value)
    if (question and not version_id) or "&" in version:
        raise _bad_copy_source(value)
    return CopySource(ObjectKey(bucket, check_key(key)), version_id or None)


def _bad_copy_source(value: str) -> S3Error:
    return s3_error(
        "InvalidArgument",
        "Copy Source must mention the source bucket and key: sourcebucket/sourcekey, percent-encoded UTF-8, "
        "with ?versionId=ID for one version.",
        ArgumentName="x-amz-copy-source",
        ArgumentValue=value,
    )
