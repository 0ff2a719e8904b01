"""The protocol between the nodes of a cluster: S3 GET and HEAD, and the headers beside S3's.

A peer is an origin that already has the block: a node sends it the GET with `If-Match` that it would send the bucket,
signed with SigV4 by the cluster's secret. The answer carries a proof that the peer knows the secret, and the
checksums of all bytes of its body.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Protocol

from awscrt.checksums import crc32c

from gateway.core.model import ObjectKey

VERSION: Final = "1"
"""The protocol's version. A node of another one is not asked."""

# Of requests; the signature covers all of them.
PEER = "x-forebay-peer"
"""The protocol's version."""
HOME = "x-forebay-home"
"""Digest of the bucket's home (`home_digest`): a peer that has the bucket elsewhere answers 421."""
SIZE = "x-forebay-size"
"""Size of the version that `If-Match` names, in bytes: nothing has to be asked of the bucket to read its blocks."""
MAX_AGE = "x-forebay-max-age"
"""The greatest age in seconds that the asker can use of what is remembered of an object."""
ONLY = "x-forebay-only"
"""The peer answers from its disk, or 404, and asks nobody. With TAKEN it waits for what is just coming."""
CACHED, TAKEN = "cached", "taken"
LAST = "x-forebay-last"
"""`1`: the peer sends the bytes, and names nobody else."""
FROM = "x-forebay-from"
"""The asker's own address, which others may be told."""
NONCE = "x-forebay-nonce"
"""128 random bits, hexadecimal: a request with one that was seen before is a replay."""
TO = "x-forebay-to"
"""The peer's own address, as its last answer had it in BY: no other node takes the request."""
PURPOSE = "x-forebay-purpose"
"""The `Purpose` of the read."""
DOUBT = "x-forebay-doubt"
"""`1`, with a HEAD of a range: these bytes came damaged, so verify them on the disk, and drop what is damaged.

A HEAD of a range of a named version without it has the peer keep these bytes: 200 if it has them, 201 once it has.
"""

PIN = "x-forebay-pin"
"""With a HEAD of a range that the peer is to keep: it pins what it looks after under a prefix of the key, the key's
first so many characters. 409: it cannot."""
UNPIN = "x-forebay-unpin"
"""With a HEAD: the peer lets go of that prefix, if it is pinned over the cluster; 404: it is not."""
STORE = "x-forebay-store"
"""The name of the peer's buffer that the request is about: a client's, sent on, or a question at STORE_PATH.

In an answer, NOT_PENDING: what it asks for is not pending there.
"""
ANY_STORE, NOT_PENDING = "*", "not-pending"
STORE_PATH: Final = b"/-/store"

DURABLE: Final = "x-forebay-durable"
"""Says whether the bucket has all that a marker speaks for; clients get this header, too."""

NOT_ABSORBED: Final = "x-forebay-not-absorbed"
"""Why a client's write, sent on, goes through; clients get this header, too."""

FOR_CLIENTS: Final = frozenset({DURABLE, NOT_ABSORBED})

# Of answers; the proof covers them and all that tells of the object.
AGE = "x-forebay-age"
"""Seconds since the bucket was asked about the object."""
BY = "x-forebay-by"
"""The peer's own address, which the asker may know it by or not."""
DATE = "x-forebay-date"
"""The `Date` of the bucket's answer."""
CRC32C = "x-forebay-crc32c"
"""Base64 of the CRC32C of each 64 KiB of the body, from its first byte on, as the blocks on disk have them."""
ASK = "x-forebay-ask"
"""With status 303: addresses of up to three nodes that have just got these bytes."""
PROOF = "x-forebay-proof"

BUCKET_AWAY: Final = 504
"""Status: the peer gets no answer of use from the bucket. With 503, it is busy itself, and is asked again."""

_UNPROVED = frozenset({"connection", "date", "server", "x-amz-id-2", "x-amz-request-id", PROOF})
"""Headers that the server adds to each answer, or that tell nothing of the object."""

CHUNK_BYTES, CHECKSUM_BYTES = 64 * 1024, 4

COPY = ":copy"
"""Among the headers of a request to the origin: another node looks after these bytes, so ask it.

It never leaves the process, and never comes in: no header has such a name on the wire. Fetches with it share nothing
with those without: a peer's request is read without it, so it never waits for a fetch that asks a peer, and two nodes
never wait for each other.
"""

COPY_ALONE: Final[Mapping[str, str]] = MappingProxyType({COPY: "1"})

FROM_BUCKET = "bucket"
"""As the value of COPY: what a peer sent is of no use, so ask the bucket, by ration."""


class Roles(Protocol):
    """Says which blocks other nodes look after."""

    def headers(self, key: ObjectKey, number: int, headers: Mapping[str, str], slot: str) -> Mapping[str, str]:
        """Return the headers for a request for bytes of block `number`: with COPY if another node looks after it."""

    def owners(self, key: ObjectKey, number: int) -> tuple[tuple[str, bool], ...]:
        """Return the addresses of a block's first and second owner, each with whether that is this node."""

    def owns(self, key: ObjectKey, number: int) -> bool:
        """Return True if this node is the first owner, also of those that are silent. Any thread."""


@lru_cache(maxsize=1024)
def home_digest(endpoint_url: str) -> str:
    return hashlib.blake2b(endpoint_url.encode(), digest_size=8).hexdigest()


def chunk_checksums(content: bytes | memoryview) -> bytes:
    """Return the checksums of a body, packed as CRC32C has them."""
    view = memoryview(content)
    parts = (view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES))
    return b"".join(crc32c(part).to_bytes(CHECKSUM_BYTES, "little") for part in parts)


def encode_checksums(packed: bytes) -> str:
    return base64.b64encode(packed).decode()


def new_nonce() -> str:
    return secrets.token_hex(16)


def proof(secret: bytes, nonce: str, status: int, headers: Mapping[str, str]) -> str:
    """Return PROOF of an answer with these headers, whose names are in lower case, to the request with this nonce."""
    return proof_of(secret, proved_text(nonce, status, headers))


def proved_text(nonce: str, status: int, headers: Mapping[str, str]) -> bytes:
    lines = sorted([f"{name}:{value}" for name, value in headers.items() if name not in _UNPROVED])
    return "\n".join([nonce, str(status), *lines]).encode("latin-1")


def proof_of(secret: bytes, text: bytes) -> str:
    return base64.b64encode(hmac.digest(secret, text, "sha256")).decode()
