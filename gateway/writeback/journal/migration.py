"""A journal of version 1 becomes one of this version: in one transaction, so that a kill leaves it one or the other.

    uploads, parts      writes in the state OPEN, their parts
    objects, pieces     writes in the states COMMITTED, PUBLISHING, CONFLICT, their parts
    completing          its upload, in the state PUBLISHING: what has become of it is found out
    intents, orphans    writes in the state ABORTING
    ended               writes in the state DONE

Version 1 knew no markers: by their default names (order.py) they wait from now on for what came before them.

Versions 1 and 2 knew no checkpoints: by the layouts that are known, what is pending belongs to them from now on.

A row that is not what was written goes over as it is, and still is none: it costs what it tells of, and nothing else.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gateway.clock import Moment
from gateway.errors import BufferDamaged
from gateway.model import ObjectKey
from gateway.s3.xml import CompletedPart
from gateway.steps import at_once
from gateway.writeback.checkpoints.layouts import member_of
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal import codec
from gateway.writeback.journal.checkpoints import CheckpointRows
from gateway.writeback.journal.records import (
    BucketCapabilities,
    CreateAttempt,
    ExpectedVersion,
    Part,
    Priority,
    State,
    UploadOutcome,
    Write,
    WriteSpec,
    runs_of,
)
from gateway.writeback.journal.view import BEHIND_ALL, text
from gateway.writeback.order import with_order
from gateway.writeback.pending_key_filter import hash_slot_of

VERSION = 1

_ROWS_AT_ONCE = 1000
"""Of what is pending so many are in memory."""

_TABLES = """
CREATE TABLE files (
  name TEXT PRIMARY KEY, slot TEXT NOT NULL, size_bytes INTEGER NOT NULL, record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE freed (name TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
CREATE TABLE usage (
  slot TEXT PRIMARY KEY, staged_bytes INTEGER NOT NULL, objects INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE uploads (
  upload_id TEXT PRIMARY KEY, bucket TEXT NOT NULL, key BLOB NOT NULL, slot TEXT NOT NULL, record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX uploads_by_key ON uploads (bucket, key, upload_id);
CREATE TABLE parts (
  upload_id TEXT NOT NULL, number INTEGER NOT NULL, file TEXT NOT NULL, slot TEXT NOT NULL, sent INTEGER NOT NULL,
  record BLOB NOT NULL, PRIMARY KEY (upload_id, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX parts_unsent ON parts (slot, upload_id, number) WHERE sent = 0;
CREATE INDEX parts_by_file ON parts (file);
CREATE TABLE objects (
  sequence INTEGER PRIMARY KEY AUTOINCREMENT, bucket TEXT NOT NULL, key BLOB NOT NULL, place INTEGER NOT NULL,
  slot TEXT NOT NULL, startable INTEGER NOT NULL, size_bytes INTEGER NOT NULL, record BLOB NOT NULL
) STRICT;
CREATE INDEX objects_by_key ON objects (bucket, key, sequence);
CREATE INDEX objects_by_place ON objects (place);
CREATE INDEX objects_in_conflict ON objects (sequence) WHERE startable = 0;
CREATE INDEX objects_by_slot ON objects (slot, startable, sequence);
CREATE TABLE pieces (
  sequence INTEGER NOT NULL, number INTEGER NOT NULL, file TEXT NOT NULL, sent INTEGER NOT NULL,
  size_bytes INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (sequence, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX pieces_sent ON pieces (sequence) WHERE sent = 1;
CREATE INDEX pieces_by_file ON pieces (file);
CREATE TABLE ended (upload_id TEXT PRIMARY KEY, ended_at REAL NOT NULL, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE INDEX ended_by_time ON ended (ended_at);
CREATE TABLE completing (
  upload_id TEXT PRIMARY KEY, asked_at REAL NOT NULL, record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE profiles (bucket TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE origin (
  bucket TEXT NOT NULL, key BLOB NOT NULL, at REAL NOT NULL, record BLOB NOT NULL, PRIMARY KEY (bucket, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX origin_by_time ON origin (at);
CREATE TABLE intents (
  token TEXT PRIMARY KEY, worker INTEGER NOT NULL, suspect INTEGER NOT NULL, bucket TEXT NOT NULL, key BLOB NOT NULL,
  record BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX intents_by_key ON intents (bucket, key);
CREATE TABLE orphans (origin_upload_id TEXT PRIMARY KEY, record BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""

_COUNTED = (("files", "staged_bytes", "size_bytes"), ("objects", "objects", "1"))
"""A table, the column of `usage` that sums it up, and what a row of it counts for."""

_TRIGGER = """
CREATE TRIGGER {table}_{event} AFTER {event} ON {table} BEGIN
  INSERT INTO usage VALUES ({row}.slot, 0, 0) ON CONFLICT (slot) DO NOTHING;
  UPDATE usage SET {column} = {column} {sign} {amount} WHERE slot = {row}.slot;
END
"""


def create(connection: sqlite3.Connection) -> None:
    """The tables of version 1."""
    for statement in filter(str.strip, _TABLES.split(";")):
        connection.execute(statement)
    for statement in _triggers():
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _triggers() -> Iterator[str]:
    for table, column, of_row in _COUNTED:
        for event, row, sign in (("INSERT", "new", "+"), ("DELETE", "old", "-")):
            amount = of_row if of_row.isdecimal() else f"{row}.{of_row}"
            yield _TRIGGER.format(table=table, event=event, row=row, sign=sign, column=column, amount=amount)


_STATES = {"waiting": State.COMMITTED, "sending": State.PUBLISHING, "conflict": State.CONFLICT}


def migrate(connection: sqlite3.Connection, make: Callable[[sqlite3.Connection], None]) -> None:
    """Within a transaction; `make` makes the tables of this version."""
    for kind, name in connection.execute(
        "SELECT type, name FROM sqlite_schema WHERE type IN ('index', 'trigger') AND sql IS NOT NULL"
    ).fetchall():
        connection.execute(f"DROP {kind} {name}")
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    old = [name for name in tables if not name.startswith("sqlite_")]
    for name in old:
        connection.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
    make(connection)
    _Migration(connection).run()
    for name in old:
        connection.execute(f"DROP TABLE old_{name}")


def find_checkpoints(connection: sqlite3.Connection) -> None:
    """Within a transaction: have what is pending in a journal of before belong to its checkpoints."""
    rows, last = CheckpointRows(connection), -1
    query = "SELECT sequence, id, record FROM writes WHERE pending = 1 AND sequence > ? ORDER BY sequence LIMIT ?"
    while found := connection.execute(query, (last, _ROWS_AT_ONCE)).fetchall():
        for sequence, write_id, record in found:
            last = sequence
            with suppress(BufferDamaged):  # it is found damaged by who looks at it
                _find_checkpoint(connection, rows, codec.unpack_write(write_id, record))


def _find_checkpoint(connection: sqlite3.Connection, rows: CheckpointRows, write: Write) -> None:
    member = member_of(write.key)
    if member is not None:
        write = replace(write, member=member)
        connection.execute("UPDATE writes SET record = ? WHERE id = ?", (codec.pack_write(write), write.id))
        rows.acknowledged(write)


class _Migration:
    def __init__(self, rows: sqlite3.Connection) -> None:
        self._rows = rows

    def run(self) -> None:
        self._rows.execute("INSERT INTO files SELECT * FROM old_files")
        self._rows.execute("INSERT INTO freed SELECT * FROM old_freed")
        self._rows.execute("INSERT INTO origin SELECT * FROM old_origin")
        found = self._rows.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'old_objects'")
        self._rows.execute("UPDATE node SET value = ? WHERE name = 'sequence'", found.fetchone())
        self._profiles()
        self._objects()
        self._uploads()
        self._aborting()
        self._ended()
        self._rows.execute(
            "INSERT INTO usage SELECT slot, 0, 0 FROM old_usage WHERE true ON CONFLICT (slot) DO NOTHING"
        )

    def _profiles(self) -> None:
        for bucket, packed in self._all("SELECT bucket, record FROM old_profiles"):
            record = _unpacked(("profiles", bucket), packed)
            if record is not None:  # else the next write tells
                capabilities = BucketCapabilities(record["md5_etags"], record["may_look"], record["learned"])
                packed = codec.pack_capabilities(bucket, capabilities)
                self._rows.execute("INSERT INTO profiles VALUES (?, ?)", (bucket, packed))

    def _objects(self) -> None:
        last: dict[tuple[str, bytes], int] = {}
        for sequence, bucket, key, slot, size_bytes, packed in self._all(
            "SELECT sequence, bucket, key, slot, size_bytes, record FROM old_objects ORDER BY sequence"
        ):
            record = _unpacked(("objects", sequence), packed)
            before = last.get((bucket, key))
            last[bucket, key] = sequence
            write_id = self._insert(bucket, key, slot, size_bytes, State.COMMITTED)
            parts = self._parts("pieces", "sequence", sequence, write_id)
            if record is None or sum(part.file.size_bytes for part in parts) != record["size"]:
                self._place(write_id, sequence, before, State.COMMITTED)
                self._rows.execute("UPDATE writes SET record = ? WHERE id = ?", (packed, write_id))
                continue
            write = Write(
                _fixed(record),
                _expected_version(record["base"]),
                record["acknowledged"],
                _STATES[record["state"]],
                record["etag"],
                record["size"],
                multipart=record["multipart"],
                deleted=record["deleted"],
                upload_id=record["upload"],
                origin_upload_id=record["origin_upload"],
                checksums=record["checksums"],
                acknowledged_at=record["acknowledged"],
                runs=runs_of(parts),
                id=write_id,
                sequence=sequence,
            )
            if write.state is State.COMMITTED:
                write = with_order(write, None)
                before = self._before_marker(write, before)
            ended = self._taken_ended(write.upload_id)
            self._write(replace(write, completed_of=ended.parts if ended is not None else ""))
            self._place(write_id, sequence, before, write.state)

    def _before_marker(self, write: Write, before: int | None) -> int | None:
        """What a write has to wait for that waits for `before` anyway: all else has gone over that comes before it."""
        if write.behind is None:
            return before
        start = text(write.behind)
        last = "SELECT max(sequence) FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND sequence < ?"
        values = (write.key.bucket, start, start + BEHIND_ALL, write.sequence)
        [found] = self._rows.execute(last, values).fetchone()
        return before if found is None else max(found, before or 0)

    def _place(self, write_id: int, sequence: int, before: int | None, state: State) -> None:
        waits = before is not None or state is State.CONFLICT
        self._rows.execute(
            "UPDATE writes SET pending = 1, sequence = ?, since_sequence = ?, after_sequence = ?, due_at = ?, "
            "priority = ? WHERE id = ?",
            (sequence, sequence, before, None if waits else 0.0, Priority.SMALL, write_id),
        )

    def _uploads(self) -> None:
        for upload_id, bucket, key, slot, packed in self._all(
            "SELECT upload_id, bucket, key, slot, record FROM old_uploads"
        ):
            record = _unpacked(("uploads", upload_id), packed)
            write_id = self._insert(bucket, key, slot, 0, State.OPEN)
            parts = self._parts("parts", "upload_id", upload_id, write_id)
            if record is None:
                self._rows.execute(
                    "UPDATE writes SET upload_id = ?, record = ? WHERE id = ?", (upload_id, packed, write_id)
                )
                continue
            touched_at = max([record["initiated"], *(part.stored_at for part in parts)])
            write = Write(
                _fixed(record),
                _expected_version(record["base"]),
                record["initiated"],
                State.OPEN,
                multipart=True,
                upload_id=upload_id,
                origin_upload_id=record["origin_upload"],
                touched=Moment(touched_at),
                id=write_id,
            )
            self._write(self._as_asked(write))
            self._rows.execute("UPDATE writes SET due_at = 0, priority = ? WHERE id = ?", (Priority.UPLOAD, write_id))

    def _as_asked(self, upload: Write) -> Write:
        """An upload that the origin was asked to complete: nobody waits for the answer any more."""
        row = self._rows.execute(
            "SELECT record FROM old_completing WHERE upload_id = ?", (upload.upload_id,)
        ).fetchone()
        record = _unpacked(("completing", upload.upload_id or ""), row[0]) if row is not None else None
        if record is None:
            return upload
        [sequence] = self._rows.execute("SELECT value + 1 FROM node WHERE name = 'sequence'").fetchone()
        self._rows.execute("UPDATE node SET value = ? WHERE name = 'sequence'", (sequence,))
        return replace(
            upload,
            state=State.PUBLISHING,
            etag=record["etag"] or "",
            completed_of=_digest(record["parts"]),
            asked_as="",
            answer="ServiceUnavailable",
            touched=Moment(record["at"]),
            sequence=sequence,
        )

    def _aborting(self) -> None:
        for token, packed in self._all("SELECT token, record FROM old_intents"):
            record = _unpacked(("intents", token), packed)
            if record is not None:
                suspect = None if record["suspect"] is None else Moment(record["suspect"])
                asked = CreateAttempt(record["worker"], Moment(record["asked"]), suspect)
                self._insert_aborting(record, None, asked)
        for origin_upload_id, packed in self._all("SELECT origin_upload_id, record FROM old_orphans"):
            record = _unpacked(("orphans", origin_upload_id), packed)
            if record is not None:
                self._insert_aborting(record, origin_upload_id, None)

    def _insert_aborting(
        self, record: dict[str, Any], origin_upload_id: str | None, asked: CreateAttempt | None
    ) -> None:
        key = ObjectKey(record["bucket"], record["key"])
        write_id = self._insert(key.bucket, key.key.encode("utf-8", "surrogatepass"), "", 0, State.ABORTING)
        spec, at = WriteSpec(key, {}, ""), asked.begun.at if asked is not None else 0.0
        self._write(
            Write(
                spec, ExpectedVersion(), at, State.ABORTING, origin_upload_id=origin_upload_id, asked=asked, id=write_id
            )
        )
        due_at = None if asked is not None and asked.in_doubt_since is None else 0.0
        self._rows.execute(
            "UPDATE writes SET due_at = ?, priority = ? WHERE id = ?", (due_at, Priority.ABORT, write_id)
        )

    def _taken_ended(self, upload_id: str | None) -> UploadOutcome | None:
        """How an upload ended that has become an object: that is said by the object's row from now on."""
        row = self._rows.execute("SELECT record FROM old_ended WHERE upload_id = ?", (upload_id,)).fetchone()
        record = _unpacked(("ended", upload_id or ""), row[0]) if row is not None else None
        self._rows.execute("DELETE FROM old_ended WHERE upload_id = ?", (upload_id,))
        return _ended(upload_id or "", record) if record is not None else None

    def _ended(self) -> None:
        for upload_id, ended_at, packed in self._all("SELECT upload_id, ended_at, record FROM old_ended"):
            record = _unpacked(("ended", upload_id), packed)
            if record is None:
                continue
            ended = _ended(upload_id, record)
            key = ended.key.key.encode("utf-8", "surrogatepass")
            write_id = self._insert(ended.key.bucket, key, "", 0, State.DONE)
            self._rows.execute(
                "UPDATE writes SET upload_id = ?, due_at = ?, record = ? WHERE id = ?",
                (upload_id, ended_at + 24 * 3600.0, codec.pack_ended(write_id, ended), write_id),
            )

    def _parts(self, table: str, column: str, value: str | int, write_id: int) -> list[Part]:
        """Move them. Of one that is not what was written number and length, as they are said, have to do: what lies
        behind it in the object is to stay where it was."""
        found: list[Part] = []
        for number, file, packed, size_bytes, staged in self._all(
            f"SELECT number, file, old.record, files.size_bytes, files.record FROM old_{table} AS old "
            f"LEFT JOIN files ON file = name WHERE {column} = ? ORDER BY number",
            value,
        ):
            record = _unpacked((table, value, number), packed)
            part = _part(record, number, file, staged) if record is not None else None
            size = size_bytes or 0
            if part is not None:
                found.append(part)
                packed, size = codec.pack_part(write_id, part), part.file.size_bytes
            else:
                found.append(Part(number, StagedFile(file, size, b""), 0.0))
            is_sent = part is not None and part.origin_etag is not None
            self._rows.execute(
                "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?)", (write_id, number, file, is_sent, size, packed)
            )
        return found

    def _insert(self, bucket: str, key: bytes, slot: str, size_bytes: int, state: State) -> int:
        place = hash_slot_of(ObjectKey(bucket, key.decode("utf-8", "surrogatepass")))
        inserted = self._rows.execute(
            "INSERT INTO writes (bucket, key, place, slot, state, pending, attempts, priority, damaged, size_bytes, "
            "record) VALUES (?, ?, ?, ?, ?, 0, 0, 0, 0, ?, x'')",
            (bucket, key, place, slot, state, size_bytes),
        )
        return int(inserted.lastrowid or 0)

    def _write(self, write: Write) -> None:
        self._rows.execute(
            "UPDATE writes SET upload_id = ?, state = ?, sequence = ?, behind = ?, record = ? WHERE id = ?",
            (
                write.upload_id,
                write.state,
                write.sequence or None,
                None if write.behind is None else text(write.behind),
                codec.pack_write(write),
                write.id,
            ),
        )

    def _all(self, query: str, *values: str | int) -> Iterator[tuple[Any, ...]]:
        yield from self._rows.execute(query, values).fetchall()


def _unpacked(place: codec.Place, packed: bytes) -> dict[str, Any] | None:
    try:
        return codec.unpack(place, packed)[0]
    except BufferDamaged:
        return None


def _part(record: dict[str, Any], number: int, file: str, staged: bytes | None) -> Part | None:
    """None where the row of its file is not what was written: it is left as it is."""
    if file:
        try:
            found = codec.unpack_file(file, staged or b"")
        except BufferDamaged:
            return None
    else:
        found = StagedFile("", record["size"], bytes.fromhex(record["md5"]))
    return Part(number, found, record["stored"], record["checksums"], record["origin_etag"])


def _fixed(record: dict[str, Any]) -> WriteSpec:
    return WriteSpec(ObjectKey(record["bucket"], record["key"]), record["headers"], record["slot"])


def _expected_version(record: dict[str, Any]) -> ExpectedVersion:
    return ExpectedVersion(tuple(record["etags"]), record["absent"], record["known"], record["asked"])


def _ended(upload_id: str, record: dict[str, Any]) -> UploadOutcome:
    parts = _digest(record["parts"])
    return UploadOutcome(upload_id, ObjectKey(record["bucket"], record["key"]), record["at"], record["etag"], parts)


def _digest(parts: Sequence[tuple[int, str]]) -> str:
    return at_once(codec.parts_digest([CompletedPart(number, etag, {}) for number, etag in parts]))
