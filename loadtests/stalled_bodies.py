"""A cold epoch of 1,000 objects while one of 200 bodies of the origin stops half way for ever: time, against without.

    python -m loadtests.stalled_bodies [--rounds 5] [--scale 1] [--record]

16 readers, objects of 100 KB and of 4 MiB, origin with 5 ms latency. The readers look at lengths and beginnings of
bodies; tests/origin/test_hedging.py compares every byte. Requests are those of the epoch's objects at the origin, the
ones included that were sent because others were stuck.
"""

from __future__ import annotations

import asyncio
import time

from loadtests.harness import command
from loadtests.harness.cold import Memory
from loadtests.harness.command import Options, progress
from loadtests.harness.content import Family, load_object
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import in_parallel, reader
from loadtests.harness.report import Measured, Report, Verdict, at_most

_READERS = 16
_LATENCY_SECONDS = 0.005
_STALL_EVERY = 200
_SIZES = {"100 KB": 100_000, "4 MiB": 4 * 1024**2}


def test(options: Options) -> Report:
    count = options.of(1_000, least=200)
    title = f"Cold epoch of {count:,} objects, one body of {_STALL_EVERY} stalls for ever"
    report = Report("stalled_bodies", title, options.command("stalled_bodies"))
    memory = Memory()
    for name, size_bytes in _SIZES.items():
        seconds, requests = _measure(name, size_bytes, count, options, memory)
        report.tables += [
            Measured(f"time of the epoch, {name}", "s", seconds),
            Measured(f"requests to the origin per object, {name}", "", requests),
        ]
        report.verdicts += [
            Verdict(
                memory.of(f"time, {name}, stalled / not"),
                ratio_of(seconds["stalled"], seconds["without"]),
                at_most(1.2),
            ),
            Verdict(
                f"requests, {name}, stalled / not", ratio_of(requests["stalled"], requests["without"]), at_most(1.02)
            ),
        ]
    report.notes = [memory.note()]
    return report


def _measure(
    name: str, size_bytes: int, count: int, options: Options, memory: Memory
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    rounds = [Family(f"{kind}{number}/", count, size_bytes) for number in range(options.rounds) for kind in "ab"]
    warming = Family("warming/", 200, size_bytes)
    seconds: dict[str, list[float]] = {"stalled": [], "without": []}
    requests: dict[str, list[float]] = {"stalled": [], "without": []}
    with LoadOrigin([warming, *rounds]) as origin, gateway(origin, capacity="16GiB") as ours:
        origin.shape(latency_seconds=_LATENCY_SECONDS)
        _read(ours.address, warming)
        for number, epoch in enumerate(rounds):
            progress(f"{name}, epoch {number + 1} of {len(rounds)}")
            is_stalled = number % 4 in (0, 3)  # each comes first as often as the other
            origin.shape(latency_seconds=_LATENCY_SECONDS, stall_every=_STALL_EVERY if is_stalled else 0)
            memory.touch(count * size_bytes)
            before, kind = origin.settled_counts(), "stalled" if is_stalled else "without"
            seconds[kind].append(_read(ours.address, epoch))
            after = origin.settled_counts()
            requests[kind].append((after.gets - before.gets) / count)
            if is_stalled and after.stalled == before.stalled:
                raise RuntimeError("no body has stalled")
    return seconds, requests


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
