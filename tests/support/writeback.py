"""Uploads, parts and pending objects for tests of the write-back buffer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from gateway.core.model import ObjectKey
from gateway.s3.headers import multipart_etag
from gateway.writeback.journal.records import ExpectedVersion, Part, State, Write, WriteSpec
from gateway.writeback.pending_key_filter import hash_slot_of
from gateway.writeback.staged_file import FOOTER_BYTES, StagedFile


def body_bytes(directory: Path) -> int:
    """Of all staged files below a directory, as they say themselves."""
    files = [path.read_bytes() for path in directory.rglob("w*/*")]
    footers = [one[-FOOTER_BYTES:] for one in files]
    return sum(int.from_bytes(one[16:24], "little") for one in footers if one.startswith(b"FBYSTAGE"))


class PlainPresence:
    """`PendingKeyFilter` without its file."""

    def __init__(self) -> None:
        self.places: set[int] = set()

    def may_be(self, key: ObjectKey) -> bool:
        return hash_slot_of(key) in self.places

    def anything(self) -> bool:
        return bool(self.places)

    def set(self, place: int) -> None:
        self.places.add(place)

    def keep(self, places: Iterable[int]) -> None:
        self.places = set(places)


def key(name: str) -> ObjectKey:
    return ObjectKey("bucket", name)


def spec(at: ObjectKey) -> WriteSpec:
    return WriteSpec(at, {"content-type": "text/plain", "x-amz-meta-name": "välue"}, "slot")


def md5(content: bytes) -> bytes:
    return hashlib.md5(content, usedforsecurity=False).digest()


def staged(name: str) -> StagedFile:
    """A file whose bytes are its name."""
    return StagedFile(name, len(name.encode()), md5(name.encode()))


def part(number: int, name: str) -> Part:
    return Part(number, staged(name), 12.5, {"crc32": "AAAAAA=="})


def upload(upload_id: str, at: ObjectKey, origin_upload_id: str | None = None) -> Write:
    return Write(
        spec(at),
        ExpectedVersion(('"old"',)),
        3.25,
        State.OPEN,
        multipart=True,
        upload_id=upload_id,
        origin_upload_id=origin_upload_id,
    )


def pending(
    at: ObjectKey,
    name: str | None = None,
    *,
    parts: Sequence[Part] = (),
    multipart: bool = False,
    deleted: bool = False,
    origin_upload_id: str | None = None,
) -> Write:
    """Of one part that is called `name`, or of the given ones; not yet in any journal."""
    parts = (part(1, name),) if name is not None else tuple(parts)
    etags = [one.file.etag for one in parts]
    etag = (multipart_etag(etags) if multipart else etags[0]) if etags else ""
    return Write(
        spec(at),
        ExpectedVersion(absent=True),
        99.5,
        etag=etag or "",
        size_bytes=sum(one.file.size_bytes for one in parts),
        parts=parts,
        multipart=multipart,
        deleted=deleted,
        upload_id="u" if multipart else None,
        origin_upload_id=origin_upload_id,
        acknowledged_at=99.5,
    )
