"""A cold epoch of 10,000 objects of 100 KB by 32 readers, origin with 5 ms latency: CPU and time.

    python -m loadtests.cold_epoch [--rounds 5] [--scale 1] [--record]

Each round reads objects that no one has read before. CPU is compared with bare aiohttp + `pwrite` (no signature, no
index, no checksum, no client to answer), time with the same readers at the origin itself.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path

from loadtests.harness import bare_fetch, command
from loadtests.harness.command import Options, progress
from loadtests.harness.content import Family, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import in_parallel, reader
from loadtests.harness.report import Measured, Report, Verdict, at_most

_READERS = 32
_SIZE_BYTES = 100_000
_LATENCY_SECONDS = 0.005


def test(options: Options) -> Report:
    count = options.of(10_000, least=500)
    epochs = [Family(f"epoch{number}/", count, _SIZE_BYTES) for number in range(options.rounds)]
    title = f"Cold epoch of {count:,} objects of 100 KB, {_READERS} readers, origin with 5 ms"
    report = Report("cold_epoch", title, options.command("cold_epoch"))
    cpu: dict[str, list[float]] = {"forebay, cold": [], "bare aiohttp + pwrite": []}
    seconds: dict[str, list[float]] = {"forebay, cold": [], "bare aiohttp + pwrite": [], "direct": []}
    with LoadOrigin(epochs) as origin, gateway(origin, capacity="16GiB") as ours:
        origin.shape(latency_seconds=_LATENCY_SECONDS)
        for number, epoch in enumerate(epochs):
            progress(f"epoch {number + 1}")
            wall, used = _through(ours, origin, epoch)
            bare = _bare(origin, epoch)
            seconds["forebay, cold"].append(wall)
            seconds["direct"].append(_read(origin.address, epoch))
            seconds["bare aiohttp + pwrite"].append(bare.seconds)
            cpu["forebay, cold"].append(used / count * 1e6)
            cpu["bare aiohttp + pwrite"].append(bare.cpu_seconds / count * 1e6)
    cpu_ratio = ratio_of(cpu["forebay, cold"], cpu["bare aiohttp + pwrite"])
    time_ratio = ratio_of(seconds["forebay, cold"], seconds["direct"])
    report.verdicts = [
        Verdict("server CPU, forebay / bare aiohttp + pwrite", cpu_ratio, at_most(1.5)),
        Verdict("time, forebay / direct", time_ratio, at_most(1.1)),
    ]
    report.tables = [Measured("server CPU per object", "µs", cpu), Measured("time of the epoch", "s", seconds)]
    report.notes = ["The origin is one Python process on the clients' core."]
    return report


def _through(ours: Gateway, origin: LoadOrigin, epoch: Family) -> tuple[float, float]:
    """Seconds, and CPU seconds until nothing is fetched any more."""
    before = ours.cpu_seconds()
    wall = _read(ours.address, epoch)
    origin.settled_counts()
    return wall, ours.cpu_seconds() - before


def _bare(origin: LoadOrigin, epoch: Family) -> bare_fetch.FetchFigures:
    directory = Path(tempfile.mkdtemp(prefix="forebay-load-"))
    try:
        return bare_fetch.run(origin.url, epoch, _READERS, directory)
    finally:
        shutil.rmtree(directory)


def _read(address: tuple[str, int], epoch: Family) -> float:
    async def read() -> float:
        work = [(load_object(path, epoch.size_bytes), 0, None) for path in epoch.paths()]
        async with reader(address, _READERS) as client:
            started = time.perf_counter()
            await in_parallel(work, client, _READERS)
            return time.perf_counter() - started

    return asyncio.run(read())


if __name__ == "__main__":
    command.main(test, __doc__)
