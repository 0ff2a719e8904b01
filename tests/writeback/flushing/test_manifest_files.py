"""Whether everything that a manifest names is there, asked for as little as can be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from gateway.core.clock import SystemClock
from gateway.core.errors import OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.origin.client import Origin, OriginRequest, OriginResponse, Purpose
from gateway.writeback.checkpoints.manifests import NamedFiles
from gateway.writeback.flushing.flush_logger import FlushLogger
from gateway.writeback.flushing.manifest_files import (
    FIRST_LOOK,
    FOUND_AGAIN_SECONDS,
    LONG_BYTES,
    FilePresence,
    ManifestFiles,
)
from gateway.writeback.flushing.requests import Requests
from gateway.writeback.flushing.state import LookedFor, Lost, WriteRefused
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Write
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import Answer, on
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.writeback import key, pending

COUNT = 10 * FIRST_LOOK
NAMES = tuple(f"step/{number:03}" for number in range(COUNT))


class World:
    """An origin, and one manifest whose files are looked for."""

    def __init__(self, named: NamedFiles) -> None:
        self.clock = ManualClock()
        self.origin = MemoryOrigin(self.clock)
        self.origin.create_bucket("bucket")
        origin = cast(Origin, self.origin)
        self._presence = FilePresence(origin, "bucket", named, slot="slot", purpose=Purpose.FLUSH, clock=self.clock)

    def put(self, names: Sequence[str]) -> None:
        for one in names:
            self.origin.put("bucket", one, b"x")

    def look(self, ignored: Callable[[str], bool] = lambda _: False) -> tuple[LookedFor | WriteRefused | Lost, int]:
        """What was found, and how many questions that took."""
        before = len(self.origin.calls)
        return asyncio.run(self._presence.look(ignored)), len(self.origin.calls) - before


def test_what_was_found_is_not_asked_for_again() -> None:
    """While all of some are missing, nothing else is asked; once they have come, all the rest is."""
    world = World(NamedFiles(NAMES))
    world.put(NAMES[: COUNT // 2])
    missing = LookedFor(COUNT // 2, COUNT, f"s3://bucket/{NAMES[COUNT // 2]}")
    assert world.look() == (missing, COUNT)
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
    world.look()
    asyncio.run(world.clock.advance(FOUND_AGAIN_SECONDS + 1.0))
    assert world.look() == (LookedFor(1, COUNT, f"s3://bucket/{NAMES[-1]}"), 1)
    world.put(NAMES[-1:])
    world.origin.buckets["bucket"].remove(NAMES[0])
    assert world.look()[0] == LookedFor(1, COUNT, f"s3://bucket/{NAMES[0]}")


def test_what_was_found_is_asked_for_again_once_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes: the look comes to its end."""
    world = World(NamedFiles(NAMES))
    world.put(NAMES[:-1])
    world.look()
    asyncio.run(world.clock.advance(30.0))
    world.put(NAMES[-1:])
    send = world.origin.send

    async def send_slowly(request: OriginRequest) -> OriginResponse:
        await world.clock.advance(FOUND_AGAIN_SECONDS)
        return await send(request)

    monkeypatch.setattr(world.origin, "send", send_slowly)
    assert world.look() == (LookedFor(0, COUNT), COUNT)


def test_what_nobody_waits_for_is_not_asked_for() -> None:
    """Nor does it keep others from being asked for, however many there are."""
    world = World(NamedFiles(NAMES))
    ignored = set(NAMES[: 2 * FIRST_LOOK])
    assert world.look(ignored.__contains__)[1] == COUNT - 2 * FIRST_LOOK
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
    denied = world.origin.inject(on(key=NAMES[-1]), Answer(403, "AccessDenied"), times=2)  # HEAD, GET
    assert isinstance(world.look()[0], WriteRefused)
    away = world.origin.inject(on(key=NAMES[-1]), Answer(503, "SlowDown"), times=1)
    assert isinstance(world.look()[0], Lost)
    assert (denied.times, away.times) == (0, 0)
    assert world.look() == (LookedFor(0, COUNT), 1)


# Reading them


class AwayOrigin:
    """Answers nothing."""

    async def send(self, *_: Any) -> Any:
        raise OriginUnreachable("it is away")


class CountedRequests:
    """Says how many manifests are in memory at once."""

    def __init__(self) -> None:
        self.origin = AwayOrigin()
        self.threads = None
        self.reads = self.at_once = self.most = 0

    async def content(self, write: Write, _: int) -> bytes:
        self.reads += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return json.dumps({"weight_map": {"w": f"{write.id}.safetensors"}}).encode()


class NothingPending:
    """A journal in which nothing else is."""

    @property
    def pending_keys(self) -> NothingPending:
        return self

    writes = pending_keys

    def may_be(self, _: ObjectKey) -> bool:
        return False

    def read(self, look: Callable[[Any], Any]) -> Any:
        return look(self)

    def latest(self, _: ObjectKey) -> None:
        """Nothing is pending under any key."""


class Silent(FlushLogger):
    """Refuses a manifest that is not understood."""

    def not_understood(self, write: Write, reason: str) -> None:
        raise AssertionError(reason)


def manifest(number: int, size_bytes: int) -> Write:
    return replace(pending(key(f"{number}/m.index.json"), f"file{number}"), id=number, size_bytes=size_bytes)


async def look(files: ManifestFiles, requests: CountedRequests, write: Write) -> Any:
    journal = cast(Journal, NothingPending())
    return await files.look(write, cast(Requests, requests), journal, SystemClock(), Silent(SystemClock()))


def test_of_long_manifests_one_is_in_memory_at_a_time() -> None:
    """However many are due; short ones do not wait for them."""

    async def scenario() -> tuple[int, int]:
        files, long, short = ManifestFiles(), CountedRequests(), CountedRequests()
        found = await asyncio.gather(
            *(look(files, long, manifest(number, LONG_BYTES + 1)) for number in range(10)),
            *(look(files, short, manifest(number, LONG_BYTES)) for number in range(10, 20)),
        )
        assert all(isinstance(one, Lost) for one in found)
        return long.most, short.most

    assert asyncio.run(scenario()) == (1, 10)
