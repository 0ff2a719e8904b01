"""Room that others have a right to: fills leave it free, and evict where it is missing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gateway.blocks.directory import FREE_LOOK_SECONDS, GIVEN_BACK_TIMES, Reserve
from gateway.blocks.eviction import Capacity
from gateway.core.errors import BufferUnavailable
from tests.support.blocks import BLOCK, BUCKET, MIB, block_files, content_of, make_origin, open_cache, read, stored

WHOLE = Capacity(100 * MIB)


class Disk:
    """As much free as a test says."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        self.looks = 0
        self.time = 0.0

    def look(self) -> int:
        self.looks += 1
        return self.free_bytes

    def kept_free(self, size_bytes: int, promised_bytes: int = 0) -> Reserve:
        kept = Reserve(self.look, lambda: promised_bytes, lambda: self.time)
        kept.size_bytes = size_bytes
        return kept


def test_where_nobody_has_a_right_the_disk_is_not_looked_at() -> None:
    """A cache without write-back slots pays nothing."""
    disk = Disk(0)
    assert disk.kept_free(0).capacity_for(MIB, lambda: 0, WHOLE) is WHOLE
    assert disk.looks == 0


def test_fills_go_on_as_far_as_the_room_goes() -> None:
    """One look serves for a moment: what was granted since is counted, so that a burst does not go too far."""
    disk = Disk(50 * MIB)
    kept = disk.kept_free(40 * MIB, promised_bytes=MIB)
    granted = [kept.capacity_for(MIB, lambda: 30 * MIB, WHOLE) is WHOLE for _ in range(10)]
    assert granted == [True] * 9 + [False]
    disk.time += FREE_LOOK_SECONDS
    disk.free_bytes += 10 * MIB
    assert kept.capacity_for(MIB, lambda: 30 * MIB, WHOLE) is WHOLE


@given(free=st.integers(0, 100), size=st.integers(1, 100), needed=st.integers(1, 10), used=st.integers(0, 100))
def test_what_is_missing_is_given_back_step_by_step(free: int, size: int, needed: int, used: int) -> None:
    """A fill makes room for itself at least as far as there is none, and never for more than twice itself."""
    capacity = Disk(free).kept_free(size).capacity_for(needed, lambda: used, Capacity(1000))
    if free >= size + needed:
        assert capacity.total_bytes == 1000
    else:
        gone = used + needed - capacity.total_bytes
        assert gone == min(size + needed - free, GIVEN_BACK_TIMES * needed, used + needed)


def test_the_cache_never_takes_what_others_have_a_right_to(tmp_path: Path) -> None:
    """It replaces its own blocks instead; it grows when the right is used up, and yields when others fill the disk."""
    disk_bytes, rights = 20 * BLOCK, [10 * BLOCK]

    def held_bytes() -> int:
        return sum(path.stat().st_size for path in block_files(tmp_path))

    async def scenario() -> None:
        origin = make_origin()
        origin.create_bucket(BUCKET)
        versions = [stored(origin, f"k{n}", BLOCK // 2, n) for n in range(60)]
        async with open_cache(tmp_path, origin) as cache:
            cache._dependencies.directory.reserve_of_others._free_bytes = lambda: disk_bytes - held_bytes()
            cache.keep_free(lambda: rights[0])
            for version in versions[:30]:
                assert await read(cache, version) == content_of(origin, version)
                assert held_bytes() <= disk_bytes - rights[0]
            assert held_bytes() > 8 * BLOCK
            assert cache.usage().blocks < 30
            rights[0] = 0
            cache.keep_free(lambda: rights[0])
            for version in versions[:30]:
                await read(cache, version)
            await cache.settle()
            assert cache.usage().blocks == 30
            rights[0] = 15 * BLOCK
            cache.keep_free(lambda: rights[0])
            for version in versions[30:]:
                assert await read(cache, version) == content_of(origin, version)
            assert held_bytes() <= disk_bytes - rights[0]

    asyncio.run(scenario())


def test_rights_that_cannot_be_looked_at_stay_as_they_were(tmp_path: Path) -> None:
    """The cache goes on."""

    def unreadable() -> int:
        raise BufferUnavailable("the journal cannot be read")

    async def scenario() -> None:
        async with open_cache(tmp_path, make_origin()) as cache:
            cache.keep_free(lambda: MIB)
            cache.keep_free(unreadable)
            assert cache._dependencies.directory.reserve_of_others.size_bytes == MIB

    asyncio.run(scenario())
