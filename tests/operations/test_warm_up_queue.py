"""The queue of warm-ups: whatever is begun has its turn."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from typing import Any, cast

import pytest

from gateway.blocks.cache import BlockCache
from gateway.blocks.plan import Explanation, Holding
from gateway.core.clock import SystemClock
from gateway.core.errors import StoreUnavailable
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.metadata.catalog import Catalog
from gateway.operations.warm_up_queue import LOOK_SHARE, LOOKS_MAX, OBJECTS_AT_ONCE, WAITING_MAX, WarmUpQueue
from gateway.policy.slots import Prefix
from tests.support.blocks import TestClock
from tests.support.slots import Slot

SLOT = Slot("slot", Prefix("bucket"))


class HeldBlocks:
    """Fetches everything at the same moment, when `gate` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.fetched: list[str] = []
        self.looking = asyncio.Event()
        self.looking.set()
        self.looks, self.look_seconds, self.clock = 0, 0.0, TestClock()

    def pieces(self, version: ObjectVersion, slot: str) -> Iterator[ByteRange]:
        yield ByteRange(0, 1)

    def others_fill(self) -> bool:
        return False

    async def explain(self, key: ObjectKey, version: ObjectVersion, slot: str) -> Explanation:
        self.looks += 1
        await self.looking.wait()
        self.clock.time += self.look_seconds
        return Explanation(None, Holding(0, 0), None)

    async def fetch(self, version: ObjectVersion, *_: Any, **__: Any) -> tuple[None, bool]:
        await self.gate.wait()
        self.fetched.append(version.key.key)
        return None, True


def version(name: str) -> ObjectVersion:
    return ObjectVersion(ObjectKey("bucket", name), '"e"', 1)


@pytest.mark.parametrize("steps", range(12))
def test_what_is_begun_while_the_last_ones_end_is_fetched(steps: int) -> None:
    """At whichever step of the event loop that is, between the last look at the queue and the end of who has looked."""

    async def scenario() -> None:
        blocks = HeldBlocks()
        queue = WarmUpQueue(cast(BlockCache, blocks), cast(Catalog, None), SystemClock(), lambda _: False)
        for number in range(OBJECTS_AT_ONCE):
            assert queue.begin(version(str(number)), SLOT, "me")
        blocks.gate.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        assert queue.begin(version("late"), SLOT, "me")
        await queue.settle()
        assert "late" in blocks.fetched
        await queue.close()

    asyncio.run(scenario())


def test_who_asks_again_and_again_for_a_long_object_does_not_have_it_looked_for_each_time() -> None:
    """One look for all who ask at once, and for a while after that; not beyond the end of the warm-up."""

    async def scenario() -> None:
        blocks = HeldBlocks()
        queue = WarmUpQueue(cast(BlockCache, blocks), cast(Catalog, None), blocks.clock, lambda _: False)
        one, other = version("one"), version("other")
        blocks.look_seconds = 0.1
        blocks.looking.clear()
        asking = [asyncio.create_task(queue.look(one, SLOT)) for _ in range(1000)]
        await asyncio.sleep(0)
        asking.pop().cancel()  # whose look goes on for the others
        blocks.looking.set()
        await asyncio.gather(*asking)
        assert blocks.looks == 1
        blocks.clock.time += 0.1 * LOOK_SHARE - 0.01
        await queue.look(one, SLOT)
        assert blocks.looks == 1
        await queue.look(other, SLOT)
        assert blocks.looks == 2
        blocks.clock.time += 0.02
        await queue.look(one, SLOT)
        assert blocks.looks == 3
        assert queue.begin(one, SLOT, "me")
        blocks.gate.set()
        await queue.settle()
        await queue.look(one, SLOT)
        assert blocks.looks == 4
        await queue.close()

    asyncio.run(scenario())


def test_a_quick_look_is_not_remembered_and_those_that_are_do_not_pile_up() -> None:
    """What takes no time is always as it is now."""

    async def scenario() -> None:
        blocks = HeldBlocks()
        queue = WarmUpQueue(cast(BlockCache, blocks), cast(Catalog, None), blocks.clock, lambda _: False)
        for _ in range(3):
            await queue.look(version("one"), SLOT)
        assert blocks.looks == 3
        assert not queue._looks
        blocks.look_seconds = 1e-6
        for number in range(3 * LOOKS_MAX):
            await queue.look(version(str(number)), SLOT)
        assert len(queue._looks) <= LOOKS_MAX
        await queue.close()

    asyncio.run(scenario())


def test_a_look_that_fails_fails_for_those_who_wait_and_for_nobody_after() -> None:
    """The disk is back a moment later."""

    async def scenario() -> None:
        blocks = HeldBlocks()
        queue = WarmUpQueue(cast(BlockCache, blocks), cast(Catalog, None), blocks.clock, lambda _: False)
        blocks.look_seconds, explain = 1.0, blocks.explain

        async def fail(*_: Any) -> Explanation:
            await asyncio.sleep(0)
            blocks.clock.time += 1.0
            raise StoreUnavailable("away")

        blocks.explain = fail  # type: ignore[method-assign, assignment]
        found = await asyncio.gather(*(queue.look(version("k"), SLOT) for _ in range(3)), return_exceptions=True)
        assert [type(one) for one in found] == [StoreUnavailable] * 3
        blocks.explain = explain  # type: ignore[method-assign]
        assert (await queue.look(version("k"), SLOT)).why_not_kept is None
        await queue.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_flood_takes_no_more_memory_than_the_queue() -> None:
    """100,000 objects that a thousand callers ask for: those that find no room leave nothing behind."""

    async def scenario() -> None:
        blocks = HeldBlocks()
        queue = WarmUpQueue(cast(BlockCache, blocks), cast(Catalog, None), SystemClock(), lambda _: False)
        tracemalloc.start()
        try:
            begun = sum(queue.begin(version(f"{number:0>200}"), SLOT, str(number % 1000)) for number in range(100_000))
            used_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert WAITING_MAX / 2 < begun <= WAITING_MAX
        assert used_bytes < 2048 * WAITING_MAX
        assert len(queue._known) == queue._waiting_count == begun
        await queue.close()
        assert not queue._known

    asyncio.run(scenario())


def test_no_caller_takes_all_places_or_all_turns() -> None:
    """One alone has half of them; others find room, and their turn comes after one object of each who waits."""

    async def scenario() -> None:
        blocks = HeldBlocks()
        queue = WarmUpQueue(cast(BlockCache, blocks), cast(Catalog, None), SystemClock(), lambda _: False)

        def begun(caller: str, count: int) -> int:
            return sum(queue.begin(version(f"{caller}-{number}"), SLOT, caller) for number in range(count))

        for number in range(OBJECTS_AT_ONCE):
            assert queue.begin(version(f"first-{number}"), SLOT, "greedy")
        await asyncio.sleep(0)
        half = WAITING_MAX // 2
        assert begun("greedy", WAITING_MAX) == half
        assert begun("other", half) == half // 2
        assert begun("third", 2) == 2
        blocks.gate.set()
        await queue.settle()
        fetched = blocks.fetched[OBJECTS_AT_ONCE:]
        assert sorted(fetched[:6]) == ["greedy-0", "greedy-1", "other-0", "other-1", "third-0", "third-1"]
        assert len(fetched) == half + half // 2 + 2
        assert begun("greedy", 1) == 1
        await queue.close()

    asyncio.run(scenario())
