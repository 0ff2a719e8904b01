"""A cold epoch of 10,000 objects of 100 KiB, and of 4 KiB, by 32 readers, origin with 5 ms: the workers' CPU, the rate.

    python -m loadtests.cold_epoch [--rounds 5] [--scale 1] [--record]

Each round reads objects that no one has read before; one worker on one core. CPU is compared with bare aiohttp +
`pwrite` (no signature, no index, no checksum, no client to answer), time with the same client at the origin itself. The
client is written in C and spins. Before each round memory is touched.

JuiceFS's gateway, where it is installed, reads 2,000 such objects from its own chunks at the same origin, each round
with its cache cleared; which objects there are it asks its metadata (SQLite, on this disk), and not the origin.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from loadtests.harness import bare_fetch, command, player
from loadtests.harness.cold import Memory, WorkerThreads
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import Contender, turn
from loadtests.harness.content import Family
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.peers import JuiceFS, juicefs_if_installed
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most

_READERS = 32
_SIZES = {"100 KiB": 100 * 1024, "4 KiB": 4096}
_LATENCY_SECONDS = 0.005
_WRITTEN_MAX = 2000
"""For JuiceFS, which has to write them first."""
_OURS, _BARE, _DIRECT = "forebay, cold", "bare aiohttp + pwrite", "direct"


def test(options: Options) -> Report:
    count = options.of(10_000, least=500)
    title = f"Cold epoch of {count:,} objects, {_READERS} readers, origin with 5 ms"
    report = Report("cold_epoch", title, options.command("cold_epoch"))
    memory = Memory()
    for name, size_bytes in _SIZES.items():
        with ExitStack() as stack:
            bench = _Bench(stack, name, count, size_bytes, options, memory)
            for number in range(options.rounds):
                bench.round(number)
            bench.tell(report)
            report.notes += [note for note in bench.notes if note not in report.notes]
    report.notes += [memory.note(), "The origin is one Python process on the client's core."]
    return report


class _Bench:
    """Everything that is started for objects of one size, and what was found."""

    def __init__(
        self, stack: ExitStack, name: str, count: int, size_bytes: int, options: Options, memory: Memory
    ) -> None:
        self.name, self.memory = name, memory
        first = Family(f"first-{size_bytes}/", max(100, count // 10), size_bytes)
        self.epochs = [Family(f"epoch{number}-{size_bytes}/", count, size_bytes) for number in range(options.rounds)]
        self.written = Family(f"written-{size_bytes}/", min(count, _WRITTEN_MAX), size_bytes)
        self.origin = stack.enter_context(LoadOrigin([first, *self.epochs]))
        self.ours = stack.enter_context(gateway(self.origin, name=_OURS, capacity="16GiB", names_threads=True))
        self.juicefs, self.notes = stack.enter_context(juicefs_if_installed(self.origin))
        self.threads = WorkerThreads(self.ours)
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self.rates: dict[str, list[float]] = defaultdict(list)
        if self.juicefs is not None:
            progress(f"{name}: writing through {self.juicefs.name}")
            self.juicefs.take(self.written)
        self.origin.shape(latency_seconds=_LATENCY_SECONDS)
        self._read(self.ours, first)  # connections are open, code is loaded

    def round(self, number: int) -> None:
        epoch = self.epochs[number]
        measures: dict[str, Callable[[], None]] = {
            _OURS: lambda: self._through_ours(epoch),
            _BARE: lambda: self._bare(epoch),
            _DIRECT: lambda: self._note(_DIRECT, epoch, self._read(self.origin, epoch)),
        }
        if (juicefs := self.juicefs) is not None:
            measures[juicefs.name] = lambda: self._through_juicefs(juicefs, self.written)
        for name in turn(list(measures), number):
            progress(f"{self.name}, round {number + 1}: {name}")
            self.memory.touch(epoch.count * epoch.size_bytes)
            measures[name]()

    def _through_ours(self, epoch: Family) -> None:
        self.threads.begin()
        before = self.ours.cpu_seconds()
        seconds = self._read(self.ours, epoch)
        self.origin.settled_counts()
        self.threads.end(epoch.count / 1e6)
        self._note(_OURS, epoch, seconds, self.ours.cpu_seconds() - before)

    def _through_juicefs(self, juicefs: JuiceFS, epoch: Family) -> None:
        juicefs.forget()
        before = juicefs.cpu_seconds()
        seconds = self._read(juicefs, epoch)
        self.origin.settled_counts()
        self._note(juicefs.name, epoch, seconds, juicefs.cpu_seconds() - before)

    def _bare(self, epoch: Family) -> None:
        directory = Path(tempfile.mkdtemp(prefix="forebay-load-"))
        try:
            bare = bare_fetch.run(self.origin.url, epoch, _READERS, directory)
        finally:
            shutil.rmtree(directory)
        self._note(_BARE, epoch, bare.seconds, bare.cpu_seconds)

    def _read(self, of: Contender, epoch: Family) -> float:
        return player.play(of.address[1], player.whole(of.address, epoch), _READERS).seconds

    def _note(self, name: str, epoch: Family, seconds: float, cpu_seconds: float | None = None) -> None:
        self.rates[name].append(epoch.count / seconds)
        if cpu_seconds is not None:
            self.cpu[name].append(cpu_seconds / epoch.count * 1e6)

    def tell(self, report: Report) -> None:
        def of(what: str) -> str:
            return self.memory.of(f"{what}, {self.name}")

        worker = mean_of(self.threads.totals())
        is_large = self.name == "100 KiB"
        report.verdicts += [
            Verdict(of("worker CPU per GET, µs"), worker, at_most(220 if is_large else 140)),
            Verdict(
                of("server CPU, forebay / bare aiohttp + pwrite"),
                ratio_of(self.cpu[_OURS], self.cpu[_BARE]),
                at_most(1.5) if is_large else None,
            ),
            Verdict(
                of("GETs a second, one core, forebay / direct"),
                ratio_of(self.rates[_OURS], self.rates[_DIRECT]),
                at_least(0.75) if is_large else None,
            ),
        ]
        report.verdicts += [
            Verdict(of(f"server CPU, forebay / {name}"), ratio_of(self.cpu[_OURS], values))
            for name, values in self.cpu.items()
            if name not in (_OURS, _BARE)
        ]
        report.tables += [
            self.threads.table(of("worker CPU per GET by thread"), "µs"),
            Measured(of("server CPU per GET"), "µs", self.cpu),
            Measured(of("GETs a second"), "1/s", self.rates),
        ]


if __name__ == "__main__":
    command.main(test, __doc__)
