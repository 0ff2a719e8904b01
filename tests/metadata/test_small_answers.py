"""Small answers on disk: what comes back, what does not, who shares them, and what harm to the file does."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metadata import small_answers
from gateway.metadata.answer_file import AnswerFile
from gateway.metadata.answer_records import Answer, Question, pack, unpack
from gateway.metadata.freshness import answer_freshness
from gateway.metadata.opening import ANSWERS, open_directory
from gateway.metadata.raw_disk import RawDisk
from gateway.metadata.records import Learned
from gateway.metadata.small_answers import ANSWER_BYTES_MAX, PAUSE_SECONDS, PENDING_MAX, SmallAnswers
from gateway.policy.prefixes import Prefix
from gateway.policy.slots import Slot

ROOT = Path(__file__).parents[2]
QUESTION = Question("GetBucketLocation", "bucket")
ANSWER = Answer(200, [("content-type", "application/xml"), ("x-amz-bucket-region", "eu")], b"<LocationConstraint/>")
SLOT = Slot("t", Prefix.parse("s3://bucket/"), "read-write", "ttl", 60.0)


@dataclass
class Counting:
    """An observer that remembers."""

    troubles: list[str] = field(default_factory=list)

    def answered(self, operation: str, outcome: str) -> None:
        return

    def trouble(self, kind: str) -> None:
        self.troubles.append(kind)


@dataclass
class World:
    """Answers in a directory, and the moment that a test is in."""

    directory: Path
    moment: Learned = field(default_factory=lambda: Learned(7, 1000.0, 1))
    counting: Counting = field(default_factory=Counting)

    def answers(self, **more: int) -> SmallAnswers:
        return SmallAnswers(
            self.directory / ANSWERS, lambda bucket: self.moment, ttl_seconds=60.0, observer=self.counting, **more
        )

    def pass_seconds(self, seconds: float) -> None:
        self.moment = replace(self.moment, seconds=self.moment.seconds + seconds)

    @property
    def database(self) -> Path:
        return self.directory / ANSWERS / "cache.db"


def play(directory: Path, scenario: Callable[[World, SmallAnswers], Awaitable[None]], **more: int) -> World:
    """Run a scenario with one process's answers."""
    world = World(directory)

    async def run() -> None:
        answers = world.answers(**more)
        try:
            await scenario(world, answers)
        finally:
            await answers.close()

    asyncio.run(run())
    return world


async def keep(answers: SmallAnswers, question: Question = QUESTION, answer: Answer = ANSWER) -> None:
    answers.keep(question, answers.now(question.bucket), answer)
    await answers.settle()


async def known(answers: SmallAnswers, question: Question = QUESTION) -> Answer | None:
    found = await answers.recall(question, SLOT)
    return found.answer if found is not None and found.is_fresh else None


NAMES = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=8)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20)
ANSWER_OF_ANY_KIND = st.builds(
    Answer, st.integers(200, 599), st.lists(st.tuples(NAMES, VALUES), max_size=4), st.binary(max_size=50)
)
MOMENTS = st.builds(Learned, st.integers(0, 2**63), st.floats(0, 1e9), st.integers(0, 2**32 - 1))


@given(MOMENTS, ANSWER_OF_ANY_KIND)
def test_status_headers_and_body_come_back(learned: Learned, answer: Answer) -> None:
    """A record gives back what was packed, in order, to the byte."""
    assert unpack(b"place", pack(b"place", learned, answer)) == (learned, answer)


@given(st.data())
def test_a_damaged_record_is_none(data: st.DataObject) -> None:
    """A flipped bit, a cut, an addition, another question's record: a miss, never another answer."""
    record = pack(b"place", Learned(7, 1.5, 9), ANSWER)
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    flipped = bytearray(record)
    flipped[bit // 8] ^= 1 << bit % 8
    assert unpack(b"place", bytes(flipped)) is None
    assert unpack(b"place", record[: data.draw(st.integers(0, len(record) - 1))]) is None
    assert unpack(b"place", record + b"x") is None
    assert unpack(b"elsewhere", record) is None


@pytest.mark.parametrize(
    ("consistency", "age", "boot", "generation", "expected"),
    [
        ("strict", 0.0, 1, 7, "fresh"),
        ("strict", 60.0, 1, 7, "useless"),
        ("ttl", 59.9, 1, 7, "fresh"),
        ("ttl", 60.0, 1, 7, "stale"),
        ("ttl", 90.0, 1, 7, "useless"),
        ("immutable", 1e9, 1, 7, "stale"),
        ("immutable", 0.0, 2, 7, "useless"),
        ("ttl", 0.0, 2, 7, "useless"),
        ("ttl", 0.0, 1, 8, "useless"),
        ("ttl", -1.0, 1, 7, "useless"),
    ],
)
def test_what_is_believed(consistency: str, age: float, boot: int, generation: int, expected: str) -> None:
    """By an age of this boot's own clock, in the generation of the question; stale as long as the slot goes on."""
    slot = Slot("x", Prefix(""), "read-write", consistency, 60.0, 0.0, 30.0)  # type: ignore[arg-type]
    learned, now = Learned(7, 1000.0, 1), Learned(generation, 1000.0 + age, boot)
    assert answer_freshness(learned, now, slot, ttl_seconds=60.0).value == expected


def test_what_was_kept_is_recalled_by_others_and_later(tmp_path: Path) -> None:
    """By a second user of the directory, and by one that opens it after the first is gone."""

    async def scenario(world: World, answers: SmallAnswers) -> None:
        second = world.answers()
        assert await known(second) is None
        await keep(answers)
        assert await known(second) == await known(answers) == ANSWER
        assert await known(answers, Question("GetBucketLocation", "other")) is None
        assert await known(answers, Question("HeadBucket", "bucket")) is None
        await second.close()

    world = play(tmp_path, scenario)
    assert world.counting.troubles == []
    play(tmp_path, recalls(ANSWER))


def recalls(expected: Answer | None) -> Callable[[World, SmallAnswers], Awaitable[None]]:
    async def scenario(world: World, answers: SmallAnswers) -> None:
        assert await known(answers) == expected

    return scenario


def test_what_was_asked_before_a_write_is_never_believed_after_it(tmp_path: Path) -> None:
    """Not what lies there, not what lands later, not what was asked for while the disk was read."""

    async def scenario(world: World, answers: SmallAnswers) -> None:
        await keep(answers)
        asked = answers.now("bucket")
        world.moment = replace(world.moment, generation=8)
        assert await known(answers) is None
        answers.keep(QUESTION, asked, ANSWER)
        await answers.settle()
        assert await known(answers) is None
        await keep(answers)
        recalling = asyncio.ensure_future(known(answers))
        await asyncio.sleep(0)
        world.moment = replace(world.moment, generation=9)
        assert await recalling is None

    play(tmp_path, scenario)


def test_the_file_is_for_its_user_alone_and_keeps_to_its_size(tmp_path: Path) -> None:
    """Whatever the umask; whoever has many buckets makes it forget others, and answers over 64 KiB are not kept."""

    async def scenario(world: World, answers: SmallAnswers) -> None:
        for number in range(300):
            await keep(answers, Question("GetBucketTagging", f"b{number}"), Answer(200, [], os.urandom(8000)))
        assert await known(answers, Question("GetBucketTagging", "b0")) is None
        assert await known(answers, Question("GetBucketTagging", "b299")) is not None
        await keep(answers, answer=Answer(200, [], b"x" * ANSWER_BYTES_MAX))
        assert await known(answers) is None

    before = os.umask(0)
    try:
        world = play(tmp_path, scenario, size_bytes_max=2**20)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / ANSWERS).rglob("*")}
    assert set(modes) >= {"cache.db"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / ANSWERS).stat().st_mode) == 0o700
    assert world.database.stat().st_size < 2 * 2**20
    assert world.counting.troubles == []


@pytest.mark.parametrize("value", ["text", 5, 1.5, None, bytearray(b"x"), object()])
def test_nothing_but_bytes_goes_in(tmp_path: Path, value: object) -> None:
    """Neither as a key nor as a value: what diskcache would pickle is a mistake, and says so."""
    disk = RawDisk(str(tmp_path))
    with pytest.raises(TypeError, match="only bytes"):
        disk.store(value, read=False)
    with pytest.raises(TypeError, match="only bytes"):
        disk.put(value)


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["value", "file", "key", "text", "number"])
def test_a_planted_pickle_is_a_miss_and_is_never_opened(tmp_path: Path, form: str) -> None:
    """Whatever a row of the file claims to be, only bytes are read: no code runs, no other file is read or removed."""
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    (tmp_path / "bomb").write_bytes(bomb)
    forms: dict[str, dict[str, object]] = {
        "value": {"mode": 4, "value": bomb},
        "file": {"mode": 4, "value": None, "filename": "../bomb"},
        "key": {"raw": 0, "key": pickle.dumps(Bomb(tmp_path / "exploded"))},
        "text": {"mode": 3, "value": None, "filename": "../bomb"},
        "number": {"value": 5},
    }
    columns = forms[form]

    async def scenario(world: World, answers: SmallAnswers) -> None:
        await keep(answers)
        with closing(sqlite3.connect(world.database, isolation_level=None)) as connection:
            changes = ", ".join(f"{name} = ?" for name in columns)
            connection.execute(f"UPDATE Cache SET {changes}", list(columns.values()))
        assert await known(answers) is None
        await keep(answers)
        assert await known(answers) == ANSWER

    world = play(tmp_path, scenario)
    assert world.counting.troubles == []
    assert (tmp_path / "bomb").read_bytes() == bomb
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists(), "the bomb is one"


def no_database(path: Path) -> None:
    path.write_bytes(b"no database" * 4096)


def flipped(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[24:] = bytes(byte ^ 0x5A for byte in whole[24:])
    path.write_bytes(whole)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def another_database(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE Settings (key TEXT NOT NULL UNIQUE, value)")
        connection.execute("CREATE TABLE Cache (a, b)")


def odd_settings(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("INSERT INTO Settings VALUES ('get', 1), ('disk_x', 2), ('sqlite_x y', 3)")


HARMS = [no_database, flipped, cut, another_database]


async def recovers(world: World, answers: SmallAnswers) -> None:
    """Harmed: nobody sees an error or another answer, and soon answers are kept again."""
    for _ in range(3):
        assert await known(answers) in (None, ANSWER)
        await keep(answers)
        world.pass_seconds(PAUSE_SECONDS)
    assert await known(answers) == ANSWER
    assert "damaged" in world.counting.troubles


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_harmed_while_it_is_open_is_begun_anew(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Garbage, flipped bits, a cut, another database in its place: a miss that is counted, and then a new file."""

    async def scenario(world: World, answers: SmallAnswers) -> None:
        for number in range(20):
            await keep(answers, Question("HeadBucket", str(number)), Answer(200, [], b"x" * 3000))
        await keep(answers)
        harm(world.database)
        await recovers(world, answers)

    play(tmp_path, scenario)


@pytest.mark.parametrize("harm", [*HARMS, odd_settings])
def test_a_file_harmed_before_it_is_opened_is_begun_anew(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """The same, and settings in it that diskcache would act on."""

    async def first(world: World, answers: SmallAnswers) -> None:
        await keep(answers)

    harm(play(tmp_path, first).database)
    play(tmp_path, recovers)


def test_a_file_that_is_removed_is_made_again(tmp_path: Path) -> None:
    """By hand, or by another process that found it harmed: what is kept next, both see."""

    async def scenario(world: World, answers: SmallAnswers) -> None:
        second = world.answers()
        await keep(answers)
        assert await known(second) == ANSWER
        shutil.rmtree(world.directory / ANSWERS)
        assert await known(second) is None
        await keep(answers)
        assert await known(second) == await known(answers) == ANSWER
        await second.close()

    assert play(tmp_path, scenario).counting.troubles == []


def test_a_directory_that_cannot_be_made_is_a_miss(tmp_path: Path) -> None:
    """Nothing is remembered, nothing fails, and the disk is left alone for a while."""
    (tmp_path / ANSWERS).write_bytes(b"a file")

    async def scenario(world: World, answers: SmallAnswers) -> None:
        for _ in range(3):
            await keep(answers)
            assert await known(answers) is None
        (world.directory / ANSWERS).unlink()
        assert await known(answers) is None
        world.pass_seconds(PAUSE_SECONDS)
        await keep(answers)
        assert await known(answers) == ANSWER

    assert set(play(tmp_path, scenario).counting.troubles) == {"unavailable"}


def test_a_locked_file_is_a_miss(tmp_path: Path) -> None:
    """While another process is in a transaction without end: opened already, or not yet."""

    async def scenario(world: World, answers: SmallAnswers) -> None:
        await keep(answers)
        late = world.answers()
        with closing(sqlite3.connect(world.database, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            for user in (answers, late):
                assert await known(user) is None
                world.pass_seconds(PAUSE_SECONDS)
                await keep(user)
                world.pass_seconds(PAUSE_SECONDS)
            other.execute("ROLLBACK")
        for user in (answers, late):
            assert await known(user) == ANSWER
        await late.close()

    assert play(tmp_path, scenario).counting.troubles == ["unavailable"] * 4


def test_a_file_that_another_process_is_opening_is_a_miss(tmp_path: Path) -> None:
    """Nobody waits for it, however long it takes."""

    async def scenario(world: World, answers: SmallAnswers) -> None:
        (world.directory / ANSWERS).mkdir()
        with (world.directory / ANSWERS / "opening.lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert await known(answers) is None
        world.pass_seconds(PAUSE_SECONDS)
        await keep(answers)
        assert await known(answers) == ANSWER

    assert play(tmp_path, scenario).counting.troubles == ["unavailable"]


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks goes on without it; what waits for it is bounded."""
    monkeypatch.setattr(small_answers, "RECALL_SECONDS_MAX", 0.01)
    hanging = threading.Event()

    async def scenario(world: World, answers: SmallAnswers) -> None:
        monkeypatch.setattr(answers._file, "get", lambda place: hanging.wait() or None)
        recalled = [known(answers) for _ in range(PENDING_MAX + 10)]
        assert await asyncio.gather(*recalled) == [None] * len(recalled)
        assert len(answers._pending) == PENDING_MAX
        world.pass_seconds(PAUSE_SECONDS)
        assert await known(answers) is None
        assert len(answers._pending) == PENDING_MAX
        hanging.set()

    assert set(play(tmp_path, scenario).counting.troubles) == {"unavailable"}


OTHER = """
import os, resource, signal, sys
from pathlib import Path
from gateway.metadata.answer_file import AnswerFile
file = AnswerFile(Path(sys.argv[1]))
for step in sys.argv[2:]:
    if step == "keep":
        print(file.put(b"place", b"record"))
    elif step == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    elif step == "many":
        for number in range(200):
            file.put(b"place%d" % (number % 7), b"%d" % number * 50)
    elif step == "look":
        print(file.get(b"place"))
    elif step == "die":
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
file.close()
"""


def other(directory: Path, *steps: str) -> subprocess.Popen[str]:
    """Another process that has the directory open, and does these things."""
    command = [sys.executable, "-c", OTHER, str(directory), *steps]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def ended(process: subprocess.Popen[str]) -> list[str]:
    return process.communicate(timeout=60)[0].split()


@contextmanager
def answer_file(directory: Path) -> Iterator[AnswerFile]:
    file = AnswerFile(directory)
    try:
        yield file
    finally:
        file.close()


def test_processes_share_the_file_and_may_be_killed(tmp_path: Path) -> None:
    """What a process has kept is there for all, though it is killed right after."""
    directory = tmp_path / ANSWERS
    with answer_file(directory) as file:
        assert ended(other(directory, "keep", "die")) == ["None"]
        assert file.get(b"place") == b"record"
        assert file.put(b"place", b"new") is None
        assert ended(other(directory, "look")) == ["b'new'"]


def test_processes_that_keep_answers_at_once_do_not_harm_the_file(tmp_path: Path) -> None:
    """Some may not be kept for want of the lock; every record is one that was kept for its place."""
    directory = tmp_path / ANSWERS
    with answer_file(directory) as file:
        assert file.put(b"place", b"record") is None
        processes = [other(directory, "many") for _ in range(3)]
        for process in processes:
            assert ended(process) == []
        for number in range(7):
            record = file.get(b"place%d" % number)
            assert isinstance(record, bytes)
            assert int(record[: len(record) // 50]) % 7 == number
    with closing(sqlite3.connect(directory / "cache.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_full_disk_keeps_nothing_and_harms_nothing(tmp_path: Path) -> None:
    """Neither when the file is to be made, nor when it is there."""
    assert ended(other(tmp_path / "a", "full", "keep", "look")) == ["unavailable", "unavailable"]
    assert ended(other(tmp_path / "b", "keep", "full", "many", "look")) == ["None", "b'record'"]


def test_answers_go_with_the_generations_that_they_are_held_against(tmp_path: Path) -> None:
    """Where the counters begin again at 0, an old answer could be taken for a new one: so it is dropped with them."""
    catalog = open_directory(tmp_path, "origin")
    with answer_file(tmp_path / ANSWERS) as file:
        assert file.put(b"place", b"record") is None
    catalog.close()
    open_directory(tmp_path, "origin").close()
    with answer_file(tmp_path / ANSWERS) as file:
        assert file.get(b"place") == b"record"
    (tmp_path / "generations").unlink()
    open_directory(tmp_path, "origin").close()
    with answer_file(tmp_path / ANSWERS) as file:
        assert file.get(b"place") is None
        assert file.put(b"place", b"record") is None
    open_directory(tmp_path, "another origin").close()
    with answer_file(tmp_path / ANSWERS) as file:
        assert file.get(b"place") is None
