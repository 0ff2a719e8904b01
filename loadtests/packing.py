"""What small blocks cost packed into segments, against one file each: filling, reading, surveying, evicting.

    python -m loadtests.packing [--size 100000] [--blocks 2000] [--rounds 5] [--directory DIRECTORY]

One process, an origin in memory, no sockets: what differs is all there is. Both ways take turns, so that a noisy
machine disturbs both; the ratio is that of the paired rounds, with its 95% interval. The page cache is warm.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from gateway.blocks.cache import BlockCache
from gateway.blocks.eviction import Capacity
from gateway.blocks.layout import BlockSettings
from gateway.blocks.opening import open_directory, rebuild
from gateway.core.clock import SystemClock
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.policy.slots import Slots
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.store import StoredObject

BUCKET = "train"
READERS = 32
BLOCK_SIZE_BYTES = 8 * 1024 * 1024
PACKED_BYTES_MAX = 1024 * 1024
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's t for 95%, by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one round and one way, for each block."""

    fill_cpu_us: float
    read_cpu_us: float
    survey_us: float
    evict_cpu_us: float
    files: float
    index_bytes: float


def versions_in(origin: MemoryOrigin, blocks: int, size_bytes: int) -> list[ObjectVersion]:
    origin.create_bucket(BUCKET)
    content, versions = BytesContent(b"x" * size_bytes), []
    for number in range(blocks):
        key, etag = f"imagenet/class{number % 1000:04d}/image{number:08d}.jpg", f'"{number:032x}"'
        origin.buckets[BUCKET].put(StoredObject(key, content, etag, 0.0))
        versions.append(ObjectVersion(ObjectKey(BUCKET, key), etag, size_bytes))
    return versions


async def read_all(cache: BlockCache, versions: Sequence[ObjectVersion]) -> None:
    """By READERS readers, bytes that lie in memory left where they are."""
    left = iter(versions)

    async def reader() -> None:
        for version in left:
            one = await cache.open_range(version, ByteRange(0, version.size_bytes - 1))
            if one.whole() is None:
                async for _ in one.body():
                    pass
            await one.aclose()

    await asyncio.gather(*(reader() for _ in range(READERS)))


def cpu_us(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e6


def wall_us(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


async def fill_and_read(
    settings: BlockSettings, versions: Sequence[ObjectVersion], origin: MemoryOrigin
) -> list[float]:
    """CPU time of reading all for the first time, and of a later time."""
    cache = await BlockCache.open(settings, origin, worker=0, clock=SystemClock())
    times = []
    for _ in range(3):
        started = time.process_time()
        await read_all(cache, versions)
        await cache.settle()
        times.append((time.process_time() - started) * 1e6)
    await cache.close()
    return [times[0], times[2]]


def measure(directory: Path, blocks: int, size_bytes: int, small_object_bytes_max: int) -> Costs:
    origin = MemoryOrigin(SystemClock())
    versions = versions_in(origin, blocks, size_bytes)
    settings = BlockSettings(directory, 1 << 40, BLOCK_SIZE_BYTES, small_object_bytes_max=small_object_bytes_max)
    fill, read = asyncio.run(fill_and_read(settings, versions, origin))
    index_bytes = (directory / "index" / "data.mdb").stat().st_size
    files = sum(path.is_file() for path in (directory / "data").rglob("*"))
    (directory / "CLEAN").unlink()
    (directory / "BOOT").unlink()
    opened = open_directory(settings, 0)
    surveying = wall_us(lambda: [None for _ in rebuild(opened.blocks, Slots())])
    if opened.blocks.index.usage().blocks != blocks:
        raise RuntimeError("the survey has not found all blocks")
    opened.blocks.configured_capacity = Capacity(0)
    evicting = cpu_us(opened.blocks.shrink)
    opened.close()
    return Costs(*(one / blocks for one in (fill, read, surveying, evicting, files, index_bytes)))


def ratio(pairs: Sequence[tuple[float, float]]) -> str:
    """Of the second to the first, geometric mean, with its 95% interval."""
    logs = [math.log(second / first) for first, second in pairs]
    mean = statistics.mean(logs)
    if len(logs) - 1 not in T_95:
        return f"{math.exp(mean):.2f}"
    half = T_95[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.2f} [{math.exp(mean - half):.2f}, {math.exp(mean + half):.2f}]"


def report(rounds: Sequence[tuple[Costs, Costs]]) -> None:
    print(f"{'for each block':<16} {'files':>10} {'segments':>10}  ratio [95% interval]")
    for field in fields(Costs):
        pairs = [(getattr(files, field.name), getattr(segments, field.name)) for files, segments in rounds]
        medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
        print(f"{field.name:<16} {medians[0]:>10.3f} {medians[1]:>10.3f}  {ratio(pairs)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=arguments.directory))

    def one(small_object_bytes_max: int) -> Costs:
        try:
            return measure(root / "c", arguments.blocks, arguments.size, small_object_bytes_max)
        finally:
            shutil.rmtree(root / "c")

    try:
        report([(one(0), one(PACKED_BYTES_MAX)) for _ in range(arguments.rounds)])
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
