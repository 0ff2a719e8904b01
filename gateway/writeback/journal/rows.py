"""What the journal's rows say, as bytes: JSON behind a CRC32C of the row's table, its keys and itself.

SQLite does not checksum its pages. A row that was changed behind its back, or belongs elsewhere, is BufferDamaged: it
is never taken for what was acknowledged.
"""

from __future__ import annotations

from typing import Any

import orjson
from awscrt import checksums as crt

from gateway.errors import BufferDamaged

_CRC_BYTES = 4

Place = tuple[str | int | bytes, ...]
"""A row's table and the values of its key columns."""


def pack(place: Place, record: dict[str, Any], tail: bytes = b"") -> bytes:
    """`tail` are bytes that would be long as JSON."""
    head = orjson.dumps(record)
    return _seal(place, len(head).to_bytes(4, "little") + head + tail)


def unpack(place: Place, packed: object) -> tuple[dict[str, Any], bytes]:
    """The record and its tail; BufferDamaged when they are not those that were packed for this place.

    What a damaged row gives as its record may be no bytes at all.
    """
    body = packed[_CRC_BYTES:] if isinstance(packed, bytes) else b""
    if len(body) < 4 or _seal(place, body) != packed:
        raise BufferDamaged(f"the journal's row {place!r} is damaged")
    stop = 4 + int.from_bytes(body[:4], "little")
    record: dict[str, Any] = orjson.loads(body[4:stop])
    return record, body[stop:]


def _seal(place: Place, body: bytes) -> bytes:
    value: int = crt.crc32c(body, crt.crc32c(repr(place).encode("utf-8", "backslashreplace")))
    return value.to_bytes(_CRC_BYTES, "little") + body
