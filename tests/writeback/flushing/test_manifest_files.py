"""Whether everything that a manifest names is there, asked for as little as can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

from gateway.origin.client import Origin, Purpose
from gateway.writeback.checkpoints.manifests import NamedFiles
from gateway.writeback.flushing.manifest_files import FIRST_LOOK, FOUND_AGAIN_SECONDS, Presence
from gateway.writeback.flushing.state import LookedFor, Lost, Refused
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import Answer, on
from tests.support.memory_origin.origin import MemoryOrigin

COUNT = 10 * FIRST_LOOK
NAMES = tuple(f"step/{number:03}" for number in range(COUNT))


class World:
    """An origin, and one manifest whose files are looked for."""

    def __init__(self, named: NamedFiles) -> None:
        self.clock = ManualClock()
        self.origin = MemoryOrigin(self.clock)
        self.origin.create_bucket("bucket")
        self._presence = Presence("bucket", named)

    def put(self, names: Sequence[str]) -> None:
        for one in names:
            self.origin.put("bucket", one, b"x")

    def look(
        self, ignored: Callable[[str], bool] = lambda _: False, *, is_first: bool = False
    ) -> tuple[LookedFor | Refused | Lost, int]:
        """What was found, and how many questions that took."""
        before = len(self.origin.calls)
        looking = self._presence.look(
            cast(Origin, self.origin), "slot", Purpose.FLUSH, self.clock, ignored, is_first=is_first
        )
        return asyncio.run(looking), len(self.origin.calls) - before


def test_what_was_found_is_not_asked_for_again() -> None:
    """While all of some are missing, nothing else is asked; once they have come, all the rest is."""
    world = World(NamedFiles(NAMES))
    world.put(NAMES[: COUNT // 2])
    missing = LookedFor(COUNT // 2, COUNT, f"s3://bucket/{NAMES[COUNT // 2]}")
    assert world.look(is_first=True) == (missing, COUNT)
    assert world.look() == (missing, FIRST_LOOK)
    world.put(NAMES[COUNT // 2 : -1])
    assert world.look() == (LookedFor(1, COUNT, f"s3://bucket/{NAMES[-1]}"), COUNT // 2)
    assert world.look()[1] == 1
    world.put(NAMES[-1:])
    assert world.look() == (LookedFor(0, COUNT), 1)


def test_what_was_found_long_ago_is_asked_for_again_when_all_is_there() -> None:
    """Somebody may have deleted it meanwhile."""
    world = World(NamedFiles(NAMES))
    world.put(NAMES[:-1])
    world.look(is_first=True)
    asyncio.run(world.clock.advance(FOUND_AGAIN_SECONDS + 1.0))
    assert world.look() == (LookedFor(1, COUNT, f"s3://bucket/{NAMES[-1]}"), 1)
    world.put(NAMES[-1:])
    world.origin.buckets["bucket"].remove(NAMES[0])
    assert world.look()[0] == LookedFor(1, COUNT, f"s3://bucket/{NAMES[0]}")


def test_what_nobody_waits_for_is_not_asked_for() -> None:
    """Nor does it keep others from being asked for, however many there are."""
    world = World(NamedFiles(NAMES))
    ignored = set(NAMES[: 2 * FIRST_LOOK])
    assert world.look(ignored.__contains__, is_first=True)[1] == COUNT - 2 * FIRST_LOOK
    world.put(NAMES[2 * FIRST_LOOK :])
    assert world.look(ignored.__contains__)[0] == LookedFor(0, COUNT)


def test_a_directory_is_there_with_its_first_object() -> None:
    """Beside what only begins like it."""
    world = World(NamedFiles(directories=("run/step-1",)))
    for name, count in (("run/step-10/x", 1), ("run/step-1-optimizer/x", 0)):
        world.put([name])
        assert world.look()[0] == LookedFor(count, 1, "s3://bucket/run/step-1/" if count else "")


def test_an_answer_that_says_nothing_is_none() -> None:
    """Of one file it is of all; what was found until then is remembered."""
    world = World(NamedFiles(NAMES))
    world.put(NAMES)
    denied = world.origin.inject(on(key=NAMES[-1]), Answer(403, "AccessDenied"), times=1)
    assert isinstance(world.look(is_first=True)[0], Refused)
    away = world.origin.inject(on(key=NAMES[-1]), Answer(503, "SlowDown"), times=1)
    assert isinstance(world.look()[0], Lost)
    assert (denied.times, away.times) == (0, 0)
    assert world.look() == (LookedFor(0, COUNT), 1)
