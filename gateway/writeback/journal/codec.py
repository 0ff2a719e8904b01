"""The journal's records as rows, and back: JSON behind a CRC32C of the row's table, its keys and itself.

SQLite does not checksum its pages. A row that was changed without SQLite, or moved, raises BufferDamaged instead of
passing for what was acknowledged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from awscrt import checksums as crt

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import ObjectKey
from gateway.core.steps import Steps, each
from gateway.s3.headers import unquote
from gateway.s3.xml import CompletedPart
from gateway.writeback.checkpoints.layouts import CheckpointName, Member
from gateway.writeback.files import trailer
from gateway.writeback.files.staged_file import StagedFile
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

_CRC_BYTES = 4

Place = tuple[str | int | bytes, ...]
"""A row's table and the values of its key columns."""


def pack(place: Place, record: dict[str, Any], tail: bytes = b"") -> bytes:
    """`tail` are bytes that would be long as JSON."""
    head = orjson.dumps(record)
    return _seal(place, len(head).to_bytes(4, "little") + head + tail)


def unpack(place: Place, packed: object) -> tuple[dict[str, Any], bytes]:
    """Return the record and its tail; BufferDamaged unless they were packed for this place.

    A damaged row may give a record that is no bytes at all.
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
    """Pack a file's row; `trailer` is the version of what lies behind the file's bytes."""
    record = {"size": file.size_bytes, "md5": file.md5.hex(), "trailer": trailer.VERSION}
    return pack(("files", file.name), record)


def unpack_file(name: str, packed: bytes) -> StagedFile:
    record, _ = unpack(("files", name), packed)
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
    record, _ = unpack(place, packed)
    if file is None and record["file"]:
        raise BufferDamaged(f"the journal's row {place!r} names a file that it does not know")
    if file is None:
        file = StagedFile("", record["size"], bytes.fromhex(record["md5"]))
    return Part(number, file, record["stored"], record["checksums"], record["origin_etag"])


# Records whose fields are attributes, each in the record under a name of its own. The order is that of the bytes.


def _same(value: Any) -> Any:
    return value


class _Field(NamedTuple):
    attribute: str
    pack: Callable[[Any], Any] = _same
    unpack: Callable[[Any], Any] = _same


def _packed(fields: Mapping[str, _Field], value: object) -> dict[str, Any]:
    return {name: field.pack(getattr(value, field.attribute)) for name, field in fields.items()}


def _attributes(fields: Mapping[str, _Field], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes that a record has; the others have their defaults."""
    return {field.attribute: field.unpack(record[name]) for name, field in fields.items() if name in record}


def _pack_moment(moment: Moment | None) -> list[Any] | None:
    return None if moment is None else [moment.at, moment.monotonic, moment.boot_id]


def _unpack_moment(record: list[Any] | None) -> Moment | None:
    return None if record is None else Moment(*record)


def _pack_expected(expected: ExpectedVersion) -> dict[str, Any]:
    said = _packed(_EXPECTED, expected)
    return said if expected.asked is None else said | {"moment": _pack_moment(expected.asked)}


def _unpack_expected(record: dict[str, Any]) -> ExpectedVersion:
    return ExpectedVersion(**_attributes(_EXPECTED, record), asked=_unpack_moment(record.get("moment")))


def _pack_asked(asked: CreateAttempt | None) -> list[Any] | None:
    return None if asked is None else [asked.worker, _pack_moment(asked.begun), _pack_moment(asked.in_doubt_since)]


def _unpack_asked(record: list[Any]) -> CreateAttempt:
    worker, begun, in_doubt_since = record
    return CreateAttempt(worker, Moment(*begun), _unpack_moment(in_doubt_since))


def _pack_member(member: Member | None) -> list[Any] | None:
    """The key's length tells a prefix of it."""
    return (
        None
        if member is None
        else [len(member.checkpoint.prefix), member.checkpoint.step, member.checkpoint.layout, member.rank]
    )


def _unpack_member(said: list[Any] | None, key: ObjectKey) -> Member | None:
    if said is None:
        return None
    length, step, layout, rank = said
    return Member(CheckpointName(key.bucket, key.key[:length], step, layout), rank)


def _unpack_conditions(said: list[Any]) -> Conditions:
    put, complete, delete, learned_at = said
    return Conditions(Honoured(put), Honoured(complete), Honoured(delete), learned_at)


_EXPECTED = {
    "etags": _Field("etags", list, tuple),
    "absent": _Field("absent"),
    "known": _Field("known"),
    "asked": _Field("asked_at"),
}
_WRITE = {
    "base": _Field("expected", _pack_expected, _unpack_expected),
    "state": _Field("state", int, State),
    "began": _Field("began_at"),
    "etag": _Field("etag"),
    "size": _Field("size_bytes"),
    "upload": _Field("upload_id"),
    "sequence": _Field("sequence"),
}
_WRITE_BESIDES = {
    "deleted": _Field("deleted"),
    "multipart": _Field("multipart"),
    "origin_upload": _Field("origin_upload_id"),
    "checksums": _Field("checksums", dict),
    "acknowledged": _Field("acknowledged_at"),
    "runs": _Field("runs", lambda runs: list(map(list, runs)), lambda runs: tuple(Run(*run) for run in runs)),
    "conditions": _Field("conditions", dict),
    "asked_as": _Field("asked_as"),
    "answer": _Field("answer"),
    "asked": _Field("asked", _pack_asked, _unpack_asked),
    "touched": _Field("touched", _pack_moment, _unpack_moment),
    "acknowledged_moment": _Field("acknowledged", _pack_moment, _unpack_moment),
    "completed_of": _Field("completed_of", lambda digest: digest or None),
    "behind": _Field("behind"),
    "in_order": _Field("in_order"),
    "checkpoint": _Field("member", _pack_member),
    "etag_local": _Field("is_etag_local"),
}
"""Fields that a record leaves out where they say nothing."""
_ENDED = {
    "at": _Field("ended_at"),
    "etag": _Field("etag"),
    "parts": _Field("parts"),
    "checksums": _Field("checksums", dict),
}
_CAPABILITIES = {
    "md5_etags": _Field("md5_etags"),
    "may_look": _Field("may_look"),
    "learned": _Field("learned_at"),
    "multipart_etags": _Field("multipart_etags"),
    "conditions": _Field(
        "conditions", lambda one: [*map(int, (one.put, one.complete, one.delete)), one.learned_at], _unpack_conditions
    ),
    "storage_classes": _Field("storage_classes", sorted, frozenset),
    "refused_forms": _Field("refused_forms", sorted, frozenset),
}
_OWN_WRITE = {
    "at": _Field("at"),
    "etag": _Field("etag"),
    "known": _Field("known"),
    "moment": _Field("moment", _pack_moment, _unpack_moment),
    "answered": _Field("answered"),
}

_SAYS_NOTHING: tuple[Any, ...] = (None, False, 0.0, [], {})


def pack_write(write: Write) -> bytes:
    """Pack a write without its parts, which have their own rows, and without fields at their defaults."""
    spec = {
        "bucket": write.key.bucket,
        "key": write.key.key,
        "headers": dict(write.spec.headers),
        "slot": write.spec.slot,
    }
    said = {name: value for name, value in _packed(_WRITE_BESIDES, write).items() if value not in _SAYS_NOTHING}
    return pack(("writes", write.id), spec | _packed(_WRITE, write) | said)


def unpack_write(write_id: int, packed: bytes) -> Write:
    record, _ = unpack(("writes", write_id), packed)
    key, member = ObjectKey(record["bucket"], record["key"]), record.pop("checkpoint", None)
    return Write(
        WriteSpec(key, record["headers"], record["slot"]),
        id=write_id,
        member=_unpack_member(member, key),
        **_attributes(_WRITE, record),
        **_attributes(_WRITE_BESIDES, record),
    )


def pack_ended(write_id: int, ended: UploadOutcome) -> bytes:
    named = {"upload": ended.upload_id, "bucket": ended.key.bucket, "key": ended.key.key}
    return pack(("ended", write_id), named | _packed(_ENDED, ended))


def unpack_ended(write_id: int, packed: bytes) -> UploadOutcome:
    record, _ = unpack(("ended", write_id), packed)
    key = ObjectKey(record["bucket"], record["key"])
    return UploadOutcome(record["upload"], key, **_attributes(_ENDED, record))


def pack_capabilities(bucket: str, capabilities: BucketCapabilities) -> bytes:
    return pack(("profiles", bucket), _packed(_CAPABILITIES, capabilities))


def unpack_capabilities(bucket: str, packed: bytes) -> BucketCapabilities:
    return BucketCapabilities(**_attributes(_CAPABILITIES, unpack(("profiles", bucket), packed)[0]))


def pack_last_own_write(key: ObjectKey, own: LastOwnWrite) -> bytes:
    return pack(("origin", key.bucket, key.key), _packed(_OWN_WRITE, own))


def unpack_last_own_write(key: ObjectKey, packed: bytes) -> LastOwnWrite:
    return LastOwnWrite(**_attributes(_OWN_WRITE, unpack(("origin", key.bucket, key.key), packed)[0]))


def parts_digest(parts: Sequence[CompletedPart]) -> Steps[str]:
    """Return a digest of the numbers and unquoted ETags of a CompleteMultipartUpload."""
    lines = yield from each(lambda part: f"{part.number} {unquote(part.etag)}", parts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
