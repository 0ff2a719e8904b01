"""Files harmed under a running gateway, at random, again and again (docs/semantics.md, clauses 1.4 and 8.2).

Block files and the files of running fills are flipped, torn, swapped, removed; now in memory, now on the device, and
readers must not notice. The harms come from a seed, which a failure prints; FOREBAY_HARM_SEED and FOREBAY_HARMS repeat
or lengthen a run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.crash.harms import BY_NAME, IN_PLACE, Harm, RunningFetches, drop_from_memory
from tests.scenarios.races import reading
from tests.scenarios.races.caller import Caller
from tests.scenarios.races.contents import Value
from tests.scenarios.races.history import Bounds
from tests.scenarios.races.world import World
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.store import StoredObject
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import until

HARMS = int(os.environ.get("FOREBAY_HARMS", "150"))
SEED = int(os.environ.get("FOREBAY_HARM_SEED", random.SystemRandom().randrange(2**32)))
SECONDS_MAX = 180 + HARMS / 4

WORKERS = 2
READERS = 6
HARMERS = 3
BUCKET = "bucket"
BLOCK_SIZE_BYTES = 256 * 1024
PACKED_BYTES_MAX = 64 * 1024
OBJECTS = {f"object/{number}": 900_000 + 12_345 * number for number in range(10)}
OBJECTS |= {f"small/{number}": 60_000 + 123 * number for number in range(10)}
CAPACITY_BYTES = 36 * BLOCK_SIZE_BYTES
"""Some of the objects do not fit, so that there are always fills."""

ORIGIN_BYTES_PER_SECOND = 16e6
AT_ONCE_MAX = 3
LEAVERS = 3


@pytest.fixture
def running() -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        origin.bytes_per_second = ORIGIN_BYTES_PER_SECOND
        config: dict[str, Any] = {
            "server": {"workers": WORKERS, "allow_unsigned": True},
            "origin": origin.settings,
            "cache": {
                "capacity": str(CAPACITY_BYTES),
                "block_size": str(BLOCK_SIZE_BYTES),
                "small_object_max": str(PACKED_BYTES_MAX),
            },
            "slots": [{"name": "still", "prefix": f"s3://{BUCKET}/", "consistency": "immutable"}],
        }
        with GatewayProcess(config) as gateway:
            yield gateway, origin


def world_of(origin: StrictOrigin) -> World:
    world = World(BUCKET, dict.fromkeys(OBJECTS, Bounds(remembered=True)), [])
    for number, (key, size_bytes) in enumerate(OBJECTS.items()):
        value = Value(number, size_bytes)
        world.values[value.etag] = value
        origin.model.buckets[BUCKET].put(StoredObject(key, BytesContent(value.content), value.etag, 0.0))
        world.end(key, world.begin(key, value.etag, own=False))
    return world


class Readings:
    """Reads go on side by side, or one harmer has the files to itself."""

    def __init__(self) -> None:
        self._under_way = 0
        self._alone = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._alone)
            self._under_way += 1
        try:
            yield
        finally:
            async with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._alone)
            self._alone = True
            await self._changed.wait_for(lambda: self._under_way == 0)
        try:
            yield
        finally:
            async with self._changed:
                self._alone = False
                self._changed.notify_all()


class Ground:
    """What readers and harmers share."""

    def __init__(self, world: World, url: str, directory: Path, running_fetches: RunningFetches) -> None:
        self._running_fetches = running_fetches
        self.world = world
        self.url = url
        self.done: Counter[str] = Counter()
        self.over = False
        self.fetches_awaited = 0
        self._readings = Readings()
        self._directory = directory / "blocks"

    async def read(self, caller: Caller, rng: random.Random) -> None:
        """An object, or a range of it, judged by the model: nothing breaks, nothing is wrong."""
        step = rng.choice([reading.get, reading.get, reading.get_range, reading.crowd])
        async with self._readings.shared():
            await step(self.world, caller, rng, rng.choice(list(OBJECTS)))

    async def harm(self, caller: Caller, rng: random.Random) -> None:
        """By name at any moment; in place when nothing is being read, a fill that nobody waits for perhaps."""
        if rng.random() < 0.5:
            self._do(rng, BY_NAME)
            return
        async with self._readings.alone():
            if rng.random() < 0.5:
                await self._leave_fills_behind(caller, rng)
            for _ in range(rng.randint(1, AT_ONCE_MAX)):
                self._do(rng, IN_PLACE)
            # Who joins a fetch in the process that leads it gets what that has just written, as it lies in memory: the
            # file is held against its checksums by those who come when the fetch is over.
            self.fetches_awaited += self._running_fetches()
            await until(lambda: not self._running_fetches())

    async def _leave_fills_behind(self, caller: Caller, rng: random.Random) -> None:
        for key in rng.sample(list(OBJECTS), k=LEAVERS):
            await reading.leave_early(self.world, caller, rng, key)

    def _do(self, rng: random.Random, harms: list[Harm]) -> None:
        """One harm, to a file that is being filled when there is one and chance wants it."""
        harm, files = rng.choice(harms), self._files(partial=rng.random() < 0.4)
        if not files:
            return
        try:
            harmed = harm(rng, files)
        except FileNotFoundError:  # published, evicted or dropped by now
            return
        self.done[f"{harm.__name__} {'fill' if 'partial' in harmed[0].parts else 'block'}"] += 1
        if rng.random() < 0.5:
            self._drop_from_memory(harmed)

    def _drop_from_memory(self, files: Sequence[Path]) -> None:
        for path in files:
            with suppress(FileNotFoundError):
                drop_from_memory(path)
        self.done["dropped from memory"] += 1

    def _files(self, *, partial: bool) -> list[Path]:
        filling = [path for path in (self._directory / "partial").rglob("*") if path.is_file()] if partial else []
        return filling or [path for path in (self._directory / "data").rglob("*") if path.is_file()]

    @property
    def harms(self) -> int:
        return self.done.total() - self.done["dropped from memory"]


async def reader(ground: Ground, number: int) -> None:
    rng = random.Random(f"{SEED}/reader/{number}")
    with closing(Caller(ground.url)) as caller:
        while not ground.over:
            await ground.read(caller, rng)


async def harmer(ground: Ground, number: int) -> None:
    """Harms, and reads something now and then: too many harms at once would leave nothing whole to harm."""
    rng = random.Random(f"{SEED}/harmer/{number}")
    with closing(Caller(ground.url)) as caller:
        while ground.harms < HARMS:
            await ground.harm(caller, rng)
            await ground.read(caller, rng)
    ground.over = True


async def harm_and_read(ground: Ground) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(READERS):
            group.create_task(reader(ground, number))
        for number in range(HARMERS):
            group.create_task(harmer(ground, number))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_1_4_harmed_files_reach_no_reader(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """1.4, 8.2 Whatever is done to the files: no wrong byte, and no read fails, for the origin can serve."""
    gateway, origin = running
    print(f"replay with FOREBAY_HARM_SEED={SEED} FOREBAY_HARMS={HARMS}")
    worker_pid = gateway.worker_pids()[0]
    assert worker_pid is not None
    running_fetches = RunningFetches(worker_pid)
    ground = Ground(world_of(origin), gateway.s3_url, gateway.directory, running_fetches)
    with closing(running_fetches), gateway.explaining():
        asyncio.run(harm_and_read(ground))
    print(f"{ground.harms} harms: {dict(sorted(ground.done.items()))}, {dict(sorted(ground.world.counts.items()))}")
    assert ground.world.counts["broken reads"] == 0
    assert ground.world.counts["judged"] > HARMS
    for outcome in ("cache hit", "cache partial", "cache miss"):
        assert ground.world.counts[outcome] > HARMS // 50, f"hardly any {outcome}: this run shows little"
    assert sum(count for what, count in ground.done.items() if what.endswith(" fill")) > HARMS // 50
    assert ground.fetches_awaited, "no fetch ran when files were harmed: is the table of locks another one now?"
