"""Continuation tokens: a place in a listing, so that any worker, before or after a restart, can go on from there.

"1", and in URL-safe base64 without padding: u32 CRC-32 of the rest, one byte for the kind of place, the place
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import NamedTuple

from gateway.s3.error_codes import s3_error

_VERSION = "1"
_KEY = b"k"
_PREFIX = b"p"
_LENGTH_MAX = 2048
"""Beyond what a key of 1,024 bytes makes."""


class ListPlace(NamedTuple):
    """What was listed last: a key, or, with `is_prefix`, a common prefix and so all that is under it."""

    last: bytes
    is_prefix: bool = False


def encode_token(place: ListPlace) -> str:
    """The token by which a client comes back for what is behind `place`."""
    content = (_PREFIX if place.is_prefix else _KEY) + place.last
    return _VERSION + base64.urlsafe_b64encode(zlib.crc32(content).to_bytes(4, "big") + content).decode().rstrip("=")


def decode_token(token: str) -> ListPlace:
    """The place; S3Error InvalidArgument when it is no token that this gateway has given."""
    raw = _decoded(token[1:]) if token[:1] == _VERSION and len(token) <= _LENGTH_MAX else b""
    content = raw[4:]
    is_whole = raw[:4] == zlib.crc32(content).to_bytes(4, "big") and content[:1] in (_KEY, _PREFIX)
    if not (is_whole and _is_utf8(content)):  # anybody can make one
        raise s3_error(
            "InvalidArgument", "The continuation token provided is incorrect", ArgumentName="continuation-token"
        )
    return ListPlace(content[1:], content[:1] == _PREFIX)


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
