"""The journal's records as rows, and back: JSON behind a CRC32C of the row's table, its keys and itself.

SQLite does not checksum its pages. A row that was changed without SQLite, or moved, raises BufferDamaged instead of
passing for what was acknowledged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import orjson
from awscrt import checksums as crt

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import ObjectKey
from gateway.core.steps import Steps, each
from gateway.s3.headers import unquote
from gateway.s3.xml import CompletedPart
from gateway.writeback.checkpoints.layouts import CheckpointName, Member
from gateway.writeback.journal.records import (
    BucketCapabilities,
    Conditions,
    CreateAttempt,
    ExpectedVersion,
    Honoured,
    LastOwnWrite,
    Part,
    Run,
    State,
    UploadOutcome,
    Write,
    WriteSpec,
)
from gateway.writeback.staged_file import TRAILER_VERSION, StagedFile

_CRC_BYTES = 4

Place = tuple[str | int | bytes, ...]
"""A row's table and the values of its key columns."""


def pack(place: Place, record: dict[str, Any]) -> bytes:
    head = orjson.dumps(record)
    return _seal(place, len(head).to_bytes(4, "little") + head)


def unpack(place: Place, packed: object) -> Any:
    """Return the record; BufferDamaged unless it was packed for this place.

    A damaged row may give a record that is no bytes at all.
    """
    body = packed[_CRC_BYTES:] if isinstance(packed, bytes) else b""
    if len(body) < 4 or _seal(place, body) != packed:
        raise BufferDamaged(f"the journal's row {place!r} is damaged")
    stop = 4 + int.from_bytes(body[:4], "little")
    return orjson.loads(body[4:stop])


def _seal(place: Place, body: bytes) -> bytes:
    value: int = crt.crc32c(body, crt.crc32c(repr(place).encode("utf-8", "backslashreplace")))
    return value.to_bytes(_CRC_BYTES, "little") + body


def pack_file(file: StagedFile) -> bytes:
    """Pack a file's row; `trailer` is the version of what lies behind the file's bytes."""
    record = {"size": file.size_bytes, "md5": file.md5.hex(), "trailer": TRAILER_VERSION}
    return pack(("files", file.name), record)


def unpack_file(name: str, packed: bytes) -> StagedFile:
    record = unpack(("files", name), packed)
    return StagedFile(name, record["size"], bytes.fromhex(record["md5"]))


def pack_part(write_id: int, part: Part) -> bytes:
    record = {
        "file": part.file.name,
        "stored": part.stored_at,
        "checksums": dict(part.checksums),
        "origin_etag": part.origin_etag,
    }
    if not part.file.is_here:
        record |= {"size": part.file.size_bytes, "md5": part.file.md5.hex()}
    return pack(("parts", write_id, part.number), record)


def unpack_part(write_id: int, number: int, packed: bytes, file: StagedFile | None) -> Part:
    """`file` None: only the origin has the part, or the row of its file is missing, which is BufferDamaged."""
    place = ("parts", write_id, number)
    record = unpack(place, packed)
    if file is None and record["file"]:
        raise BufferDamaged(f"the journal's row {place!r} names a file that it does not know")
    if file is None:
        file = StagedFile("", record["size"], bytes.fromhex(record["md5"]))
    return Part(number, file, record["stored"], record["checksums"], record["origin_etag"])


def pack_write(write: Write) -> bytes:
    """Pack a write without its parts, which have their own rows, and without fields at their defaults."""
    said = {
        "deleted": write.deleted,
        "multipart": write.multipart,
        "origin_upload": write.origin_upload_id,
        "checksums": dict(write.checksums),
        "acknowledged": write.acknowledged_at,
        "runs": [list(run) for run in write.runs],
        "conditions": dict(write.conditions),
        "asked_as": write.asked_as,
        "answer": write.answer,
        "asked": None if write.asked is None else _asked(write.asked),
        "touched": _moment(write.touched),
        "acknowledged_moment": _moment(write.acknowledged),
        "completed_of": write.completed_of or None,
        "behind": write.behind,
        "in_order": write.in_order,
        "checkpoint": _member(write.member),
        "etag_local": write.is_etag_local,
        "restarts": write.restarts,
    }
    record = {
        "bucket": write.key.bucket,
        "key": write.key.key,
        "headers": dict(write.spec.headers),
        "slot": write.spec.slot,
        "base": _expected_version(write.expected),
        "state": int(write.state),
        "began": write.began_at,
        "etag": write.etag,
        "size": write.size_bytes,
        "upload": write.upload_id,
        "sequence": write.sequence,
    }
    return pack(
        ("writes", write.id), record | {name: value for name, value in said.items() if value not in _SAYS_NOTHING}
    )


_SAYS_NOTHING: tuple[Any, ...] = (None, False, 0.0, [], {})


def unpack_write(write_id: int, packed: bytes) -> Write:
    record = unpack(("writes", write_id), packed)
    asked = record.get("asked")
    return Write(
        WriteSpec(ObjectKey(record["bucket"], record["key"]), record["headers"], record["slot"]),
        _as_expected_version(record["base"]),
        record["began"],
        State(record["state"]),
        record["etag"],
        record["size"],
        multipart=record.get("multipart", False),
        deleted=record.get("deleted", False),
        upload_id=record["upload"],
        origin_upload_id=record.get("origin_upload"),
        checksums=record.get("checksums", {}),
        acknowledged_at=record.get("acknowledged", 0.0),
        runs=tuple(Run(*run) for run in record.get("runs", ())),
        conditions=record.get("conditions", {}),
        asked_as=record.get("asked_as"),
        answer=record.get("answer"),
        asked=_as_asked(asked) if asked is not None else None,
        touched=_as_moment(record.get("touched")),
        acknowledged=_as_moment(record.get("acknowledged_moment")),
        completed_of=record.get("completed_of", ""),
        behind=record.get("behind"),
        in_order=record.get("in_order", False),
        member=_as_member(record.get("checkpoint"), record["bucket"], record["key"]),
        is_etag_local=record.get("etag_local", False),
        restarts=record.get("restarts", 0),
        id=write_id,
        sequence=record["sequence"],
    )


def _member(member: Member | None) -> list[Any] | None:
    """Return a member's fields; the length of its prefix is enough, as the key begins with it."""
    if member is None:
        return None
    name = member.checkpoint
    return [len(name.prefix), name.step, name.layout, member.rank]


def _as_member(said: list[Any] | None, bucket: str, key: str) -> Member | None:
    if said is None:
        return None
    length, step, layout, rank = said
    return Member(CheckpointName(bucket, key[:length], step, layout), rank)


def pack_ended(write_id: int, ended: UploadOutcome) -> bytes:
    record = {
        "upload": ended.upload_id,
        "bucket": ended.key.bucket,
        "key": ended.key.key,
        "at": ended.ended_at,
        "etag": ended.etag,
        "parts": ended.parts,
        "checksums": dict(ended.checksums),
    }
    return pack(("ended", write_id), record)


def unpack_ended(write_id: int, packed: bytes) -> UploadOutcome:
    record = unpack(("ended", write_id), packed)
    key = ObjectKey(record["bucket"], record["key"])
    return UploadOutcome(record["upload"], key, record["at"], record["etag"], record["parts"], record["checksums"])


def parts_digest(parts: Sequence[CompletedPart]) -> Steps[str]:
    """Return a digest of the numbers and unquoted ETags of a CompleteMultipartUpload."""
    lines = yield from each(lambda part: f"{part.number} {unquote(part.etag)}", parts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def pack_capabilities(bucket: str, capabilities: BucketCapabilities) -> bytes:
    known = capabilities.conditions
    record = {
        "md5_etags": capabilities.md5_etags,
        "may_look": capabilities.may_look,
        "learned": capabilities.learned_at,
        "multipart_etags": capabilities.multipart_etags,
        "conditions": [int(known.put), int(known.complete), int(known.delete), known.learned_at],
        "storage_classes": sorted(capabilities.storage_classes),
        "refused_forms": sorted(capabilities.refused_forms),
    }
    return pack(("profiles", bucket), record)


def unpack_capabilities(bucket: str, packed: bytes) -> BucketCapabilities:
    record = unpack(("profiles", bucket), packed)
    put, complete, delete, learned_at = record["conditions"]
    conditions = Conditions(Honoured(put), Honoured(complete), Honoured(delete), learned_at)
    return BucketCapabilities(
        record["md5_etags"],
        record["may_look"],
        record["learned"],
        conditions,
        record.get("multipart_etags", True),
        frozenset(record.get("storage_classes", ())),
        frozenset(record.get("refused_forms", ())),
    )


def pack_last_own_write(key: ObjectKey, own: LastOwnWrite) -> bytes:
    return pack(
        ("origin", key.bucket, key.key),
        {
            "at": own.at,
            "etag": own.etag,
            "known": own.known,
            "moment": _moment(own.moment),
            "answered": own.answered,
        },
    )


def unpack_last_own_write(key: ObjectKey, packed: bytes) -> LastOwnWrite:
    record = unpack(("origin", key.bucket, key.key), packed)
    moment = _as_moment(record.get("moment"))
    return LastOwnWrite(record["at"], record["etag"], record["known"], moment, record.get("answered"))


def _asked(asked: CreateAttempt) -> list[Any]:
    return [asked.worker, _moment(asked.begun), _moment(asked.in_doubt_since)]


def _expected_version(expected: ExpectedVersion) -> dict[str, Any]:
    said = {
        "etags": list(expected.etags),
        "absent": expected.absent,
        "known": expected.known,
        "asked": expected.asked_at,
    }
    return said if expected.asked is None else said | {"moment": _moment(expected.asked)}


def _as_expected_version(record: dict[str, Any]) -> ExpectedVersion:
    moment = _as_moment(record.get("moment"))
    return ExpectedVersion(tuple(record["etags"]), record["absent"], record["known"], record["asked"], moment)


def _moment(moment: Moment | None) -> list[Any] | None:
    return None if moment is None else [moment.at, moment.monotonic, moment.boot_id]


def _as_moment(record: list[Any] | None) -> Moment | None:
    return None if record is None else Moment(*record)


def _as_asked(record: list[Any]) -> CreateAttempt:
    worker, begun, suspect = record
    return CreateAttempt(worker, Moment(*begun), _as_moment(suspect))
