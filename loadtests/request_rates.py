"""Two slots of weights 4 and 1 read small objects from an origin that takes 300 requests per second.

    python -m loadtests.request_rates [--seconds 10] [--rounds 3] [--record]

What the origin does not take it answers 503 SlowDown. Both slots want all of it, through a gateway of two workers, with
24 connections each; who is answered 503 tries another object a tenth of a second later. Contenders are the gateway, and
the same gateway where nothing is held back: there are its retries only. The window begins when it has been so for some
seconds. Last, what asking costs where nothing was refused.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.core.clock import SystemClock
from gateway.origin.client import OriginRequest
from gateway.policy.request_rates import RequestRates, rows_for
from gateway.shared.arena import SharedCells, make_shared_memory
from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.content import BUCKET, Family, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import mean_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.reader import Reader, WrongAnswer, reader
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most

_LIMIT = 300.0
_WEIGHTS = {"a": 4, "b": 1}
_CONNECTIONS = 24
_OBJECT_BYTES = 4096
_OBJECTS = 20_000
_SETTLING_SECONDS = 6.0
_WINDOW_SECONDS_MIN = 10.0
_PAUSE_SECONDS = 0.1
_ASKED = 200_000
_NONE = 1e-6
"""Stands for none: means are geometric."""

_RETRIES_ONLY = Path(__file__).parent / "harness" / "retries_only"
_CONTENDERS = ("rates", "retries only")


@dataclass(frozen=True, slots=True)
class _Window:
    """Of the time that was looked at: requests per second that clients had answered by slot, the part of the heavier
    slot, what part of what it was asked the origin refused, and what part of their requests clients saw fail."""

    answered: float
    share: float
    refused: float
    failed: float
    slowest_seconds: float


@contextmanager
def _module_path(of: str) -> Iterator[None]:
    """For the processes that are started meanwhile."""
    before = os.environ.get("PYTHONPATH")
    if of == "retries only":
        os.environ["PYTHONPATH"] = str(_RETRIES_ONLY)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


class _Readers:
    """Tasks that read, each time an object that nobody has read."""

    def __init__(self, families: dict[str, Family]) -> None:
        self.answered = Counter[str]()
        self.failed = 0
        self.seconds: list[float] = []
        self._paths = {slot: itertools.cycle(family.paths()) for slot, family in families.items()}

    async def read(self, client: Reader, slot: str) -> None:
        while True:
            began = time.monotonic()
            try:
                await client.get(load_object(next(self._paths[slot]), _OBJECT_BYTES))
            except WrongAnswer as error:
                if ": 503 " not in str(error):
                    raise
                self.failed += 1
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                self.answered[slot] += 1
                self.seconds.append(time.monotonic() - began)


async def _read(of: Gateway, origin: LoadOrigin, families: dict[str, Family], seconds: float) -> _Window:
    readers = _Readers(families)
    async with reader(of.address, _CONNECTIONS) as one, reader(of.address, _CONNECTIONS) as other:
        work = [
            asyncio.create_task(readers.read(client, slot))
            for slot, client in zip(_WEIGHTS, (one, other), strict=True)
            for _ in range(_CONNECTIONS)
        ]
        await asyncio.sleep(_SETTLING_SECONDS)
        answered, failed = readers.answered.copy(), readers.failed
        readers.seconds.clear()
        before = await asyncio.to_thread(origin.counts)
        await asyncio.sleep(seconds)
        after = await asyncio.to_thread(origin.counts)
        got = {slot: readers.answered[slot] - answered[slot] for slot in _WEIGHTS}
        failed, times = readers.failed - failed, sorted(readers.seconds)
        for task in work:
            task.cancel()
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    refused, taken = after.refused - before.refused, after.gets + after.heads - before.gets - before.heads
    total = sum(got.values())
    return _Window(
        total / seconds,
        got["a"] / total,
        max(_NONE, refused / (refused + taken)),
        max(_NONE, failed / (failed + total)),
        times[int(0.99 * len(times))],
    )


def _measured(contender: str, seconds: float) -> _Window:
    families = {slot: Family(f"data/{slot}/", _OBJECTS, _OBJECT_BYTES) for slot in _WEIGHTS}
    slots = [
        {"name": slot, "prefix": f"s3://{BUCKET}/data/{slot}/", "weight": weight, "consistency": "immutable"}
        for slot, weight in _WEIGHTS.items()
    ]
    with (
        LoadOrigin(list(families.values())) as origin,
        _module_path(contender),
        gateway(
            origin, server={"workers": 2}, cores=machine.all_cores(), cache={"readahead": 0}, more_slots=slots
        ) as ours,
    ):
        origin.shape(taken_per_second=_LIMIT)
        return asyncio.run(_read(ours, origin, families, seconds))


def _asking_nanoseconds() -> list[float]:
    """What a request takes where nothing was refused, in one of five processes."""
    weights, clock = _WEIGHTS, SystemClock()
    rows = rows_for(len(weights), 5)
    descriptor = make_shared_memory(rows, 5, clock.monotonic())
    try:
        cells = SharedCells.attach(descriptor, rows, 5, 0)
    finally:
        os.close(descriptor)
    rates = RequestRates(weights, clock, cells, wait_seconds_max=20.0)
    request, found = OriginRequest("GET", BUCKET, "data/a/1", slot="a"), []
    for _ in range(5):
        began = time.process_time_ns()
        for _ in itertools.repeat(None, _ASKED):
            rates.passes(request)
        found.append((time.process_time_ns() - began) / _ASKED)
    return found


def test(options: Options) -> Report:
    title = "Slots of weights 4 and 1 at an origin that takes 300 requests per second"
    report = Report("request_rates", title, options.command("request_rates"))
    found: dict[str, list[_Window]] = {name: [] for name in _CONTENDERS}
    for number in range(options.rounds):
        for name in _CONTENDERS:
            progress(f"round {number + 1}: {name}")
            found[name].append(_measured(name, max(options.seconds, _WINDOW_SECONDS_MIN)))
    asking = _asking_nanoseconds()
    of_rates = found["rates"]
    due = _WEIGHTS["a"] / sum(_WEIGHTS.values())
    off_share = max(max(one.share / due, due / one.share) for one in of_rates)
    report.verdicts = [
        Verdict("rates: of the limit", mean_of([one.answered / _LIMIT for one in of_rates]), at_least(0.85)),
        Verdict("rates: share of weight 4, off what is due by a factor", mean_of([off_share]), at_most(1.05)),
        Verdict("rates: refused, of what was asked", mean_of([max(one.refused for one in of_rates)]), at_most(0.01)),
        Verdict("rates: failed for clients", mean_of([max(one.failed for one in of_rates)]), at_most(0.001)),
        Verdict("asking where nothing was refused, ns", mean_of(asking), at_most(1000)),
    ]
    report.tables = [
        Measured(what, unit, {name: [getattr(one, field) for one in windows] for name, windows in found.items()})
        for what, unit, field in (
            ("answered to clients", "requests/s", "answered"),
            ("share of the slot of weight 4 (due: 0.8)", "1", "share"),
            ("refused by the origin, of what it was asked", "1", "refused"),
            ("failed for clients (503)", "1", "failed"),
            ("99th percentile of what was answered", "s", "slowest_seconds"),
        )
    ]
    report.notes = [
        f"{_NONE:g} stands for none: means are geometric. Factors, refusals and failures are of the worst round."
    ]
    report.tables.append(Measured("asking where nothing was refused", "ns CPU", {"five processes": asking}))
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
