"""The messages of local reads, as gateway and client pack them (docs/local-reads.md). Integers are little-endian.

gateway: greeting, with a nonce       client: HELLO, with a proof of its key          gateway: WELCOME or REFUSED
client: RESOLVE, up to KEYS_MAX reads     gateway: what it has of each, with descriptors that the client lacks
client: RELEASE, files that it has closed: not answered        client: REPORT, a read whose bytes are wrong
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator

GREETING = b"FBYLOCAL\x01"
NONCE_BYTES = 32
HELLO, RESOLVE, RELEASE, REPORT, REFUSED = range(1, 6)
"""The first byte of a message; an answer begins with that of its question."""

ABSENT, GIVEN, LATER = range(3)
"""States of a read: the client reads it by HTTP; its place follows; the client asks again, as this answer is full."""

KEYS_MAX = 64
MESSAGE_BYTES_MAX = 96 * 1024
HELLO_BYTES_MAX = 16 * 1024
"""As much as a head of HTTP may have: the gateway keeps its texts as long as the connection lasts."""

CHUNK_BYTES = 64 * 1024
"""Bytes of one checksum (CRC32C); chunks are counted from the beginning of an extent."""

FILES_MAX = 64
"""Descriptors that come with one answer."""

FILE_ID_BYTES = 8

LENGTHS = struct.Struct("<HHH")
"""Lengths of the texts of a HELLO: access key id, session token, User-Agent. The proof follows them."""

WELCOME = struct.Struct("<BHH")
"""HELLO, the most files that a client may hold, and the seconds after which it must have released an unused one."""

READ = struct.Struct("<HQQ")
"""The length of a name, which follows; first byte; number of bytes, 0: to the end. A name is bucket, slash, key."""

ANSWER = struct.Struct("<BHH")
"""RESOLVE, the number of reads, and the number of new files, whose ids follow in the order of their descriptors."""

OBJECT = struct.Struct("<BBHQQ")
"""GIVEN, the length of the ETag, the number of extents, the object's size, and how many bytes of the read they have."""

EXTENT = struct.Struct("<8sQII")
"""File id, offset and length of whole chunks in the file, and how many of these bytes are before the read's first. The
checksums of the chunks follow, 4 bytes each."""


def proof(secret_access_key: str, nonce: bytes, access_key_id: str, session_token: str) -> bytes:
    """Return the proof that a client knows a secret key: an HMAC-SHA256 that signs nothing that S3 would accept."""
    signed = b"\0".join((GREETING, nonce, access_key_id.encode(), session_token.encode()))
    return hmac.digest(secret_access_key.encode(), signed, hashlib.sha256)


def pack_read(name: bytes, first: int, count: int) -> bytes:
    return READ.pack(len(name), first, count) + name


def reads_of(message: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, first byte and number of bytes of each read in a RESOLVE or REPORT. Raises ValueError."""
    position, left = 1, KEYS_MAX
    while position < len(message):
        if not left:
            raise ValueError("too many reads")
        left -= 1
        try:
            length, first, count = READ.unpack_from(message, position)
        except struct.error:
            raise ValueError("a read is cut off") from None
        position += READ.size + length
        if position > len(message):
            raise ValueError("a name is cut off")
        yield message[position - length : position], first, count
