"""Slots on one cache directory: what is guaranteed, what is lent, what is on whose account."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.blocks.cache import BlockCache
from gateway.blocks.layout import BlockSettings
from gateway.blocks.opening import open_directory, rebuild
from gateway.core.model import ObjectVersion
from gateway.policy.slots import Prefix, Slots
from gateway.telemetry import metrics
from tests.support.blocks import BLOCK, block_files, make_origin, open_cache, stored, take, whole
from tests.support.counting import by_label, counted
from tests.support.fill_worker import FillWorker
from tests.support.memory_origin import MemoryOrigin
from tests.support.slots import Slot

FILE = BLOCK + 4096
"""What a whole block takes on disk, header included."""


def slots(guarantee_a: int = 4 * FILE, limit_a: int | None = None, limit_b: int | None = None) -> Slots:
    return Slots(
        [
            Slot("a", Prefix.parse("s3://train/a/"), capacity_bytes=guarantee_a, capacity_limit_bytes=limit_a),
            Slot("b", Prefix.parse("s3://train/b/"), capacity_limit_bytes=limit_b),
        ]
    )


async def read_in(cache: BlockCache, slot: str, *versions: ObjectVersion) -> None:
    for version in versions:
        await take(await cache.open_range(version, whole(version), slot=slot))
        await cache.settle()


def objects(origin: MemoryOrigin, prefix: str, count: int) -> list[ObjectVersion]:
    return [stored(origin, f"{prefix}/{n}", BLOCK) for n in range(count)]


def blocks_of(cache: BlockCache) -> dict[str, int]:
    return {slot: usage.blocks for slot, usage in cache.usage().slots.items() if usage.blocks}


def test_a_guarantee_survives_any_scan(tmp_path: Path) -> None:
    """What a slot holds within its guarantee is not evicted by others, however much they read."""

    async def scenario() -> None:
        origin = make_origin()
        async with open_cache(tmp_path / "c", origin, capacity_bytes=10 * FILE, slots=slots()) as cache:
            mine = objects(origin, "a", 4)
            await read_in(cache, "a", *mine)
            await read_in(cache, "b", *objects(origin, "b", 30))
            assert blocks_of(cache) == {"a": 4, "b": 6}
            assert by_label(metrics.CACHE_EVICTED_BLOCKS, "slot") == {"b": 24}
            asked = origin.count()
            await read_in(cache, "a", *mine)
            assert origin.count() == asked

    asyncio.run(scenario())


def test_idle_room_is_lent_and_comes_back(tmp_path: Path) -> None:
    """Others fill what a slot is guaranteed while it does not need it, and give it back when it does."""

    async def scenario() -> None:
        origin = make_origin()
        async with open_cache(tmp_path / "c", origin, capacity_bytes=10 * FILE, slots=slots()) as cache:
            await read_in(cache, "b", *objects(origin, "b", 12))
            assert blocks_of(cache) == {"b": 10}
            await read_in(cache, "a", *objects(origin, "a", 4))
            assert blocks_of(cache) == {"a": 4, "b": 6}

    asyncio.run(scenario())


def test_slots_without_guarantees_end_up_with_equal_parts(tmp_path: Path) -> None:
    """Beyond the guarantees the room is shared by need, and nobody's scan takes it all."""

    async def scenario() -> None:
        origin = make_origin()
        async with open_cache(tmp_path / "c", origin, capacity_bytes=10 * FILE, slots=slots(0)) as cache:
            await read_in(cache, "b", *objects(origin, "b", 12))
            await read_in(cache, "a", *objects(origin, "a", 12))
            assert blocks_of(cache) == {"a": 5, "b": 5}
            await read_in(cache, "default", *objects(origin, "c", 12))
            assert sorted(blocks_of(cache).values()) == [3, 3, 4]

    asyncio.run(scenario())


def test_a_limit_holds_while_there_is_room(tmp_path: Path) -> None:
    """A slot at its limit evicts its own, and others' blocks stay."""

    async def scenario() -> None:
        origin = make_origin()
        async with open_cache(
            tmp_path / "c", origin, capacity_bytes=100 * FILE, slots=slots(limit_b=3 * FILE)
        ) as cache:
            await read_in(cache, "a", *objects(origin, "a", 5))
            await read_in(cache, "b", *objects(origin, "b", 10))
            assert blocks_of(cache) == {"a": 5, "b": 3}

    asyncio.run(scenario())


def test_a_slot_for_which_nothing_is_left_reads_past_the_cache(tmp_path: Path) -> None:
    """With all room guaranteed to others and used by them, a read is still right, and nobody loses a block."""

    async def scenario() -> None:
        origin = make_origin()
        async with open_cache(tmp_path / "c", origin, capacity_bytes=4 * FILE, slots=slots()) as cache:
            await read_in(cache, "a", *objects(origin, "a", 4))
            await read_in(cache, "b", *objects(origin, "b", 2))
            assert blocks_of(cache)["a"] == 4
            assert (by_label(metrics.CACHE_NOT_KEPT, "reason"), counted(metrics.CACHE_STORE_UNAVAILABLE)) == (
                {"room": 2},
                0,
            )

    asyncio.run(scenario())


@pytest.mark.parametrize("limit", [None, 2 * FILE])
def test_another_configuration_moves_blocks_to_their_new_slots(tmp_path: Path, limit: int | None) -> None:
    """After a survey every byte is on the account that the slots of now give it, within its limit; no block is lost."""

    async def scenario() -> None:
        origin = make_origin()
        in_a, in_b = objects(origin, "a", 3), objects(origin, "b", 3)
        async with open_cache(tmp_path / "c", origin) as cache:
            await read_in(cache, "default", *in_a, *in_b)
            assert blocks_of(cache) == {"default": 6}
        async with open_cache(tmp_path / "c", origin, slots=slots(limit_b=limit)) as cache:
            before = cache.usage()
            assert before.blocks == 6
            await cache.rebuild_index()
            kept = 3 if limit is None else 2
            assert blocks_of(cache) == {"a": 3, "b": kept}
            assert cache.usage().used_bytes == (3 + kept) * FILE
            asked = origin.count()
            await read_in(cache, "a", *in_a)
            await read_in(cache, "b", *in_b[3 - kept :])
            assert origin.count() == asked

    asyncio.run(scenario())


def test_a_survey_that_is_broken_off_is_carried_on(tmp_path: Path) -> None:
    """Whoever opens the directory next finishes it; what was moved before stays moved."""

    async def scenario() -> None:
        origin = make_origin()
        async with open_cache(tmp_path / "c", origin) as cache:
            await read_in(cache, "default", *objects(origin, "a", 20))
        async with open_cache(tmp_path / "c", origin, slots=slots()) as cache:
            steps = rebuild(cache._dependencies.directory, slots())
            for _ in range(9):
                next(steps)
        async with open_cache(tmp_path / "c", origin, slots=slots()) as cache:
            moved = blocks_of(cache)
            assert 0 < moved["a"] < 20
            await cache.rebuild_index()
            assert blocks_of(cache) == {"a": 20}

    asyncio.run(scenario())


def test_slots_change_while_the_cache_is_open(tmp_path: Path) -> None:
    """Blocks go to the accounts of now, and beyond a new limit they are evicted; those that come count there."""

    async def scenario() -> None:
        origin, now, prefix = make_origin(), Slots(), Prefix.parse("s3://train/a/")
        async with open_cache(tmp_path / "c", origin, slots=now) as cache:

            async def change(*slots: Slot) -> None:
                now.apply_settings(slots)
                await cache.apply_settings(64 * BLOCK)
                await cache.move_between_slots()

            await read_in(cache, "default", *objects(origin, "a", 20))
            assert blocks_of(cache) == {"default": 20}
            await change(Slot("a", prefix))
            assert blocks_of(cache) == {"a": 20}
            await change(Slot("a", prefix, capacity_limit_bytes=10 * FILE))
            assert blocks_of(cache) == {"a": 10}
            await read_in(cache, "a", *objects(origin, "a/more", 5))
            assert blocks_of(cache) == {"a": 10}
            await change()
            assert blocks_of(cache) == {"default": 10}

    asyncio.run(scenario())


def test_no_fill_waits_for_all_that_a_lowered_capacity_evicts(tmp_path: Path) -> None:
    """It evicts a little more than it brings; the rest goes in steps, while others read."""

    async def scenario() -> None:
        origin = make_origin()
        async with open_cache(tmp_path / "c", origin, slots=Slots()) as cache:
            await read_in(cache, "default", *objects(origin, "a", 40))
            await cache.apply_settings(10 * FILE)
            await read_in(cache, "default", *objects(origin, "b", 3))
            assert blocks_of(cache) == {"default": 37}, "each that comes lets two go"
            await cache.move_between_slots()
            assert blocks_of(cache) == {"default": 10}
            await cache.apply_settings(20 * FILE)
            await read_in(cache, "default", *objects(origin, "c", 30))
            assert blocks_of(cache) == {"default": 20}

    asyncio.run(scenario())


def test_what_is_fetched_while_slots_change_goes_to_the_account_of_now(tmp_path: Path) -> None:
    """It began on that of before."""

    async def scenario() -> None:
        origin, now = make_origin(), Slots()
        async with open_cache(tmp_path / "c", origin, slots=now) as cache:
            await read_in(cache, "default", *objects(origin, "a", 3))
            late = stored(origin, "a/late", BLOCK)
            reader = await cache.open_range(late, whole(late), slot="default")
            now.apply_settings([Slot("a", Prefix.parse("s3://train/a/"))])
            await cache.apply_settings(64 * BLOCK)
            moving = asyncio.create_task(cache.move_between_slots())
            await asyncio.sleep(0)
            await take(reader)
            await cache.settle()
            await moving
            assert blocks_of(cache) == {"a": 4}

    asyncio.run(scenario())


def test_a_process_that_comes_later_leaves_the_accounts_to_the_others(tmp_path: Path) -> None:
    """Slots were changed, and not all keep to them yet: who starts meanwhile changes nothing of the accounts."""
    settings = BlockSettings(tmp_path / "c", 64 * BLOCK, BLOCK, slots=slots())
    with FillWorker(tmp_path / "c", 1, "http://127.0.0.1:9"):
        opened = open_directory(settings, 0)
        with opened.blocks.index.reading() as transaction:
            assert not transaction.unindexed()
        opened.close()


def test_files_on_disk_are_what_the_accounts_say(tmp_path: Path) -> None:
    """Usage is counted in whole pages, as the disk counts."""

    async def scenario() -> None:
        origin = make_origin()
        async with open_cache(tmp_path / "c", origin, slots=slots()) as cache:
            await read_in(cache, "a", stored(origin, "a/odd", 100_001), stored(origin, "a/one", 1))
            await read_in(cache, "b", stored(origin, "b/odd", 70_000))
            on_disk = sum(path.stat().st_blocks * 512 for path in block_files(tmp_path / "c"))
            assert cache.usage().used_bytes == on_disk
            used = cache.usage().slots
            assert used["a"].used_bytes + used["b"].used_bytes == on_disk

    asyncio.run(scenario())
