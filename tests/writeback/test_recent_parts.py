"""Parts are looked up once for many reads, within bounds, and are those of the object that is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import Part
from gateway.writeback.recent_parts import RecentParts
from tests.support.writeback import key, part, pending

COUNT = 20


class Looks:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def at(self, parts: Sequence[Part]) -> Sequence[Part]:
        self.count += 1
        return parts


def parts_of(name: str, count: int = COUNT) -> Sequence[Part]:
    return tuple(part(number, f"{name}-{number}") for number in range(1, count + 1))


def test_many_parts_are_looked_up_once() -> None:
    """However often they are asked for, in whatever order."""
    recent, looks, stored = RecentParts(), Looks(), {number: parts_of(f"o{number}") for number in range(3)}
    for number in [0, 1, 2, 2, 1, 0]:
        assert recent.of(number, lambda: looks.at(stored[number])) == stored[number]  # noqa: B023
    assert looks.count == 3


def test_few_parts_are_not_held() -> None:
    """Most objects have one."""
    recent, looks = RecentParts(), Looks()
    for _ in range(3):
        recent.of(1, lambda: looks.at(parts_of("small", 1)))
    assert looks.count == 3


def test_what_was_asked_for_longest_ago_goes() -> None:
    """Memory is bounded, and an object that alone is more than that is looked up each time."""
    recent, looks = RecentParts(bytes_max=2 * COUNT * 720), Looks()
    for number in [1, 2, 1, 3, 1, 2]:
        recent.of(number, lambda: looks.at(parts_of(f"o{number}")))  # noqa: B023
    assert looks.count == 4  # 2 went when 3 came
    for _ in range(2):
        recent.of(9, lambda: looks.at(parts_of("large", 4 * COUNT)))
    assert looks.count == 6
    recent.of(2, lambda: looks.at(()))
    assert looks.count == 6


def test_an_overwritten_object_has_its_own_parts(tmp_path: Path) -> None:
    """At once, and with fewer or more of them; deleted, none."""

    async def scenario() -> None:
        buffer = await WritebackBuffer.open(tmp_path / "writeback", 0)
        try:
            for name, count in (("first", COUNT), ("second", 2 * COUNT), ("third", 1)):
                made = pending(key("a"), parts=parts_of(name, count), multipart=True)
                await buffer.journal.change(lambda book: book.put(made))  # noqa: B023
                for _ in range(2):
                    found = buffer.pending(key("a"))
                    assert found is not None
                    assert [one.file.name for one in found.parts] == [one.file.name for one in made.parts]
            await buffer.journal.change(lambda book: book.put(replace(pending(key("a"), deleted=True))))
            found = buffer.pending(key("a"))
            assert found is not None
            assert (found.deleted, found.parts) == (True, ())
        finally:
            await buffer.close()

    asyncio.run(scenario())
