"""What a slot's snapshot says of an object that a job is about."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.errors import NoSuchSnapshot, OriginAnswered, SnapshotError
from gateway.jobs.patience import patiently
from gateway.jobs.tools import Tools
from gateway.metadata.catalog import CHECKSUM_MODE, ObjectHead
from gateway.metadata.listing.records import etag_and_size
from gateway.metadata.snapshots.registry import check_covers
from gateway.objects import ObjectKey, ObjectVersion
from gateway.policy.slots import Slot
from gateway.s3.etags import quote


def frozen_version(tools: Tools, key: ObjectKey, slot: Slot) -> ObjectVersion | None:
    """The frozen version; None where there was no such object. SnapshotError, StoreUnavailable. Blocks."""
    if tools.snapshots is None:
        raise NoSuchSnapshot(f"there is no snapshot {slot.snapshot!r}")
    with tools.snapshots.opened(slot.snapshot) as snapshot:
        check_covers(snapshot.manifest, slot)
        record = snapshot.data.record(key.key.encode())
        if record is None:
            return None
        return ObjectVersion(key, *etag_and_size(record))


async def learn_version(tools: Tools, version: ObjectVersion, slot: Slot, headers: Mapping[str, str]) -> ObjectVersion:
    """The version as the origin names it, which learns its head on the way, where it is not known.

    SnapshotError when the origin has another version now.
    """
    with_checksums = CHECKSUM_MODE in headers
    known = tools.catalog.of_version(version, with_checksums=with_checksums)
    if known is not None:
        return known.version
    etag = quote(version.etag.removeprefix("W/"))

    async def ask() -> ObjectHead:
        return await tools.catalog.ask(version.key, slot, headers={**headers, "if-match": etag})

    try:
        head = await patiently(tools.clock, ask)
    except OriginAnswered as answer:
        if answer.status in (404, 412):
            raise SnapshotError(f"the origin does not have it with ETag {etag} any more") from None
        raise
    if (quote(head.version.etag.removeprefix("W/")), head.version.size_bytes) != (etag, version.size_bytes):
        raise SnapshotError(f"the origin does not have it with ETag {etag} any more")
    tools.catalog.learned_version(head, with_checksums=with_checksums)
    return head.version
