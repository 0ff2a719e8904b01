"""Processes killed with -9 at any moment, again and again (docs/semantics.md, clauses 5.1 to 5.3).

A worker, the background process, or the supervisor with all its children, while clients read what is cold and what is
warm, crowd round fills, make the cache evict, and write. The schedule comes from a seed, which a failure prints;
FOREBAY_KILL_SEED and FOREBAY_KILLS repeat or lengthen a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtests.harness.server_process import held_port
from tests.scenarios.races import reading
from tests.scenarios.races.caller import Caller
from tests.scenarios.races.contents import Value
from tests.scenarios.races.history import STRICT, Bounds
from tests.scenarios.races.playing import READS, WRITES, Play, Steps, race
from tests.scenarios.races.world import World
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.living_files import living_files
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.store import StoredObject
from tests.support.processes import kill_if_there
from tests.support.strict_origin import StrictOrigin

KILLS = int(os.environ.get("FOREBAY_KILLS", "10"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", random.SystemRandom().randrange(2**32)))
SECONDS_MAX = 180 + KILLS * 10

WORKERS = 4
CLIENTS = 8
BUCKET = "bucket"
OBJECTS = 48
OBJECT_SIZE_BYTES = 1_234_567
SMALL_SIZE_BYTES = 60_000
BLOCK_SIZE_BYTES = 256 * 1024
PACKED_BYTES_MAX = 64 * 1024
"""Small objects and what clients write are packed into segments; the blocks of large ones have files of their own."""

CAPACITY_BYTES = 56 * BLOCK_SIZE_BYTES
"""Half of the objects fit: every run fills, evicts and refills."""

ORIGIN_BYTES_PER_SECOND = 8e6
"""Per connection: a block takes some 30 milliseconds, in which its leader can be killed."""

EVERYBODY, BACKGROUND = 0.08, 0.2
"""How often it is all processes that are killed, and how often the background process; else a worker."""

COLD = [f"cold/{number}" for number in range(OBJECTS)]
WRITTEN = {
    **{f"strict/{number}": STRICT for number in range(4)},
    **{f"kept/{number}": Bounds(remembered=True) for number in range(4)},
}
COLD_READS: Steps = {reading.get: 5, reading.get_range: 8, reading.crowd: 6, reading.leave_early: 3}


def config_of(origin: StrictOrigin, port: int) -> dict[str, Any]:
    return {
        "server": {"port": port, "workers": WORKERS, "allow_unsigned": True},
        "origin": origin.settings,
        "cache": {
            "capacity": str(CAPACITY_BYTES),
            "block_size": str(BLOCK_SIZE_BYTES),
            "small_object_max": str(PACKED_BYTES_MAX),
        },
        "slots": [{"name": "kept", "prefix": f"s3://{BUCKET}/kept/", "consistency": "immutable"}],
    }


@pytest.fixture
def running() -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    """The port stays the same over restarts, as it does for those who use the gateway."""
    with held_port() as holder, StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        origin.bytes_per_second = ORIGIN_BYTES_PER_SECOND
        with GatewayProcess(config_of(origin, holder.getsockname()[1])) as gateway:
            yield gateway, origin


def world_of(origin: StrictOrigin) -> World:
    """Clients write some keys; the large objects stay as they are."""
    world = World(BUCKET, {**WRITTEN, **dict.fromkeys(COLD, STRICT)}, list(WRITTEN), breaks_allowed=True)
    for number, key in enumerate(COLD):
        size_bytes = SMALL_SIZE_BYTES if number % 2 else OBJECT_SIZE_BYTES
        value = Value(10**9 + number, size_bytes + number)
        world.values[value.etag] = value
        origin.model.buckets[BUCKET].put(StoredObject(key, BytesContent(value.content), value.etag, 0.0))
        world.end(key, world.begin(key, value.etag, own=False))
    return world


class Gate:
    """Lets clients go on, or keeps all of them waiting before their next step."""

    def __init__(self, clients: int) -> None:
        self.over = False
        self._clients = clients
        self._waiting = 0
        self._changed = asyncio.Condition()
        self._open = True

    async def goes_on(self, _taken: int) -> bool:
        async with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._open)
            self._waiting -= 1
            return not self.over

    async def shut(self) -> None:
        """Return when nobody is under way."""
        async with self._changed:
            self._open = False
            await self._changed.wait_for(lambda: self._waiting == self._clients)

    async def open(self, *, over: bool = False) -> None:
        async with self._changed:
            self._open, self.over = True, over
            self._changed.notify_all()


class Killer:
    """Kills what the schedule says, and starts again what does not come back by itself."""

    def __init__(self, gateway: GatewayProcess, gate: Gate) -> None:
        self.killed: Counter[str] = Counter()
        self._gateway = gateway
        self._gate = gate
        self._schedule = random.Random(SEED)

    async def run(self) -> None:
        while self.killed.total() < KILLS:
            await asyncio.sleep(self._schedule.uniform(0.02, 0.9))
            choice = self._schedule.random()
            if choice < EVERYBODY:
                await self._kill_everybody()
            else:
                self._kill_one("background" if choice < EVERYBODY + BACKGROUND else "worker")

    def _kill_one(self, kind: str) -> None:
        """Any process of a kind, if one lives just now: one that was killed before may still be seen, or just gone."""
        living = [pid for pid, name in children_of(self._gateway.pid) if name.startswith(kind)]
        if living and kill_if_there(self._schedule.choice(living)):
            self.killed[kind] += 1

    async def _kill_everybody(self) -> None:
        """The supervisor first, which its children notice, or are killed before they do."""
        children = [pid for pid, _ in children_of(self._gateway.pid)]
        self._gateway.signal(signal.SIGKILL)
        if self._schedule.random() < 0.5:
            for pid in children:
                kill_if_there(pid)
        await asyncio.to_thread(self._gateway.wait)
        self.killed["everybody"] += 1
        await self._gate.shut()
        await asyncio.to_thread(self._gateway.start)
        assert_exact(self._gateway)
        await self._gate.open()


def children_of(pid: int) -> list[tuple[int, str]]:
    """Process ids and names of the supervisor's children, as they are right now."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            arguments = Path(f"/proc/{child}/cmdline").read_text().removeprefix("forebay: ").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        names = [one.replace(" ", "") for one in arguments if one.startswith(("worker", "background"))]
        found += [(int(child), name) for name in names[:1]]
    return found


def total(gateway: GatewayProcess, name: str) -> float:
    """A gauge, its labels summed up."""
    with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
        text = client.get(f"{gateway.admin_url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    assert lines, f"{name} is not reported"
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def block_bytes_on_disk(gateway: GatewayProcess) -> int:
    """What the block files take, in whole pages."""
    files = living_files(gateway.directory / "blocks" / "data")
    return sum(-(-status.st_size // 4096) * 4096 for _, status in files if stat.S_ISREG(status.st_mode))


def unfinished_files(gateway: GatewayProcess) -> list[Path]:
    return [path for path in (gateway.directory / "blocks" / "partial").rglob("*") if path.is_file()]


def assert_exact(gateway: GatewayProcess) -> None:
    """Right after a start, before anybody asks for anything: the index says what the disk says."""
    on_disk = block_bytes_on_disk(gateway)
    assert not unfinished_files(gateway)
    assert total(gateway, "forebay_cache_usage_bytes") == on_disk <= CAPACITY_BYTES
    assert total(gateway, "forebay_cache_reserved_bytes") == 0


async def under_fire(gateway: GatewayProcess, world: World) -> Counter[str]:
    """Clients at work while processes die; then all of them come to rest."""
    play = Play(world, [(READS, list(WRITTEN)), (WRITES, list(WRITTEN)), (COLD_READS, COLD), (COLD_READS, COLD)])
    gate = Gate(CLIENTS)
    killer = Killer(gateway, gate)
    async with asyncio.TaskGroup() as group:
        group.create_task(race(play, gateway.s3_url, seed=SEED, clients=CLIENTS, goes_on=gate.goes_on))
        await killer.run()
        await gate.open(over=True)
    return killer.killed


async def in_peace(gateway: GatewayProcess, world: World) -> None:
    """Every key once more, when nothing is killed any more: nothing breaks, nothing is lost."""
    rng, world.breaks_allowed = random.Random(SEED), False
    with closing(Caller(gateway.s3_url)) as caller:
        for key in world.keys:
            await reading.get(world, caller, rng, key)
            await reading.head(world, caller, rng, key)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_5_2_killed_processes_cost_their_own_requests_only(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """5.1, 5.2, 5.3 No wrong byte, nothing stuck, nothing acknowledged lost, and after each restart exact accounts."""
    gateway, origin = running
    print(f"replay with FOREBAY_KILL_SEED={SEED} FOREBAY_KILLS={KILLS}")
    world = world_of(origin)
    with gateway.explaining():
        killed = asyncio.run(under_fire(gateway, world))
        print(f"killed {dict(killed)}: {dict(sorted(world.counts.items()))}")
        asyncio.run(in_peace(gateway, world))
    assert killed.total() == KILLS
    assert world.counts["judged"] > KILLS * 5, "the clients hardly got through: this run shows nothing"
    assert gateway.terminate() == 0
    assert not unfinished_files(gateway)
    gateway.start()
    assert_exact(gateway)
