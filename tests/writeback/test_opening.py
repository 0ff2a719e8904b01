"""A buffer's directory is made, put in order or refused; what was acknowledged stays in each case."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.core.errors import BufferUnavailable, StartupError
from gateway.core.model import Homes, ObjectKey
from gateway.writeback.journal.buckets import BucketCapabilities, LastOwnWrite
from gateway.writeback.journal.journal import Journal
from gateway.writeback.opening import ARRIVING, FORMAT, ORIGIN, Recovered, drop, keep_to_homes, prepare, recover
from gateway.writeback.staged_file import Staging
from tests.support.writeback import key, md5, part, pending


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "writeback"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def stage(directory: Path, content: bytes) -> str:
    """A sealed file that no journal names yet; its name."""
    staging = Staging(directory, 0)
    staging.prepare()
    writer = staging.create()
    writer.write(memoryview(content))
    return staging.seal(writer, md5(content)).name


def test_a_new_directory_is_private_and_says_what_it_is(directory: Path) -> None:
    """Made with all that lead to it, and taken for what it is when it is opened again."""
    prepare(directory)
    prepare(directory)
    assert contents(directory) == {"FORMAT": FORMAT}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_start_that_died_before_it_said_what_it_is_is_repeated(directory: Path) -> None:
    """Half a format, not yet in its place, is no foreign file."""
    directory.mkdir(parents=True)
    (directory / "FORMAT.new").write_bytes(FORMAT[:5])
    prepare(directory)
    assert contents(directory) == {"FORMAT": FORMAT}


@pytest.mark.parametrize("found", [b"forebay writeback 2\n", b"forebay writeback 0\n", b"", b"\xff\n"])
def test_another_format_is_refused_and_nothing_is_touched(directory: Path, found: bytes) -> None:
    """Newer, older or damaged: what lies there is somebody's acknowledged writes."""
    directory.mkdir(parents=True)
    (directory / "FORMAT").write_bytes(found)
    (directory / "journal").write_bytes(b"of that version")
    before = contents(directory)
    with pytest.raises(StartupError, match="is untouched; run the version that wrote it"):
        recover(directory, Moment(0.0))
    assert contents(directory) == before


def test_a_directory_of_something_else_is_refused(directory: Path) -> None:
    """No file of it becomes the buffer's, and none is added."""
    directory.mkdir(parents=True)
    (directory / "thesis.tex").write_bytes(b"x")
    with pytest.raises(StartupError, match=r"holds 'thesis\.tex'"):
        recover(directory, Moment(0.0))
    assert contents(directory) == {"thesis.tex": b"x"}


def test_a_directory_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    """With the file system's reason."""
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(BufferUnavailable, match=r"cannot be used: .*Not a directory"):
        prepare(tmp_path / "cache" / "writeback")


def test_recovery_keeps_what_the_journal_names_and_removes_the_rest(directory: Path) -> None:
    """Files that nobody was told of go, and so do reservations of bodies that arrive no more."""
    recover(directory, Moment(0.0))
    kept, gone = stage(directory, b"acknowledged"), stage(directory, b"never acknowledged")
    (directory / ARRIVING).write_bytes(b"reservations of the dead")
    journal = Journal(directory, lambda _: None)
    try:
        asyncio.run(journal.change(lambda tx: tx.writes.acknowledge(pending(key("a"), parts=[part(1, kept)]))))
    finally:
        journal.close()
    recovered = recover(directory, Moment(0.0))
    assert (recovered.pending, recovered.uploads, recovered.orphans, recovered.removed_files) == (1, 0, 0, 1)
    left = contents(directory)
    assert left[f"staged/{kept}"].startswith(b"acknowledged")
    assert f"staged/{gone}" not in left
    assert ARRIVING not in left


_MADE_BY_READING = frozenset({"journal-shm", "journal-wal"})


@pytest.mark.parametrize("left", ["nothing", "an empty file", "no log"])
def test_without_its_journal_a_buffer_is_left_alone(directory: Path, left: str) -> None:
    """8.6 The staged files may be acknowledged writes: a new journal would know none of them, and have them removed."""
    recover(directory, Moment(0.0))
    stage(directory, b"acknowledged, perhaps")
    for path in directory.glob("journal*"):
        path.unlink()
    if left == "no log":
        with closing(sqlite3.connect(directory / "journal")) as journal:
            journal.execute("PRAGMA journal_mode = WAL")
    if left == "an empty file":
        (directory / "journal").touch()
    before = contents(directory)
    with pytest.raises(StartupError, match="nothing was changed"):
        recover(directory, Moment(0.0))
    after = {name: content for name, content in contents(directory).items() if name not in _MADE_BY_READING}
    assert after == before


# Whose it is

HERE, THERE = Homes("https://s3.here.example"), Homes("https://s3.there.example")
CAPABILITIES = BucketCapabilities(md5_etags=True, may_look=True, learned_at=1.0)
BUCKETS = frozenset({"bucket"})
NOTHING = Recovered(0, 0, 0, 0)


@pytest.fixture
def of_here(directory: Path) -> Path:
    """A buffer of HERE."""
    keep_to_homes(directory, HERE, recover(directory, Moment(0.0)))
    return directory


def test_a_buffer_says_whose_it_is(of_here: Path) -> None:
    """For its owner only to read, as all that lies in it; and stays so."""
    assert (of_here / ORIGIN).read_text() == f"{HERE.main}\n"
    assert (of_here / ORIGIN).stat().st_mode & 0o777 == 0o600
    keep_to_homes(of_here, HERE, Recovered(3, 1, 1, 0, BUCKETS))
    assert (of_here / ORIGIN).read_text() == f"{HERE.main}\n"


@pytest.mark.parametrize("counts", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_what_it_holds_is_not_taken_elsewhere(of_here: Path, counts: tuple[int, int, int]) -> None:
    """Objects, open uploads, and uploads to be aborted. The message names the key, both values and the ways out."""
    held = Recovered(*counts, 0, BUCKETS)
    before = {path.name: path.stat().st_mtime_ns for path in of_here.iterdir()}
    with pytest.raises(StartupError) as refused:
        keep_to_homes(of_here, THERE, held)
    counted = f"{held.pending} objects, {held.uploads} open uploads", f"{held.orphans} uploads and probes"
    for said in (
        *counted,
        "origin.endpoint_url",
        repr(HERE.main),
        repr(THERE.main),
        "forebay flush --wait",
        str(of_here / ORIGIN),
    ):
        assert said in str(refused.value)
    assert {path.name: path.stat().st_mtime_ns for path in of_here.iterdir()} == before


def test_where_it_holds_nothing_all_is_forgotten(of_here: Path) -> None:
    """What is known of buckets and keys is not true of those of the same names elsewhere."""
    keep_to_homes(of_here, THERE, NOTHING)
    assert {path.name: path.read_bytes() for path in of_here.iterdir()} == {
        "FORMAT": FORMAT,
        ORIGIN: f"{THERE.main}\n".encode(),
    }
    assert recover(of_here, Moment(0.0)) == NOTHING


def test_whose_it_is_can_be_said_by_hand(of_here: Path) -> None:
    """One store has two names: nothing is forgotten then."""
    (of_here / ORIGIN).write_text(THERE.main)
    keep_to_homes(of_here, THERE, Recovered(1, 0, 0, 0, BUCKETS))
    assert (of_here / "journal").exists()


def test_a_disk_that_does_not_say_is_no_other_origin(of_here: Path) -> None:
    """It may be well tomorrow."""
    (of_here / ORIGIN).unlink()
    (of_here / ORIGIN).mkdir()
    with pytest.raises(BufferUnavailable, match="cannot be used"):
        keep_to_homes(of_here, HERE, NOTHING)


def test_each_bucket_keeps_to_its_own_home(of_here: Path) -> None:
    """Only the bucket that has moved matters: where something of it is held, the start is refused, and says which
    it is,
    and both homes; what is held of others is nobody's business, and what was learned of those that stay is kept."""
    moved = Homes(HERE.main, {"moved": THERE.main})
    held = Recovered(2, 0, 0, 0, frozenset({"stays", "moved"}))
    before = contents(of_here)
    with pytest.raises(StartupError) as refused:
        keep_to_homes(of_here, moved, held)
    assert contents(of_here) == before
    for said in ("'moved'", repr(HERE.main), repr(THERE.main), "nothing was changed"):
        assert said in str(refused.value)
    assert "'stays'" not in str(refused.value)
    journal, own = Journal(of_here, lambda _: None), LastOwnWrite(1.0)
    try:
        for bucket in ("stays", "moved"):
            asyncio.run(journal.change(lambda tx, bucket=bucket: tx.buckets.learn(bucket, CAPABILITIES)))  # type: ignore[misc]
            at = ObjectKey(bucket, "k")
            asyncio.run(journal.change(lambda tx, at=at: tx.buckets.record_own_write(at, own)))  # type: ignore[misc]
    finally:
        journal.close()
    keep_to_homes(of_here, moved, Recovered(1, 0, 0, 0, frozenset({"stays"})))
    assert (of_here / ORIGIN).read_text() == f"{HERE.main}\nmoved {THERE.main}\n"
    journal = Journal(of_here, lambda _: None)
    try:
        for bucket, is_known in (("stays", True), ("moved", False)):
            known = journal.read(lambda tx, bucket=bucket: tx.buckets.capabilities(bucket))  # type: ignore[misc]
            own_write = journal.read(lambda tx, bucket=bucket: tx.buckets.last_own_write(ObjectKey(bucket, "k")))  # type: ignore[misc]
            assert (known is not None, own_write is not None) == (is_known, is_known)
    finally:
        journal.close()
    with pytest.raises(StartupError, match="'moved'"):  # and back
        keep_to_homes(of_here, HERE, Recovered(1, 0, 0, 0, frozenset({"moved"})))


def test_what_moves_with_its_bucket_is_no_move(of_here: Path) -> None:
    """Another origin is the main one, and the buckets of before are said to be where they were: nothing is refused."""
    homes = Homes(THERE.main, {"bucket": HERE.main})
    keep_to_homes(of_here, homes, Recovered(1, 0, 0, 0, BUCKETS))
    assert (of_here / "journal").exists()


@pytest.mark.parametrize("forget", [lambda directory: keep_to_homes(directory, THERE, NOTHING), drop])
def test_a_kill_while_a_buffer_is_dropped_stops_no_start(
    of_here: Path, monkeypatch: pytest.MonkeyPatch, forget: Callable[[Path], None]
) -> None:
    """It is there wholly or not at all: for another origin, or because no slot writes back; and nothing of it stays."""

    def killed(path: Path) -> None:
        if path.exists():
            (path / "FORMAT").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("gateway.writeback.opening.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            forget(of_here)
    keep_to_homes(of_here, THERE, recover(of_here, Moment(0.0)))
    assert [path.name for path in of_here.parent.iterdir()] == [of_here.name]
