"""Slots of weights 4, 2 and 1 on a contended link of 100 MB/s, reading and flushing at once, and a flush at a ceiling.

    python -m loadtests.fair_shares [--rounds 5] [--scale 1] [--record]

Both directions are contended at the same time, each through a gateway of four workers: eight readers of each slot read
objects that are not cached, and checkpoints of 4 : 2 : 1, acknowledged before, are flushed. What each slot gets is what
the workers have counted over five seconds. They count what has arrived, and what is read ahead waits in pieces of a MiB
after that, as many as blocks are begun: several percent of what the lightest slot reads come and go so. Nothing is read
ahead here. Then 2 GB are flushed under a slot's ceiling of 50 MB/s: the farthest from
it of all spans of five seconds counts. Last, what asking costs a piece where nothing is contended, beside the CPU time
of a cold GET of 100 KiB without any ceiling.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

from gateway import metric_kinds, metrics
from gateway.clock import SystemClock
from gateway.policy.bandwidth import Bandwidth, Ceiling, Share, cells_for
from gateway.policy.token_bucket import SharedCells, make_shared_memory
from gateway.serve.shared_directory import in_memory_directory
from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.content import BUCKET, Family, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import mean_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import in_parallel, reader
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.saver import Part, Saver, at_once
from loadtests.harness.sink import SinkOrigin
from loadtests.harness.stream import stream_seconds
from loadtests.writeback_parts import WRITES_BACK

_LINK = 100e6
_CEILING = 50e6
_WEIGHTS = {"a": 4, "b": 2, "c": 1}
_WINDOW_SECONDS = 5.0
_SETTLING_SECONDS = 3.0
_LOOK_SECONDS = 0.1
_READERS = 8
_OBJECT_BYTES = 32 * 1024**2
_PART_BYTES = 8 * 1024**2
_PARTS_OF_A_WEIGHT = 32
"""Of eight MiB: so that the flush takes longer than it is looked at."""

_SMALL_BYTES = 100 * 1024
_SMALL = 2_000
_PIECES = 200_000
_FLUSHED_SECONDS_MAX = 300.0
_WORKERS = {"workers": 4}


def _slots(**more: object) -> list[dict[str, object]]:
    return [{"name": name, "prefix": f"s3://{BUCKET}/{name}/", "weight": w, **more} for name, w in _WEIGHTS.items()]


def _counted(of: Gateway) -> Counter[str]:
    """Bytes that all processes have moved, by slot."""
    by_slot, *_ = metric_kinds.by_label(in_memory_directory(of.process.directory), "slot", metrics.ORIGIN_BYTES)
    return Counter({slot: int(count) for slot, count in by_slot.items()})


def _samples(gateways: Mapping[str, Gateway], seconds: float) -> dict[str, list[tuple[float, Counter[str]]]]:
    """What had been moved, again and again, by gateway."""
    found: dict[str, list[tuple[float, Counter[str]]]] = {name: [] for name in gateways}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, one in gateways.items():
            found[name].append((time.monotonic(), _counted(one)))
        time.sleep(_LOOK_SECONDS)
    return found


def _rates(samples: list[tuple[float, Counter[str]]]) -> list[dict[str, float]]:
    """Bytes per second by slot, in every span of five seconds."""
    found = []
    for begin, before in samples:
        behind = next(((end, after) for end, after in samples if end >= begin + _WINDOW_SECONDS), None)
        if behind is not None:
            end, after = behind
            found.append({slot: (after[slot] - before[slot]) / (end - begin) for slot in after})
    return found


@contextmanager
def _reading(of: Gateway, objects: Mapping[str, Family]) -> Iterator[None]:
    """Readers of each slot, as long as the context lasts; each reads what nobody has read."""
    ended, failures = threading.Event(), list[BaseException]()

    def read(family: Family, numbers: Iterator[int]) -> None:
        try:
            while not ended.is_set():
                stream_seconds(of.address, load_object(family.path(next(numbers)), family.size_bytes))
        except BaseException as error:
            failures.append(error)

    threads = []
    for family in objects.values():
        numbers = iter(range(family.count))
        threads += [threading.Thread(target=read, args=(family, numbers)) for _ in range(_READERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


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
    families = {name: Family(f"{name}/", 64, _OBJECT_BYTES) for name in _WEIGHTS}
    link = {"read_bandwidth": f"{_LINK / 1e6:g}MB/s", "write_bandwidth": f"{_LINK / 1e6:g}MB/s"}
    cores = machine.all_cores()
    with ExitStack() as stack:
        origin, sink = stack.enter_context(LoadOrigin(list(families.values()))), stack.enter_context(SinkOrigin())
        reads = stack.enter_context(
            gateway(
                origin,
                link=link,
                server=_WORKERS,
                cores=cores,
                cache={"readahead": 0},
                more_slots=_slots(consistency="immutable"),
            )
        )
        back = {**WRITES_BACK, "buffer": "2GiB"}
        writes = stack.enter_context(
            gateway(
                sink,
                link=link,
                server=_WORKERS,
                cores=cores,
                slot=back,
                cache={"persistent": True},
                more_slots=_slots(**back),
            )
        )
        _learn(writes)
        progress("saving checkpoints")
        _save(writes, part, {name: weight * _PARTS_OF_A_WEIGHT for name, weight in _WEIGHTS.items()})
        progress("reading and flushing")
        with _reading(reads, families):
            time.sleep(_SETTLING_SECONDS)
            samples = _samples({"read": reads, "write": writes}, _WINDOW_SECONDS + 1)
        return {direction: _rates(found) for direction, found in samples.items()}


def _flushed_at_a_ceiling(part: Part, parts: int) -> list[float]:
    """The rates of a flush in each span of five seconds, but for the first and the last second."""
    slot = {**WRITES_BACK, "write_bandwidth": f"{_CEILING / 1e6:g}MB/s"}
    with (
        SinkOrigin() as sink,
        gateway(sink, server=_WORKERS, cores=machine.all_cores(), slot=slot, cache={"persistent": True}) as ours,
    ):
        _learn(ours)
        _save(ours, part, {"flushed": parts})
        seconds = parts * _PART_BYTES / _CEILING - (ours_seconds := _flushed_seconds(ours)) - 2.0
        progress(f"flushing at a ceiling for {seconds:.0f} s, after {ours_seconds:.0f} s of saving")
        samples = _samples({"": ours}, max(seconds, _WINDOW_SECONDS + 1))[""]
        sink.until_it_has(2, _FLUSHED_SECONDS_MAX)
    return [one["load"] for one in _rates(samples)]


def _flushed_seconds(of: Gateway) -> float:
    """For how long it has flushed at the ceiling."""
    return _counted(of)["load"] / _CEILING


def _asking_nanoseconds() -> list[float]:
    """What a piece takes that nothing keeps, under a slot's ceiling and the link's, as one of five processes."""
    ceilings = [Ceiling("read", None, 1e15), Ceiling("read", "a", 1e15)]
    shares = [Share("read", name, weight, 1e6) for name, weight in _WEIGHTS.items()]
    clock, rows = SystemClock(), cells_for(ceilings, shares)
    descriptor = make_shared_memory(rows, 5, clock.monotonic())
    try:
        limiter = Bandwidth(ceilings, clock, SharedCells.attach(descriptor, rows, 5, 0), shares).limiter("read", "a")
    finally:
        os.close(descriptor)
    assert limiter is not None
    found = []
    for _ in range(5):
        began = time.process_time_ns()
        for _ in itertools.repeat(None, _PIECES):
            limiter.passes(1, lambda: 0)
        found.append((time.process_time_ns() - began) / _PIECES)
    return found


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
    measure: Callable[[], dict[str, list[dict[str, float]]]] = partial(_contended, part)
    for number in range(options.rounds):
        progress(f"round {number + 1}")
        for direction, spans in measure().items():
            for slot, weight in _WEIGHTS.items():
                due = _LINK * weight / sum(_WEIGHTS.values())
                worst = max((one[slot] / due for one in spans), key=lambda share: abs(share - 1))
                shares.setdefault(f"{direction}, weight {weight}", []).append(worst)
            used.setdefault(direction, []).append(min(sum(one[slot] for slot in _WEIGHTS) for one in spans) / _LINK)
    ceiling = _flushed_at_a_ceiling(part, options.of(238, least=80))
    farthest = max((rate / _CEILING for rate in ceiling), key=lambda share: abs(share - 1))
    asking, cold = _asking_nanoseconds(), _cold_microseconds(options.of(_SMALL, least=200))
    for name, values in shares.items():
        off = [abs(value - 1) for value in values]
        report.verdicts.append(Verdict(f"{name}: off its share, in the worst 5 s", mean_of(off), at_most(0.05)))
    for direction, values in used.items():
        report.verdicts.append(Verdict(f"{direction}: of the link, in the worst 5 s", mean_of(values), at_least(0.95)))
    report.verdicts += [
        Verdict("flush, ceiling of 50 MB/s: off it, in the worst 5 s", mean_of([abs(farthest - 1)]), at_most(0.05)),
        Verdict("asking / CPU of a cold GET of 100 KiB", mean_of([one / 1e3 / cold for one in asking]), at_most(0.01)),
    ]
    report.tables = [
        Measured("share in the worst 5 s, of what is due", "1", shares),
        Measured("asking, nothing contended", "ns", {"five processes, two ceilings": asking}),
        Measured("cold GET of 100 KiB, no ceiling", "µs CPU", {"forebay": [cold]}),
    ]
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
