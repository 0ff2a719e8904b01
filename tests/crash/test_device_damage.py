"""Bytes that change on the device under a running gateway, again and again (docs/semantics.md, clauses 1.4 and 8.2).

The cache directory lies on an ext4 in an image, in which bits are flipped where its files lie: neither page cache nor
times tell of it. Memory is taken from the gateway's processes, and outsiders bring pages back before the gateway does.
Clients read whole objects and ranges, stand still in the middle of a body while all that happens, and leave. The
schedule comes from a seed, which a failure prints; FOREBAY_DAMAGE_SEED and FOREBAY_DAMAGES repeat or lengthen a run.
Takes root.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.support.device import Device
from tests.support.disks import mortal_disk
from tests.support.downloads import BrokenOff, Client, Wanted
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.memory_group import MemoryGroup, memory_group
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

DAMAGES = int(os.environ.get("FOREBAY_DAMAGES", "250"))
SEED = int(os.environ.get("FOREBAY_DAMAGE_SEED", random.SystemRandom().randrange(2**32)))
SECONDS_MAX = 240 + DAMAGES / 2

WORKERS = 2
READERS, SLOW_READERS, LEAVERS = 4, 4, 1
BUCKET = "bucket"
MEBI = 1024 * 1024
OBJECTS = {f"packed/{number}": 5_000 + 1_777 * number for number in range(30)}
OBJECTS |= {f"packed/large/{number}": 300_000 + 12_345 * number for number in range(4)}
OBJECTS |= {f"one/{number}": 3 * MEBI + 4_097 * number for number in range(4)}
OBJECTS |= {f"four/{number}": 9 * MEBI + 12_345 * number for number in range(3)}
OBJECTS |= {f"eight/{number}": 17 * MEBI + 999 * number for number in range(2)}
BLOCK_SIZES = {"packed": "64KiB", "one": "1MiB", "four": "4MiB", "eight": "8MiB"}
DISK_BYTES = 320 * MEBI
CAPACITY_BYTES = 80 * MEBI
"""A few of the objects do not fit, so that there are always fills."""

FLIPS_AT_ONCE_MAX = 12
ORIGIN_SPEEDS: Sequence[float | None] = (None, None, 20e6)
"""Slow enough that memory is taken while a block is filled."""

SLOW_BUFFER_BYTES = 16 * 1024


@contextmanager
def gateway_on(directory: Path, origin: StrictOrigin, group: MemoryGroup) -> Iterator[GatewayProcess]:
    slots = [
        {"name": name, "prefix": f"s3://{BUCKET}/{name}/", "consistency": "immutable", "block_size": size}
        for name, size in BLOCK_SIZES.items()
    ]
    config: dict[str, Any] = {
        "server": {"workers": WORKERS, "allow_unsigned": True},
        "origin": origin.settings,
        "cache": {"directory": str(directory), "capacity": str(CAPACITY_BYTES), "small_object_max": "128KiB"},
        "slots": slots,
    }
    with GatewayProcess(config, directory=directory, before_exec=group.join) as gateway:
        yield gateway


@dataclass(frozen=True)
class World:
    """A gateway, and what its files are done to."""

    gateway: GatewayProcess
    origin: StrictOrigin
    group: MemoryGroup
    device: Device
    contents: dict[str, bytes]
    targets: dict[str, str]
    counts: Counter[str]

    def files(self, *, partial: bool) -> list[Path]:
        blocks = self.gateway.directory / "blocks"
        filling = [path for path in (blocks / "partial").rglob("*") if path.is_file()] if partial else []
        return filling or [path for path in (blocks / "data").rglob("*") if path.is_file()]

    def wanted(self, rng: random.Random, *, large: bool = False) -> Wanted:
        """A whole object, or a part of one."""
        keys = [key for key in OBJECTS if not large or OBJECTS[key] > MEBI]
        key = rng.choice(keys)
        size_bytes = OBJECTS[key]
        first, stop = 0, size_bytes
        if rng.random() < 0.5:
            first = rng.randrange(size_bytes)
            stop = min(size_bytes, first + rng.choice([1, 5_000, 200_000, 3 * MEBI]))
        return Wanted(self.targets[key], self.contents[key], first, stop)

    def counted(self, metric: str) -> float:
        """As the gateway does, in all slots."""
        with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
            text = client.get(f"{self.gateway.admin_url}/metrics").text
        return sum(map(float, re.findall(rf"^{metric}\{{.*\}} (\S+)$", text, re.MULTILINE)))


def presigned_target(gateway: GatewayProcess, key: str) -> str:
    """Only requests that are signed are answered by what is prepared; by these the most are."""
    request = AWSRequest("GET", f"{gateway.s3_url}/{BUCKET}/{key}")
    S3SigV4QueryAuth(Credentials(ACCESS_KEY_ID, SECRET_ACCESS_KEY), "s3", "us-east-1", 86_400).add_auth(request)
    return str(request.url).removeprefix(gateway.s3_url)


class Rounds:
    """Rounds of damage go on as fast as answers come, and slow clients stand still for a round or two."""

    def __init__(self) -> None:
        self.over = False
        self._rounds = 0
        self._answers = 0
        self._changed = asyncio.Condition()

    async def answered(self) -> None:
        async with self._changed:
            self._answers += 1
            self._changed.notify_all()

    async def wait_for_answers(self, count: int) -> None:
        async with self._changed:
            enough = self._answers + count
            await self._changed.wait_for(lambda: self._answers >= enough)

    async def finished_round(self) -> None:
        async with self._changed:
            self._rounds += 1
            self._changed.notify_all()

    async def stand_still(self, count: int) -> None:
        async with self._changed:
            enough = self._rounds + count
            await self._changed.wait_for(lambda: self._rounds >= enough or self.over)

    async def end(self) -> None:
        async with self._changed:
            self.over = True
            self._changed.notify_all()


def damage(world: World, rng: random.Random) -> None:
    """Flip some bytes, take memory away, read as an outsider, in one order or another. Blocks."""
    steps: list[Callable[[World, random.Random], None]] = [flip_some, take_memory]
    if rng.random() < 0.6:
        steps.append(read_outside)
    if rng.random() < 0.3:
        rng.shuffle(steps)
    for step in steps:
        step(world, rng)


def flip_some(world: World, rng: random.Random) -> None:
    files = world.files(partial=rng.random() < 0.3)
    if not files:
        return
    for path in rng.choices(files, k=rng.randint(1, FLIPS_AT_ONCE_MAX)):
        with suppress(FileNotFoundError):  # published, evicted or dropped by now
            size_bytes = path.stat().st_size
            if size_bytes and world.device.flip(path, rng.randrange(size_bytes)):
                world.counts["flips of fills" if "partial" in path.parts else "flips"] += 1


def take_memory(world: World, rng: random.Random) -> None:
    world.group.reclaim()
    world.counts["reclaimed"] += 1


def read_outside(world: World, rng: random.Random) -> None:
    """As a backup would: what comes into memory that way was read by nobody who could tell."""
    files = world.files(partial=rng.random() < 0.3)
    chosen = map(str, rng.sample(files, k=min(len(files), rng.choice([2, 10, 1000]))))
    subprocess.run(["cat", *chosen], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=world.group.join)
    world.counts["read by outsiders"] += 1


async def damager(world: World, rounds: Rounds) -> None:
    rng = random.Random(f"{SEED}/damager")
    while world.counts["flips"] + world.counts["flips of fills"] < DAMAGES:
        world.origin.bytes_per_second = rng.choice(ORIGIN_SPEEDS)
        await asyncio.to_thread(damage, world, rng)
        await rounds.finished_round()
        await rounds.wait_for_answers(rng.randrange(12))
    await rounds.end()


async def reader(world: World, rounds: Rounds, number: int) -> None:
    rng = random.Random(f"{SEED}/reader/{number}")
    with closing(Client(world.gateway.s3_url)) as client:
        while not rounds.over:
            await judged(world, client, client.read(world.wanted(rng)))
            await rounds.answered()
            if rng.random() < 0.2:
                client.close()  # the next connection may be another worker's


async def slow_reader(world: World, rounds: Rounds, number: int) -> None:
    """Takes some of the body, stands still while bytes rot and memory is taken, takes some more."""
    rng = random.Random(f"{SEED}/slow/{number}")
    while not rounds.over:
        with closing(Client(world.gateway.s3_url, SLOW_BUFFER_BYTES)) as client:
            await judged(world, client, read_slowly(world, client, rounds, rng))
        await rounds.answered()


async def read_slowly(world: World, client: Client, rounds: Rounds, rng: random.Random) -> None:
    await client.ask(world.wanted(rng, large=True))
    while await client.take(rng.choice([1, 50_000, 400_000, 4 * MEBI])):
        if rng.random() < 0.5:
            await rounds.stand_still(rng.randint(1, 2))
            world.counts["stood still"] += 1


async def leaver(world: World, rounds: Rounds, number: int) -> None:
    rng = random.Random(f"{SEED}/leaver/{number}")
    while not rounds.over:
        with closing(Client(world.gateway.s3_url)) as client:
            await judged(world, client, leave_early(client, world.wanted(rng), rng))
        await rounds.answered()


async def leave_early(client: Client, wanted: Wanted, rng: random.Random) -> None:
    await client.ask(wanted)
    await client.take(rng.choice([0, 1, 100_000, 2 * MEBI]))
    client.reset()


async def judged(world: World, client: Client, reading: Any) -> None:
    """Bytes are judged as they come; an answer that is broken off in the middle is counted."""
    try:
        await reading
    except BrokenOff:
        world.counts["broken off"] += 1
    world.counts["answers"] += 1
    world.counts[f"cache {client.cached}"] += 1


async def damage_and_read(world: World) -> None:
    rounds = Rounds()
    async with asyncio.TaskGroup() as group:
        for play, count in ((reader, READERS), (slow_reader, SLOW_READERS), (leaver, LEAVERS)):
            for number in range(count):
                group.create_task(play(world, rounds, number))
        group.create_task(damager(world, rounds))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Device]]:
    image = tmp_path / "image"
    with mortal_disk(tmp_path / "disk", image, DISK_BYTES) as mounted, closing(Device(image)) as device:
        yield mounted, device


@pytest.mark.root
@pytest.mark.slow
def test_flips_come_from_the_device(disk: tuple[Path, Device]) -> None:
    """The campaign does what it says: a flip shows when the page has left memory, and changes no time of the file."""
    directory, device = disk
    path = directory / "f"
    path.write_bytes(bytes(MEBI))
    assert device.flip(path, 5_000)
    facts = path.stat()
    assert path.read_bytes() == bytes(MEBI)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert [at for at, byte in enumerate(path.read_bytes()) if byte] == [5_000]
    assert (facts.st_mtime_ns, facts.st_ctime_ns) == (path.stat().st_mtime_ns, path.stat().st_ctime_ns)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_1_4_what_rots_on_the_device_reaches_no_reader(disk: tuple[Path, Device]) -> None:
    """1.4, 8.2 Whatever comes back from the device, and whoever fetched it: no wrong byte, and no read fails."""
    directory, device = disk
    print(f"replay with FOREBAY_DAMAGE_SEED={SEED} FOREBAY_DAMAGES={DAMAGES}")
    with StrictOrigin() as origin, memory_group() as group:
        origin.model.create_bucket(BUCKET)
        for seed, (key, size_bytes) in enumerate(OBJECTS.items()):
            origin.model.put_generated(BUCKET, key, size_bytes, seed)
        stored = origin.model.buckets[BUCKET].objects
        contents = {key: stored[key].content.read(0, size_bytes) for key, size_bytes in OBJECTS.items()}
        with gateway_on(directory / "cache", origin, group) as gateway, gateway.explaining():
            targets = {key: presigned_target(gateway, key) for key in OBJECTS}
            world = World(gateway, origin, group, device, contents, targets, Counter())
            try:
                asyncio.run(damage_and_read(world))
            finally:
                noticed = world.counted("forebay_cache_damaged_blocks_total")
                prepared = world.counted("forebay_prepared_requests_total")
                print(f"{dict(sorted(world.counts.items()))}, damaged blocks noticed: {noticed:g}, {prepared=:g}")
    flips = world.counts["flips"] + world.counts["flips of fills"]
    assert noticed > flips / 20, "hardly any damage was come upon: this run shows little"
    assert world.counts["broken off"] <= flips, "only damage found in the middle of an answer breaks it off"
    assert world.counts["cache hit"] > flips / 20
    assert prepared > world.counts["cache hit"] / 4
    assert world.counts["stood still"] > flips / 20
