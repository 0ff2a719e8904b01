"""One file of 3.8 GB, random reads of 64 to 256 KiB in a window that slides over it (recommendation training).

    python -m loadtests.single_file [--rounds 5] [--scale 1] [--record]

Eight readers. An epoch reads about as many bytes as the file has, and every epoch reads other places. The first fills
the cache, later ones are compared with a part of an epoch read directly, origin with 20 ms latency.
"""

from __future__ import annotations

import asyncio
import random
import time

from loadtests.harness import command
from loadtests.harness.command import Options, progress
from loadtests.harness.content import Family, LoadObject, load_object
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import in_parallel, reader
from loadtests.harness.report import Measured, Report, Verdict, at_least

_KIB = 1024
_READERS = 8
WINDOW_BYTES = 64 * 1024**2
_SHORTEST_BYTES, _LONGEST_BYTES = 64 * _KIB, 256 * _KIB
_LATENCY_SECONDS = 0.020
_DIRECT_READS = 1000

Piece = tuple[LoadObject, int, int | None]


def test(options: Options) -> Report:
    family = Family("single/", 1, options.of(3_800_000_000, least=4 * WINDOW_BYTES))
    of = load_object(family.path(0), family.size_bytes)
    title = f"One file of {family.size_bytes / 1e9:.2g} GB, random reads of 64 to 256 KiB in a sliding window"
    report = Report("single_file", title, options.command("single_file"))
    rates: dict[str, list[float]] = {"forebay, second epoch on": [], "direct": []}
    with LoadOrigin([family]) as origin, gateway(origin, capacity="16GiB") as ours:
        origin.shape(latency_seconds=_LATENCY_SECONDS)
        progress("first epoch")
        first = _reads_per_second(ours.address, epoch(of, 0))
        read_bytes = origin.settled_counts().sent_bytes
        for number in range(1, options.rounds + 1):
            progress(f"epoch {number + 1}")
            work = epoch(of, number)
            rates["forebay, second epoch on"].append(_reads_per_second(ours.address, work))
            rates["direct"].append(_reads_per_second(origin.address, work[:_DIRECT_READS]))
    ratio = ratio_of(rates["forebay, second epoch on"], rates["direct"])
    report.verdicts = [Verdict("rate, forebay from the second epoch on / direct", ratio, at_least(10))]
    report.tables = [Measured("rate", "reads/s", rates | {"forebay, first epoch": [first]})]
    share = read_bytes / family.size_bytes
    report.notes = [f"The first epoch read {share:.2f} times the file's size from the origin."]
    return report


def epoch(of: LoadObject, number: int) -> list[Piece]:
    """The reads of one epoch in order; another number, other places."""
    rng = random.Random(number)
    count = of.size_bytes * 2 // (_SHORTEST_BYTES + _LONGEST_BYTES)
    last_window = of.size_bytes - WINDOW_BYTES
    reads: list[Piece] = []
    for at in range(count):
        length = rng.randint(_SHORTEST_BYTES, _LONGEST_BYTES)
        reads.append((of, last_window * at // count + rng.randrange(WINDOW_BYTES - length), length))
    return reads


def _reads_per_second(address: tuple[str, int], work: list[Piece]) -> float:
    async def read() -> float:
        async with reader(address, _READERS) as client:
            started = time.perf_counter()
            await in_parallel(work, client, _READERS)
            return len(work) / (time.perf_counter() - started)

    return asyncio.run(read())


if __name__ == "__main__":
    command.main(test, __doc__)
