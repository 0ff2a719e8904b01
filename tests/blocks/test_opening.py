"""What a cache directory goes through between two lives of the gateway."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks import opening
from gateway.blocks.index import Usage
from gateway.blocks.layout import BlockSettings
from gateway.blocks.opening import FORMAT, WorkerLocks, open_directory
from gateway.blocks.store import BALLAST_BYTES
from gateway.core.errors import ConfigError, StartupError, StoreUnavailable
from gateway.core.model import ObjectVersion
from gateway.telemetry import metrics
from tests.support.blocks import (
    BLOCK,
    KIB,
    MIB,
    block_files,
    by_last_use,
    content_of,
    make_origin,
    open_cache,
    partial_files,
    read,
    stored,
)
from tests.support.counting import counted
from tests.support.memory_origin import MemoryOrigin


async def fill(directory: Path, origin: MemoryOrigin, *versions: ObjectVersion) -> None:
    async with open_cache(directory, origin) as cache:
        for version in versions:
            await read(cache, version)
            await cache.settle()


async def assert_warm(directory: Path, origin: MemoryOrigin, *versions: ObjectVersion) -> None:
    asked = origin.count()
    async with open_cache(directory, origin) as cache:
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)
    assert origin.count() == asked


async def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    """After an orderly end the next process serves from disk what this one fetched."""
    origin = make_origin()
    versions = [stored(origin, f"k{n}", 600_000 + n) for n in range(3)]
    await fill(tmp_path / "c", origin, *versions)
    await assert_warm(tmp_path / "c", origin, *versions)


@pytest.mark.parametrize(
    "left", ["as it was", "noise", "nothing", "an older copy", "half of the pages", "the beginning"]
)
async def test_after_an_unclean_boot_the_index_is_rebuilt_from_the_files(tmp_path: Path, left: str) -> None:
    """An index of another boot without the mark of an orderly end is not believed, not even looked at; blocks stay.

    Until the survey has found them they count as nobody's, exactly.
    """
    origin = make_origin()
    directory = tmp_path / "c"
    versions = [stored(origin, f"k{n}", 600_000 + n) for n in range(3)]
    await fill(directory, origin, versions[0])
    older = (directory / "index" / "data.mdb").read_bytes()
    await fill(directory, origin, *versions)
    before = usage_of(directory)
    (directory / "CLEAN").unlink()
    (directory / "BOOT").write_text("00000000-another-boot\n")
    leave_of_the_index(directory / "index" / "data.mdb", left, older)
    torn, truncated = block_files(directory)[:2]
    torn.write_bytes(b"\0" * torn.stat().st_size)
    os.truncate(truncated, 5000)
    (directory / "partial" / "w3").mkdir()
    (directory / "partial" / "w3" / "left").write_bytes(b"x")
    async with open_cache(directory, origin, worker=1) as cache:
        unknown = cache.usage()
        assert (unknown.blocks, unknown.used_bytes, unknown.reserved_bytes) == (0, 0, 0)
        assert unknown.unsurveyed_bytes == on_disk(directory)
        await cache.rebuild_index()
        after = cache.usage()
        assert after.unsurveyed_bytes == 0
        assert (after.blocks, after.reserved_bytes) == (before.blocks - 2, 0)
        assert after.used_bytes == on_disk(directory)
        assert partial_files(directory) == []
        assert len(block_files(directory)) == after.blocks
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)
        await cache.settle()
        assert cache.usage().blocks == before.blocks
        assert cache.usage().used_bytes == before.used_bytes
    assert origin.count() == 9 + 2


def leave_of_the_index(path: Path, left: str, older: bytes) -> None:
    """What a crash may leave of a file that was never synced."""
    whole = path.read_bytes()
    pages = [(whole if start // 4096 % 2 else older)[start : start + 4096] for start in range(0, len(older), 4096)]
    contents = {
        "as it was": whole,
        "noise": os.urandom(100_000),
        "nothing": b"",
        "an older copy": older,
        "half of the pages": b"".join(pages),
        "the beginning": whole[: 3 * 4096],
    }
    path.write_bytes(contents[left])


def on_disk(directory: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in block_files(directory))


async def test_an_index_that_its_disk_has_cut_short_is_rebuilt(tmp_path: Path) -> None:
    """In the same boot: to touch what is missing would kill the process."""
    origin, directory = make_origin(), tmp_path / "c"
    version = stored(origin, "k", 600_000)
    await fill(directory, origin, version)
    (directory / "CLEAN").unlink()
    os.truncate(directory / "index" / "data.mdb", 3 * 4096)
    async with open_cache(directory, origin, worker=1) as cache:
        await cache.rebuild_index()
        assert await read(cache, version) == content_of(origin, version)
    await assert_warm(directory, origin, version)


@pytest.mark.slow
async def test_the_cache_serves_and_fills_while_it_is_surveyed(tmp_path: Path) -> None:
    """From the first moment every read is right; a block fetched again meanwhile is there once; the capacity holds."""
    origin = make_origin()
    directory = tmp_path / "c"
    versions = [stored(origin, f"k{n}", 100_000) for n in range(60)]
    await fill(directory, origin, *versions)
    capacity_bytes = on_disk(directory) - 100_000
    (directory / "CLEAN").unlink()
    (directory / "BOOT").unlink()
    async with open_cache(directory, origin, capacity_bytes=capacity_bytes) as cache:
        survey = asyncio.create_task(cache.rebuild_index())
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)
        await cache.settle()
        await survey
        usage = cache.usage()
        assert usage.used_bytes == on_disk(directory) <= capacity_bytes
        assert (usage.blocks, usage.unsurveyed_bytes) == (len(block_files(directory)), 0)


def usage_of(directory: Path) -> Usage:
    opened = open_directory(BlockSettings(directory, 64 * MIB, BLOCK), 0)
    usage = opened.blocks.index.usage()
    opened.close()
    return usage


async def test_a_rebuilt_index_keeps_the_order_in_which_files_were_written(tmp_path: Path) -> None:
    """What was written last is evicted last, also after a rebuild."""
    origin = make_origin()
    directory = tmp_path / "c"
    versions = [stored(origin, f"k{n}", 100_000) for n in range(5)]
    await fill(directory, origin, *versions)
    order = order_of(directory)
    files = {path.name[:64]: path for path in block_files(directory)}
    for second, block_id in enumerate(order):
        os.utime(files[block_id.hex()], (second, second))
    (directory / "CLEAN").unlink()
    (directory / "BOOT").unlink()
    async with open_cache(directory, origin) as cache:
        await cache.rebuild_index()
    assert order_of(directory) == order


def order_of(directory: Path) -> list[bytes]:
    opened = open_directory(BlockSettings(directory, 64 * MIB, BLOCK), 0)
    order = by_last_use(opened.blocks.index)
    opened.close()
    return order


async def test_after_an_orderly_end_another_boot_believes_the_index(tmp_path: Path) -> None:
    """With CLEAN in place no block is scanned: a block whose header is damaged is still listed."""
    origin = make_origin()
    directory = tmp_path / "c"
    await fill(directory, origin, stored(origin, "k", BLOCK))
    (directory / "BOOT").write_text("another boot\n")
    [path] = block_files(directory)
    with path.open("r+b") as file:
        file.write(b"damaged!")
    async with open_cache(directory, origin) as cache:
        assert cache.usage().blocks == 1
        assert not (directory / "CLEAN").exists()
    assert (directory / "CLEAN").exists()


@pytest.mark.parametrize("content", [b"forebay blocks 2\n", b"", b"\xff\xfe"])
def test_another_format_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    """A newer or unknown format is an error that says what to do; not a byte of it is changed."""
    directory = tmp_path / "c"
    asyncio.run(fill(directory, origin := make_origin(), stored(origin, "k", BLOCK)))
    (directory / "FORMAT").write_bytes(content)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    with pytest.raises(StartupError, match="block format"):
        open_directory(BlockSettings(directory, MIB, BLOCK), 0)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before


def test_somebody_elses_directory_is_refused(tmp_path: Path) -> None:
    """A directory that holds other things is not taken for an empty cache."""
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(StartupError, match=r"thesis\.txt"):
        open_directory(BlockSettings(tmp_path, MIB, BLOCK), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_processes_that_begin_a_directory_at_the_same_time_do_not_take_it_for_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writes FORMAT between another's look for it and its look at what else there is."""
    read_bytes = Path.read_bytes

    def meanwhile(path: Path) -> bytes:
        try:
            return read_bytes(path)
        except FileNotFoundError:
            if path.name == "FORMAT":
                path.write_bytes(FORMAT)
            raise

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", meanwhile)
        open_directory(BlockSettings(tmp_path, MIB, BLOCK), 0).close()
    assert (tmp_path / "FORMAT").read_bytes() == FORMAT


def test_a_directory_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    """A path through a file, and the like, end the start with a message that names the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="file/c"):
        open_directory(BlockSettings(tmp_path / "file" / "c", MIB, BLOCK), 0)


def refusing(number: int) -> Callable[..., None]:
    """A system call that gives this error."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("call", ["open", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fails_while_it_is_opened_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """StoreUnavailable: who opens it goes on without. The next time, all is well again."""
    settings = BlockSettings(tmp_path / "c", MIB, BLOCK)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, refusing(number))
        with pytest.raises(StoreUnavailable, match="cannot be used"):
            open_directory(settings, 0)
    open_directory(settings, 0).close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM], ids=errno.errorcode.get)
def test_wrong_rights_are_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """No disk comes to that by itself: the start ends, and the message says what is wrong."""
    monkeypatch.setattr(os, "mkdir", refusing(number))
    with pytest.raises(StartupError, match=os.strerror(number)):
        open_directory(BlockSettings(tmp_path / "c", MIB, BLOCK), 0)


def test_a_full_disk_can_be_opened_without_ballast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there can be read: that there is no room for more is known soon enough."""
    settings = BlockSettings(tmp_path / "c", MIB, BLOCK)
    posix_fallocate = os.posix_fallocate

    def refuse(descriptor: int, offset: int, count: int) -> None:
        if count == BALLAST_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        posix_fallocate(descriptor, offset, count)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    open_directory(settings, 0).close()


def test_only_the_owner_can_read_the_directory(tmp_path: Path) -> None:
    """Directories are 0700 and files 0600, whatever the umask allows."""

    async def scenario() -> None:
        origin = make_origin()
        await fill(tmp_path / "c", origin, stored(origin, "k", BLOCK))
        for path in (tmp_path / "c", *(tmp_path / "c").rglob("*")):
            expected = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == expected, path

    previous = os.umask(0)
    try:
        asyncio.run(scenario())
    finally:
        os.umask(previous)


@pytest.mark.slow
async def test_a_lower_capacity_takes_effect_when_the_directory_is_opened(tmp_path: Path) -> None:
    """Blocks beyond the new capacity are gone before anything is served; the ones used last stay."""
    origin = make_origin()
    versions = [stored(origin, f"k{n}", 100 * KIB) for n in range(200)]
    await fill(tmp_path / "c", origin, *versions)
    async with open_cache(tmp_path / "c", origin, capacity_bytes=MIB) as cache:
        usage = cache.usage()
        assert usage.used_bytes <= MIB
        assert usage.blocks == len(block_files(tmp_path / "c")) == 9
        assert counted(metrics.CACHE_EVICTED_BLOCKS) == 191
        asked = origin.count()
        for version in versions[-9:]:
            await read(cache, version)
        assert origin.count() == asked


@pytest.mark.parametrize("wrong", [{"block_size_bytes": 100_000}, {"readahead_bytes": -1}, {"fills_max": 0}])
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """A setting out of its range is named."""
    with pytest.raises(ConfigError):
        BlockSettings(tmp_path, MIB, **wrong)


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPENING_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(opening, "OPENING_LOOKS_MAX", 5)


def hangs(worker: int) -> int:
    return 7 * worker


@pytest.mark.usefixtures("short_looks")
def test_one_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """It may be stopped, and nobody able to end it: those who wait say so, and serve without the directory."""
    with WorkerLocks(tmp_path, 3).opening(hangs), pytest.raises(BlockingIOError, match="worker 3 hangs while it opens"):
        WorkerLocks(tmp_path, 1).opening(hangs).__enter__()
    with WorkerLocks(tmp_path, 1).opening(hangs):
        pass


@pytest.mark.usefixtures("short_looks")
def test_one_that_turns_is_waited_for(tmp_path: Path) -> None:
    """However long it takes: a directory of many files is looked through, and killed half-way begun again."""
    beats, waited = count(), threading.Event()
    asked: list[int] = []

    def turns(worker: int) -> int:
        asked.append(worker)
        if len(asked) > 3 * opening.OPENING_LOOKS_MAX:
            waited.set()
        return next(beats)

    def wait() -> None:
        with WorkerLocks(tmp_path, 1).opening(turns):
            opened.set()

    opened = threading.Event()
    with WorkerLocks(tmp_path, 3).opening(turns):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert waited.wait(30)
        assert not opened.is_set()
    waiting.join(30)
    assert opened.is_set()
    assert set(asked) == {3}
