"""The journal's records as rows, and back: JSON behind a CRC32C of the row's table, its keys and itself.

SQLite does not checksum its pages. A row that was changed behind its back, or belongs elsewhere, is BufferDamaged: it
is never taken for what was acknowledged.
"""

from __future__ import annotations

from typing import Any

import orjson
from awscrt import checksums as crt

from gateway.errors import BufferDamaged
from gateway.objects import ObjectKey
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal.records import (
    Base,
    Ended,
    Fixed,
    Intent,
    Orphan,
    OwnDoing,
    Part,
    PendingObject,
    Profile,
    State,
    Upload,
)

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


def pack_file(file: StagedFile) -> bytes:
    return pack(("files", file.name), {"size": file.size_bytes, "md5": file.md5.hex()}, file.checksums)


def unpack_file(name: str, packed: bytes) -> StagedFile:
    record, checksums = unpack(("files", name), packed)
    return StagedFile(name, record["size"], bytes.fromhex(record["md5"]), checksums)


def pack_upload(upload: Upload) -> bytes:
    record = _fixed(upload.fixed) | {
        "base": _base(upload.base),
        "initiated": upload.initiated_at,
        "origin_upload": upload.origin_upload_id,
    }
    return pack(("uploads", upload.upload_id), record)


def unpack_upload(upload_id: str, packed: bytes) -> Upload:
    record, _ = unpack(("uploads", upload_id), packed)
    return Upload(upload_id, _as_fixed(record), _as_base(record["base"]), record["initiated"], record["origin_upload"])


def pack_part(place: Place, part: Part) -> bytes:
    """`place` says whether it is a part of an upload or of a pending object."""
    record = {
        "file": part.file.name,
        "stored": part.stored_at,
        "checksums": dict(part.checksums),
        "origin_etag": part.origin_etag,
    }
    if not part.file.is_here:
        record |= {"size": part.file.size_bytes, "md5": part.file.md5.hex()}
    return pack(place, record)


def unpack_part(place: Place, number: int, packed: bytes, file: StagedFile | None) -> Part:
    """`file` None: only the origin has the part, or the row of its file is missing, which is BufferDamaged."""
    record, _ = unpack(place, packed)
    if file is None and record["file"]:
        raise BufferDamaged(f"the journal's row {place!r} names a file that it does not know")
    if file is None:
        file = StagedFile("", record["size"], bytes.fromhex(record["md5"]), b"")
    return Part(number, file, record["stored"], record["checksums"], record["origin_etag"])


def pack_object(pending: PendingObject) -> bytes:
    record = _fixed(pending.fixed) | {
        "base": _base(pending.base),
        "acknowledged": pending.acknowledged_at,
        "etag": pending.etag,
        "size": pending.size_bytes,
        "multipart": pending.multipart,
        "deleted": pending.deleted,
        "upload": pending.upload_id,
        "origin_upload": pending.origin_upload_id,
        "checksums": dict(pending.checksums),
        "state": pending.state.value,
    }
    return pack(("objects", pending.sequence), record)


def unpack_object(sequence: int, packed: bytes) -> PendingObject:
    """Without its parts, which are rows of their own."""
    record, _ = unpack(("objects", sequence), packed)
    return PendingObject(
        sequence,
        _as_fixed(record),
        _as_base(record["base"]),
        record["acknowledged"],
        record["etag"],
        record["size"],
        multipart=record["multipart"],
        deleted=record["deleted"],
        upload_id=record["upload"],
        origin_upload_id=record["origin_upload"],
        checksums=record["checksums"],
        state=State(record["state"]),
    )


def pack_ended(ended: Ended) -> bytes:
    return pack(("ended", ended.upload_id), _ended(ended))


def unpack_ended(upload_id: str, packed: bytes) -> Ended:
    return _as_ended(upload_id, unpack(("ended", upload_id), packed)[0])


def pack_completing(asked: Ended) -> bytes:
    return pack(("completing", asked.upload_id), _ended(asked))


def unpack_completing(upload_id: str, packed: bytes) -> Ended:
    return _as_ended(upload_id, unpack(("completing", upload_id), packed)[0])


def pack_orphan(orphan: Orphan) -> bytes:
    record = {"bucket": orphan.key.bucket, "key": orphan.key.key}
    return pack(("orphans", orphan.origin_upload_id), record)


def unpack_orphan(origin_upload_id: str, packed: bytes) -> Orphan:
    record, _ = unpack(("orphans", origin_upload_id), packed)
    return Orphan(ObjectKey(record["bucket"], record["key"]), origin_upload_id)


def pack_intent(intent: Intent) -> bytes:
    record = {
        "worker": intent.worker,
        "bucket": intent.key.bucket,
        "key": intent.key.key,
        "asked": intent.asked_at,
        "suspect": intent.suspect_since,
    }
    return pack(("intents", intent.token), record)


def unpack_intent(token: str, packed: bytes) -> Intent:
    record, _ = unpack(("intents", token), packed)
    key = ObjectKey(record["bucket"], record["key"])
    return Intent(token, record["worker"], key, record["asked"], record["suspect"])


def pack_profile(bucket: str, profile: Profile) -> bytes:
    return pack(
        ("profiles", bucket),
        {"md5_etags": profile.md5_etags, "may_look": profile.may_look, "learned": profile.learned_at},
    )


def unpack_profile(bucket: str, packed: bytes) -> Profile:
    record, _ = unpack(("profiles", bucket), packed)
    return Profile(record["md5_etags"], record["may_look"], record["learned"])


def pack_own_doing(key: ObjectKey, own: OwnDoing) -> bytes:
    return pack(("origin", key.bucket, key.key), {"at": own.at, "etag": own.etag, "known": own.known})


def unpack_own_doing(key: ObjectKey, packed: bytes) -> OwnDoing:
    record, _ = unpack(("origin", key.bucket, key.key), packed)
    return OwnDoing(record["at"], record["etag"], record["known"])


def _fixed(fixed: Fixed) -> dict[str, Any]:
    return {
        "bucket": fixed.key.bucket,
        "key": fixed.key.key,
        "headers": dict(fixed.headers),
        "slot": fixed.slot,
    }


def _as_fixed(record: dict[str, Any]) -> Fixed:
    return Fixed(ObjectKey(record["bucket"], record["key"]), record["headers"], record["slot"])


def _base(base: Base) -> dict[str, Any]:
    return {"etags": list(base.etags), "absent": base.absent, "known": base.known, "asked": base.asked_at}


def _as_base(record: dict[str, Any]) -> Base:
    return Base(tuple(record["etags"]), record["absent"], record["known"], record["asked"])


def _ended(ended: Ended) -> dict[str, Any]:
    return {
        "bucket": ended.key.bucket,
        "key": ended.key.key,
        "at": ended.ended_at,
        "etag": ended.etag,
        "parts": list(ended.parts),
    }


def _as_ended(upload_id: str, record: dict[str, Any]) -> Ended:
    parts = [(number, etag) for number, etag in record["parts"]]
    return Ended(upload_id, ObjectKey(record["bucket"], record["key"]), record["at"], record["etag"], parts)
