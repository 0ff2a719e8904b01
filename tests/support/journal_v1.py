"""A journal as version 1 wrote it: its tables are those of migration.py, its records those of its codec."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.model import ObjectKey
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal import codec, migration
from gateway.writeback.journal.records import ExpectedVersion, Part, WriteSpec
from gateway.writeback.pending_key_filter import hash_slot_of

APPLICATION_ID = 0x464F5242


class JournalV1:
    """Writes rows. `pack` of the codec is the same in both versions."""

    def __init__(self, path: Path) -> None:
        self.rows = sqlite3.connect(path, isolation_level=None)
        self.rows.execute("PRAGMA journal_mode = WAL")
        migration.create(self.rows)
        self.rows.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self.rows.execute("BEGIN")

    def close(self) -> None:
        self.rows.execute("COMMIT")
        self.rows.close()

    def upload(
        self, upload_id: str, spec: WriteSpec, expected: ExpectedVersion, at: float, origin_upload_id: str | None = None
    ) -> None:
        record = _fixed(spec) | {
            "base": _expected_version(expected),
            "initiated": at,
            "origin_upload": origin_upload_id,
        }
        packed = codec.pack(("uploads", upload_id), record)
        self._insert("uploads", upload_id, spec.key.bucket, _encoded(spec.key), spec.slot, packed)

    def part(self, upload_id: str, part: Part, slot: str = "slot") -> None:
        self._file(part.file, slot)
        packed = codec.pack(("parts", upload_id, part.number), _part(part))
        is_sent = part.origin_etag is not None
        self._insert("parts", upload_id, part.number, part.file.name, slot, is_sent, packed)

    def object(
        self,
        spec: WriteSpec,
        expected: ExpectedVersion,
        parts: Sequence[Part],
        state: str = "waiting",
        etag: str = "",
        upload_id: str | None = None,
        origin_upload_id: str | None = None,
        checksums: Mapping[str, str] | None = None,
        *,
        multipart: bool = False,
        deleted: bool = False,
    ) -> int:
        """Its sequence; acknowledged at 1000 and so many seconds."""
        key, size_bytes = spec.key, sum(part.file.size_bytes for part in parts)
        inserted = self.rows.execute(
            "INSERT INTO objects (bucket, key, place, slot, startable, size_bytes, record) "
            "VALUES (?, ?, ?, ?, ?, ?, x'')",
            (key.bucket, _encoded(key), hash_slot_of(key), spec.slot, int(state != "conflict"), size_bytes),
        )
        sequence = int(inserted.lastrowid or 0)
        record = _fixed(spec) | {
            "base": _expected_version(expected),
            "acknowledged": 1000.0 + sequence,
            "etag": etag,
            "size": size_bytes,
            "multipart": multipart,
            "deleted": deleted,
            "upload": upload_id,
            "origin_upload": origin_upload_id,
            "checksums": dict(checksums or {}),
            "state": state,
        }
        packed = codec.pack(("objects", sequence), record)
        self.rows.execute("UPDATE objects SET record = ? WHERE sequence = ?", (packed, sequence))
        for part in parts:
            self._file(part.file, spec.slot)
            packed = codec.pack(("pieces", sequence, part.number), _part(part))
            is_sent = part.origin_etag is not None
            self._insert("pieces", sequence, part.number, part.file.name, is_sent, part.file.size_bytes, packed)
        return sequence

    def ended(
        self,
        upload_id: str,
        key: ObjectKey,
        at: float,
        etag: str | None,
        parts: Sequence[tuple[int, str]] = (),
        table: str = "ended",
    ) -> None:
        """`table` "completing": the origin is being asked for it."""
        record = {"bucket": key.bucket, "key": key.key, "at": at, "etag": etag, "parts": list(parts)}
        self._insert(table, upload_id, at, codec.pack((table, upload_id), record))

    def intent(self, token: str, key: ObjectKey, worker: int, at: float, suspect: float | None = None) -> None:
        record = {"worker": worker, "bucket": key.bucket, "key": key.key, "asked": at, "suspect": suspect}
        packed = codec.pack(("intents", token), record)
        self._insert("intents", token, worker, suspect is not None, key.bucket, _encoded(key), packed)

    def orphan(self, origin_upload_id: str, key: ObjectKey) -> None:
        packed = codec.pack(("orphans", origin_upload_id), {"bucket": key.bucket, "key": key.key})
        self._insert("orphans", origin_upload_id, packed)

    def capabilities(self, bucket: str, *, md5_etags: bool, may_look: bool, at: float) -> None:
        record = {"md5_etags": md5_etags, "may_look": may_look, "learned": at}
        self._insert("profiles", bucket, codec.pack(("profiles", bucket), record))

    def last_own_write(self, key: ObjectKey, at: float, etag: str | None, *, known: bool = True) -> None:
        packed = codec.pack(("origin", key.bucket, key.key), {"at": at, "etag": etag, "known": known})
        self._insert("origin", key.bucket, _encoded(key), at, packed)

    def freed(self, name: str) -> None:
        self._insert("freed", name)

    def _file(self, file: StagedFile, slot: str) -> None:
        if file.is_here and not self.rows.execute("SELECT 1 FROM files WHERE name = ?", (file.name,)).fetchone():
            record = {"size": file.size_bytes, "md5": file.md5.hex()}
            packed = codec.pack(("files", file.name), record, file.checksums or b"")
            self._insert("files", file.name, slot, file.size_bytes, packed)

    def _insert(self, table: str, *values: str | float | bytes) -> None:
        self.rows.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)


def _encoded(key: ObjectKey) -> bytes:
    return key.key.encode("utf-8", "surrogatepass")


def _fixed(spec: WriteSpec) -> dict[str, Any]:
    key = spec.key
    return {"bucket": key.bucket, "key": key.key, "headers": dict(spec.headers), "slot": spec.slot}


def _expected_version(expected: ExpectedVersion) -> dict[str, Any]:
    return {
        "etags": list(expected.etags),
        "absent": expected.absent,
        "known": expected.known,
        "asked": expected.asked_at,
    }


def _part(part: Part) -> dict[str, Any]:
    record = {
        "file": part.file.name,
        "stored": part.stored_at,
        "checksums": dict(part.checksums),
        "origin_etag": part.origin_etag,
    }
    if not part.file.is_here:
        record |= {"size": part.file.size_bytes, "md5": part.file.md5.hex()}
    return record
