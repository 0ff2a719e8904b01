"""Byte ranges: what clients ask (`Range`), what answers say (`Content-Range`), what part copies take.

S3's grammar is one range in one of three forms, `bytes=a-b`, `bytes=a-`, `bytes=-n`, and nothing else: whatever differs
(several ranges, spaces, another unit, `10-5`) is ignored and the whole object served (S3 API, "GetObject").
"""

from __future__ import annotations

import re

from gateway.errors import OriginBodyError, S3Error
from gateway.objects import ByteRange
from gateway.s3.error_codes import s3_error

# More digits than any size has, fewer than int() refuses to convert.
_DIGITS = r"(\d{1,300})"
_FROM = re.compile(rf"bytes={_DIGITS}-(?:{_DIGITS})?", re.ASCII)
_SUFFIX = re.compile(rf"bytes=-{_DIGITS}", re.ASCII)
_CONTENT_RANGE = re.compile(rf"bytes {_DIGITS}-{_DIGITS}/{_DIGITS}", re.ASCII)


def parse_range(header: str | None, size_bytes: int) -> ByteRange | None:
    """The bytes that a `Range` header means in an object of `size_bytes`; None for the whole object (status 200).

    Raises S3Error InvalidRange (416, with `Content-Range: bytes */size`) when nothing of the range lies in the object.
    """
    if header is None:
        return None
    found = _FROM.fullmatch(header)
    if found is not None:
        return _from(header, int(found[1]), found[2], size_bytes)
    found = _SUFFIX.fullmatch(header)
    return None if found is None else _suffix(header, int(found[1]), size_bytes)


def first_and_last(header: str | None) -> tuple[int, int | None] | None:
    """The bytes that a `Range` header means in an object of any size (None: to its end); None where size matters."""
    if header is None:
        return 0, None
    found = _FROM.fullmatch(header)
    return None if found is None else (int(found[1]), None if found[2] is None else int(found[2]))


def is_one_range(header: str) -> bool:
    """Whether a `Range` header is in S3's grammar. What is not, other servers than AWS answer each in its own way."""
    found = _FROM.fullmatch(header)
    if found is None:
        return _SUFFIX.fullmatch(header) is not None
    return found[2] is None or int(found[1]) <= int(found[2])


def _from(header: str, first: int, last_digits: str | None, size_bytes: int) -> ByteRange | None:
    last = size_bytes - 1 if last_digits is None else int(last_digits)
    if last_digits is not None and last < first:
        return None
    if first >= size_bytes:
        raise invalid_range(header, size_bytes)
    return ByteRange(first, min(last, size_bytes - 1))


def _suffix(header: str, length: int, size_bytes: int) -> ByteRange | None:
    if length == 0:
        raise invalid_range(header, size_bytes)
    if size_bytes == 0:
        return None
    return ByteRange(max(0, size_bytes - length), size_bytes - 1)


def invalid_range(header: str, size_bytes: int) -> S3Error:
    """416: the range asked for lies outside the object."""
    return s3_error(
        "InvalidRange",
        headers={"Content-Range": f"bytes */{size_bytes}"},
        RangeRequested=header,
        ActualObjectSize=str(size_bytes),
    )


def content_range(byte_range: ByteRange, size_bytes: int) -> str:
    """The `Content-Range` of an answer: `bytes 0-9/443`."""
    return f"bytes {byte_range.first}-{byte_range.last}/{size_bytes}"


def parse_content_range(value: str) -> tuple[ByteRange, int]:
    """Range and object size in bytes of an origin's `Content-Range`; raises OriginBodyError when it makes no sense."""
    found = _CONTENT_RANGE.fullmatch(value)
    if found is not None:
        first, last, size_bytes = map(int, found.groups())
        if first <= last < size_bytes:
            return ByteRange(first, last), size_bytes
    raise OriginBodyError(f"the origin's Content-Range makes no sense: {value!r}")


def parse_copy_source_range(value: str, size_bytes: int | None = None) -> ByteRange:
    """The bytes that `x-amz-copy-source-range` means: both ends are mandatory, and nothing is clamped.

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
