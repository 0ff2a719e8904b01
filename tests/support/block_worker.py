"""A worker process on a shared cache directory: reads random ranges, checks every byte, and may kill itself.

Some of the blocks are packed into segments, the others have files of their own.

    python -m tests.support.block_worker DIRECTORY SLOT SEED READS CAPACITY DIE_AT

Prints `died` before the DIE_AT-th step that changes the disk (0: never), or `done MISMATCHES` at the end.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.blocks.index import BlockIndex
from gateway.core.model import ByteRange, ObjectVersion
from tests.support.blocks import BLOCK, KIB, content_of, make_origin, open_cache, read, stored
from tests.support.memory_origin import MemoryOrigin

OBJECTS = 12
READERS = 3
PACKED = 40 * KIB


def objects(origin: MemoryOrigin) -> list[ObjectVersion]:
    return [stored(origin, f"k{n}", BLOCK * (n % 3) + 20_000 * n + 1, seed=n) for n in range(OBJECTS)]


class Mortal:
    """Kills the process before or after the n-th call of whatever it watches."""

    def __init__(self, die_at: int) -> None:
        self._left = die_at

    def watch(self, owner: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any, **keywords: Any) -> Any:
            self._step()
            result = function(*arguments, **keywords)
            self._step()
            return result

        setattr(owner, name, watched)

    def _step(self) -> None:
        self._left -= 1
        if self._left == 0:
            print("died", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


async def work(directory: Path, slot: int, seed: int, reads: int, capacity: int, mortal: Mortal) -> int:
    rng = random.Random(seed)
    origin = make_origin()
    versions = objects(origin)

    async def reader() -> int:
        wrong = 0
        for _ in range(reads):
            version = rng.choice(versions)
            first = rng.randrange(version.size_bytes)
            asked = ByteRange(first, rng.randrange(first, version.size_bytes))
            wrong += await read(cache, version, asked) != content_of(origin, version, asked)
            if rng.random() < 0.05:
                await cache.invalidate(version.key)
        return wrong

    async with open_cache(
        directory,
        origin,
        worker=slot,
        capacity_bytes=capacity,
        block_size_bytes=64 * KIB,
        small_object_bytes_max=PACKED,
    ) as cache:
        for name in ("pwrite", "pwritev", "rename", "unlink"):
            mortal.watch(os, name)
        for name in ("reserve", "commit", "extend", "release", "drop", "drop_object", "end_unlinks", "touch"):
            mortal.watch(BlockIndex, name)
        return sum(await asyncio.gather(*(reader() for _ in range(READERS))))


def main() -> None:
    directory, slot, seed, reads, capacity, die_at = sys.argv[1], *map(int, sys.argv[2:])
    wrong = asyncio.run(work(Path(directory), slot, seed, reads, capacity, Mortal(die_at)))
    print(f"done {wrong}", flush=True)


if __name__ == "__main__":
    main()
