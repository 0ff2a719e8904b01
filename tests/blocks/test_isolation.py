"""A disk that fills up, goes read-only or dies: the origin serves, the directory is left alone, and comes back."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from gateway.blocks.cache import BlockCache
from gateway.blocks.isolation import (
    FAILURES_MAX,
    FAILURES_SECONDS,
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    STEADY_SECONDS,
    Isolation,
)
from gateway.blocks.probe import GROW_SECONDS, DirectoryProbe
from gateway.blocks.troubles import Trouble, trouble_of
from gateway.errors import BlockDamaged, StoreUnavailable, is_mistake
from gateway.objects import ByteRange, ObjectVersion
from tests.support.blocks import (
    BLOCK,
    KIB,
    MIB,
    CountingObserver,
    TestClock,
    content_of,
    make_origin,
    open_cache,
    partial_files,
    pass_until,
    read,
    stored,
    take,
    whole,
)
from tests.support.disks import fill_up, kill_disk, mortal_disk, small_disk


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
    """What a probe will find, and how often it was asked."""

    def __init__(self) -> None:
        self.clock = TestClock()
        self.observer = CountingObserver()
        self.finds: Trouble | None = None
        self.probes = 0
        self.isolation = Isolation(Path("/c"), self.probe, self.clock, self.observer)

    async def probe(self, trouble: Trouble) -> Trouble | None:
        self.probes += 1
        return self.finds

    def fails(self, number: int) -> None:
        self.isolation.note(caused(StoreUnavailable("x"), number))

    async def wait(self, seconds: float) -> None:
        """Let time pass, and whoever has waited for it go on."""
        await settled()
        self.clock.advance(seconds)
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_bad_sector_isolates_nothing_and_three_failures_do() -> None:
    """Failures that lie far apart never add up."""

    async def scenario() -> None:
        patient = Patient()
        for _ in range(3 * FAILURES_MAX):
            patient.fails(errno.EIO)
            patient.clock.time += FAILURES_SECONDS
        assert patient.isolation.readable
        for _ in range(FAILURES_MAX):
            patient.fails(errno.EIO)
        assert (patient.isolation.readable, patient.isolation.writable) == (False, False)
        assert patient.observer.disk_states == ["well", "failing"]
        await patient.isolation.close()

    asyncio.run(scenario())


def test_a_full_disk_is_known_at_once_and_goes_on_giving() -> None:
    """No space leaves no doubt. What has become worse since is seen, what is less bad changes nothing."""

    async def scenario() -> None:
        patient = Patient()
        patient.fails(errno.ENOSPC)
        assert (patient.isolation.readable, patient.isolation.writable) == (True, False)
        patient.fails(errno.EROFS)
        patient.fails(errno.ENOSPC)
        assert patient.observer.disk_states == ["well", "full", "read-only"]
        for _ in range(FAILURES_MAX):
            patient.fails(errno.EIO)
        assert patient.isolation.state == "failing"
        await patient.isolation.close()

    asyncio.run(scenario())


def test_probes_come_at_growing_distances_and_end_the_isolation() -> None:
    """1, 2, 4 … 60 seconds; what the probe has found counts, and a disk that is soon ill again is left alone longer."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_the_log_has_a_line_for_each_change_and_not_for_each_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand refused writes are one line; coming back is another."""

    async def scenario() -> None:
        patient = Patient()
        for _ in range(1000):
            patient.fails(errno.ENOSPC)
        await patient.wait(PAUSE_SECONDS)
        assert patient.isolation.writable
        assert patient.observer.disk_errors == ["full"] * 1000
        await patient.isolation.close()

    asyncio.run(scenario())
    assert len(capsys.readouterr().out.splitlines()) == 2


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
def test_whatever_call_fails_every_byte_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """8.2 Cold and warm, alone and side by side: right bytes; when the disk is back, so is the cache."""

    async def scenario() -> None:
        origin, observer, clock = make_origin(), CountingObserver(), TestClock()
        warm, cold = stored(origin, "warm", 3 * BLOCK), [stored(origin, f"k{n}", 5 * BLOCK, seed=n) for n in range(4)]
        async with open_cache(tmp_path / "c", origin, observer=observer, clock=clock) as cache:
            await read(cache, warm)
            await cache.settle()
            with refusing(monkeypatch, number, call):
                for version in (*cold, warm):
                    asked = ByteRange(10 * KIB, version.size_bytes - 7)
                    bodies = await asyncio.gather(*(read(cache, version, asked) for _ in range(3)))
                    assert bodies == [content_of(origin, version, asked)] * 3
                await cache.settle()
            await pass_until(clock, lambda: observer.disk_states[-1] == "well")
            for version in (*cold, warm):
                assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert set(await outcomes(cache, (*cold, warm))) == {"hit"}
        async with open_cache(tmp_path / "c", origin) as cache:
            assert cache.usage().reserved_bytes == 0
        assert partial_files(tmp_path / "c") == []

    asyncio.run(scenario())


def test_small_objects_too_arrive_while_the_disk_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8.2 Those that are packed together: served from memory, not kept, and kept again when the disk is back."""

    async def scenario() -> None:
        origin, observer, clock = make_origin(), CountingObserver(), TestClock()
        versions = [stored(origin, f"k{n}", 10_000 + n, seed=n) for n in range(40)]
        async with open_cache(tmp_path / "c", origin, observer=observer, clock=clock, packed_bytes_max=MIB) as cache:
            for version in versions[:10]:
                await read(cache, version)
            await cache.settle()
            with refusing(monkeypatch, errno.ENOSPC, "pwritev", "posix_fallocate"):
                for version in versions:
                    assert await read(cache, version) == content_of(origin, version)
                await cache.settle()
                assert observer.disk_states == ["well", "full"]
                assert await outcomes(cache, versions[:10]) == ["hit"] * 10
            await pass_until(clock, lambda: cache.isolation.writable)
            for version in versions:
                assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert await outcomes(cache, versions) == ["hit"] * 40

    asyncio.run(scenario())


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


def test_a_disk_that_gives_nothing_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probes: list[Trouble | None]
) -> None:
    """EIO on every read: after a few of them nothing is tried any more, until a probe succeeds."""

    async def scenario() -> None:
        origin, observer, clock = make_origin(), CountingObserver(), TestClock()
        versions = [stored(origin, f"k{n}", BLOCK, seed=n) for n in range(8)]
        async with open_cache(tmp_path / "c", origin) as cache:
            for version in versions:
                await read(cache, version)
            await cache.settle()
        async with open_cache(tmp_path / "c", origin, observer=observer, clock=clock) as cache:
            with refusing(monkeypatch, errno.EIO, "preadv", "pwrite"):
                for version in versions:
                    assert await read(cache, version) == content_of(origin, version)
                assert observer.disk_states == ["well", "failing"]
                errors = len(observer.disk_errors)
                for version in versions:
                    assert await read(cache, version) == content_of(origin, version)
                assert len(observer.disk_errors) == errors
                assert await outcomes(cache, versions[7:]) == ["miss"]
                await pass_until(clock, lambda: len(probes) == 2)
                assert not cache.isolation.readable
            await pass_until(clock, lambda: cache.isolation.writable)
            assert (await outcomes(cache, versions)).count("hit") >= len(versions) - FAILURES_MAX

    asyncio.run(scenario())


def test_an_index_that_cannot_commit_leaves_hits_and_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MDB_MAP_FULL and a failed commit: what is there is served, the rest comes from the origin, nothing is lost."""

    async def scenario() -> None:
        origin, observer, clock = make_origin(), CountingObserver(), TestClock()
        warm, cold = stored(origin, "warm", 2 * BLOCK), stored(origin, "cold", 3 * BLOCK, seed=1)
        async with open_cache(tmp_path / "c", origin, observer=observer, clock=clock) as cache:
            await read(cache, warm)
            await cache.settle()
            with monkeypatch.context() as patched:
                patched.setattr("gateway.blocks.ledger.Ledger.reserve", out_of_map)
                patched.setattr("gateway.blocks.ledger.Ledger.touch", out_of_map)
                assert await read(cache, cold) == content_of(origin, cold)
                assert observer.disk_states == ["well", "full"]
                reader = await cache.open_range(warm, whole(warm))
                assert (await take(reader), reader.outcome) == (content_of(origin, warm), "hit")
            await pass_until(clock, lambda: cache.isolation.writable)
            await read(cache, cold)
            await cache.settle()
            assert await outcomes(cache, [cold]) == ["hit"]

    asyncio.run(scenario())


def out_of_map(*_: object) -> None:
    raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached")


def test_a_disk_that_somebody_else_fills_makes_the_cache_smaller(tmp_path: Path) -> None:
    """8.2 No space, for real: hits stay hits, the origin serves the rest, a little is given back, and filling goes on
    with what is left; when there is room again the whole capacity is used."""

    async def scenario(disk: Path) -> None:
        origin, observer, clock = make_origin(), CountingObserver(), TestClock()
        versions = [stored(origin, f"k{n}", BLOCK, seed=n) for n in range(100)]
        async with open_cache(disk / "c", origin, observer=observer, clock=clock, capacity_bytes=26 * MIB) as cache:
            for version in versions[:40]:
                await read(cache, version)
            await cache.settle()
            others = fill_up(disk)
            for version in versions[40:60]:
                assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert observer.disk_states == ["well", "full"]
            assert await outcomes(cache, versions[:40]) == ["hit"] * 40
            await pass_until(clock, lambda: cache.isolation.writable)
            evicted = observer.evicted_blocks
            assert 0 < evicted <= 8
            for version in versions[60:]:
                assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert observer.disk_states == ["well", "full", "well"]
            assert 30 <= cache.usage().blocks < 40
            others.unlink()
            clock.advance(GROW_SECONDS)
            await settled()
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


def test_a_disk_that_dies_leaves_the_origin_serving(tmp_path: Path, probes: list[Trouble | None]) -> None:
    """8.2 The file system answers everything with EIO, for real: not one wrong or missing byte, and an orderly end."""

    async def scenario(disk: Path) -> None:
        origin, observer, clock = make_origin(), CountingObserver(), TestClock()
        versions = [stored(origin, f"k{n}", 2 * BLOCK, seed=n) for n in range(6)]
        async with open_cache(disk / "c", origin, observer=observer, clock=clock) as cache:
            for version in versions[:4]:
                await read(cache, version)
            await cache.settle()
            kill_disk(disk)
            for version in versions * 2:
                assert await read(cache, version) == content_of(origin, version)
            await cache.settle()
            assert observer.disk_states == ["well", "failing"]
            await pass_until(clock, lambda: len(probes) == 2)
            for version in versions:
                assert await read(cache, version) == content_of(origin, version)
            assert observer.disk_states == ["well", "failing"]

    with mortal_disk(tmp_path / "disk", tmp_path / "image") as disk:
        asyncio.run(scenario(disk))
