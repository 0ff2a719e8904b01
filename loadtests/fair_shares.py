"""Slots of weights 4, 2 and 1 on a contended link of 100 MB/s, reading and flushing at once, and a flush at a ceiling.

    python -m loadtests.fair_shares [--rounds 5] [--scale 1] [--record]

Both directions are contended at the same time, each through a gateway of four workers: eight readers of each slot read
objects that are not cached, and checkpoints of 4 : 2 : 1, acknowledged before, are flushed. What each slot gets is what
the workers have counted over five seconds; nothing is read ahead. Then the same reads, with the cache's usual
readahead: as counted, and as passed. The workers count what has arrived, and that waits before the link in pieces of up
to a MiB, as many as blocks are begun: several percent of what the lightest slot reads come and go so.

Then 2 GB are flushed under a slot's ceiling of 50 MB/s: the farthest from it of all spans of five seconds counts. Last,
what sharing costs: a piece where nothing is contended, beside the CPU time of a cold GET of 100 KiB without any
ceiling; a piece where 24 readers wait for the link; and the CPU time of a gateway for a GB that is read so, beside the
same reads without any ceiling.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from gateway.core.clock import SystemClock
from gateway.policy.bandwidth import Bandwidth, BandwidthShare, Ceiling, numbering_of, rows_for
from gateway.shared.arena import SharedCells, make_shared_memory
from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import in_turns
from loadtests.harness.content import BUCKET, Family, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.link import WINDOW_SECONDS, Look, Readers, at_work, counted, farthest, passed, rates, watched
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import in_parallel, reader
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.saver import Part, Saver, at_once
from loadtests.harness.sink import SinkOrigin
from loadtests.writeback_parts import WRITES_BACK

_LINK = 100e6
_CEILING = 50e6
_WEIGHTS = {"a": 4, "b": 2, "c": 1}
_SETTLING_SECONDS = 3.0
_READERS = 8
_OBJECT_BYTES = 32 * 1024**2
_PART_BYTES = 8 * 1024**2
_PARTS_OF_A_WEIGHT = 32
"""Of eight MiB: so that the flush takes longer than it is looked at."""

_SMALL_BYTES = 100 * 1024
_SMALL = 2_000
_PIECES = 200_000
_PIECE_BYTES = 256 * 1024
_WAITING_SECONDS = 2.0
_COST_BYTES = 8 * 1024**2
_COST_OBJECTS = 48
_FLUSHED_SECONDS_MAX = 300.0
_HELD = 1e6
_WORKERS = {"workers": 4}
_FAMILIES = [Family(f"{name}/", 64, _OBJECT_BYTES) for name in _WEIGHTS]
_BOTH_WAYS = {"read_bandwidth": f"{_LINK / 1e6:g}MB/s", "write_bandwidth": f"{_LINK / 1e6:g}MB/s"}


def _slots(**more: object) -> list[dict[str, object]]:
    return [{"name": name, "prefix": f"s3://{BUCKET}/{name}/", "weight": w, **more} for name, w in _WEIGHTS.items()]


def _save(of: Gateway, part: Part, parts: Mapping[str, int]) -> None:
    """An object in each prefix, side by side."""
    savers = {prefix: Saver(of.address, part) for prefix in parts}
    at_once([partial(saver.save, f"{prefix}/large", parts[prefix]) for prefix, saver in savers.items()])
    for saver in savers.values():
        saver.close()


def _learn(of: Gateway) -> None:
    """The first write to a bucket goes through."""
    saver = Saver(of.address, Part.of(b"x"))
    saver.put("first", b"x")
    saver.close()


def _contended(part: Part) -> dict[str, list[dict[str, float]]]:
    """By direction, the rates of all slots in each span of five seconds."""
    with ExitStack() as stack:
        sink = stack.enter_context(SinkOrigin())
        reads = stack.enter_context(_reader_gateway({"readahead": 0}))
        back = {**WRITES_BACK, "buffer": "2GiB"}
        writes = stack.enter_context(
            gateway(
                sink,
                link=_BOTH_WAYS,
                server=_WORKERS,
                cores=machine.all_cores(),
                slot=back,
                cache={"persistent": True},
                more_slots=_slots(**back),
            )
        )
        _learn(writes)
        progress("saving checkpoints")
        sink.pace(_HELD)  # on a slow machine it would have all of them before the last is saved
        _save(writes, part, {name: weight * _PARTS_OF_A_WEIGHT for name, weight in _WEIGHTS.items()})
        sink.pace(0)
        progress("reading and flushing")
        with at_work(*(Readers(reads, family, _READERS) for family in _FAMILIES)):
            time.sleep(_SETTLING_SECONDS)
            looks: dict[str, Look] = {
                "read": partial(counted, reads, "read"),
                "write": partial(counted, writes, "write"),
            }
            samples = watched(looks, WINDOW_SECONDS + 1)
        return {direction: rates(found) for direction, found in samples.items()}


@contextmanager
def _reader_gateway(cache: Mapping[str, object]) -> Iterator[Gateway]:
    with (
        LoadOrigin(_FAMILIES) as origin,
        gateway(
            origin,
            link=_BOTH_WAYS,
            server=_WORKERS,
            cores=machine.all_cores(),
            cache=cache,
            more_slots=_slots(consistency="immutable"),
        ) as reads,
    ):
        yield reads


def _reading_ahead() -> dict[str, list[dict[str, float]]]:
    """The same of reads with the usual readahead: as counted, and as passed."""
    with _reader_gateway({}) as reads, at_work(*(Readers(reads, one, _READERS) for one in _FAMILIES)):
        time.sleep(_SETTLING_SECONDS)
        looks: dict[str, Look] = {"passed": passed(reads, "read"), "counted": partial(counted, reads, "read")}
        samples = watched(looks, WINDOW_SECONDS + 1)
    return {f"read ahead, {how}": rates(found) for how, found in samples.items()}


def _flushed_at_a_ceiling(part: Part, parts: int) -> list[float]:
    """The rates of a flush in each span of five seconds, but for the first and the last second."""
    slot = {**WRITES_BACK, "write_bandwidth": f"{_CEILING / 1e6:g}MB/s"}
    with (
        SinkOrigin() as sink,
        gateway(sink, server=_WORKERS, cores=machine.all_cores(), slot=slot, cache={"persistent": True}) as ours,
    ):
        _learn(ours)
        _save(ours, part, {"flushed": parts})
        flushed_seconds = counted(ours, "write")["load"] / _CEILING
        seconds = parts * _PART_BYTES / _CEILING - flushed_seconds - 2.0
        progress(f"flushing at a ceiling for {seconds:.0f} s, after {flushed_seconds:.0f} s of saving")
        samples = watched({"": partial(counted, ours, "write")}, max(seconds, WINDOW_SECONDS + 1))[""]
        sink.until_it_has(2, _FLUSHED_SECONDS_MAX)
    return [one["load"] for one in rates(samples)]


@contextmanager
def _one_of_five(link: float, slot_ceiling: float | None) -> Iterator[Bandwidth]:
    """The link as one of five processes has it, with the slots."""
    ceilings = [Ceiling("read", None, link)] + [Ceiling("read", "a", one) for one in [slot_ceiling] if one is not None]
    shares = [BandwidthShare("read", name, weight, 1e6) for name, weight in _WEIGHTS.items()]
    clock, rows = SystemClock(), rows_for(numbering_of(ceilings, shares).most)
    descriptor = make_shared_memory(rows, 5, clock.monotonic())
    try:
        yield Bandwidth(ceilings, clock, SharedCells.attach(descriptor, rows, 5, 0), shares)
    finally:
        os.close(descriptor)


def _asking_nanoseconds() -> list[float]:
    """What a piece takes that nothing keeps, under a slot's ceiling and the link's."""
    with _one_of_five(1e15, 1e15) as bandwidth:
        limiter = bandwidth.limiter("read", "a")
        assert limiter is not None
        found = []
        for _ in range(5):
            began = time.process_time_ns()
            for _ in itertools.repeat(None, _PIECES):
                limiter.passes(1, lambda: 0)
            found.append((time.process_time_ns() - began) / _PIECES)
        return found


def _waiting_microseconds() -> list[float]:
    """What a piece takes where eight readers of each slot wait for the link; looking at who waits is in it."""
    return [asyncio.run(_waited_for_microseconds()) for _ in range(5)]


async def _waited_for_microseconds() -> float:
    count = 0

    async def read(bandwidth: Bandwidth, slot: str) -> None:
        nonlocal count
        limiter = bandwidth.limiter("read", slot)
        assert limiter is not None
        while True:
            await limiter.take(_PIECE_BYTES, lambda: 0)
            count += 1

    with _one_of_five(_LINK, None) as bandwidth:
        readers = [asyncio.create_task(read(bandwidth, slot)) for slot in _WEIGHTS for _ in range(_READERS)]
        await asyncio.sleep(_WAITING_SECONDS / 4)  # what the link had saved up
        began, before = time.process_time(), count
        await asyncio.sleep(_WAITING_SECONDS)
        took, passed_pieces = time.process_time() - began, count - before
        for one in readers:
            one.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return took / passed_pieces * 1e6


def _cpu_of_a_gb(objects: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of the gateway for a GB of cold reads, with and without a contended link."""
    families = [Family(f"{name}/", objects * rounds, _COST_BYTES) for name in _WEIGHTS]

    def read(of: Gateway, done: itertools.count[int]) -> float:
        first = next(done) * objects
        before = of.cpu_seconds()
        asyncio.run(_read_all(of, families, range(first, first + objects)))
        return (of.cpu_seconds() - before) / (len(families) * objects * _COST_BYTES / 1e9)

    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin(families))
        measures = {}
        for name, link in (("link of 100 MB/s", _BOTH_WAYS), ("no ceiling", {})):
            ours = gateway(
                origin,
                link=link,
                server=_WORKERS,
                cores=machine.all_cores(),
                cache={"readahead": 0},
                more_slots=_slots(consistency="immutable"),
            )
            measures[name] = partial(read, stack.enter_context(ours), itertools.count())
        return in_turns(measures, rounds)


async def _read_all(of: Gateway, families: list[Family], numbers: range) -> None:
    async with asyncio.TaskGroup() as group:
        for one in families:
            group.create_task(_read_family(of, one, numbers))


async def _read_family(of: Gateway, one: Family, numbers: range) -> None:
    work = [(load_object(one.path(number), one.size_bytes), 0, None) for number in numbers]
    async with reader(of.address, _READERS) as client:
        await in_parallel(work, client, _READERS)


def _cold_microseconds(count: int) -> float:
    """CPU time of the gateway for a cold GET, all of them added up."""
    family = Family("small/", count, _SMALL_BYTES)
    with LoadOrigin([family]) as origin, gateway(origin) as ours:

        async def read() -> None:
            work = [(load_object(path, _SMALL_BYTES), 0, None) for path in family.paths()]
            async with reader(ours.address, 8) as client:
                await in_parallel(work, client, 8)

        before = ours.cpu_seconds()
        asyncio.run(read())
        return (ours.cpu_seconds() - before) / count * 1e6


def test(options: Options) -> Report:
    report = Report("fair_shares", "Slots of weights 4, 2 and 1 on a link of 100 MB/s", options.command("fair_shares"))
    part = Part.of(os.urandom(_PART_BYTES))
    shares: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    for number in range(options.rounds):
        progress(f"round {number + 1}")
        for direction, spans in (_contended(part) | _reading_ahead()).items():
            for slot, weight in _WEIGHTS.items():
                due = _LINK * weight / sum(_WEIGHTS.values())
                worst = farthest([one[slot] / due for one in spans])
                shares.setdefault(f"{direction}, weight {weight}", []).append(worst)
            used.setdefault(direction, []).append(min(sum(one[slot] for slot in _WEIGHTS) for one in spans) / _LINK)
    ceiling = _flushed_at_a_ceiling(part, options.of(238, least=80))
    off_ceiling = farthest([rate / _CEILING for rate in ceiling])
    progress("what sharing costs")
    asking, waiting, cold = _asking_nanoseconds(), _waiting_microseconds(), _cold_microseconds(options.of(_SMALL, 200))
    cpu = _cpu_of_a_gb(options.of(_COST_OBJECTS, least=8), options.rounds)
    for name, values in shares.items():
        off = [max(abs(value - 1), 1e-6) for value in values]
        target = None if name.startswith("read ahead, counted") else at_most(0.05)
        report.verdicts.append(Verdict(f"{name}: off its share, in the worst 5 s", mean_of(off), target))
    for direction, values in used.items():
        target = None if direction == "read ahead, counted" else at_least(0.95)
        report.verdicts.append(Verdict(f"{direction}: of the link, in the worst 5 s", mean_of(values), target))
    report.verdicts += [
        Verdict("flush, ceiling of 50 MB/s: off it, in the worst 5 s", mean_of([abs(off_ceiling - 1)]), at_most(0.05)),
        Verdict("asking / CPU of a cold GET of 100 KiB", mean_of([one / 1e3 / cold for one in asking]), at_most(0.01)),
        Verdict("CPU of a GB, link of 100 MB/s / no ceiling", ratio_of(*cpu.values())),
    ]
    report.tables = [
        Measured("share in the worst 5 s, of what is due", "1", shares),
        Measured("asking, nothing contended", "ns", {"five processes, two ceilings": asking}),
        Measured("a piece, 24 readers waiting for the link", "µs CPU", {"one of five processes": waiting}),
        Measured("cold GET of 100 KiB, no ceiling", "µs CPU", {"forebay": [cold]}),
        Measured("cold reads of 8 MiB by 24 readers", "s CPU/GB", cpu),
    ]
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
