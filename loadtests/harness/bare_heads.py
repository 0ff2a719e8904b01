"""The least that asking about objects costs in Python: aiohttp, one HEAD each.

    python -m loadtests.harness.bare_heads ORIGIN_URL PREFIX:COUNT:SIZE READERS SECONDS

No signature, nobody who asks, nothing that is done with the answer. Prints how many were answered, and CPU seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from dataclasses import dataclass

import aiohttp

from loadtests.harness import bare
from loadtests.harness.content import Family, family


@dataclass(frozen=True, slots=True)
class HeadFigures:
    answered: int
    cpu_seconds: float


def run(origin_url: str, of: Family, readers: int, seconds: float) -> HeadFigures:
    """Ask about the objects of a family, round and round, in a process of its own."""
    answered, cpu = bare.figures("bare_heads", origin_url, of, readers, seconds)
    return HeadFigures(int(answered), cpu)


async def _ask(origin_url: str, of: Family, readers: int, seconds: float) -> tuple[int, float]:
    paths = itertools.cycle(of.paths())
    answered = 0

    async def one(session: aiohttp.ClientSession, stop: float) -> None:
        nonlocal answered
        while time.monotonic() < stop:
            async with session.head(origin_url + next(paths)) as response:
                assert response.status == 200, response.status
            answered += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=readers)) as session:
        await one(session, time.monotonic() + 0.2)  # what is done once is no part of it
        answered, cpu, stop = 0, time.process_time(), time.monotonic() + seconds
        await asyncio.gather(*(one(session, stop) for _ in range(readers)))
        return answered, time.process_time() - cpu


def main() -> None:
    origin_url, objects, readers, seconds = sys.argv[1:]
    print(*asyncio.run(_ask(origin_url, family(objects), int(readers), float(seconds))))


if __name__ == "__main__":
    main()
