"""Cold random reads of 4 KiB: time to the first byte against direct, and what each costs the origin.

    python -m loadtests.random_reads [--rounds 5] [--scale 1] [--record]

Objects of 256 MiB, origin with 20 ms latency; one reader, no block touched twice. Bytes are counted at the origin once
nothing is fetched any more, so that a fill that goes on behind the answer counts.

JuiceFS's gateway, where it is installed, has read four such objects from its own chunks at the same origin: each round
16 touches of them, its cache cleared before. By default it fetches the whole block (4 MiB) behind the answer.
"""

from __future__ import annotations

import asyncio
import random
import statistics

from loadtests.harness import command
from loadtests.harness.cold import Memory
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import Contender
from loadtests.harness.content import Family, LoadObject, load_object
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.peers import juicefs_if_installed
from loadtests.harness.reader import reader
from loadtests.harness.report import Measured, Report, Verdict, at_most

_TOUCH_BYTES = 4096
_LARGEST_BLOCK_BYTES = 64 * 1024**2
_OBJECT_BYTES = 256 * 1024**2
_LATENCY_SECONDS = 0.020
_TOUCHES = 100

_WRITTEN = 4
_FETCHED_BYTES = 4 * 1024**2
"""The most that a touch makes anyone fetch."""

Touch = tuple[LoadObject, int]


def test(options: Options) -> Report:
    touches = options.of(_TOUCHES, least=20)
    family = Family("random/", options.rounds * touches // 4 + 1, _OBJECT_BYTES)
    report = Report("random_reads", "Random 4 KiB reads, cold, origin with 20 ms", options.command("random_reads"))
    unread = iter(_touches(family))
    first_byte: dict[str, list[float]] = {"forebay, cold": [], "direct": []}
    memory = Memory()
    from_origin: dict[str, list[float]] = {"forebay, cold": []}
    written = Family("written/", _WRITTEN, _OBJECT_BYTES)
    with (
        LoadOrigin([family]) as origin,
        gateway(origin, capacity="16GiB") as ours,
        juicefs_if_installed(origin) as (juicefs, notes),
    ):
        if juicefs is not None:
            progress(f"writing through {juicefs.name}")
            juicefs.take(written)
        origin.shape(latency_seconds=_LATENCY_SECONDS)
        for number in range(options.rounds):
            progress(f"round {number + 1}")
            work = [next(unread) for _ in range(touches)]
            cold: list[tuple[str, Contender, list[Touch]]] = [("forebay, cold", ours, work)]
            if juicefs is not None:
                juicefs.forget()
                cold.append((f"{juicefs.name}, cold", juicefs, _touches(written, number)))
            for name, server, asked in cold:
                memory.touch(len(asked) * _FETCHED_BYTES)
                before = origin.counts().sent_bytes
                first_byte.setdefault(name, []).append(_first_byte_milliseconds(server.address, asked))
                fetched = (origin.settled_counts().sent_bytes - before) / len(asked) / 1024
                from_origin.setdefault(name, []).append(fetched)
            first_byte["direct"].append(_first_byte_milliseconds(origin.address, work))
    ratio = ratio_of(first_byte["forebay, cold"], first_byte["direct"])
    report.verdicts = [
        Verdict(memory.of("first byte (median), forebay / direct"), ratio, at_most(1.1)),
        Verdict("KiB from the origin per touch", mean_of(from_origin["forebay, cold"]), at_most(256)),
    ]
    report.tables = [
        Measured(memory.of("first byte, median"), "ms", first_byte),
        Measured("from the origin per touch", "KiB", from_origin),
    ]
    report.notes = [*notes, memory.note()]
    return report


def _touches(family: Family, seed: int = 4) -> list[Touch]:
    """One offset in each 64 MiB of every object, in random order: no block twice, whatever the block size."""
    rng = random.Random(seed)
    places = _LARGEST_BLOCK_BYTES // _TOUCH_BYTES
    found = [
        (load_object(path, family.size_bytes), first + _TOUCH_BYTES * rng.randrange(places))
        for path in family.paths()
        for first in range(0, family.size_bytes, _LARGEST_BLOCK_BYTES)
    ]
    rng.shuffle(found)
    return found


def _first_byte_milliseconds(address: tuple[str, int], work: list[Touch]) -> float:
    async def read() -> float:
        async with reader(address, 1) as client:
            readings = [await client.get(of, first, _TOUCH_BYTES) for of, first in work]
        return statistics.median(one.first_byte_seconds for one in readings) * 1e3

    return asyncio.run(read())


if __name__ == "__main__":
    command.main(test, __doc__)
