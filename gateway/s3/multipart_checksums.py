"""Checksums of objects made of parts (S3 API, "Checking object integrity for data uploads": composite and full object).

COMPOSITE is the checksum of the parts' raw checksums, followed by `-N`; FULL_OBJECT is the CRC of the whole, which can
be computed from the parts' CRCs and lengths alone.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Literal

from gateway.errors import S3Error
from gateway.s3.checksums import ALGORITHMS, Checksum, decode_checksum
from gateway.s3.error_codes import s3_error

ChecksumType = Literal["COMPOSITE", "FULL_OBJECT"]


def upload_checksum_type(algorithm: str | None, checksum_type: str | None) -> tuple[str, ChecksumType]:
    """Algorithm (lower-case) and type of an upload, from the headers of CreateMultipartUpload.

    Without any, S3 computes CRC64NVME of the whole. Raises S3Error InvalidRequest for a pair that does not exist.
    """
    if algorithm is None:
        if checksum_type is not None:
            raise s3_error(
                "InvalidRequest", "The x-amz-checksum-type header can only be used with x-amz-checksum-algorithm."
            )
        return "crc64nvme", "FULL_OBJECT"
    name = algorithm.lower()
    if name not in ALGORITHMS:
        raise s3_error("InvalidRequest", "Checksum algorithm provided is unsupported.")
    return name, _type_of(name, checksum_type)


def _type_of(name: str, checksum_type: str | None) -> ChecksumType:
    known = ALGORITHMS[name]
    wanted = checksum_type.upper() if checksum_type else "COMPOSITE" if known.composite else "FULL_OBJECT"
    if wanted == "COMPOSITE" and known.composite:
        return "COMPOSITE"
    if wanted == "FULL_OBJECT" and known.combine is not None:
        return "FULL_OBJECT"
    raise _no_such_pair(wanted, name)


def _no_such_pair(checksum_type: str, name: str) -> S3Error:
    return s3_error(
        "InvalidRequest",
        f"The {checksum_type} checksum type cannot be used with the {name} checksum algorithm.",
    )


def composite_checksum(algorithm: str, part_checksums: Sequence[str]) -> str:
    """The COMPOSITE checksum of parts whose own are given in base64: `uWBwpe1d…=-3`."""
    whole = Checksum(algorithm)
    for value in part_checksums:
        whole.update(decode_checksum(algorithm, value))
    return f"{whole.base64()}-{len(part_checksums)}"


def full_object_checksum(algorithm: str, parts: Sequence[tuple[str, int]]) -> str:
    """The FULL_OBJECT checksum of (base64 checksum, length in bytes) parts in order.

    Raises S3Error InvalidRequest for an algorithm that cannot be combined.
    """
    known = ALGORITHMS[algorithm]
    if known.combine is None:
        raise _no_such_pair("FULL_OBJECT", algorithm)
    value = 0
    for checksum, size_bytes in parts:
        part = int.from_bytes(decode_checksum(algorithm, checksum), "big")
        value = known.combine(value, part, size_bytes)
    return base64.b64encode(value.to_bytes(known.size_bytes, "big")).decode()
