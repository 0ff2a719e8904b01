"""What an upload comes to when it is completed (S3 API, "CompleteMultipartUpload"). Pure, in S3's order of checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.s3.checksums import PREFIX, composite_checksum, full_object_checksum, upload_checksum_type
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import md5s_etag, unquote
from gateway.s3.xml import CompletedPart
from gateway.steps import Steps, each
from gateway.writeback.journal.records import Part

PART_SIZE_BYTES_MIN = 5 * 1024**2
"""Of every part but the last."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The object that the parts make. `checksums`: algorithm → value, as far as the parts' own tell it."""

    parts: Sequence[Part]
    etag: str
    size_bytes: int
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str | None = None


def complete(
    upload_id: str,
    create: Mapping[str, str],
    request: Mapping[str, str],
    stored: Mapping[int, Part],
    listed: Sequence[CompletedPart],
) -> Steps[Completion]:
    """`create` and `request` are the headers of Create and of Complete; `listed` is in ascending order.

    Raises S3Error InvalidPart, EntityTooSmall, InvalidPartOrder, InvalidRequest, BadDigest.
    """
    chosen = yield from each(lambda one: _part(upload_id, stored, one), listed)
    yield from each(_check_size, chosen[:-1])
    size_bytes = sum((yield from each(lambda part: part.file.size_bytes, chosen)))
    declared = request.get("x-amz-mp-object-size")
    if declared is not None and declared != str(size_bytes):
        raise s3_error("InvalidRequest", "The provided x-amz-mp-object-size does not match the size of the object.")
    checksums, checksum_type = yield from _checksums(create, chosen)
    _check_digest(request, checksums)
    etag = md5s_etag((yield from each(lambda part: part.file.md5, chosen)))
    return Completion(chosen, etag, size_bytes, checksums, checksum_type)


def _part(upload_id: str, stored: Mapping[int, Part], listed: CompletedPart) -> Part:
    part = stored.get(listed.number)
    if part is None or unquote(part.file.etag) != unquote(listed.etag) or not _checksums_fit(part, listed):
        raise s3_error("InvalidPart", UploadId=upload_id, PartNumber=str(listed.number), ETag=unquote(listed.etag))
    return part


def _checksums_fit(part: Part, listed: CompletedPart) -> bool:
    return all(part.checksums.get(name, value) == value for name, value in listed.checksums.items())


def _check_size(part: Part) -> None:
    if part.file.size_bytes < PART_SIZE_BYTES_MIN:
        raise s3_error(
            "EntityTooSmall",
            ProposedSize=str(part.file.size_bytes),
            MinSizeAllowed=str(PART_SIZE_BYTES_MIN),
            PartNumber=str(part.number),
            ETag=unquote(part.file.etag),
        )


def _checksums(create: Mapping[str, str], chosen: Sequence[Part]) -> Steps[tuple[dict[str, str], str | None]]:
    declared = create.get("x-amz-checksum-algorithm")
    if declared is None:
        return {}, None
    algorithm, checksum_type = upload_checksum_type(declared, create.get("x-amz-checksum-type"))
    own = yield from each(lambda part: part.checksums.get(algorithm), chosen)
    known = list(filter(None, own))
    # They are in ascending order.
    if len(known) == len(own) and (chosen[0].number, chosen[-1].number) != (1, len(chosen)):
        raise s3_error("InvalidPartOrder", "With a checksum for each part, part numbers must be consecutive from 1.")
    if checksum_type == "COMPOSITE":
        if len(known) < len(own):
            raise s3_error(
                "InvalidRequest",
                f"The upload was created using a {algorithm} checksum. The complete request must include the checksum "
                "for each part.",
            )
        return {algorithm: (yield from composite_checksum(algorithm, known))}, checksum_type
    if len(known) < len(own):
        return {}, None  # the origin computes it from the bytes
    sized = yield from each(lambda part: (part.checksums[algorithm], part.file.size_bytes), chosen)
    return {algorithm: (yield from full_object_checksum(algorithm, sized))}, checksum_type


def _check_digest(request: Mapping[str, str], checksums: Mapping[str, str]) -> None:
    for algorithm, value in checksums.items():
        if request.get(PREFIX + algorithm, value) != value:
            raise s3_error("BadDigest", f"The {algorithm} you specified did not match the calculated checksum.")
