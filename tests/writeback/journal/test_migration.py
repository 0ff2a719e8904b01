"""A journal of version 1 becomes one of version 2 with all that is in it, or stays what it is."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.clock import Moment
from gateway.errors import BufferDamaged, StartupError
from gateway.model import ByteRange
from gateway.s3.headers import multipart_etag
from gateway.s3.xml import CompletedPart
from gateway.steps import at_once
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal import codec, migration
from gateway.writeback.journal.integrity_check import check_journal
from gateway.writeback.journal.records import (
    BucketCapabilities,
    Conditions,
    CreateAttempt,
    ExpectedVersion,
    LastOwnWrite,
    Part,
    Priority,
    Run,
    State,
    Turn,
    UploadOutcome,
    Write,
    WriteSpec,
)
from gateway.writeback.journal.schema import VERSION, check_version, has_our_tables, prepare
from gateway.writeback.journal.transaction import ENDED_KEPT_SECONDS, JournalTransaction
from gateway.writeback.journal.view import Usage
from gateway.writeback.opening import FORMAT, recover
from gateway.writeback.pending_reader import PendingReader
from tests.support.flushing import Buffer, with_buffer
from tests.support.journal_v1 import JournalV1
from tests.support.writeback import PlainPresence, key, md5, spec
from tests.writeback.offline_export.test_export import exported, lines
from tests.writeback.offline_export.test_export import run as run_export

TABLES_DIGEST = "a12946ab32a74385898b324bb3f59fe7da2961f60c30d56cbaa21f9760ffc89c"
"""Of what the last gateway that wrote version 1 has made: names and statements."""

NOTHING, OLD = ExpectedVersion(absent=True), ExpectedVersion(('"old"',), asked_at=900.0)

STRIDE = int(os.environ.get("FOREBAY_MIGRATION_STRIDE", "3"))
"""A kill before one in so many statements."""


def digest_of(*parts: tuple[int, str]) -> str:
    return at_once(codec.parts_digest([CompletedPart(*one, {}) for one in parts]))


def part(number: int, name: str, origin_etag: str | None = None) -> Part:
    """Of a file whose bytes are its name, with the checksums that its row has."""
    content = name.encode()
    return Part(number, StagedFile(name, len(content), md5(content), b"sums"), 12.5, {"crc32": "AAAAAA=="}, origin_etag)


def elsewhere(number: int, name: str) -> Part:
    """One that only the origin has."""
    made = part(number, name)
    file = replace(made.file, name="", checksums=None)
    return replace(made, file=file, origin_etag=f'"{made.file.md5.hex()}"')


PARTS = [part(1, "model-1", '"at the origin"'), part(2, "model-2"), part(4, "model-44")]
OPENED = [part(1, "open-1", '"sent"'), part(3, "open-3"), elsewhere(4, "open-4")]


def write_all(journal: JournalV1) -> None:
    """Something of each kind, in each state."""
    journal.object(spec(key("waiting")), OLD, [part(1, "w")], etag='"w"')
    journal.object(spec(key("sending")), NOTHING, [part(1, "s")], "sending", '"s"')
    journal.object(spec(key("sending")), NOTHING, [part(1, "s2")], etag='"s2"')
    journal.object(spec(key("conflict")), OLD, [part(1, "c")], "conflict", '"c"')
    journal.object(spec(key("gone")), OLD, [], deleted=True)
    journal.object(
        spec(key("é/x")), ExpectedVersion(('"old"',), known=False, asked_at=950.0), [part(1, "shared")], etag='"x"'
    )
    other = replace(spec(key("copy")), slot="other")
    journal.object(other, NOTHING, [part(1, "shared")], etag='"x"')
    etag = multipart_etag([one.file.etag for one in PARTS]) or ""
    made: dict[str, Any] = {"upload_id": "u-model", "origin_upload_id": "o-model", "multipart": True}
    journal.object(spec(key("model")), NOTHING, PARTS, etag=etag, checksums={"crc32": "BBBBBB=="}, **made)
    journal.ended("u-model", key("model"), 1008.0, etag, [(one.number, one.file.etag) for one in PARTS])
    for upload_id, origin_upload_id in (("u-open", "o-open"), ("u-here", None), ("u-doubt", "o-doubt")):
        journal.upload(upload_id, spec(key("open")), OLD, 990.0, origin_upload_id)
    for one in OPENED:
        journal.part("u-open", one)
    journal.part("u-here", part(7, "here"))
    journal.part("u-doubt", part(1, "doubt", '"sent"'))
    journal.ended("u-doubt", key("open"), 995.0, '"doubt-1"', [(1, "abc")], table="completing")
    journal.ended("u-aborted", key("z"), 980.0, None)
    journal.ended("u-done", key("z"), 970.0, '"e-2"', [(1, "a"), (2, "b")])
    journal.intent("asked", key("model"), 3, 940.0)
    journal.intent("suspect", key("open"), 2, 930.0, 935.0)
    journal.orphan("o-orphan", key("orphan"))
    journal.capabilities("bucket", md5_etags=True, may_look=True, at=900.0)
    journal.capabilities("other", md5_etags=False, may_look=True, at=901.0)
    journal.last_own_write(key("done"), 905.0, '"own"')
    journal.last_own_write(key("away"), 906.0, None, known=False)
    journal.freed("w0/freed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of version 1 in which all of that is."""
    directory = tmp_path / "writeback"
    directory.mkdir()
    (directory / "FORMAT").write_bytes(FORMAT)
    with closing(JournalV1(directory / "journal")) as journal:
        write_all(journal)
    return directory / "journal"


@pytest.fixture
def tx(path: Path) -> Iterator[JournalTransaction]:
    """What has become of it."""
    with closing(opened(path)) as connection:
        prepare(connection)
        yield JournalTransaction(connection, PlainPresence())


def opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def dump(connection: sqlite3.Connection) -> list[str]:
    return list(connection.iterdump())


def latest(tx: JournalTransaction, name: str) -> Write:
    found = tx.latest(key(name))
    assert found is not None
    return replace(found, parts=tuple(tx.parts(found.id)))


def turn(tx: JournalTransaction, write: Write) -> Turn:
    found = tx.turn(write.id)
    assert found is not None
    return found


def test_version_1_is_what_it_was() -> None:
    """The tables that are taken for its own are those that it has made, to the letter."""
    with closing(sqlite3.connect(":memory:")) as connection:
        migration.create(connection)
        query = "SELECT name, tbl_name, sql FROM sqlite_schema WHERE sql IS NOT NULL"
        made = sorted(connection.execute(query).fetchall())
    assert hashlib.sha256(repr(made).encode()).hexdigest() == TABLES_DIGEST


def test_each_version_is_known_by_its_tables(path: Path) -> None:
    """Before and after; nothing of version 1 is left behind; and with others neither is taken for whole."""
    with closing(opened(path)) as connection:
        assert (check_version(connection), has_our_tables(connection)) == (1, True)
        connection.execute("CREATE INDEX mine ON objects (slot)")
        assert not has_our_tables(connection)
        connection.execute("DROP INDEX mine")
        prepare(connection)
        assert (check_version(connection), has_our_tables(connection)) == (VERSION, True)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        before = dump(connection)
        prepare(connection)
        assert dump(connection) == before
        connection.execute("DROP INDEX writes_due")
        assert not has_our_tables(connection)


def test_objects_go_over_with_all_that_was_said_of_them(tx: JournalTransaction) -> None:
    """Their bytes, bases, headers, checksums, ETags, and their places in the order."""
    waiting = latest(tx, "waiting")
    assert (waiting.spec, waiting.expected) == (spec(key("waiting")), OLD)
    assert (waiting.etag, waiting.size_bytes, waiting.acknowledged_at) == ('"w"', 1, 1001.0)
    assert waiting.parts == (part(1, "w"),)
    assert (waiting.state, turn(tx, waiting)) == (State.COMMITTED, Turn(0.0))
    assert (latest(tx, "gone").deleted, latest(tx, "gone").parts) == (True, ())
    assert latest(tx, "é/x").expected == ExpectedVersion(('"old"',), known=False, asked_at=950.0)
    assert latest(tx, "copy").spec.slot == "other"
    model = latest(tx, "model")
    assert (model.upload_id, model.origin_upload_id, model.multipart) == ("u-model", "o-model", True)
    assert (model.checksums, list(model.parts)) == ({"crc32": "BBBBBB=="}, PARTS)
    assert model.runs == (Run(1, 2, 7), Run(4, 1, 8))
    assert [one.number for one in tx.unsent_parts(model.id, 10)] == [2, 4]
    assert [one.sequence for one in tx.waiting(0, 100)] == list(range(1, 9))
    assert tx.acknowledge(replace(waiting, sequence=0)).sequence == 10  # the Complete in doubt has one, too


def test_chains_and_conflicts_are_what_they_were(tx: JournalTransaction) -> None:
    """What may be on its way is found out first; what a person is to decide waits for one."""
    first = tx.earliest(key("sending"))
    assert first is not None
    assert (first.state, first.etag, turn(tx, first).due_at) == (State.PUBLISHING, '"s"', 0.0)
    second = latest(tx, "sending")
    assert turn(tx, second) == Turn(None, after_sequence=first.sequence)
    tx.settle(first.id, '"s"', Moment(1100.0))
    assert (latest(tx, "sending").expected, turn(tx, second).due_at) == (ExpectedVersion(('"s"',)), 1100.0)
    conflict = latest(tx, "conflict")
    assert (conflict.state, turn(tx, conflict).due_at) == (State.CONFLICT, None)
    tx.begin_epoch(1100.0)
    assert turn(tx, conflict).due_at is None
    assert tx.overwrite(conflict.id, OLD, 1100.0)


def test_a_marker_waits_for_what_was_there_before(tx: JournalTransaction) -> None:
    """Shards that version 1 has acknowledged are shards."""
    marker = replace(latest(tx, "waiting"), spec=spec(key("é/_SUCCESS")), behind="é/")
    stored = tx.acknowledge(replace(marker, sequence=0))
    assert turn(tx, stored).after_sequence == latest(tx, "é/x").sequence
    tx.settle(latest(tx, "é/x").id, '"x"', Moment(1100.0))
    assert turn(tx, stored).due_at == 1100.0


def test_a_marker_of_version_1_waits_for_its_data(tmp_path: Path) -> None:
    """By its default name: for all that was acknowledged before it under its directory, and for nothing else."""
    path = tmp_path / "journal"
    with closing(JournalV1(path)) as journal:
        for name, state in (("step/0", "waiting"), ("step/.metadata", "waiting"), ("step/1", "waiting")):
            journal.object(spec(key(name)), NOTHING, [part(1, name)], state, '"e"')
        journal.object(spec(key("sent/0")), NOTHING, [part(1, "sent")], "waiting", '"e"')
        journal.object(spec(key("sent/latest")), NOTHING, [part(1, "l")], "sending", '"e"')
        journal.object(spec(key("alone/latest")), NOTHING, [part(1, "a")], "waiting", '"e"')
    with closing(opened(path)) as connection:
        prepare(connection)
        tx = JournalTransaction(connection, PlainPresence())
        shard, marker = latest(tx, "step/0"), latest(tx, "step/.metadata")
        assert (marker.behind, turn(tx, marker).after_sequence) == ("step/", shard.sequence)
        assert [turn(tx, latest(tx, name)).due_at for name in ("step/1", "sent/latest", "alone/latest")] == [0.0] * 3
        tx.settle(shard.id, '"e"', Moment(1100.0))
        assert turn(tx, marker).due_at == 1100.0


def test_uploads_go_over_with_their_parts(tx: JournalTransaction) -> None:
    """With the origin's or without one, parts that are sent, and are not, and that only the origin has."""
    upload = tx.upload("u-open")
    assert upload is not None
    assert (upload.spec, upload.expected, upload.began_at) == (spec(key("open")), OLD, 990.0)
    assert (upload.state, upload.origin_upload_id, upload.touched_then.at) == (State.OPEN, "o-open", 990.0)
    assert list(tx.parts(upload.id)) == OPENED
    assert [one.number for one in tx.unsent_parts(upload.id, 10)] == [3]
    assert turn(tx, upload) == Turn(0.0, priority=Priority.UPLOAD)
    here = tx.upload("u-here")
    assert here is not None
    assert (here.origin_upload_id, list(tx.parts(here.id))) == (None, [part(7, "here")])
    assert [one.upload_id for one in tx.uploads("bucket")] == ["u-doubt", "u-here", "u-open"]
    made = replace(here, parts=[part(7, "here")], etag='"h-1"', size_bytes=4, acknowledged_at=1100.0)
    assert tx.complete(made) is not None


def test_a_complete_in_doubt_is_found_out(tx: JournalTransaction) -> None:
    """Nobody waits for it any more; where it has come to nothing its upload is open, as it was."""
    doubt = tx.upload("u-doubt")
    assert doubt is not None
    assert (doubt.state, doubt.is_completed_at_origin, doubt.etag) == (State.PUBLISHING, True, '"doubt-1"')
    assert (doubt.answer, doubt.touched_then.at, turn(tx, doubt).due_at) == ("ServiceUnavailable", 995.0, 0.0)
    assert doubt.completed_of == digest_of((1, "abc"))
    tx.answer(doubt.id, "NoSuchUpload", is_over=True)
    found = tx.upload("u-doubt")
    assert found is not None
    assert (found.state, [one.number for one in tx.parts(found.id)]) == (State.OPEN, [1])


def test_how_uploads_ended_is_told_as_before(tx: JournalTransaction) -> None:
    """Completed, aborted, and become an object that is still pending: for a day."""
    model = latest(tx, "model")
    digest = digest_of(*((one.number, one.file.etag) for one in PARTS))
    assert tx.ended("u-model") == UploadOutcome("u-model", key("model"), 1008.0, model.etag, digest, model.checksums)
    done = UploadOutcome("u-done", key("z"), 970.0, '"e-2"', digest_of((1, "a"), (2, "b")))
    assert tx.ended("u-done") == done
    assert tx.ended("u-aborted") == UploadOutcome("u-aborted", key("z"), 980.0, None, digest_of())
    tx.forget_ended(Moment(975.0 + ENDED_KEPT_SECONDS))
    assert (tx.ended("u-done"), tx.ended("u-aborted") is not None) == (None, True)


def test_what_the_origin_is_asked_for_and_is_to_forget_goes_over(tx: JournalTransaction) -> None:
    """What a dead process asked for is suspected at the next start; what was suspected is looked for at once."""
    by_key = {one.key.key: one for one in tx.aborting()}
    assert (by_key["orphan"].origin_upload_id, turn(tx, by_key["orphan"]).due_at) == ("o-orphan", 0.0)
    assert by_key["model"].asked == CreateAttempt(3, Moment(940.0))
    assert turn(tx, by_key["model"]) == Turn(None, priority=Priority.ABORT)
    assert by_key["open"].asked == CreateAttempt(2, Moment(930.0), Moment(935.0))
    assert turn(tx, by_key["open"]).due_at == 0.0
    tx.mark_all_in_doubt(Moment(1000.0))
    [asked] = tx.asked(key("model"))
    assert asked.asked == CreateAttempt(3, Moment(940.0), Moment(1000.0))


def test_what_is_known_of_buckets_and_keys_goes_over(tx: JournalTransaction) -> None:
    """But for conditions, which version 1 has not asked for."""
    assert tx.capabilities("bucket") == BucketCapabilities(True, True, 900.0, Conditions())
    assert tx.capabilities("other") == BucketCapabilities(False, True, 901.0, Conditions())
    assert tx.last_own_write(key("done")) == LastOwnWrite(905.0, '"own"')
    assert tx.last_own_write(key("away")) == LastOwnWrite(906.0, None, known=False)


def test_files_and_counters_are_what_they_were(tx: JournalTransaction, path: Path) -> None:
    """Each file once, on the account on which it was."""
    assert tx.usages() == tx.counted()
    assert tx.usage("other") == Usage(0, 1)
    assert tx.usage("slot").objects == 7
    assert tx.left_behind() == ["w0/freed"]
    assert all(tx.knows_file(name) for name in ("w", "shared", "model-44", "open-3", "here", "doubt"))
    assert tx.hash_slots() == {place for (place,) in tx._rows.execute("SELECT place FROM writes WHERE pending = 1")}
    assert len(tx.hash_slots()) == 7


# Damage

DAMAGED = {
    "objects": ("key = 'waiting'", {"waiting"}, set[str]()),
    "an object in a chain": ("key = CAST('sending' AS BLOB) AND sequence = 2", {"sending"}, set[str]()),
    "pieces": ("file = 'model-2'", {"model"}, set[str]()),
    "files": ("name = 'model-2'", {"model"}, set[str]()),
    "uploads": ("upload_id = 'u-open'", set[str](), {"u-open"}),
    "parts": ("file = 'open-3'", set[str](), {"u-open"}),
}
"""Which row, and what it costs: objects and uploads."""

ALL = {"waiting", "sending", "conflict", "gone", "é/x", "copy", "model"}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_row_costs_what_it_tells_of(path: Path, kind: str) -> None:
    """Nothing else, and never with other bytes than were acknowledged: it is told of, and stays."""
    where, objects, uploads = DAMAGED[kind]
    table = kind if kind in ("pieces", "files", "uploads", "parts") else "objects"
    with closing(opened(path)) as connection:
        where = where.replace("key = 'waiting'", "key = CAST('waiting' AS BLOB)")
        assert connection.execute(f"UPDATE {table} SET record = zeroblob(60) WHERE {where}").rowcount == 1
        prepare(connection)
        tx = JournalTransaction(connection, PlainPresence())
        assert tx.counts()[0] == 8
        for name in ALL:
            assert _is_told(tx, name) == (name in objects), name
        for upload_id in ("u-open", "u-here", "u-doubt"):
            assert _is_upload_told(tx, upload_id) == (upload_id in uploads), upload_id
        tx.recount()
        assert tx.usages() == tx.counted()


def _is_told(tx: JournalTransaction, name: str) -> bool:
    """Whether something of it is said to be damaged. Otherwise it is as it was acknowledged."""
    chain = tx._rows.execute("SELECT id FROM writes WHERE key = ? AND pending = 1", (name.encode(),)).fetchall()
    try:
        for (write_id,) in chain:
            found = tx.write(write_id)
            assert found is not None
            assert sum(one.file.size_bytes for one in found.parts) == found.size_bytes
            assert sum(run.length * run.size_bytes for run in found.runs) == found.size_bytes
    except BufferDamaged:
        return True
    assert chain
    return False


def _is_upload_told(tx: JournalTransaction, upload_id: str) -> bool:
    try:
        found = tx.upload(upload_id)
        assert found is not None
        list(tx.parts(found.id))
    except BufferDamaged:
        return True
    return False


@pytest.mark.parametrize("table", ["profiles", "ended", "completing", "intents", "orphans", "origin"])
def test_what_is_damaged_and_holds_no_bytes_stops_nobody(path: Path, table: str) -> None:
    """All that was acknowledged is there; what cannot be told is not told."""
    with closing(opened(path)) as connection:
        connection.execute(f"UPDATE {table} SET record = zeroblob(60)")
        prepare(connection)
        tx = JournalTransaction(connection, PlainPresence())
        assert not any(_is_told(tx, name) for name in ALL)
        assert not any(_is_upload_told(tx, name) for name in ("u-open", "u-here", "u-doubt"))
        tx.aborting()
        assert has_our_tables(connection)


def test_no_range_of_an_object_with_a_damaged_part_is_taken_from_another_part(tmp_path: Path) -> None:
    """What lies behind it stays where it was."""
    contents = [bytes([number]) * 100 for number in range(1, 4)]

    async def scenario(buffer: Buffer) -> None:
        reader = PendingReader(buffer.journal, buffer.staging, buffer.threads)
        found = buffer.journal.read(lambda tx: tx.latest(key("model")))
        assert found is not None
        with pytest.raises(BufferDamaged):
            _ = [bytes(piece) async for piece in reader.pieces(found, ByteRange(100, 199))]
        with pytest.raises(BufferDamaged):
            _ = [bytes(piece) async for piece in reader.pieces(found, ByteRange(0, 299))]

    def damage(rows: sqlite3.Connection) -> None:
        rows.execute("UPDATE pieces SET record = zeroblob(60) WHERE number = 2")

    with_buffer(_with_real_files(tmp_path, contents, damage), scenario)


def _with_real_files(tmp_path: Path, contents: list[bytes], change: Callable[[sqlite3.Connection], None]) -> Path:
    """A directory of version 1 with one object of several parts."""
    directory = tmp_path / "writeback"
    directory.mkdir()
    (directory / "FORMAT").write_bytes(FORMAT)
    parts: list[Part] = []

    async def stage(buffer: Buffer) -> None:
        for number, content in enumerate(contents, 1):
            file = buffer.stage(content)
            before = replace(file, checksums=buffer.staging.checksums(file))
            os.truncate(buffer.staging.path(file), len(content))
            parts.append(Part(number, before, 12.5))

    with_buffer(directory, stage)
    for left in directory.glob("journal*"):
        left.unlink()
    etag = multipart_etag([one.file.etag for one in parts]) or ""
    with closing(JournalV1(directory / "journal")) as journal:
        whole = WriteSpec(key("model"), {"content-type": "text/plain"}, "slot")
        journal.object(whole, NOTHING, parts, etag=etag, upload_id="u", multipart=True)
        change(journal.rows)
    return directory


# All or nothing


class _Failing:
    """A connection whose `left`th statement fails."""

    def __init__(self, real: sqlite3.Connection, left: int) -> None:
        self._real = real
        self.left = left

    def execute(self, statement: str, *values: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise sqlite3.OperationalError("disk I/O error")
        return self._real.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_statement_that_fails_leaves_it_as_it_was(path: Path) -> None:
    """Whichever it is; the next start makes it whole."""
    with closing(opened(path)) as connection:
        before = dump(connection)
        for number in range(2, 10_000):  # the first one is BEGIN
            failing = _Failing(connection, number)
            try:
                prepare(cast(sqlite3.Connection, failing))
            except sqlite3.OperationalError:
                assert not connection.in_transaction
                assert dump(connection) == before, number
                assert check_version(connection) == 1
                continue
            break
        assert number > 100
        assert (check_version(connection), has_our_tables(connection)) == (VERSION, True)
        assert JournalTransaction(connection, PlainPresence()).counts() == (8, 3)


@pytest.mark.slow
def test_a_kill_leaves_one_version_or_the_other(path: Path) -> None:
    """At any statement, with all that SQLite has written by then."""
    with closing(opened(path)) as connection:
        before = dump(connection)
    counted = 0
    for number in range(1 + random.SystemRandom().randrange(STRIDE), 10_000, STRIDE):
        if not _killed(path, number):
            break
        counted += STRIDE
        check_journal(path.parent)
        with closing(opened(path)) as connection:
            assert (check_version(connection), has_our_tables(connection)) == (1, True)
            assert dump(connection) == before, number
    assert counted > 100
    check_journal(path.parent)
    with closing(opened(path)) as connection:
        assert (check_version(connection), has_our_tables(connection)) == (VERSION, True)
        assert JournalTransaction(connection, PlainPresence()).counts() == (8, 3)


def _killed(path: Path, number: int) -> bool:
    """Whether a process that migrates is killed before its `number`th statement; else it comes to its end."""
    child = os.fork()
    if child == 0:
        try:
            connection, left = opened(path), number

            def count(_: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            connection.set_trace_callback(count)
            prepare(connection)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_journal_of_yet_another_version_stays_as_it_is(path: Path) -> None:
    """Neither newer ones nor what is no journal of ours."""
    for pragma in ("user_version = 5", "user_version = 0", "application_id = 7"):
        with closing(opened(path)) as connection:
            connection.execute(f"PRAGMA {pragma}")
            before = dump(connection)
            with pytest.raises(StartupError, match="is untouched"):
                prepare(connection)
            assert dump(connection) == before
            connection.execute("PRAGMA user_version = 1")


# Whole directories


def test_a_directory_of_version_1_is_flushed(tmp_path: Path) -> None:
    """Put in order, read, and brought to the origin with its ETag."""
    contents = [os.urandom(5 * 2**20), os.urandom(100_000)]
    directory = _with_real_files(tmp_path, contents, lambda _: None)
    recovered = recover(directory, Moment(2000.0))
    assert (recovered.pending, recovered.uploads, recovered.removed_files) == (1, 0, 0)

    async def scenario(buffer: Buffer) -> None:
        [found] = buffer.left()
        reader = PendingReader(buffer.journal, buffer.staging, buffer.threads)
        whole = ByteRange(0, found.size_bytes - 1)
        assert b"".join([bytes(piece) async for piece in reader.pieces(found, whole)]) == b"".join(contents)
        buffer.start()
        await buffer.flushed()
        assert buffer.origin.data("bucket", "model") == b"".join(contents)
        assert buffer.bucket.object("model").etag == found.etag

    with_buffer(directory, scenario)


def test_a_directory_of_version_1_is_exported_as_it_is(tmp_path: Path) -> None:
    """Nothing of it is changed, least of all its version."""
    contents = [os.urandom(100_000), b"x"]
    directory = _with_real_files(tmp_path, contents, lambda _: None)
    before = (directory / "journal").read_bytes()
    found = run_export(directory, tmp_path / "out")
    assert (found.objects, found.damaged, found.unnamed_files, found.whole) == (1, 0, 0, True)
    assert exported(tmp_path / "out") == {"model": b"".join(contents)}
    assert (directory / "journal").read_bytes() == before


def test_what_is_damaged_of_version_1_is_named_by_the_export(path: Path, tmp_path: Path) -> None:
    """Rows, and files that are gone; deletions and open uploads come out."""
    with closing(opened(path)) as connection:
        connection.execute("UPDATE objects SET record = zeroblob(60) WHERE key = CAST('waiting' AS BLOB)")
    found = run_export(path.parent, tmp_path / "out")
    assert (found.objects, found.tombstones, found.uploads, found.damaged) == (0, 1, 3, 7)
    assert {one["key"] for one in lines(tmp_path / "out", "damaged")} == ALL - {"gone"}


def test_recovery_of_a_directory_of_version_1_is_that_of_any(path: Path) -> None:
    """It is whole, becomes one of version 2, and what it told is told."""
    assert check_journal(path.parent)
    recovered = recover(path.parent, Moment(2000.0))
    assert (recovered.pending, recovered.uploads, recovered.orphans) == (8, 3, 3)
    assert check_journal(path.parent)
    assert asyncio.run(asyncio.to_thread(recover, path.parent, Moment(2000.0))).pending == 8
