"""The least that fetching small objects into files costs in Python: aiohttp and `pwrite`, one file an object.

    python -m loadtests.harness.bare_fetch ORIGIN_URL PREFIX:COUNT:SIZE READERS DIRECTORY

No signature, no index, no checksum, no client. Prints seconds and CPU seconds.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from loadtests.harness import bare
from loadtests.harness.content import Family, family


@dataclass(frozen=True, slots=True)
class FetchFigures:
    seconds: float
    cpu_seconds: float


def run(origin_url: str, of: Family, readers: int, directory: Path) -> FetchFigures:
    """Fetch all objects of a family in a process of its own."""
    return FetchFigures(*bare.figures("bare_fetch", origin_url, of, readers, directory))


async def _fetch(origin_url: str, of: Family, readers: int, directory: Path) -> None:
    paths = iter(of.paths())
    connector = aiohttp.TCPConnector(limit=readers)

    async def one(session: aiohttp.ClientSession) -> None:
        for path in paths:
            async with session.get(origin_url + path) as response:
                body = await response.read()
            descriptor = os.open(directory / path.replace("/", "_"), os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                assert os.pwrite(descriptor, body, 0) == of.size_bytes
            finally:
                os.close(descriptor)

    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        await asyncio.gather(*(one(session) for _ in range(readers)))


def main() -> None:
    origin_url, objects, readers, directory = sys.argv[1:]
    started, cpu = time.perf_counter(), time.process_time()
    asyncio.run(_fetch(origin_url, family(objects), int(readers), Path(directory)))
    print(time.perf_counter() - started, time.process_time() - cpu)


if __name__ == "__main__":
    main()
