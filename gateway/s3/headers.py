"""The headers of S3: which travel on between client and origin, which are stored with an object, and what they ask for.

HeadObject says of an object what PutObject or CreateMultipartUpload has said of it (S3 API, pages of those names).

Conditions ask whether the current version may be served, or need not be (RFC 9110, 13; S3 API, "GetObject"). Dates
compare at one-second granularity; one format is written, and three are read. ETags are opaque, quoted in headers, and
MD5s only sometimes. They compare as bytes, after quotes and a weak mark `W/` are taken off, because clients leave the
quotes out.

S3's grammar of `Range` is one range in one of three forms, `bytes=a-b`, `bytes=a-`, `bytes=-n`, and nothing else:
whatever differs (several ranges, spaces, another unit, `10-5`) is ignored and the whole object served.
"""

from __future__ import annotations

import hashlib
import math
import re
from calendar import timegm
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from time import gmtime, strftime
from typing import Literal, NamedTuple

from gateway.core.errors import OriginBodyError, S3Error
from gateway.core.model import ByteRange, ObjectVersion
from gateway.s3.error_codes import s3_error
from gateway.s3.trace_context import passed_on_state


class EncodedHeaders(NamedTuple):
    """Headers as they go onto the wire, made once for many answers: the lines of a response head."""

    lines: bytes

    @classmethod
    def of(cls, headers: Iterable[tuple[str, str]]) -> EncodedHeaders:
        """Encode lower-case names and latin-1 values, none of them about the body's length or the connection.

        Raise ValueError when a value contains a line break or NUL, which could forge an answer.
        """
        lines = [f"{name}: {value}\r\n" for name, value in headers]
        encoded = "".join(lines).encode("latin-1")
        if encoded.count(b"\r") != len(lines) or encoded.count(b"\n") != len(lines) or b"\0" in encoded:
            raise ValueError("a header field has a line break or NUL in it")
        return cls(encoded)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Names and values again."""
        split = [line.partition(": ") for line in self.lines.decode("latin-1").split("\r\n")[:-1]]
        return [(name, value) for name, _, value in split]


NO_HEADERS = EncodedHeaders(b"")


def name_set(text: str) -> frozenset[str]:
    """Return the names in a text, which white space separates."""
    return frozenset(text.split())


HOP_BY_HOP = name_set(
    "connection expect keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    "transfer-encoding upgrade"
)
"""Headers about one connection (RFC 9110, 7.6.1). Each server answers `expect` itself."""

_END_TO_END = ("x-amz-", "x-forebay-", "content-", "if-", "range", "cache-control", "expires")
"""Beginnings of field names that S3, or a gateway behind this one, goes by: never those of one connection alone."""

_SET_ANEW_FOR_THE_ORIGIN = HOP_BY_HOP | name_set(
    "authorization content-length date host x-amz-content-sha256 x-amz-date x-amz-decoded-content-length "
    "x-amz-security-token x-amz-trailer"
)
"""Headers of the client's signature and framing. The origin gets the gateway's own."""

_SET_ANEW_FOR_THE_CLIENT = HOP_BY_HOP | {"date", "server", "x-amz-id-2", "x-amz-request-id"}


def filter_request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Every header of the client's request that goes along, unknown ones too.

    `aws-chunked` leaves Content-Encoding: it described the body on the wire, and must not be stored with the object. A
    `tracestate` that does not parse does not go along (W3C Trace Context). `Connection` is not signed, so it must not
    take from a request what was signed, authorised and verified: nothing that means something to S3.
    """
    for_connection = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    dropped = _SET_ANEW_FOR_THE_ORIGIN | {name for name in for_connection if not name.startswith(_END_TO_END)}
    onward = {name: value for name, value in headers.items() if name not in dropped}
    if "aws-chunked" in onward.get("content-encoding", "").lower():
        codings = [coding.strip() for coding in onward.pop("content-encoding").split(",")]
        kept = ",".join(coding for coding in codings if coding.lower() != "aws-chunked" and coding)
        if kept:
            onward["content-encoding"] = kept
    if "tracestate" in onward and (state := passed_on_state(onward.pop("tracestate"))):
        onward["tracestate"] = state
    return onward


def filter_response_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Every header of the origin's answer that goes along; its request id under a name of its own."""
    onward = [(n, v) for n, v in without_doubtful_checksums(headers).items() if n not in _SET_ANEW_FOR_THE_CLIENT]
    if "x-amz-request-id" in headers:
        onward.append(("x-forebay-origin-request-id", headers["x-amz-request-id"]))
    return onward


_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def sendable(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Latin-1 text to text whose UTF-8 has the same bytes; S3Error InvalidArgument where there is none.

    S3 itself takes header values in UTF-8 only.
    """
    if (text := "".join(headers.values())).isascii() and text.isprintable():
        return headers
    return {
        name: value if value.isascii() and value.isprintable() else _as_utf8(name, value)
        for name, value in headers.items()
    }


def _as_utf8(name: str, value: str) -> str:
    try:
        text, problem = value.encode("latin-1").decode("utf-8"), "must not hold control characters"
    except UnicodeError:
        text, problem = "\0", "must be valid UTF-8"
    if _CONTROL.search(text):
        raise s3_error("InvalidArgument", f"Header values {problem}.", ArgumentName=name)
    return text


def without(headers: Iterable[tuple[str, str]], *names: str) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name not in names]


DEFAULT_CONTENT_TYPE = "binary/octet-stream"

_KEPT = name_set(
    "cache-control content-disposition content-encoding content-language content-type expires "
    "x-amz-object-lock-legal-hold x-amz-object-lock-mode x-amz-object-lock-retain-until-date "
    "x-amz-server-side-encryption x-amz-server-side-encryption-aws-kms-key-id "
    "x-amz-server-side-encryption-bucket-key-enabled x-amz-website-redirect-location"
)

_METADATA = "x-amz-meta-"


def stored_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the answer's headers that follow from the request's, lower-case names; all but those about the bytes."""
    stored = {"content-type": DEFAULT_CONTENT_TYPE}
    stored |= {name: value for name, value in headers.items() if name in _KEPT or name.startswith(_METADATA)}
    storage_class = headers.get("x-amz-storage-class", "STANDARD")
    if storage_class != "STANDARD":
        stored["x-amz-storage-class"] = storage_class
    tags = [tag for tag in headers.get("x-amz-tagging", "").split("&") if tag]
    if tags:
        stored["x-amz-tagging-count"] = str(len(tags))
    return stored


_MD5 = re.compile("[0-9a-f]{32}")
_MD5_OF_EITHER_CASE = re.compile(r"[0-9A-Fa-f]{32}(?:-\d{1,5})?", re.ASCII)
MD5_OF_NOTHING = "d41d8cd98f00b204e9800998ecf8427e"
_OF_PARTS = re.compile(r"-\d{1,5}\Z", re.ASCII)


def quote(etag: str) -> str:
    """Return the ETag in quotes, once."""
    return f'"{unquote(etag)}"'


def unquote(etag: str) -> str:
    """Return the ETag without its quotes; clients leave them out in conditions and in lists of parts."""
    etag = etag.strip()
    if len(etag) >= 2 and etag[0] == etag[-1] == '"':
        return etag[1:-1]
    return etag


def strong_etag(etag: str) -> str:
    """Return `etag` as `If-Match` takes it: some servers list ETags without quotes, in two pairs, or as weak ones."""
    return f'"{etag.strip().removeprefix("W/").strip(chr(34))}"'


def plain_etag(etag: str) -> str:
    """Return the text by which ETags compare that the origin may write in two forms, in HEAD and in LIST."""
    bare = strong_etag(etag)[1:-1]
    return bare.lower() if _MD5_OF_EITHER_CASE.fullmatch(bare) else bare


def is_same_version(one: ObjectVersion, other: ObjectVersion) -> bool:
    """Return whether two versions of a key are one, though HEAD may name the one and LIST the other."""
    return plain_etag(one.etag) == plain_etag(other.etag) and one.size_bytes == other.size_bytes


def is_md5_etag(etag: str) -> bool:
    """Return whether `etag` has the form of an MD5: 32 hex digits, no part count."""
    return bool(_MD5.fullmatch(unquote(etag)))


def is_of_parts(etag: str) -> bool:
    """Return whether `etag` ends like that of a multipart object: `-` and the number of parts."""
    return bool(_OF_PARTS.search(unquote(etag)))


_CHECKSUM = re.compile("x-amz-checksum-")


def without_doubtful_checksums(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Leave out checksums without `x-amz-checksum-type` that may be of parts' checksums: no `-N` behind the value.

    SDKs take them for checksums of the bytes. Only an ETag that is an MD5 says that the object has no parts.
    """
    if not any(map(_CHECKSUM.match, headers)):
        return headers
    if "x-amz-checksum-type" in headers or is_md5_etag(plain_etag(headers.get("etag", ""))):
        return headers
    kept = "x-amz-checksum-algorithm"  # some stores show it with the object
    return {
        name: value
        for name, value in headers.items()
        if not name.startswith("x-amz-checksum-") or "-" in value or name == kept
    }


def multipart_etag(part_etags: Sequence[str]) -> str | None:
    """Return the quoted ETag of an object of these parts: hex(MD5(raw MD5s of the parts)), `-`, their number.

    `part_etags` are the parts' ETags, that is their hex MD5s. None when there is no part, or when one's ETag is no MD5
    (SSE-KMS, SSE-C): then the object's cannot be foretold.
    """
    if not part_etags or not all(is_md5_etag(etag) for etag in part_etags):
        return None
    return md5s_etag([bytes.fromhex(unquote(etag)) for etag in part_etags])


def md5s_etag(part_md5s: Sequence[bytes]) -> str:
    """Return the ETag of a multipart object from the raw MD5s of its parts."""
    return f'"{hashlib.md5(b"".join(part_md5s), usedforsecurity=False).hexdigest()}-{len(part_md5s)}"'


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH_NUMBERS = {name: number for number, name in enumerate(_MONTHS, 1)}

_TIME = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
_FORMS = tuple(
    re.compile(form, re.ASCII)
    for form in (
        rf"[A-Z][a-z]{{2}}, (?P<day>\d\d) (?P<month>[A-Z][a-z]{{2}}) (?P<year>\d{{4}}) {_TIME} (?:GMT|UTC)",
        rf"[A-Z][a-z]+day, (?P<day>\d\d)-(?P<month>[A-Z][a-z]{{2}})-(?P<year>\d\d) {_TIME} GMT",
        rf"[A-Z][a-z]{{2}} (?P<month>[A-Z][a-z]{{2}}) (?P<day>[ \d]\d) {_TIME} (?P<year>\d{{4}})",
    )
)
"""IMF-fixdate, then the obsolete forms of RFC 850 and of C's asctime."""


def parse_http_date(text: str) -> float | None:
    """Seconds since the epoch; None when `text` is no date."""
    return _parse_http_date(text) if len(text) <= _CHARACTERS_MAX else None


_CHARACTERS_MAX = 40
"""Longer than any valid form. Caches keep these values, so strangers must not choose their length."""


@lru_cache(maxsize=1024)
def _parse_http_date(text: str) -> float | None:
    found = next(filter(None, (form.fullmatch(text) for form in _FORMS)), None)
    month = None if found is None else _MONTH_NUMBERS.get(found["month"])
    if found is None or month is None:
        return None
    day, year = int(found["day"]), int(found["year"])
    hour, minute, second = int(found["hour"]), int(found["minute"]), int(found["second"])
    if len(found["year"]) == 2:
        year += 1900 if year >= 70 else 2000
    if not 1 <= day <= 31 or hour > 23 or minute > 59 or second > 60 or year < 1900:
        return None
    return float(timegm((year, month, day, hour, minute, second)))


def format_http_date(seconds: float) -> str:
    """IMF-fixdate of `seconds` since the epoch, the fraction cut off: `Wed, 12 Oct 2009 17:50:00 GMT`."""
    day, second = divmod(math.floor(seconds), 86_400)
    return f"{_http_day(day)} {second // 3600:02}:{second // 60 % 60:02}:{second % 60:02} GMT"


@lru_cache(maxsize=1024)
def _http_day(number: int) -> str:
    """Return the day in an IMF-fixdate; `number` counts from 1 January 1970."""
    at = gmtime(number * 86_400)
    return f"{_DAYS[at.tm_wday]}, {at.tm_mday:02} {_MONTHS[at.tm_mon - 1]} {at.tm_year:04}"


def format_iso_date(seconds: float) -> str:
    """ISO 8601 as in S3's error documents, the fraction cut off: `2009-10-12T17:50:00Z`."""
    return strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(seconds))


def parse_iso_date(text: str) -> float | None:
    """Seconds since the epoch of `2009-10-12T17:50:30.000Z`, as listings write dates; None when it is none."""
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return None
    return date.timestamp() if date.tzinfo is not None else None


# More digits than any size has, fewer than int() refuses to convert.
_DIGITS = r"(\d{1,300})"
_FROM = re.compile(rf"bytes={_DIGITS}-(?:{_DIGITS})?", re.ASCII)
_SUFFIX = re.compile(rf"bytes=-{_DIGITS}", re.ASCII)
_CONTENT_RANGE = re.compile(rf"bytes {_DIGITS}-{_DIGITS}/{_DIGITS}", re.ASCII)


def parse_range(header: str | None, size_bytes: int) -> ByteRange | None:
    """Return the bytes that `Range` means in an object of `size_bytes`; None for the whole object (status 200).

    Raises S3Error InvalidRange (416, with `Content-Range: bytes */size`) when nothing of the range lies in the object.
    """
    if header is None:
        return None
    if (found := _FROM.fullmatch(header)) is not None:
        first, last = int(found[1]), size_bytes - 1 if found[2] is None else int(found[2])
        if found[2] is not None and last < first:
            return None
        if first >= size_bytes:
            raise invalid_range(header, size_bytes)
        return ByteRange(first, min(last, size_bytes - 1))
    if (found := _SUFFIX.fullmatch(header)) is None:
        return None
    length = int(found[1])
    if length == 0:
        raise invalid_range(header, size_bytes)
    return ByteRange(max(0, size_bytes - length), size_bytes - 1) if size_bytes else None


def first_and_last(header: str | None) -> tuple[int, int | None] | None:
    """Return the bytes that `Range` means in an object of any size (None: to its end); None where size matters."""
    if header is None:
        return 0, None
    found = _FROM.fullmatch(header)
    return None if found is None else (int(found[1]), None if found[2] is None else int(found[2]))


def is_one_range(header: str) -> bool:
    """Return whether a `Range` header is in S3's grammar. Servers differ in how they answer any other."""
    found = _FROM.fullmatch(header)
    if found is None:
        return _SUFFIX.fullmatch(header) is not None
    return found[2] is None or int(found[1]) <= int(found[2])


def invalid_range(header: str, size_bytes: int) -> S3Error:
    """416: the range asked for lies outside the object."""
    return s3_error(
        "InvalidRange",
        headers={"Content-Range": f"bytes */{size_bytes}"},
        RangeRequested=header,
        ActualObjectSize=str(size_bytes),
    )


def parse_content_range(value: str) -> tuple[ByteRange, int]:
    """Range and object size in bytes of an origin's `Content-Range`; raises OriginBodyError when it makes no sense."""
    found = _CONTENT_RANGE.fullmatch(value)
    if found is not None:
        first, last, size_bytes = map(int, found.groups())
        if first <= last < size_bytes:
            return ByteRange(first, last), size_bytes
    raise OriginBodyError(f"the origin's Content-Range makes no sense: {value!r}")


def parse_copy_source_range(value: str, size_bytes: int | None = None) -> ByteRange:
    """Return the bytes that `x-amz-copy-source-range` means: both ends are mandatory, and nothing is clamped.

    With the source's `size_bytes` the range must lie inside it. Raises S3Error InvalidArgument.
    """
    found = _FROM.fullmatch(value)
    if found is None or found[2] is None or int(found[2]) < int(found[1]):
        message = "The x-amz-copy-source-range value must be of the form bytes=first-last where first and last are the "
        raise _bad_copy_range(value, message + "zero-based offsets of the first and last bytes to copy")
    byte_range = ByteRange(int(found[1]), int(found[2]))
    if size_bytes is not None and byte_range.last >= size_bytes:
        raise _bad_copy_range(value, f"Range specified is not valid for source object of size: {size_bytes}")
    return byte_range


def _bad_copy_range(value: str, message: str) -> S3Error:
    return s3_error("InvalidArgument", message, ArgumentName="x-amz-copy-source-range", ArgumentValue=value)


READ_CONDITIONS = frozenset({"if-match", "if-none-match", "if-modified-since", "if-unmodified-since"})
_ETAG = re.compile(r"""\s*+(?:W/)?+("[^"]*+"|[^",\s]++(?:\s++[^",\s]++)*+)?+\s*+(?:,|\Z)""")
"""One of a list, which may be empty (RFC 9110, 5.6.1). Possessive throughout: what was taken is never given back, so
that no list costs more than looking at it once."""


def evaluate_read(
    headers: Mapping[str, str], *, etag: str, last_modified: float | None, now: float | None = None
) -> Literal["serve", "not-modified"]:
    """Judge the conditions of a GET or HEAD against the version (`etag`, `last_modified` in seconds).

    Without a `last_modified`, conditions on dates are ignored; so is, where `now` is given, an `If-Modified-Since` in
    the future. Raises S3Error PreconditionFailed (412).
    """
    if READ_CONDITIONS.isdisjoint(headers):
        return "serve"
    failed = _failed_precondition(headers, "", etag, last_modified)
    if failed is not None:
        raise s3_error("PreconditionFailed", Condition=failed)
    return "not-modified" if _unchanged(headers, "", etag, last_modified, now) else "serve"


def check_copy_source(
    headers: Mapping[str, str], *, etag: str, last_modified: float | None, now: float | None = None
) -> None:
    """Judge the conditions on the source of a copy (`x-amz-copy-source-if-*`). Every failure is a 412."""
    prefix = "x-amz-copy-source-"
    failed = _failed_precondition(headers, prefix, etag, last_modified)
    failed = failed or _unchanged(headers, prefix, etag, last_modified, now)
    if failed is not None:
        raise s3_error("PreconditionFailed", Condition=failed)


def if_range_holds(headers: Mapping[str, str], *, etag: str, last_modified: float | None) -> bool:
    """Return whether `Range` counts (RFC 9110, 13.1.5): without `If-Range`, or when that names this version."""
    value = headers.get("if-range")
    if value is None:
        return True
    date = parse_http_date(value)
    if date is not None:
        return last_modified is not None and date == math.floor(last_modified)
    weak = value.startswith("W/") or etag.startswith("W/")
    return not weak and unquote(value) == unquote(etag)


def etag_matches(condition: str, etag: str) -> bool:
    """Return whether an `If-Match` or `If-None-Match` value (`*`, one ETag, or a list) names `etag`.

    In a list, a malformed ETag ends the search.
    """
    if condition.strip() == "*":
        return True
    wanted = unquote(etag.removeprefix("W/"))
    position = 0
    while position < len(condition) and (found := _ETAG.match(condition, position)) is not None:
        if found[1] is not None and unquote(found[1]) == wanted:
            return True
        position = found.end()
    return False


def _failed_precondition(headers: Mapping[str, str], prefix: str, etag: str, modified: float | None) -> str | None:
    """Return the condition that forbids the answer. `If-Match` overrides `If-Unmodified-Since`."""
    if_match = headers.get(f"{prefix}if-match")
    if if_match is not None:
        return None if etag_matches(if_match, etag) else "If-Match"
    since = parse_http_date(headers.get(f"{prefix}if-unmodified-since", ""))
    if since is not None and modified is not None and math.floor(modified) > since:
        return "If-Unmodified-Since"
    return None


def _unchanged(
    headers: Mapping[str, str], prefix: str, etag: str, modified: float | None, now: float | None
) -> str | None:
    """Return the condition by which the client has the version. `If-None-Match` overrides `If-Modified-Since`."""
    if_none_match = headers.get(f"{prefix}if-none-match")
    if if_none_match is not None:
        return "If-None-Match" if etag_matches(if_none_match, etag) else None
    since = parse_http_date(headers.get(f"{prefix}if-modified-since", ""))
    if since is None or modified is None or (now is not None and since > now):
        return None
    return "If-Modified-Since" if math.floor(modified) <= since else None
