"""One of several processes that read shuffled epochs together from one cache directory.

    python -m tests.support.epoch_worker DIRECTORY WORKER WORKERS CAPACITY PACKED

For each line `NAME BLOCKS SEED` on standard input it reads its part of the data set's objects in the order of the seed,
and answers `HITS`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from gateway.policy.slots import Prefix, Slots
from tests.support.blocks import KIB, make_origin, open_cache, stored, whole
from tests.support.slots import Slot

SIZE = 64 * KIB
FLUSHED_AFTER = 20


async def main(directory: Path, worker: int, workers: int, capacity_bytes: int, small_object_bytes_max: int) -> None:
    origin = make_origin()
    slots = Slots([Slot("default", Prefix(""), eviction="epoch")])
    async with open_cache(
        directory,
        origin,
        worker=worker,
        capacity_bytes=capacity_bytes,
        block_size_bytes=SIZE,
        small_object_bytes_max=small_object_bytes_max,
        slots=slots,
    ) as cache:
        print("open", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, count, seed = line.split()
            numbers = random.Random(int(seed)).sample(range(int(count)), int(count))
            hits = 0
            for step, number in enumerate(numbers[worker::workers]):
                version = stored(origin, f"{name}/{number}", SIZE - 200)
                reader = await cache.open_range(version, whole(version))
                async for _ in reader.body():
                    pass
                hits += reader.outcome == "hit"
                await cache.settle()
                if step % FLUSHED_AFTER == 0:
                    await cache.flush_accesses()
            await cache.flush_accesses()
            print(hits, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:6])))
