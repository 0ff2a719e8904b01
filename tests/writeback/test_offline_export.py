"""What was acknowledged gets out of a buffer's directory without a gateway, whatever has happened to it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.errors import BufferUnavailable, StartupError
from gateway.writeback.journal.records import Write
from gateway.writeback.offline_export import MANIFEST, OBJECTS, Findings, buffer_of, export
from tests.support.flushing import Buffer
from tests.support.writeback import key, upload

FLIPS = int(os.environ.get("FOREBAY_EXPORT_FLIPS", "40"))
SEED = int(os.environ.get("FOREBAY_EXPORT_SEED", random.SystemRandom().randrange(2**32)))

Content = dict[str, bytes]


class Watcher:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.total_bytes = self.done_bytes = 0
        self.damages: list[str] = []

    def begin(self, objects: int, size_bytes: int) -> None:
        self.total_bytes = size_bytes

    def advance(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes

    def damaged(self, name: str, reason: str) -> None:
        self.damages.append(name)


def left_by_a_kill(
    path: Path, scenario: Callable[[Buffer], Coroutine[Any, Any, None]], made: type[Buffer] = Buffer
) -> Path:
    """A buffer's directory as a killed process leaves it: the log holds every commit."""
    written, copy = path / "written", path / "copy"
    written.mkdir()

    async def run() -> None:
        buffer = made(written)
        try:
            await scenario(buffer)
            shutil.copytree(written, copy)
        finally:
            await buffer.close()

    asyncio.run(run())
    return copy


def run(buffer: Path, target: Path, watcher: Watcher | None = None, *, running: bool = False) -> Findings:
    return export(buffer, target, watcher or Watcher(), running=running)


def lines(target: Path, kind: str) -> list[dict[str, Any]]:
    found = [orjson.loads(line) for line in (target / MANIFEST).read_bytes().splitlines()]
    assert (found[0]["type"], found[-1]["type"]) == ("export", "end")
    return [one for one in found if one["type"] == kind]


def exported(target: Path) -> Content:
    return {one["key"]: (target / one["file"]).read_bytes() for one in lines(target, "object")}


NAMES = ["../../etc/passwd", "/", "a\0b", "a\nb", "é/" + "x" * 900, "objects/../manifest.jsonl"]


def put_all(names: list[str], content: Content, size: int = 70_000) -> Callable[[Buffer], Coroutine[Any, Any, None]]:
    async def scenario(buffer: Buffer) -> None:
        for name in names:
            content[name] = os.urandom(size)
            await buffer.put(key(name), content[name])

    return scenario


def tree(path: Path) -> dict[str, tuple[int, int]]:
    """Every file below, with its length and when it was changed."""
    return {
        str(one.relative_to(path)): (one.stat().st_size, one.stat().st_mtime_ns)
        for one in path.rglob("*")
        if one.is_file()
    }


def test_everything_comes_out_of_a_directory_that_is_only_read(tmp_path: Path) -> None:
    """Objects with their bytes and headers, deletions and open uploads; keys are no names, and others read nothing."""
    content: Content = {}
    uploaded: list[Write] = []

    async def scenario(buffer: Buffer) -> None:
        await put_all(NAMES, content)(buffer)
        await buffer.put(key("empty"), b"")
        uploaded.append(await buffer.upload(key("model"), [5 * 2**20, 100]))
        await buffer.delete(key("gone"))
        await buffer.journal.change(lambda tx: tx.uploads.begin(upload("open", key("o"))))

    copy = left_by_a_kill(tmp_path, scenario)
    for path in (copy, copy / "staged", copy / "staged" / "w0"):
        path.chmod(0o500)
    before = tree(copy)
    watcher, target = Watcher(), tmp_path / "out"
    found = run(copy, target, watcher)
    assert (found.objects, found.tombstones, found.uploads, found.damaged) == (len(NAMES) + 2, 1, 1, 0)
    assert found.whole
    out = exported(target)
    model = out.pop("model")
    digests = b"".join(hashlib.md5(part).digest() for part in (model[: 5 * 2**20], model[5 * 2**20 :]))
    assert uploaded[0].etag == f'"{hashlib.md5(digests).hexdigest()}-2"'
    assert out == {**content, "empty": b""}
    [line] = [one for one in lines(target, "object") if one["key"] == "model"]
    assert (line["etag"], line["multipart"], line["parts"]) == (uploaded[0].etag, True, [[2, 5 * 2**20], [4, 100]])
    assert line["headers"]["x-amz-meta-step"] == "12"
    assert [one["key"] for one in lines(target, "tombstone")] == ["gone"]
    assert [one["upload_id"] for one in lines(target, "upload")] == ["open"]
    assert watcher.done_bytes == watcher.total_bytes == found.size_bytes
    assert tree(copy) == before
    assert {one.name for one in target.iterdir()} == {MANIFEST, OBJECTS}
    assert {one.stat().st_mode & 0o777 for one in target.rglob("*") if one.is_file()} == {0o600}
    assert {one.stat().st_mode & 0o777 for one in (target, target / OBJECTS)} == {0o700}


def test_what_is_damaged_is_named_and_the_rest_exported(tmp_path: Path) -> None:
    """A flipped bit, of bytes, checksums or footer, a file cut short, in its bytes or behind them, or gone, a row that
    was changed: each is one object and no other."""
    content: Content = {}
    damaged = ["flipped", "checksum", "footer", "short", "no trailer", "gone", "row"]
    copy = left_by_a_kill(tmp_path, put_all([*damaged, "well"], content))
    files = by_key(copy)
    for name, at in (("flipped", 66_000), ("checksum", 70_000), ("footer", 70_020)):
        with files[name].open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
    os.truncate(files["short"], 69_999)
    os.truncate(files["no trailer"], 70_000)
    files["gone"].unlink()
    with sqlite3.connect(copy / "journal") as connection:
        connection.execute("UPDATE writes SET record = zeroblob(80) WHERE key = ?", (b"row",))
    connection.close()
    watcher, target = Watcher(), tmp_path / "out"
    found = run(copy, target, watcher)
    assert (found.objects, found.damaged, found.whole) == (1, len(damaged), False)
    assert exported(target) == {"well": content["well"]}
    assert {one["key"] for one in lines(target, "damaged")} == set(damaged)
    assert len(watcher.damages) == len(damaged)
    assert len(list((target / OBJECTS).iterdir())) == 1


def by_key(buffer: Path) -> dict[str, Path]:
    connection = sqlite3.connect(buffer / "journal")
    rows = connection.execute("SELECT key, file FROM writes JOIN parts ON write_id = id").fetchall()
    connection.close()
    return {name.decode(): buffer / "staged" / file for name, file in rows}


def test_a_part_that_the_journal_has_lost_makes_no_object(tmp_path: Path) -> None:
    """An object is exported with all of its parts, or named as damaged."""

    async def scenario(buffer: Buffer) -> None:
        await buffer.upload(key("model"), [100, 100, 100])

    copy = left_by_a_kill(tmp_path, scenario)
    with sqlite3.connect(copy / "journal") as connection:
        connection.execute("DELETE FROM parts WHERE number = 4")
    connection.close()
    found = run(copy, tmp_path / "out")
    assert (found.objects, found.damaged, found.unnamed_files) == (0, 1, 0)


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """Stopped in the middle, full disk or kill, and run again: what is complete stays, the rest is made."""
    content: Content = {}
    copy = left_by_a_kill(tmp_path, put_all(["a", "b", "c"], content))
    target = tmp_path / "out"

    class Stopping(Watcher):
        def advance(self, size_bytes: int) -> None:
            super().advance(size_bytes)
            if self.done_bytes > 70_000:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(copy, target, Stopping())
    [done] = (target / OBJECTS).iterdir()
    made = done.stat().st_mtime_ns
    assert not (target / MANIFEST).exists()
    (target / ".journal-left").mkdir()
    (target / OBJECTS / f"{done.name[:-1]}z.part").touch()
    assert run(copy, target).objects == 3
    assert done.stat().st_mtime_ns == made
    assert exported(target) == content
    assert not (target / ".journal-left").exists()
    assert run(copy, target).objects == 3


def test_two_buffers_do_not_share_a_directory(tmp_path: Path) -> None:
    """Nor does an export go where something else is called a manifest."""
    one = left_by_a_kill(tmp_path, put_all(["a"], {}))
    other = Path(shutil.copytree(one, tmp_path / "other"))
    run(one, tmp_path / "out")
    with pytest.raises(StartupError, match="holds an export of"):
        run(other, tmp_path / "out")
    assert run(one, tmp_path / "out").objects == 1


def test_a_damaged_log_gives_what_precedes_it(tmp_path: Path) -> None:
    """With a warning, and the number of files that it does not name any more."""
    content: Content = {}
    copy = left_by_a_kill(tmp_path, put_all(["a", "b", "c", "d"], content))
    whole = (copy / "journal-wal").read_bytes()
    spoiled = bytearray(whole)
    spoiled[len(whole) * 2 // 3] ^= 1
    (copy / "journal-wal").write_bytes(spoiled)
    found = run(copy, tmp_path / "out")
    assert not found.whole
    assert "damaged in frame" in found.warnings[0]
    out = exported(tmp_path / "out")
    assert 0 < len(out) < 4
    assert out.items() <= content.items()
    assert found.unnamed_files == 4 - len(out)


@pytest.mark.slow
def test_no_flipped_bit_makes_another_object_or_hides_one(tmp_path: Path) -> None:
    """Anywhere in journal, log and staged files: what is exported was acknowledged so, and what is missing is told of;
    but for damage to the very last commit, which cannot be told from one that was torn."""
    content: Content = {}

    async def scenario(buffer: Buffer) -> None:
        await put_all([f"k{number}" for number in range(5)], content, 300)(buffer)
        stored = await buffer.upload(key("model"), [300, 100])
        bodies = [buffer.staging.path(part.file).read_bytes()[: part.file.size_bytes] for part in stored.parts]
        content["model"] = b"".join(bodies)
        other = sqlite3.connect(tmp_path / "written" / "journal")
        other.execute("PRAGMA wal_checkpoint(FULL)")
        other.close()
        await put_all(["late", "last"], content, 300)(buffer)

    print(f"FOREBAY_EXPORT_SEED={SEED}")
    copy = left_by_a_kill(tmp_path, scenario)
    dice, told, whole = random.Random(SEED), 0, set(content) - {"last"}
    for number in range(FLIPS):
        spoiled = Path(shutil.copytree(copy, tmp_path / f"spoiled{number}"))
        file = dice.choice([spoiled / "journal", spoiled / "journal-wal", *(spoiled / "staged" / "w0").iterdir()][:4])
        flip(file, dice)
        try:
            found = run(spoiled, tmp_path / f"out{number}")
        except BufferUnavailable:
            told += 1
            continue
        out = exported(tmp_path / f"out{number}")
        assert out.items() <= content.items(), file
        assert not found.whole or whole <= out.keys(), file
        told += not found.whole
        shutil.rmtree(spoiled)
        shutil.rmtree(tmp_path / f"out{number}")
    assert told > FLIPS // 5


def flip(file: Path, dice: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    file.write_bytes(content)


def test_pages_that_cannot_be_read_cost_what_is_in_them(tmp_path: Path) -> None:
    """In the middle of the journal's tables: what lies before and behind is exported."""
    content: Content = {}
    copy = left_by_a_kill(tmp_path, put_all([f"k{number:03}" for number in range(120)], content))
    connection = sqlite3.connect(copy / "journal")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    pages = _leaves_of_writes(connection)
    connection.close()
    assert len(pages) > 2
    with (copy / "journal").open("r+b") as file:
        file.seek((pages[len(pages) // 2] - 1) * 4096)
        file.write(b"\xff" * 4096)
    found = run(copy, tmp_path / "out")
    out = exported(tmp_path / "out")
    assert found.warnings
    assert 0 < len(out) < 120
    assert {"k000", "k119"} <= out.keys()
    assert out.items() <= content.items()


def _leaves_of_writes(connection: sqlite3.Connection) -> list[int]:
    """The table's leaf pages, in order: the root's children (https://www.sqlite.org/fileformat2.html#b_tree_pages)."""
    [root] = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'writes'").fetchone()
    [path] = [row[2] for row in connection.execute("PRAGMA database_list")]
    page = Path(path).read_bytes()[(root - 1) * 4096 : root * 4096]
    assert page[0] == 5  # an interior page of a table
    cells = int.from_bytes(page[3:5], "big")
    pointers = [int.from_bytes(page[12 + 2 * n : 14 + 2 * n], "big") for n in range(cells)]
    return [int.from_bytes(page[at : at + 4], "big") for at in pointers] + [int.from_bytes(page[8:12], "big")]


def test_what_is_no_buffer_of_this_version_is_refused(tmp_path: Path) -> None:
    """Nothing is taken for an empty one: not a directory without a journal, nor one of another version."""
    copy = left_by_a_kill(tmp_path, put_all(["a"], {}))
    with pytest.raises(StartupError, match="holds no write-back journal"):
        run(tmp_path, tmp_path / "out")
    emptied = Path(shutil.copytree(copy, tmp_path / "emptied"))
    os.truncate(emptied / "journal", 0)
    (emptied / "journal-wal").unlink()
    with pytest.raises(StartupError, match="is empty"):
        run(emptied, tmp_path / "out")
    newer = Path(shutil.copytree(copy, tmp_path / "newer"))
    (newer / "FORMAT").write_bytes(b"forebay writeback 2\n")
    with pytest.raises(StartupError, match="forebay writeback 2"):
        run(newer, tmp_path / "out")
    (newer / "FORMAT").unlink()
    with sqlite3.connect(newer / "journal") as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(BufferUnavailable, match="version 9"):
        run(newer, tmp_path / "out")
    (newer / "journal").write_bytes(b"no database at all" * 1000)
    (newer / "journal-wal").unlink(missing_ok=True)
    with pytest.raises(BufferUnavailable, match="cannot be read"):
        run(newer, tmp_path / "out")


def test_a_schema_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """In words, also where SQLite's own quote bytes that are no UTF-8."""
    copy = left_by_a_kill(tmp_path, put_all(["a"], {}))
    connection = sqlite3.connect(copy / "journal")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    whole = (copy / "journal").read_bytes()
    (copy / "journal").write_bytes(whole.replace(b"tablewriteswrites", b"table\xa0rites\xa0rites"))
    with pytest.raises(BufferUnavailable, match="cannot be read"):
        run(copy, tmp_path / "out")


def test_a_gateway_that_is_at_work_is_not_disturbed(tmp_path: Path) -> None:
    """What it has flushed meanwhile is left out, and no damage; what is damaged is."""
    directory, target = tmp_path / "buffer", tmp_path / "out"
    directory.mkdir()

    async def scenario() -> None:
        buffer = Buffer(directory)
        try:
            names = ("stays", "flushed", "damaged")
            stored = {name: await buffer.put(key(name), name.encode()) for name in names}
            (directory / "staged" / stored["damaged"].parts[0].file.name).write_bytes(b"DAMAGED")
            flushed = stored["flushed"]

            class Flushing(Watcher):
                def begin(self, objects: int, size_bytes: int) -> None:
                    (directory / "staged" / flushed.parts[0].file.name).unlink()
                    with sqlite3.connect(directory / "journal") as other:
                        other.execute("DELETE FROM writes WHERE sequence = ?", (flushed.sequence,))
                    other.close()

            found = await asyncio.to_thread(run, directory, target, Flushing(), running=True)
            assert (found.objects, found.damaged) == (1, 1)
            assert exported(target) == {"stays": b"stays"}
            await buffer.put(key("later"), b"later")
        finally:
            await buffer.close()

    asyncio.run(scenario())


def test_the_buffer_is_found_in_a_cache_directory_or_is_named_itself(tmp_path: Path) -> None:
    """So that a copy of it alone can be exported."""
    (tmp_path / "writeback").mkdir()
    assert buffer_of(tmp_path) == tmp_path / "writeback"
    (tmp_path / "writeback" / "journal").touch()
    assert buffer_of(tmp_path / "writeback") == tmp_path / "writeback"
    assert buffer_of(tmp_path / "none") == tmp_path / "none" / "writeback"
