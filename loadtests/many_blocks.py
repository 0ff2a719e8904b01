"""What a hit costs with many small blocks cached, against few.

    python -m loadtests.many_blocks [--blocks 1000000] [--few 2000] [--size 1000] [--hits 100000] [--rounds 7]
                                    [--directory DIRECTORY]

One process, no sockets: the look-up of a small object's block, in the index and in its open file, up to the span that
would be sent. The blocks are written by the writer of segments itself. Keys are shuffled, everything is in the page
cache, verified and looked up once before. CPU time of the thread; rounds take turns, so that a noisy machine disturbs
both. The last line assumes that the rest of a warm GET costs 80 µs; `loadtests.warm_small` measures whole ones.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gateway.blocks.cache import BlockCache
from gateway.blocks.layout import BlockSettings, block_at
from gateway.blocks.opening import open_directory
from gateway.blocks.small_block_fetch import SegmentAppender
from gateway.blocks.store import SmallBlock
from gateway.core.clock import SystemClock
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from tests.support.memory_origin import MemoryOrigin

BATCH_BLOCKS = 256
WARM_READERS = 8
REST_OF_A_WARM_GET_US = 80


def version(number: int, size_bytes: int) -> ObjectVersion:
    key = ObjectKey("train", f"imagenet/class{number % 1000:04d}/image{number:08d}.jpg")
    return ObjectVersion(key, f'"{number:032x}"', size_bytes)


def settings_of(directory: Path, blocks: int, size_bytes: int) -> BlockSettings:
    return BlockSettings(directory, max(1 << 30, 2 * blocks * (size_bytes + 512)))


def fill(settings: BlockSettings, blocks: int, size_bytes: int) -> float:
    """Write the blocks; CPU microseconds for each."""
    content = memoryview(bytes(size_bytes))
    opened = open_directory(settings, 0)
    appender, started = SegmentAppender(opened.blocks), time.process_time()
    for first in range(0, blocks, BATCH_BLOCKS):
        versions = (version(number, size_bytes) for number in range(first, min(first + BATCH_BLOCKS, blocks)))
        batch = [SmallBlock(block_at(one, 0, settings.block_size_bytes), content) for one in versions]
        while batch:
            batch = batch[appender.append("default", batch) :]
    used = (time.process_time() - started) / blocks * 1e6
    opened.close()
    return used


async def warm_up(cache: BlockCache, versions: Iterator[ObjectVersion]) -> None:
    async def reader() -> None:
        for one in versions:
            opened = await cache.open_range(one, ByteRange(0, one.size_bytes - 1))
            span = opened.whole()
            if span is not None:
                span.close()
            else:
                async for _ in opened.body():
                    pass
            await opened.aclose()

    await asyncio.gather(*(reader() for _ in range(WARM_READERS)))


def hit_us(cache: BlockCache, versions: list[ObjectVersion]) -> tuple[float, int]:
    """CPU microseconds of a hit, and how many were none."""
    missed, started = 0, time.thread_time()
    for one in versions:
        span = cache.warm_span(one, 0, one.size_bytes, slot="default")
        if span is None:
            missed += 1
        else:
            span.close()
    return (time.thread_time() - started) / len(versions) * 1e6, missed


async def measure(arguments: argparse.Namespace, directory: Path) -> None:
    rng, clock = random.Random(1), SystemClock()
    caches: dict[int, BlockCache] = {}
    figures: dict[int, list[float]] = {}
    for blocks in (arguments.few, arguments.blocks):
        settings = settings_of(directory / str(blocks), blocks, arguments.size)
        print(f"{blocks:,} blocks: filled, {fill(settings, blocks, arguments.size):.1f} µs of CPU each", flush=True)
        cache = await BlockCache.open(settings, MemoryOrigin(clock), worker=0, clock=clock)
        started = time.process_time()
        await warm_up(cache, (version(number, arguments.size) for number in range(blocks)))
        each_us = (time.process_time() - started) / blocks * 1e6
        print(f"{blocks:,} blocks: verified, {each_us:.0f} µs of CPU each", flush=True)
        caches[blocks], figures[blocks] = cache, []
    for _ in range(arguments.rounds):
        for blocks, cache in caches.items():
            versions = [version(rng.randrange(blocks), arguments.size) for _ in range(arguments.hits)]
            each_us, missed = hit_us(cache, versions)
            figures[blocks].append(each_us)
            if missed:
                print(f"{blocks:,} blocks: {missed:,} of {len(versions):,} were no hits")
            await asyncio.sleep(0)
    for cache in caches.values():
        await cache.close()
    few, many = (statistics.median(figures[blocks]) for blocks in (arguments.few, arguments.blocks))
    print(f"a hit: {few:.1f} µs of CPU with {arguments.few:,} blocks, {many:.1f} µs with {arguments.blocks:,}")
    whole = (many + REST_OF_A_WARM_GET_US) / (few + REST_OF_A_WARM_GET_US)
    print(f"ratio {many / few:.2f}; of a whole warm GET, whose rest costs {REST_OF_A_WARM_GET_US} µs: {whole:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--few", type=int, default=2_000)
    parser.add_argument("--size", type=int, default=1_000, help="bytes of an object")
    parser.add_argument("--hits", type=int, default=100_000, help="looked up in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary directory unless given")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="forebay-many-", dir=arguments.directory))
    try:
        asyncio.run(measure(arguments, directory))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
