"""`read_bandwidth = "auto"` and `write_bandwidth = "auto"` on a link whose capacity changes by four times, both ways.

    python -m loadtests.auto_bandwidth [--rounds 1] [--scale 1] [--record]

The link (harness/shaped_link.py) is 20 ms long, there and back, and carries the kernel's own TCP: 50 MB/s, then 12.5
MB/s, then 50 MB/s again. Sixteen readers read 32 MiB objects that are not cached, in blocks of 8 MiB, through a gateway
of two workers; then eight writers put objects of 8 MiB through it. What counts begins five seconds after each change:
which part of the link is used, and for how long what comes to its queue has to wait. Needs root.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.content import Family, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import mean_of
from loadtests.harness.link import working
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.saver import Part, Saver
from loadtests.harness.shaped_link import Direction, FarLoadOrigin, FarSinkOrigin, ShapedLink
from loadtests.harness.stream import stream_seconds

_CAPACITIES = (50e6, 12.5e6, 50e6)
_SETTLING_SECONDS = 5.0
_MEASURED_SECONDS = 20.0
_READERS, _WRITERS = 16, 8
_OBJECT_BYTES, _WRITTEN_BYTES = 32 * 2**20, 8 * 2**20
_OBJECTS = 400
_THINKING_SECONDS = 0.025
_AUTO = {"read_bandwidth": "auto", "write_bandwidth": "auto"}
_STEPS = ("at first", "a quarter", "four times as much")


@dataclass(frozen=True, slots=True)
class Stage:
    """After one change: the part of the link that was used, and the queue's delays."""

    used: float
    delays: Sequence[float]
    lost_packets: int

    def delay(self, part: float) -> float:
        return sorted(self.delays)[min(len(self.delays) - 1, int(part * len(self.delays)))]


def _reader(of: Gateway, family: Family, numbers: Iterator[int]) -> Callable[[threading.Event], None]:
    def read(ended: threading.Event) -> None:
        while not ended.is_set():
            stream_seconds(of.address, load_object(family.path(next(numbers)), family.size_bytes))

    return read


def _writer(of: Gateway, number: int, part: Part) -> Callable[[threading.Event], None]:
    def write(ended: threading.Event) -> None:
        saver, count = Saver(of.address, part), 0
        while not ended.is_set():
            saver.put(f"written/{number}/{count}", part.content)
            count += 1
        saver.close()

    return write


def _stages(link: ShapedLink, direction: Direction, workers: list[Callable[[threading.Event], None]]) -> list[Stage]:
    link.limit(_CAPACITIES[0])
    with working(workers):
        found = []
        for capacity in _CAPACITIES:
            progress(f"{direction}: {capacity / 1e6:g} MB/s")
            link.limit(capacity)
            time.sleep(_SETTLING_SECONDS)
            link.take(direction)
            began = time.monotonic()
            time.sleep(_MEASURED_SECONDS)
            passed, seconds = link.take(direction), time.monotonic() - began
            found.append(Stage(passed.size_bytes / seconds / capacity, passed.delays, passed.lost_packets))
    return found


def _gateway(stack: ExitStack, origin: Any, link: dict[str, str], **slot: object) -> Gateway:
    server = {"workers": 2}
    cores = machine.all_cores()
    return stack.enter_context(gateway(origin, link=link, server=server, cores=cores, capacity="24GiB", slot=slot))


def _reads(settings: dict[str, str]) -> list[Stage]:
    family = Family("read/", _OBJECTS, _OBJECT_BYTES)
    with ExitStack() as stack:
        link = stack.enter_context(ShapedLink())
        origin = FarLoadOrigin([family])
        origin.link = link
        stack.enter_context(origin)
        origin.shape(latency_seconds=_THINKING_SECONDS)
        ours = _gateway(stack, origin, settings)
        numbers = iter(range(family.count))
        return _stages(link, "read", [_reader(ours, family, numbers) for _ in range(_READERS)])


def _writes(settings: dict[str, str]) -> list[Stage]:
    part = Part.of(os.urandom(_WRITTEN_BYTES))
    with ExitStack() as stack:
        link = stack.enter_context(ShapedLink())
        origin = FarSinkOrigin()
        origin.link = link
        stack.enter_context(origin)
        ours = _gateway(stack, origin, settings, mode="read-write", consistency="strict")
        return _stages(link, "write", [_writer(ours, number, part) for number in range(_WRITERS)])


def test(options: Options) -> Report:
    title = 'A link of 50, 12.5 and 50 MB/s, with read_bandwidth and write_bandwidth = "auto"'
    report = Report("auto_bandwidth", title, options.command("auto_bandwidth"))
    used: dict[str, list[float]] = {}
    delays: dict[str, list[float]] = {}
    lost: dict[str, int] = {}
    for number in range(options.rounds):
        progress(f"round {number + 1}")
        for direction, measure in (("reads", _reads), ("writes", _writes)):
            for step, stage in zip(_STEPS, measure(_AUTO), strict=True):
                name = f"{direction}, {step}"
                used.setdefault(name, []).append(stage.used)
                for what, part in (("half", 0.5), ("99%", 0.99), ("all", 1.0)):
                    delays.setdefault(f"{name}: {what} within", []).append(stage.delay(part))
                lost[name] = lost.get(name, 0) + stage.lost_packets
    for name, values in used.items():
        report.verdicts.append(Verdict(f"{name}: of the link", mean_of(values), at_least(0.9)))
        report.verdicts.append(
            Verdict(f"{name}: longest delay of its queue, s", mean_of(delays[f"{name}: all within"]), at_most(0.2))
        )
    report.tables = [
        Measured("used of the link, from 5 s after the change on", "1", used),
        Measured("delay of its queue, from 5 s after the change on", "s", delays),
    ]
    report.notes = [f"Packets lost because the queue was full: {lost}"]
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
