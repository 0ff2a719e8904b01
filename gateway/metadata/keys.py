"""An object's place in the catalog: ordered by bucket, then key, byte by byte, as S3 lists them."""

from __future__ import annotations

import hashlib

from gateway.objects import ObjectKey, ObjectVersion

CATALOG_KEY_BYTES_MAX = 511
"""What LMDB takes."""

_DIGEST_BYTES = 32


def catalog_key(key: ObjectKey) -> bytes:
    """Bucket, a zero byte, key. A longer one is cut and ends in a digest of all of it.

    Cut keys have the greatest length there is, others are shorter: the two are never mistaken for each other.
    """
    whole = f"{key.bucket}\0{key.key}".encode("utf-8", "surrogatepass")
    if len(whole) < CATALOG_KEY_BYTES_MAX:
        return whole
    digest = hashlib.blake2b(whole, digest_size=_DIGEST_BYTES, person=b"forebay catalog1").digest()
    return whole[: CATALOG_KEY_BYTES_MAX - _DIGEST_BYTES] + digest


def version_key(version: ObjectVersion) -> bytes:
    """One version's place: a digest, as nobody asks for versions in order."""
    key = version.key
    whole = f"{key.bucket}\0{len(key.key)}\0{key.key}{version.etag}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(whole, digest_size=_DIGEST_BYTES, person=b"forebay version1").digest()
