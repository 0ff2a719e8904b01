"""1,000 range GETs of 1 MiB at once, a connection each: the worker's memory, and the slowest against the median.

    python -m loadtests.many_ranges [--rounds 5] [--scale 1] [--record]

All requests leave in the same moment. Warm: everything is cached. Cold: nothing is, and the origin has 20 ms latency.
"""

from __future__ import annotations

import asyncio
import statistics

from loadtests.harness import command, machine
from loadtests.harness.cold import Memory
from loadtests.harness.command import Options, progress
from loadtests.harness.content import Family, LoadObject, load_object
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import in_parallel, reader
from loadtests.harness.report import Measured, Report, Verdict, at_most

_MIB = 1024**2
_OBJECT_BYTES = 64 * _MIB
_LATENCY_SECONDS = 0.020
_MEMORY_MAX_MIB = 200

Piece = tuple[LoadObject, int, int | None]


def test(options: Options) -> Report:
    count = options.of(1000, least=100)
    families = [Family(f"many{number}/", -(-count // 64), _OBJECT_BYTES) for number in range(options.rounds + 1)]
    report = Report("many_ranges", f"{count:,} concurrent range GETs of 1 MiB", options.command("many_ranges"))
    slowest: dict[str, list[float]] = {"warm": [], "cold": []}
    median: dict[str, list[float]] = {"warm": [], "cold": []}
    memory = Memory()
    with LoadOrigin(families) as origin, gateway(origin, capacity="16GiB") as ours:
        at_start = machine.peak_memory_bytes(ours.worker_pid) / _MIB

        def wave(kind: str, family: Family) -> None:
            seconds = _wave(ours.address, _pieces(family, count))
            slowest[kind].append(max(seconds))
            median[kind].append(statistics.median(seconds))

        progress("filling")
        _wave(ours.address, _pieces(families[0], count), tasks=4)
        for number in range(options.rounds):
            progress(f"warm wave {number + 1}")
            wave("warm", families[0])
        warm_peak = machine.peak_memory_bytes(ours.worker_pid) / _MIB
        origin.shape(latency_seconds=_LATENCY_SECONDS)
        for number in range(options.rounds):
            progress(f"cold wave {number + 1}")
            memory.touch(count * _MIB)
            wave("cold", families[number + 1])
            origin.settled_counts()
        cold_peak = machine.peak_memory_bytes(ours.worker_pid) / _MIB
    report.verdicts = [
        Verdict("peak memory of the worker after the warm waves, MiB", mean_of([warm_peak]), at_most(_MEMORY_MAX_MIB)),
        Verdict("peak memory of the worker after the cold waves, MiB", mean_of([cold_peak]), at_most(_MEMORY_MAX_MIB)),
        *(
            Verdict(what, ratio_of(slowest[kind], median[kind]), at_most(3))
            for kind, what in (("warm", "slowest / median, warm"), ("cold", memory.of("slowest / median, cold")))
        ),
    ]
    report.tables = [Measured("slowest", "s", slowest), Measured("median", "s", median)]
    report.notes = [f"The worker had {at_start:.0f} MiB resident before the first request.", memory.note()]
    return report


def _pieces(family: Family, count: int) -> list[Piece]:
    """One MiB each, neighbours in the list far apart in the objects."""
    objects = [load_object(path, family.size_bytes) for path in family.paths()]
    return [(objects[n % len(objects)], n // len(objects) * _MIB, _MIB) for n in range(count)]


def _wave(address: tuple[str, int], work: list[Piece], tasks: int | None = None) -> list[float]:
    async def read() -> list[float]:
        async with reader(address, tasks or len(work)) as client:
            return [one.seconds for one in await in_parallel(work, client, tasks or len(work))]

    return asyncio.run(read())


if __name__ == "__main__":
    command.main(test, __doc__)
