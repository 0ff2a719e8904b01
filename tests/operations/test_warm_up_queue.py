"""The queue of warm-ups: whatever is begun has its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from gateway.blocks.cache import BlockCache
from gateway.clock import SystemClock
from gateway.metadata.catalog import Catalog
from gateway.model import ByteRange, ObjectKey, ObjectVersion
from gateway.operations.warm_up_queue import OBJECTS_AT_ONCE, WAITING_MAX, WarmUpQueue
from gateway.policy.slots import Prefix, Slot

SLOT = Slot("slot", Prefix("bucket"))


class HeldBlocks:
    """Fetches everything at the same moment, when `gate` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.fetched: list[str] = []

    def pieces(self, version: ObjectVersion, slot: str) -> Iterator[ByteRange]:
        yield ByteRange(0, 1)

    def others_fill(self) -> bool:
        return False

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
