"""ETags: opaque, quoted in headers, MD5 only sometimes (S3 API, "Object")."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

_MD5 = re.compile("[0-9a-f]{32}")


def quote(etag: str) -> str:
    """The ETag in quotes, once."""
    return f'"{unquote(etag)}"'


def unquote(etag: str) -> str:
    """The ETag without its quotes; clients leave them out in conditions and in lists of parts."""
    etag = etag.strip()
    if len(etag) >= 2 and etag[0] == etag[-1] == '"':
        return etag[1:-1]
    return etag


def is_md5_etag(etag: str) -> bool:
    """Whether it looks like the MD5 of a body sent in one piece: 32 hex digits, no part count."""
    return bool(_MD5.fullmatch(unquote(etag)))


def multipart_etag(part_etags: Sequence[str]) -> str | None:
    """The quoted ETag that S3 gives an object of these parts: hex(MD5(raw MD5s of the parts)), `-`, their number.

    `part_etags` are the parts' ETags, that is their hex MD5s. None when there is no part, or when one's ETag is no MD5
    (SSE-KMS, SSE-C): then the object's cannot be foretold.
    """
    if not part_etags or not all(is_md5_etag(etag) for etag in part_etags):
        return None
    digests = b"".join([bytes.fromhex(unquote(etag)) for etag in part_etags])
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(part_etags)}"'
