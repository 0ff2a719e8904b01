"""A checkpoint of 2 GiB from eight writers, parts of 8 MiB, with an origin that takes 125 MB/s.

    python -m loadtests.writeback_burst [--rounds 5] [--scale 1] [--record]

Each writer saves an object of its own, in parts, over one connection. "Acknowledged" is the last answer to the last
writer; "durable" is when the origin has the last object. Directly: the same writers to the same origin. The bare
receiver takes the parts alone (`recv_into`, MD5, `pwrite`, `fsync`) and keeps them. All processes on all cores; the
origin is one link for all connections together, and what lies in the kernel has not crossed it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.receiving_server import ReceivingServer
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.saver import Part, Saver, at_once
from loadtests.harness.sink import SinkOrigin
from loadtests.harness.uploader import upload_seconds
from loadtests.writeback_parts import WRITES_BACK

_WRITERS = 8
_PART_BYTES = 8 * 1024**2
_PARTS = 256
_LINK_BYTES_PER_SECOND = 125e6
_GIB = 1024**3
_FLUSHED_SECONDS_MAX = 300.0

_OURS, _BARE, _DIRECT = "forebay", "bare", "direct"

_Series = dict[str, list[float]]


class _Bench:
    """Everything that is started, and what was found by contender and round."""

    def __init__(self, stack: ExitStack, options: Options) -> None:
        self.origin = stack.enter_context(SinkOrigin())
        self.bare = stack.enter_context(ReceivingServer("keeping"))
        ours = gateway(self.origin, slot=WRITES_BACK, cache={"persistent": True}, cores=machine.all_cores())
        self.ours: Gateway = stack.enter_context(ours)
        self.part = Part.of(os.urandom(_PART_BYTES))
        self.parts = options.of(_PARTS // _WRITERS, least=2)
        self.acknowledged: _Series = defaultdict(list)
        self.durable: _Series = defaultdict(list)
        self.cpu: _Series = defaultdict(list)
        self._objects = 0

    @property
    def gibibytes(self) -> float:
        return _WRITERS * self.parts * _PART_BYTES / _GIB

    def learn(self) -> None:
        """The first write to a bucket goes through."""
        saver = Saver(self.ours.address, self.part)
        saver.put("first", b"x")
        saver.close()
        self._objects = 1
        self.origin.pace(_LINK_BYTES_PER_SECOND)

    def round(self, number: int) -> None:
        works: dict[str, Callable[[], None]] = {
            _OURS: partial(self._through_the_gateway, number),
            _BARE: self._received,
            _DIRECT: partial(self._directly, number),
        }
        for name in turn(list(works), number):
            progress(f"round {number + 1}: {name}")
            works[name]()

    def _through_the_gateway(self, number: int) -> None:
        before, began = self.ours.cpu_seconds(), time.perf_counter()
        self.acknowledged[_OURS].append(self._save(self.ours.address, f"ours/{number}"))
        self.origin.until_it_has(self._objects, _FLUSHED_SECONDS_MAX)
        self.durable[_OURS].append(time.perf_counter() - began)
        self.cpu["all of forebay, until durable"].append((self.ours.cpu_seconds() - before) / self.gibibytes)

    def _directly(self, number: int) -> None:
        seconds = self._save(self.origin.address, f"direct/{number}", tells_md5=True)
        self.acknowledged[_DIRECT].append(seconds)
        self.durable[_DIRECT].append(seconds)

    def _received(self) -> None:
        before = self.bare.cpu_seconds()
        seconds = upload_seconds(self.bare, connections=_WRITERS, parts=self.parts, part=self.part.content)
        self.acknowledged[_BARE].append(seconds)
        self.cpu[_BARE].append((self.bare.cpu_seconds() - before) / self.gibibytes)
        self.bare.forget()

    def _save(self, address: tuple[str, int], prefix: str, *, tells_md5: bool = False) -> float:
        savers = [Saver(address, self.part, tells_md5=tells_md5) for _ in range(_WRITERS)]
        self._objects += _WRITERS
        try:
            return at_once([partial(saver.save, f"{prefix}/{n}", self.parts) for n, saver in enumerate(savers)])
        finally:
            for saver in savers:
                saver.close()


def test(options: Options) -> Report:
    with ExitStack() as stack:
        bench = _Bench(stack, options)
        size = f"{bench.gibibytes:.3g} GiB"
        title = f"A checkpoint of {size} from {_WRITERS} writers, with an origin of 125 MB/s"
        report = Report("writeback_burst", title, options.command("writeback_burst"))
        bench.learn()
        for number in range(options.rounds):
            bench.round(number)
    acknowledged, durable = bench.acknowledged, bench.durable
    bare = acknowledged[_BARE]
    report.tables = [
        Measured("last acknowledgement", "s", acknowledged),
        Measured("durable at the origin", "s", durable),
        Measured("CPU", "s/GiB", bench.cpu),
    ]
    report.verdicts = [
        Verdict("acknowledged, forebay / bare", ratio_of(acknowledged[_OURS], bare), at_most(1.25)),
        Verdict("acknowledged, direct / forebay", ratio_of(acknowledged[_DIRECT], acknowledged[_OURS]), at_least(5)),
        Verdict("acknowledged, direct / bare: what the machine gave", ratio_of(acknowledged[_DIRECT], bare)),
        Verdict("durable, forebay / direct", ratio_of(durable[_OURS], durable[_DIRECT]), at_most(1.1)),
    ]
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
