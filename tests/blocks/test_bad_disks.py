"""A disk that fills up, goes read-only or dies: the origin serves, the directory is left alone, and comes back."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest

from gateway.blocks import store
from gateway.blocks.cache import BlockCache
from gateway.blocks.directory import BlockDirectory, DiskThreads
from gateway.blocks.disk_health import (
    FAILURES_MAX,
    FAILURES_SECONDS,
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    STEADY_SECONDS,
    CircuitBreaker,
    DirectoryProbe,
    Trouble,
    trouble_of,
)
from gateway.blocks.index import GROW_SECONDS, LOWERED_SECONDS
from gateway.blocks.layout import BlockSettings
from gateway.blocks.opening import open_directory
from gateway.blocks.small_block_fetch import SegmentAppender
from gateway.blocks.store import BlockStore
from gateway.core.errors import BlockDamaged, StoreUnavailable, is_mistake
from gateway.core.model import ByteRange, ObjectVersion
from gateway.telemetry import metrics
from tests.support.appending import append_all, small_blocks
from tests.support.blocks import (
    BLOCK,
    KIB,
    MIB,
    TestClock,
    content_of,
    disk_state,
    make_origin,
    open_cache,
    partial_files,
    pass_until,
    read,
    stored,
    take,
    whole,
)
from tests.support.counting import by_label, counted
from tests.support.disks import fill_up, kill_disk, mortal_disk, small_disk


@contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, number: int, *names: str) -> Iterator[None]:
    """These functions of `os` fail when they are about a file or directory of the cache."""

    def refuse(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        for name in names:
            patched.setattr(os, name, refuse)
        yield


WRITING = ["open", "pwrite", "rename", "unlink"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", WRITING)
async def test_whatever_call_fails_every_byte_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """8.2 Cold and warm, alone and side by side: right bytes; when the disk is back, so is the cache."""
    origin, clock = make_origin(), TestClock()
    warm, cold = stored(origin, "warm", 3 * BLOCK), [stored(origin, f"k{n}", 5 * BLOCK, seed=n) for n in range(4)]
    async with open_cache(tmp_path / "c", origin, clock=clock) as cache:
        await read(cache, warm)
        await cache.settle()
        with refusing(monkeypatch, number, call):
            for version in (*cold, warm):
                asked = ByteRange(10 * KIB, version.size_bytes - 7)
                bodies = await asyncio.gather(*(read(cache, version, asked) for _ in range(3)))
                assert bodies == [content_of(origin, version, asked)] * 3
            await cache.settle()
        await pass_until(clock, lambda: disk_state() == "well")
        for version in (*cold, warm):
            assert await read(cache, version) == content_of(origin, version)
        await cache.settle()
        assert set(await outcomes(cache, (*cold, warm))) == {"hit"}
    async with open_cache(tmp_path / "c", origin) as cache:
        assert cache.usage().reserved_bytes == 0
    assert partial_files(tmp_path / "c") == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP], ids=errno.errorcode.get)
async def test_a_disk_that_sets_no_room_aside_is_full_or_takes_the_bytes_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """8.2 A file system that has no fallocate keeps blocks all the same; on a full one no room stays reserved."""
    is_full, origin, clock = number != errno.EOPNOTSUPP, make_origin(), TestClock()
    version = stored(origin, "k", 5 * BLOCK)

    def refuse(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    async with open_cache(tmp_path / "c", origin, clock=clock) as cache:
        monkeypatch.setattr(store, "_libc", SimpleNamespace(fallocate=refuse))
        assert await read(cache, version) == content_of(origin, version)
        await cache.settle()
        assert disk_state() == ("full" if is_full else "well")
        assert await outcomes(cache, [version]) == ["miss" if is_full else "hit"]
        assert cache.usage().reserved_bytes == 0
    assert partial_files(tmp_path / "c") == []


async def test_small_objects_too_arrive_while_the_disk_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8.2 Those that are packed together: served from memory, not kept, and kept again when the disk is back."""
    origin, clock = make_origin(), TestClock()
    versions = [stored(origin, f"k{n}", 10_000 + n, seed=n) for n in range(40)]
    async with open_cache(tmp_path / "c", origin, clock=clock, small_object_bytes_max=MIB) as cache:
        for version in versions[:10]:
            await read(cache, version)
        await cache.settle()
        with refusing(monkeypatch, errno.ENOSPC, "pwritev", "posix_fallocate"):
            for version in versions:
                assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert disk_state() == "full"
            assert await outcomes(cache, versions[:10]) == ["hit"] * 10
        await pass_until(clock, lambda: cache.isolation.writable)
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)
        await cache.settle()
        assert await outcomes(cache, versions) == ["hit"] * 40


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Trouble | None]:
    """What the probes have found."""
    found: list[Trouble | None] = []
    probe = DirectoryProbe.__call__

    async def tell(self: DirectoryProbe, trouble: Trouble) -> Trouble | None:
        found.append(await probe(self, trouble))
        return found[-1]

    monkeypatch.setattr(DirectoryProbe, "__call__", tell)
    return found


async def test_a_disk_that_gives_nothing_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probes: list[Trouble | None]
) -> None:
    """EIO on every read: after a few of them nothing is tried any more, until a probe succeeds."""
    origin, clock = make_origin(), TestClock()
    versions = [stored(origin, f"k{n}", BLOCK, seed=n) for n in range(8)]
    async with open_cache(tmp_path / "c", origin) as cache:
        for version in versions:
            await read(cache, version)
        await cache.settle()
    async with open_cache(tmp_path / "c", origin, clock=clock) as cache:
        with refusing(monkeypatch, errno.EIO, "preadv", "pwrite"):
            for version in versions:
                assert await read(cache, version) == content_of(origin, version)
            assert disk_state() == "failing"
            errors = counted(metrics.CACHE_DISK_ERRORS)
            for version in versions:
                assert await read(cache, version) == content_of(origin, version)
            assert counted(metrics.CACHE_DISK_ERRORS) == errors
            assert await outcomes(cache, versions[7:]) == ["miss"]
            await pass_until(clock, lambda: len(probes) == 2)
            assert not cache.isolation.readable
        await pass_until(clock, lambda: cache.isolation.writable)
        assert (await outcomes(cache, versions)).count("hit") >= len(versions) - FAILURES_MAX


async def test_an_index_that_cannot_commit_leaves_hits_and_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MDB_MAP_FULL and a failed commit: what is there is served, the rest comes from the origin, nothing is lost."""
    origin, clock = make_origin(), TestClock()
    warm, cold = stored(origin, "warm", 2 * BLOCK), stored(origin, "cold", 3 * BLOCK, seed=1)
    async with open_cache(tmp_path / "c", origin, clock=clock) as cache:
        await read(cache, warm)
        await cache.settle()
        with monkeypatch.context() as patched:
            patched.setattr("gateway.blocks.transaction.IndexTransaction.reserve", out_of_map)
            patched.setattr("gateway.blocks.transaction.IndexTransaction.touch", out_of_map)
            assert await read(cache, cold) == content_of(origin, cold)
            assert disk_state() == "full"
            reader = await cache.open_range(warm, whole(warm))
            assert (await take(reader), reader.outcome) == (content_of(origin, warm), "hit")
        await pass_until(clock, lambda: cache.isolation.writable)
        await read(cache, cold)
        await cache.settle()
        assert await outcomes(cache, [cold]) == ["hit"]


def out_of_map(*_: object) -> None:
    raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached")


@pytest.mark.root
def test_a_disk_that_somebody_else_fills_makes_the_cache_smaller(tmp_path: Path) -> None:
    """8.2 No space, for real: hits stay hits, the origin serves the rest, a little is given back, and filling goes on
    with what is left; when there is room again the whole capacity is used."""

    async def scenario(disk: Path) -> None:
        origin, clock = make_origin(), TestClock()
        versions = [stored(origin, f"k{n}", BLOCK, seed=n) for n in range(100)]
        async with open_cache(disk / "c", origin, clock=clock, capacity_bytes=26 * MIB) as cache:
            for version in versions[:40]:
                await read(cache, version)
            await cache.settle()
            others = fill_up(disk)
            for version in versions[40:60]:
                assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert disk_state() == "full"
            assert await outcomes(cache, versions[:40]) == ["hit"] * 40
            await pass_until(clock, lambda: cache.isolation.writable)
            evicted = counted(metrics.CACHE_EVICTED_BLOCKS)
            assert 0 < evicted <= 8
            for version in versions[60:]:
                assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert disk_state() == "well"
            assert 30 <= cache.usage().blocks < 40
            others.unlink()
            for version in versions * 3:  # it takes half of what is free at a time
                await read(cache, version)
                await cache.settle()
                clock.advance(1.0)
                await asyncio.sleep(0)
            for version in versions:
                await read(cache, version)
            await cache.settle()
            assert cache.usage().blocks > 60

    with small_disk(tmp_path / "disk", 32 * MIB) as disk:
        asyncio.run(scenario(disk))


async def outcomes(cache: BlockCache, versions: Iterable[ObjectVersion]) -> list[str]:
    found: list[str] = []
    for version in versions:
        reader = await cache.open_range(version, whole(version))
        found.append(reader.outcome)
        await reader.aclose()
    return found


@pytest.mark.root
def test_a_disk_that_dies_leaves_the_origin_serving(tmp_path: Path, probes: list[Trouble | None]) -> None:
    """8.2 The file system answers everything with EIO, for real: not one wrong or missing byte, and an orderly end."""

    async def scenario(disk: Path) -> None:
        origin, clock = make_origin(), TestClock()
        versions = [stored(origin, f"k{n}", 2 * BLOCK, seed=n) for n in range(6)]
        async with open_cache(disk / "c", origin, clock=clock) as cache:
            for version in versions[:4]:
                await read(cache, version)
            await cache.settle()
            kill_disk(disk)
            for version in versions * 2:
                assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert disk_state() == "failing"
            await pass_until(clock, lambda: len(probes) == 2)
            for version in versions:
                assert await read(cache, version) == content_of(origin, version)
            assert disk_state() == "failing"

    with mortal_disk(tmp_path / "disk", tmp_path / "image") as disk:
        asyncio.run(scenario(disk))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 17])
def test_one_full_disk_costs_the_same_however_many_processes_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """8.2 Each finds the disk full, all together give back a little, once; later all use the whole capacity again."""
    clock, capacity_bytes = TestClock(), 20 * MIB
    opened = open_directory(BlockSettings(tmp_path / "c", capacity_bytes, 64 * KIB), 0, clock.now)
    append_all(SegmentAppender(opened.blocks), small_blocks("k", 320, 60_000))
    held_bytes = opened.blocks.index.usage().used_bytes
    blocks = [
        BlockDirectory(opened.blocks.store, opened.blocks.index, opened.blocks.capacity, opened.blocks.pins, clock.now)
        for _ in range(processes)
    ]
    outcomes = iter([False, True] * processes)
    try_writing = BlockStore.try_writing

    def try_once_in_vain(store: BlockStore, room_bytes: int) -> None:
        if not next(outcomes):
            raise StoreUnavailable("full") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try_writing(store, room_bytes)

    monkeypatch.setattr(BlockStore, "try_writing", try_once_in_vain)

    async def scenario() -> None:
        threads = DiskThreads(1)
        for directory in blocks:
            probe = DirectoryProbe(directory, threads, 64 * KIB)
            assert await probe(Trouble.FULL) is None
        threads.shut_down()

    asyncio.run(scenario())
    assert 0.97 * held_bytes <= opened.blocks.index.usage().used_bytes < held_bytes
    [lowered_bytes] = {directory.capacity.total_bytes for directory in blocks}
    assert 0.97 * held_bytes <= lowered_bytes < held_bytes
    append_all(SegmentAppender(blocks[-1]), small_blocks("l", 50, 60_000))
    assert opened.blocks.index.usage().used_bytes <= lowered_bytes
    clock.advance(GROW_SECONDS)
    assert {directory.capacity.total_bytes for directory in blocks} == {capacity_bytes}
    opened.close()


@pytest.mark.slow
def test_a_disk_that_stays_full_gets_back_half_at_most_however_often_it_is_tried(tmp_path: Path) -> None:
    """Somebody else takes whatever is given back: then the cache is left as it is."""
    clock = TestClock()
    opened = open_directory(BlockSettings(tmp_path / "c", 20 * MIB, 64 * KIB), 0, clock.now)
    append_all(SegmentAppender(opened.blocks), small_blocks("k", 320, 60_000))
    held_bytes = opened.blocks.index.usage().used_bytes
    for _ in range(200):
        clock.advance(LOWERED_SECONDS)
        opened.blocks.give_back(64 * KIB)
    assert 0.48 * held_bytes <= opened.blocks.index.usage().used_bytes <= 0.5 * held_bytes
    opened.close()


@pytest.mark.slow
def test_there_is_room_again_and_the_cache_grows_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By half of what is free, as somebody else may want some; not while it has just been full, and the later the more
    often it was: a quota, say, that the file system does not know of."""
    clock, capacity_bytes, step_bytes = TestClock(), 40 * MIB, 64 * KIB
    opened = open_directory(BlockSettings(tmp_path / "c", capacity_bytes, 64 * KIB), 0, clock.now)
    append_all(SegmentAppender(opened.blocks), small_blocks("k", 320, 60_000))
    free = {"bytes": 0}
    monkeypatch.setattr(BlockStore, "free_bytes", lambda _: free["bytes"])
    blocks = opened.blocks

    def held_bytes() -> int:
        return blocks.index.usage().used_bytes

    blocks.give_back(step_bytes)
    lowered_bytes = blocks.capacity.total_bytes
    free["bytes"] = 4 * MIB
    blocks.grow_again(step_bytes)
    assert blocks.capacity.total_bytes == lowered_bytes, "it has just been full"
    clock.advance(LOWERED_SECONDS)
    free["bytes"] = step_bytes
    blocks.grow_again(step_bytes)
    assert blocks.capacity.total_bytes == lowered_bytes, "that is no room"
    free["bytes"] = 4 * MIB
    blocks.grow_again(step_bytes)
    assert blocks.capacity.total_bytes == held_bytes() + 2 * MIB
    append_all(SegmentAppender(blocks), small_blocks("l", 80, 60_000))
    assert held_bytes() <= blocks.capacity.total_bytes
    free["bytes"] = 1024 * MIB
    blocks.grow_again(step_bytes)
    assert blocks.capacity is blocks.configured_capacity

    for waits in (2, 4, 8):  # it is full again, and again
        blocks.give_back(step_bytes)
        lowered_bytes = blocks.capacity.total_bytes
        clock.advance(waits * LOWERED_SECONDS - 1)
        blocks.grow_again(step_bytes)
        assert blocks.capacity.total_bytes == lowered_bytes
        clock.advance(1)
        blocks.grow_again(step_bytes)
        assert blocks.capacity is blocks.configured_capacity
    clock.advance(GROW_SECONDS)
    blocks.give_back(step_bytes)
    clock.advance(LOWERED_SECONDS)
    blocks.grow_again(step_bytes)
    assert blocks.capacity is blocks.configured_capacity, "it is long ago"
    opened.close()


def caused(error: Exception, number: int) -> Exception:
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (errno.ENOSPC, Trouble.FULL),
        (errno.EDQUOT, Trouble.FULL),
        (errno.EROFS, Trouble.READ_ONLY),
        (errno.EIO, Trouble.FAILING),
        (errno.ENODEV, Trouble.FAILING),
        (errno.ENOENT, Trouble.FAILING),
        (errno.EMFILE, None),
        (errno.ENOMEM, None),
    ],
)
def test_errors_say_what_is_wrong_with_the_disk(number: int, trouble: Trouble | None) -> None:
    """No space and no device are told apart; a lack of descriptors or memory is no fault of the disk."""
    assert trouble_of(caused(StoreUnavailable("x"), number)) is trouble


def test_what_is_wrong_with_a_block_is_not_wrong_with_the_disk() -> None:
    """A wrong checksum, a file that somebody removed, a slot without room: the directory is as good as before."""
    assert trouble_of(BlockDamaged("the checksum of chunk 3 differs")) is None
    assert trouble_of(caused(BlockDamaged("the block's file is gone"), errno.ENOENT)) is None
    assert trouble_of(StoreUnavailable("no room for 8 MiB of slot a")) is None
    assert trouble_of(caused(BlockDamaged("cannot be read"), errno.EIO)) is Trouble.FAILING
    full = StoreUnavailable("the index cannot be written")
    full.__cause__ = lmdb.MapFullError("mdb_put: MDB_MAP_FULL")
    assert trouble_of(full) is Trouble.FULL


def test_mistakes_are_told_from_bad_luck() -> None:
    """No disk comes to wrong rights by itself."""
    assert is_mistake(PermissionError(errno.EACCES, "x"))
    assert is_mistake(caused(StoreUnavailable("x"), errno.ENOTDIR))
    assert not is_mistake(OSError(errno.EROFS, "x"))
    assert not is_mistake(OSError(errno.ENOSPC, "x"))
    assert not is_mistake(StoreUnavailable("x"))


class Patient:
    """A probe that finds what a test sets, and counts its calls."""

    def __init__(self) -> None:
        self.clock = TestClock()
        self.finds: Trouble | None = None
        self.probes = 0
        self.isolation = CircuitBreaker(Path("/c"), self.probe, self.clock)

    async def probe(self, trouble: Trouble) -> Trouble | None:
        self.probes += 1
        return self.finds

    def fails(self, number: int) -> None:
        self.isolation.note(caused(StoreUnavailable("x"), number))

    async def wait(self, seconds: float) -> None:
        """Let time pass, and let those go on that waited for it."""
        await settled()
        self.clock.advance(seconds)
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_bad_sector_isolates_nothing_and_three_failures_do() -> None:
    """Failures that lie far apart never add up."""
    patient = Patient()
    for _ in range(3 * FAILURES_MAX):
        patient.fails(errno.EIO)
        patient.clock.time += FAILURES_SECONDS
    assert patient.isolation.readable
    for _ in range(FAILURES_MAX):
        patient.fails(errno.EIO)
    assert (patient.isolation.readable, patient.isolation.writable) == (False, False)
    assert disk_state() == "failing"
    await patient.isolation.close()


async def test_a_full_disk_is_known_at_once_and_goes_on_giving() -> None:
    """No space leaves no doubt. What has become worse since is seen, what is less bad changes nothing."""
    patient = Patient()
    patient.fails(errno.ENOSPC)
    assert (patient.isolation.readable, patient.isolation.writable) == (True, False)
    patient.fails(errno.EROFS)
    patient.fails(errno.ENOSPC)
    assert disk_state() == "read-only"
    for _ in range(FAILURES_MAX):
        patient.fails(errno.EIO)
    assert patient.isolation.state == "failing"
    await patient.isolation.close()


async def test_probes_come_at_growing_distances_and_end_the_isolation() -> None:
    """1, 2, 4 … 60 seconds; what the probe has found counts, and a disk that is soon ill again is left alone longer."""
    patient = Patient()
    patient.finds = Trouble.FULL
    patient.fails(errno.ENOSPC)
    expected = PAUSE_SECONDS
    for probes in range(1, 10):
        await patient.wait(expected * 0.99)
        assert patient.probes == probes - 1
        await patient.wait(expected * 0.01 + 1e-6)
        assert patient.probes == probes
        expected = min(2 * expected, PAUSE_SECONDS_MAX)
    patient.finds = None
    await patient.wait(PAUSE_SECONDS_MAX)
    assert patient.isolation.writable
    patient.fails(errno.ENOSPC)
    await patient.wait(PAUSE_SECONDS_MAX - 1)
    assert not patient.isolation.writable
    await patient.wait(2)
    assert patient.isolation.writable
    patient.clock.time += STEADY_SECONDS
    patient.fails(errno.ENOSPC)
    await patient.wait(PAUSE_SECONDS)
    assert patient.isolation.writable
    await patient.isolation.close()


def test_the_log_has_a_line_for_each_change_and_not_for_each_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand refused writes are one line; coming back is another."""

    async def scenario() -> None:
        patient = Patient()
        for _ in range(1000):
            patient.fails(errno.ENOSPC)
        await patient.wait(PAUSE_SECONDS)
        assert patient.isolation.writable
        assert by_label(metrics.CACHE_DISK_ERRORS, "trouble") == {"full": 1000}
        await patient.isolation.close()

    asyncio.run(scenario())
    assert len(capsys.readouterr().out.splitlines()) == 2
