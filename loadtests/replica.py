"""A bucket with a replica: what a pinned miss costs with and without it, and whom the bytes come from.

    python -m loadtests.replica [--rounds 5] [--scale 1] [--record]

A pinned miss is the first GET of an object whose version a HEAD has told. Each round reads objects that nobody has
read, over 16 connections. Then the replica has every second object, and then none: it is killed. Bytes and GETs are
counted at the source.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack

from loadtests.harness import command
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import Family, LoadObject, load_object
from loadtests.harness.gateway import Gateway, WorkerOf, gateway
from loadtests.harness.headers_only import head_client, signed_heads
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import reader
from loadtests.harness.report import Measured, Report, Verdict, at_most

_CONNECTIONS = 16
_SIZES_BYTES = {"100 KiB": 100 * 1024, "1 MiB": 1024**2, "16 MiB": 16 * 1024**2}
_OBJECTS = {"100 KiB": 2000, "1 MiB": 400, "16 MiB": 40}
_WITHOUT, _WITH = "without a replica", "with a replica"

Series = dict[str, list[float]]


def test(options: Options) -> Report:
    report = Report("replica", "Misses of a bucket with a replica", options.command("replica"))
    rounds = {
        size: [
            Family(f"{size.replace(' ', '')}/{number}/", options.of(_OBJECTS[size], least=20), size_bytes)
            for number in range(options.rounds)
        ]
        for size, size_bytes in _SIZES_BYTES.items()
    }
    lacking = Family("lacking/", options.of(200, least=20), 1024**2)
    there = Family("there/", lacking.count, lacking.size_bytes)
    late = Family("late/", lacking.count, lacking.size_bytes)
    known = [one for families in rounds.values() for one in families]
    cpu: dict[str, Series] = {size: {_WITHOUT: [], _WITH: []} for size in rounds}
    of_source: list[float] = []
    with ExitStack() as stack:
        source = stack.enter_context(LoadOrigin([*known, lacking, there, late]))
        of_replica = stack.enter_context(ExitStack())
        near = of_replica.enter_context(LoadOrigin([*known, there]))
        alone = stack.enter_context(gateway(source, name=_WITHOUT, capacity="16GiB"))
        ours = stack.enter_context(gateway(source, name=_WITH, capacity="16GiB", replica=near))
        workers = [WorkerOf(alone, _WITHOUT), WorkerOf(ours, _WITH)]
        for size, families in rounds.items():
            for number, family in enumerate(families):
                progress(f"{size}, round {number + 1}")
                for one in turn(workers, number):
                    _name_versions(one.of, family)
                    before, spent = source.settled_counts().gets, one.cpu_seconds()
                    read(one.of, family)
                    gets = source.settled_counts().gets - before
                    cpu[size][one.name].append((one.cpu_seconds() - spent) / family.count * 1e6)
                    if one.name == _WITH:
                        of_source.append(1 + gets)
        progress("half behind")
        half = [one for pair in zip(_objects(lacking), _objects(there), strict=True) for one in pair]
        before = source.settled_counts().sent_bytes
        _read_list(ours, half)
        missing = (source.settled_counts().sent_bytes - before) / (lacking.count * lacking.size_bytes)
        progress("dead")
        of_replica.close()
        started = time.monotonic()
        read(ours, late)
        dead_seconds = time.monotonic() - started
        started = time.monotonic()
        read(alone, late)
        alive_seconds = time.monotonic() - started
    report.verdicts = [
        *(
            Verdict(f"CPU of a pinned miss of {size}, with / without a replica", ratio_of(*_pair(of)), at_most(1.05))
            for size, of in cpu.items()
        ),
        Verdict("GETs at the source in a round with the replica there, and one", mean_of(of_source), at_most(1)),
        Verdict("bytes of the source with half of the objects there, of the missing ones", mean_of([missing] * 2)),
        Verdict("seconds that a dead replica costs an epoch", mean_of([dead_seconds - alive_seconds] * 2)),
    ]
    report.tables = [Measured(f"worker's CPU per pinned miss of {size}", "µs", of) for size, of in cpu.items()]
    return report


def _pair(of: Series) -> tuple[list[float], list[float]]:
    return of[_WITH], of[_WITHOUT]


def _objects(family: Family) -> list[LoadObject]:
    return [load_object(path, family.size_bytes) for path in family.paths()]


def _name_versions(one: Gateway, family: Family) -> None:
    with head_client(one.address, _CONNECTIONS) as client:
        client.once(signed_heads(one.address, family))


def read(one: Gateway, family: Family) -> None:
    """GET every object once; an answer that is wrong, or none, ends the test."""
    _read_list(one, _objects(family))


def _read_list(one: Gateway, objects: list[LoadObject]) -> None:
    async def read() -> None:
        async with reader(one.address, _CONNECTIONS) as client:
            await asyncio.gather(*(client.get(of) for of in objects))

    asyncio.run(read())


if __name__ == "__main__":
    command.main(test, __doc__)
