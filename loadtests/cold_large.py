"""A cold object of 1 GiB as one GET against direct, origin with 20 ms latency and 100 MB/s per connection.

    python -m loadtests.cold_large [--rounds 5] [--scale 1] [--record]

Each round reads an object that no one has read before. The direct parallel client fetches ranges of 8 MiB over 8, 16 or
32 connections and throws them away; the best of the three counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from loadtests.harness import command
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import in_turns
from loadtests.harness.content import Family, LoadObject, load_object
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import highest, ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import in_parallel, reader
from loadtests.harness.report import Measured, Report, Verdict, at_least
from loadtests.harness.stream import stream_seconds

_PART_BYTES = 8 * 1024**2
_CONNECTIONS = (8, 16, 32)


def test(options: Options) -> Report:
    family = Family("cold/", options.rounds, options.of(1024**3, least=64 * 1024**2))
    objects = [load_object(path, family.size_bytes) for path in family.paths()]
    mebibytes = family.size_bytes / 1024**2
    title = f"Cold object of {mebibytes:,.0f} MiB, origin with 20 ms and 100 MB/s per connection"
    report = Report("cold_large", title, options.command("cold_large"))
    with LoadOrigin([family]) as origin, gateway(origin, capacity="16GiB") as ours:
        origin.shape(latency_seconds=0.020, bytes_per_second=100e6)
        unread = iter(objects)

        def cold() -> float:
            progress("forebay, cold")
            return mebibytes / stream_seconds(ours.address, next(unread))

        measures: dict[str, Callable[[], float]] = {
            "forebay, cold": cold,
            "direct, one GET": lambda: mebibytes / stream_seconds(origin.address, objects[0]),
        }
        for connections in _CONNECTIONS:
            measures[f"direct, {connections} connections"] = partial(_parallel, origin, objects[0], connections)
        rates = in_turns(measures, options.rounds)
    ours_rates, single = rates["forebay, cold"], rates["direct, one GET"]
    best = highest({name: values for name, values in rates.items() if "connections" in name})
    report.verdicts = [
        Verdict("rate, forebay cold / direct, one GET", ratio_of(ours_rates, single), at_least(3)),
        Verdict(f"rate, forebay cold / {best} (best)", ratio_of(ours_rates, rates[best]), at_least(0.95)),
    ]
    report.tables = [Measured("rate", "MiB/s", rates)]
    return report


def _parallel(origin: LoadOrigin, of: LoadObject, connections: int) -> float:
    """MiB per second of a client that fetches ranges side by side."""

    async def read() -> float:
        work = [(of, first, min(_PART_BYTES, of.size_bytes - first)) for first in range(0, of.size_bytes, _PART_BYTES)]
        async with reader(origin.address, connections) as client:
            started = time.perf_counter()
            await in_parallel(work, client, connections)
            return of.size_bytes / 1024**2 / (time.perf_counter() - started)

    return asyncio.run(read())


if __name__ == "__main__":
    command.main(test, __doc__)
