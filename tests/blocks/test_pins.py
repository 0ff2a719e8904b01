"""Pins: what is under one stays, whatever happens beside it; there is no more of it than fits; a restart loses none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.blocks.cache import BlockCache
from gateway.core.errors import PinRefused, StoreUnavailable
from gateway.core.model import ObjectVersion
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix, Slots
from tests.cluster.test_copies import Others
from tests.support.blocks import BLOCK, KIB, content_of, make_origin, open_cache, read, stored, whole
from tests.support.memory_origin import MemoryOrigin
from tests.support.slots import Slot

FILE = BLOCK + 4096
PINNED = "s3://train/pinned/"


def objects(origin: MemoryOrigin, prefix: str, count: int, size_bytes: int = BLOCK) -> list[ObjectVersion]:
    return [stored(origin, f"{prefix}/{n}", size_bytes) for n in range(count)]


async def read_all(cache: BlockCache, *versions: ObjectVersion, slot: str = "default") -> int:
    """How many of them hit."""
    hits = 0
    for version in versions:
        reader = await cache.open_range(version, whole(version), slot=slot)
        async for _ in reader.body():
            pass
        hits += reader.outcome == "hit"
        await cache.settle()
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["epoch", "lru"])
@pytest.mark.parametrize("small_object_bytes_max", [0, 64 * KIB])
async def test_5_5_what_is_pinned_is_never_evicted(tmp_path: Path, eviction: str, small_object_bytes_max: int) -> None:
    """Neither what was there before the pin nor what came under it later, however much is read beside it."""
    origin = make_origin()
    mine = objects(origin, "pinned", 6, 60 * KIB)
    slots = Slots([Slot("default", Prefix(""), eviction=eviction)])
    more: dict[str, Any] = {
        "capacity_bytes": 4 * FILE,
        "slots": slots,
        "small_object_bytes_max": small_object_bytes_max,
    }
    async with open_cache(tmp_path / "c", origin, **more) as cache:
        await read_all(cache, *mine[:3])
        number = await cache.pin(PINNED)
        for version in mine[:3]:
            await cache.hold(version, whole(version), number, slot="default")
        await read_all(cache, *mine[3:])
        await read_all(cache, *objects(origin, "other", 40, 60 * KIB))
        assert await read_all(cache, *mine) == 6
        assert cache.usage().slots["default"].pinned_bytes >= 6 * 60 * KIB
        assert cache.usage().used_bytes <= 4 * FILE


@pytest.mark.parametrize("clean", [True, False])
async def test_5_5_pins_survive_a_restart_and_a_power_cut(tmp_path: Path, clean: bool) -> None:
    """With the index as it was, and with one built anew by a survey."""
    origin = make_origin()
    mine, others = objects(origin, "pinned", 4), objects(origin, "other", 20)
    async with open_cache(tmp_path / "c", origin, capacity_bytes=8 * FILE) as cache:
        await cache.pin(PINNED)
        await read_all(cache, *mine, *others[:3])
    if not clean:
        for name in ("CLEAN", "BOOT"):
            (tmp_path / "c" / name).unlink(missing_ok=True)
    async with open_cache(tmp_path / "c", origin, capacity_bytes=8 * FILE) as cache:
        await cache.rebuild_index()
        assert cache.pins() == [PINNED]
        assert cache.usage().slots["default"].pinned_bytes == 4 * FILE
        await read_all(cache, *others)
        assert await read_all(cache, *mine) == 4


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("small_object_bytes_max", [0, 64 * KIB])
async def test_a_pin_over_the_cluster_keeps_what_this_node_owns(
    tmp_path: Path, small_object_bytes_max: int, clean: bool
) -> None:
    """It keeps no copy of blocks that others own, even if it fetched them for a node that did not ask the owner."""
    origin = make_origin()
    mine, others = objects(origin, "pinned/own", 4, 60 * KIB), objects(origin, "pinned/others", 4, 60 * KIB)
    more: dict[str, Any] = {
        "capacity_bytes": 8 * FILE,
        "small_object_bytes_max": small_object_bytes_max,
        "roles": Others("pinned/others"),
        "slots": Slots([Slot("default", Prefix(""), copies="all")]),
    }

    def pinned() -> int:
        return cache.usage().slots["default"].pinned_bytes // (60 * KIB)

    async with open_cache(tmp_path / "c", origin, **more) as cache:
        await cache.pin(PINNED, cluster=True)
        await read_all(cache, *mine[:3], *others[:2])
        for version in others[2:]:
            assert await cache.fetch(version, whole(version), slot="default", purpose=Purpose.LIVE, of_peer=True)
        await cache.settle()
        assert pinned() == 3
    if not clean:
        for name in ("CLEAN", "BOOT"):
            (tmp_path / "c" / name).unlink(missing_ok=True)
    async with open_cache(tmp_path / "c", origin, **more) as cache:
        await cache.rebuild_index()
        assert await read_all(cache, mine[3], *others) == 4
        assert pinned() == 4
        assert await cache.unpin(PINNED, cluster=True)
        assert pinned() == 0


async def test_pins_of_this_node_are_none_over_the_cluster(tmp_path: Path) -> None:
    async with open_cache(tmp_path / "c", make_origin()) as cache:
        number = await cache.pin(PINNED)
        assert await cache.pin(PINNED, cluster=True) == number  # all of it is pinned already
        assert not await cache.unpin(PINNED, cluster=True)
        assert await cache.unpin(PINNED)
        number = await cache.pin(PINNED, cluster=True)
        assert await cache.pin(PINNED, cluster=True) == number
        with pytest.raises(PinRefused, match="is pinned over the cluster: unpin it first"):
            await cache.pin(PINNED)
        assert await cache.unpin(PINNED)


@pytest.mark.slow
async def test_what_is_unpinned_is_evicted_again(tmp_path: Path) -> None:
    """Many files in many steps; what another pin holds stays."""
    origin = make_origin()
    mine, still = objects(origin, "pinned", 100, 4000), objects(origin, "still", 5, 4000)
    async with open_cache(tmp_path / "c", origin, capacity_bytes=150 * 8192) as cache:
        await cache.pin(PINNED)
        await cache.pin("s3://train/still/")
        await read_all(cache, *mine, *still)
        assert cache.usage().slots["default"].pinned_bytes == 105 * 8192
        assert await cache.unpin(PINNED)
        assert not await cache.unpin(PINNED)
        assert cache.usage().slots["default"].pinned_bytes == 5 * 8192
        await read_all(cache, *objects(origin, "other", 300, 4000))
        assert await read_all(cache, *still) == 5
        assert await read_all(cache, *mine) < 10


async def test_an_unpinning_that_was_broken_off_is_carried_on(tmp_path: Path) -> None:
    """A process killed between taking the pin back and letting go of its files leaves none that is held for ever."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin) as cache:
        await cache.pin(PINNED)
        await read_all(cache, *objects(origin, "pinned", 3))
        assert cache._dependencies.directory.pins.remove(PINNED)
        assert cache.usage().slots["default"].pinned_bytes == 3 * FILE
    async with open_cache(tmp_path / "c", origin) as cache:
        await cache.rebuild_index()
        assert cache.usage().slots["default"].pinned_bytes == 0
        assert await read_all(cache, *objects(origin, "pinned", 3)) == 3


async def test_5_5_no_more_is_pinned_than_the_slot_may_have(tmp_path: Path) -> None:
    """Its limit, and what others are guaranteed, stand; what comes under the pin beyond that is cached like others."""
    origin = make_origin()
    slots = Slots(
        [
            Slot("a", Prefix.parse("s3://train/pinned/"), capacity_limit_bytes=5 * FILE),
            Slot("b", Prefix.parse("s3://train/b/"), capacity_bytes=6 * FILE),
        ]
    )
    async with open_cache(tmp_path / "c", origin, capacity_bytes=10 * FILE, slots=slots) as cache:
        mine = objects(origin, "pinned", 10)
        assert cache.pinnable_bytes("a") == 4 * FILE
        number = await cache.pin(PINNED)
        await read_all(cache, *mine, slot="a")
        assert cache.usage().slots["a"].pinned_bytes == 4 * FILE
        assert cache.usage().slots["a"].blocks == 5
        with pytest.raises(PinRefused, match="no room"):
            await cache.hold(mine[9], whole(mine[9]), number, slot="a")
        await read_all(cache, *objects(origin, "b", 6), slot="b")
        assert cache.usage().slots["b"].blocks == 6
        assert await read_all(cache, *mine[:4], slot="a") == 4


async def test_a_slot_full_of_pins_serves_the_rest_from_the_origin(tmp_path: Path) -> None:
    """Nothing fails, nothing pinned goes, nothing waits."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, capacity_bytes=3 * FILE) as cache:
        await cache.pin(PINNED)
        mine = objects(origin, "pinned", 3)
        await read_all(cache, *mine)
        for version in objects(origin, "other", 5):
            assert await read(cache, version) == content_of(origin, version)
        assert await read_all(cache, *mine) == 3


async def test_a_smaller_capacity_takes_precedence(tmp_path: Path) -> None:
    """Lowered below what is pinned, pins yield to it: the directory never holds more than it may."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, capacity_bytes=8 * FILE) as cache:
        await cache.pin(PINNED)
        await read_all(cache, *objects(origin, "pinned", 8))
    async with open_cache(tmp_path / "c", origin, capacity_bytes=5 * FILE) as cache:
        assert cache.usage().slots["default"].pinned_bytes == cache.usage().used_bytes == 5 * FILE


async def test_pins_do_not_overlap(tmp_path: Path) -> None:
    """Each file is under one pin at most, so that unpinning is plain. Pinning again changes nothing."""
    async with open_cache(tmp_path / "c", make_origin()) as cache:
        number = await cache.pin(PINNED)
        assert await cache.pin(PINNED) == number
        for overlapping in ("s3://train/pinned/more/", "s3://train/", "s3://train/pin"):
            with pytest.raises(PinRefused, match="pinned"):
                await cache.pin(overlapping)
        assert await cache.pin("s3://other/pinned/") != number
        assert cache.pins() == ["s3://other/pinned/", PINNED]


async def test_a_file_of_pins_that_says_something_else_is_not_overwritten(tmp_path: Path) -> None:
    """Of a version to come, or damaged: pinning fails, and says so."""
    async with open_cache(tmp_path / "c", make_origin()) as cache:
        (tmp_path / "c" / "PINS").write_bytes(b'{"format": 2}')
        with pytest.raises(StoreUnavailable, match="pins"):
            await cache.pin(PINNED)
        assert (tmp_path / "c" / "PINS").read_bytes() == b'{"format": 2}'


KEPT, KEPT_TOO = "s3://train/run/step-1/", "s3://train/run/step-2/"


@pytest.mark.parametrize("eviction", ["epoch", "lru"])
async def test_what_is_kept_stays_and_is_the_first_to_leave_when_it_is_kept_no_more(
    tmp_path: Path, eviction: str
) -> None:
    """Also over a restart; it is no pin that somebody has made."""
    origin = make_origin()
    old, new = objects(origin, "run/step-1", 3, 60 * KIB), objects(origin, "run/step-2", 3, 60 * KIB)
    slots = Slots([Slot("default", Prefix(""), eviction=eviction)])
    more: dict[str, Any] = {"capacity_bytes": 4 * FILE, "slots": slots, "small_object_bytes_max": 0}
    async with open_cache(tmp_path / "c", origin, **more) as cache:
        await read_all(cache, *old, *new)
        numbers, refused = await cache.keep_only([KEPT, KEPT_TOO])
        assert (set(numbers), refused, cache.pins()) == ({KEPT, KEPT_TOO}, {}, [])
        for version in (*old, *new):
            await cache.hold_object(version.key, numbers[KEPT if version in old else KEPT_TOO])
        assert await cache.unpin(KEPT) is False
    async with open_cache(tmp_path / "c", origin, **more) as cache:
        assert await read_all(cache, *objects(origin, "other", 30, 60 * KIB)) == 0
        assert all(cache.has_blocks_of(version.key) for version in (*old, *new))
        assert await cache.keep_only([KEPT_TOO]) == ({KEPT_TOO: numbers[KEPT_TOO]}, {})
        await read_all(cache, *objects(origin, "more", 3, 60 * KIB))
        assert [cache.has_blocks_of(version.key) for version in (*old, *new)] == [False] * 3 + [True] * 3


async def test_what_somebody_pins_comes_before_what_is_kept(tmp_path: Path) -> None:
    """A pin around it takes its place, one within it is in its way, and is told; what is kept counts for neither."""
    async with open_cache(tmp_path / "c", make_origin()) as cache:
        numbers, _ = await cache.keep_only([KEPT, KEPT_TOO])
        around = await cache.pin("s3://train/run/")
        assert cache.pins() == ["s3://train/run/"]
        assert await cache.keep_only([KEPT, KEPT_TOO]) == ({KEPT: around, KEPT_TOO: around}, {})
        assert await cache.unpin("s3://train/run/")
        await cache.pin(f"{KEPT}a")
        found, refused = await cache.keep_only([KEPT, KEPT_TOO])
        assert (list(found), list(refused), found[KEPT_TOO] != numbers[KEPT_TOO]) == ([KEPT_TOO], [KEPT], True)
        with pytest.raises(PinRefused, match="stays already"):
            await cache.pin(f"{KEPT_TOO}a")
        assert await cache.pin(KEPT_TOO) == found[KEPT_TOO]
        assert await cache.keep_only([]) == ({}, {})
        assert cache.pins() == [f"{KEPT}a", KEPT_TOO]
