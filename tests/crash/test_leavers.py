"""Clients that leave at any moment, beside others that stay (docs/semantics.md, clauses 1.4 and 5.1).

Each leaves an open file behind, which a thread may still be about to use, while the gateway opens and closes many
others: a number that is used after its end is somebody else's file by then. Memory is taken away all the time, so that
files are read and checked again and again. What leavers do comes from a seed, which a failure prints;
FOREBAY_LEAVER_SEED and FOREBAY_LEAVERS repeat or lengthen a run. Takes root.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.downloads import Client, Wanted
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_group import MemoryGroup, memory_group
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import until

LEAVERS = int(os.environ.get("FOREBAY_LEAVERS", "2000"))
SEED = int(os.environ.get("FOREBAY_LEAVER_SEED", random.SystemRandom().randrange(2**32)))
SECONDS_MAX = 240 + LEAVERS / 20

WORKERS = 2
LEAVERS_AT_ONCE, READERS = 10, 3
BUCKET = "bucket"
TENANTS = {"a": "8MiB", "b": "4MiB", "c": "8MiB", "d": "1MiB"}
"""Each with a slot, and the size of its blocks."""

MEBI = 1024 * 1024
LARGE = {f"{tenant}/large/{number}": 6 * MEBI + 4_321 * number for tenant in TENANTS for number in range(2)}
SMALL = {f"{tenant}/small/{number}": 2_000 + 111 * number for tenant in TENANTS for number in range(120)}
OBJECTS = LARGE | SMALL

DESCRIPTORS_MAX = 256
"""Of each process: files are kept open in half of them, so that most of the small ones are opened for each read."""

AWAY_SECONDS_MAX = 0.2
LEAVE_SECONDS_MAX = 0.004
DEFECTS = ("Bad file descriptor", "LeaseEnded", "Traceback", "failed unexpectedly")


@contextmanager
def gateway_for(origin: StrictOrigin, group: MemoryGroup) -> Iterator[GatewayProcess]:
    slots = [
        {"name": tenant, "prefix": f"s3://{BUCKET}/{tenant}/", "consistency": "immutable", "block_size": size}
        for tenant, size in TENANTS.items()
    ]
    config: dict[str, Any] = {
        "server": {"workers": WORKERS, "allow_unsigned": True},
        "origin": origin.settings,
        "cache": {"capacity": "256MiB", "small_object_max": 0},
        "slots": slots,
    }

    def before_exec() -> None:
        group.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS_MAX, DESCRIPTORS_MAX))

    with GatewayProcess(config, before_exec=before_exec) as gateway:
        yield gateway


@dataclass
class Ground:
    """What leavers, and those who stay, share."""

    url: str
    contents: dict[str, bytes]
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def over(self) -> bool:
        return self.counts["left"] >= LEAVERS

    def wanted(self, rng: random.Random, *, large: bool) -> Wanted:
        key = rng.choice(list(LARGE if large else SMALL))
        first, stop = 0, OBJECTS[key]
        if rng.random() < 0.3:
            first = rng.randrange(stop)
        return Wanted(f"/{BUCKET}/{key}", self.contents[key], first, stop)


async def leaver(ground: Ground, number: int) -> None:
    rng = random.Random(f"{SEED}/leaver/{number}")
    while not ground.over:
        with closing(Client(ground.url, rng.choice([None, None, 16 * 1024]))) as client:
            await leave(ground, client, rng)
        ground.counts["left"] += 1


async def leave(ground: Ground, client: Client, rng: random.Random) -> None:
    """Before the answer, in the middle of it, by a reset, a close, or after reading no more."""
    wanted = ground.wanted(rng, large=rng.random() < 0.8)
    await client.say(wanted)
    if rng.random() < 0.8:
        await client.hear(wanted)
        await client.take(rng.choice([0, 1, 100_000, MEBI, 2 * MEBI, 4 * MEBI]))
    if rng.random() < 0.7:
        await asyncio.sleep(rng.random() * LEAVE_SECONDS_MAX)
    how = rng.choice(["reset", "reset", "close", "half-read"])
    if how == "reset":
        client.reset()
    elif how == "half-read":
        client.stop_reading()
        await asyncio.sleep(rng.random() * LEAVE_SECONDS_MAX)
    ground.counts[how] += 1


async def reader(ground: Ground, number: int) -> None:
    """Stays to the end of every answer, every byte of which is judged: none is wrong, and none breaks off."""
    rng = random.Random(f"{SEED}/reader/{number}")
    with closing(Client(ground.url)) as client:
        while not ground.over:
            await client.read(ground.wanted(rng, large=rng.random() < 0.2))
            ground.counts["read to the end"] += 1
            ground.counts[f"cache {client.cached}"] += 1
            if rng.random() < 0.1:
                client.close()


async def leave_and_read(ground: Ground) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(LEAVERS_AT_ONCE):
            group.create_task(leaver(ground, number))
        for number in range(READERS):
            group.create_task(reader(ground, number))


async def read_all(ground: Ground) -> None:
    with closing(Client(ground.url)) as client:
        for key, content in ground.contents.items():
            await client.read(Wanted(f"/{BUCKET}/{key}", content, 0, len(content)))


@contextmanager
def memory_taken(gateway: GatewayProcess, group: MemoryGroup) -> Iterator[None]:
    """All the time, with pauses in which files are warm; and files touched, so that they are another state of it."""
    over, rng = threading.Event(), random.Random(f"{SEED}/memory")

    def take() -> None:
        while not over.wait(rng.random() * AWAY_SECONDS_MAX):
            group.reclaim()
            for path in rng.sample(block_files(gateway), k=4):
                with suppress(FileNotFoundError):
                    os.utime(path)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def block_files(gateway: GatewayProcess) -> list[Path]:
    return [path for path in (gateway.directory / "blocks" / "data").rglob("*") if path.is_file()]


def open_files(pid: int, directory: Path) -> Counter[str]:
    """How often a process has each file of the block directory open, and each socket."""
    found: Counter[str] = Counter()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{number}")
            if target.startswith((str(directory / "blocks" / "data"), str(directory / "blocks" / "partial"))):
                found[target] += 1
    return found


def mappings(pid: int, directory: Path) -> Counter[str]:
    """How many areas of a process's memory lie in each of these files."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    paths = [line.split(maxsplit=5)[5] for line in lines if line.count(" ") > 5 and str(directory) in line]
    return Counter(path for path in paths if "/blocks/data/" in path or "/blocks/partial/" in path)


def untidy(gateway: GatewayProcess) -> list[str]:
    """What processes have open beyond what they keep: each file once, in one piece, and none that is gone."""
    found = []
    for worker, pid in enumerate(gateway.worker_pids()):
        assert pid is not None, "a worker is down"
        opened, mapped = open_files(pid, gateway.directory), mappings(pid, gateway.directory)
        many = [*opened.items(), *mapped.items()]
        found += [f"worker {worker}: {path}, {count} times" for path, count in many if count > 1]
        found += [f"worker {worker}: {path}" for path, _ in many if path.endswith("(deleted)")]
        found += [f"worker {worker}: mapped only: {path}" for path in sorted(set(mapped) - set(opened))]
        if len(opened) > DESCRIPTORS_MAX // 2:
            found.append(f"worker {worker}: {len(opened)} files")
    return found


async def until_tidy(gateway: GatewayProcess) -> None:
    try:
        await until(lambda: not untidy(gateway))
    except TimeoutError:
        raise AssertionError(f"left open: {untidy(gateway)}") from None


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_5_1_clients_that_leave_harm_nobody() -> None:
    """1.4, 5.1 Who stays gets every byte, right and whole, whoever leaves; and nothing of those who left remains."""
    print(f"replay with FOREBAY_LEAVER_SEED={SEED} FOREBAY_LEAVERS={LEAVERS}")
    with StrictOrigin() as origin, memory_group() as group:
        origin.model.create_bucket(BUCKET)
        for seed, (key, size_bytes) in enumerate(OBJECTS.items()):
            origin.model.put_generated(BUCKET, key, size_bytes, seed)
        stored = origin.model.buckets[BUCKET].objects
        contents = {key: stored[key].content.read(0, size_bytes) for key, size_bytes in OBJECTS.items()}
        with gateway_for(origin, group) as gateway, gateway.explaining():
            pids = gateway.worker_pids()
            ground = Ground(gateway.s3_url, contents)
            asyncio.run(read_all(ground))
            try:
                with memory_taken(gateway, group):
                    asyncio.run(leave_and_read(ground))
            finally:
                print(dict(sorted(ground.counts.items())))
            asyncio.run(until_tidy(gateway))
            asyncio.run(read_all(ground))
            assert gateway.worker_pids() == pids, "a worker died"
            assert [line for line in gateway.log.splitlines() if any(defect in line for defect in DEFECTS)] == []
    assert ground.counts["read to the end"] > LEAVERS / 20
    assert ground.counts["cache hit"] > ground.counts["read to the end"] / 2
