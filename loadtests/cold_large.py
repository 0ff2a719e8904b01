"""A cold object of 1 GiB as one GET against 32 direct connections, origin with 20 ms latency and 100 MB/s for each.

    python -m loadtests.cold_large [--rounds 5] [--scale 1] [--record]

Each round reads an object that no one has read before, through a gateway of one worker on one core, and through one of
two workers on all cores, of which the client and the origin use the last. The direct client fetches ranges of 8 MiB and
throws them away. CPU is that of the workers, compared with blocking sockets, kept buffers and `pwrite` in threads (no
signature, no index, no checksum, no client to answer): what receiving and writing a GiB costs in the same minute
differs by a factor of five on a virtual machine. Before each round memory is touched.

JuiceFS's gateway, where it is installed, reads an object from its own chunks at the same origin, its cache cleared.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from loadtests.harness import bare_ranges, command, machine, player
from loadtests.harness.cold import Memory, WorkerThreads
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import Contender, turn
from loadtests.harness.content import Family, LoadObject, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import Interval, mean_of, ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.peers import JuiceFS, juicefs_if_installed
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most

_PART_BYTES = 8 * 1024**2
_CONNECTIONS = 32
_GIB = 1024**3
_ONE, _TWO, _SINGLE, _DIRECT = "one worker", "two workers", "direct, one GET", f"direct, {_CONNECTIONS} connections"
_BARE = "bare sockets + pwrite"


def test(options: Options) -> Report:
    size_bytes = options.of(_GIB, least=64 * 1024**2)
    title = f"Cold object of {size_bytes / 1024**2:,.0f} MiB, origin with 20 ms and 100 MB/s per connection"
    report = Report("cold_large", title, options.command("cold_large"))
    with ExitStack() as stack:
        bench = _Bench(stack, size_bytes, options)
        for number in range(options.rounds):
            bench.round(number)
        bench.tell(report)
    return report


class _Bench:
    """Everything that is started, and what was found."""

    def __init__(self, stack: ExitStack, size_bytes: int, options: Options) -> None:
        families = {name: Family(f"{name.replace(' ', '-')}/", options.rounds, size_bytes) for name in (_ONE, _TWO)}
        small, written = Family("first/", 1, _PART_BYTES), Family("written/", 1, size_bytes)
        self.origin = stack.enter_context(LoadOrigin([small, written, *families.values()]))
        self.unread = {name: [load_object(path, size_bytes) for path in one.paths()] for name, one in families.items()}
        self.size_bytes, self.memory = size_bytes, Memory()
        cores = {_ONE: machine.server_core(), _TWO: machine.all_cores()}
        self.gateways: dict[str, Gateway] = {
            name: stack.enter_context(
                gateway(
                    self.origin,
                    name=name,
                    capacity="16GiB",
                    cores=cores[name],
                    server={"workers": workers},
                    names_threads=True,
                )
            )
            for name, workers in ((_ONE, 1), (_TWO, 2))
        }
        self.juicefs, self.notes = stack.enter_context(juicefs_if_installed(self.origin))
        self.threads = {name: WorkerThreads(one) for name, one in self.gateways.items()}
        self.rates: dict[str, list[float]] = defaultdict(list)
        self.peer_cpu: list[float] = []
        self.bare_cpu: list[float] = []
        self.fetched: dict[str, list[float]] = defaultdict(list)
        self.lost: dict[str, int] = defaultdict(int)
        if self.juicefs is not None:
            progress(f"writing through {self.juicefs.name}")
            self.juicefs.take(written)
        self.written = load_object(written.path(0), size_bytes)
        self.origin.shape(latency_seconds=0.020, bytes_per_second=100e6)
        for one in self.gateways.values():
            self._get(one, load_object(small.path(0), small.size_bytes))  # connections are open, code is loaded

    def round(self, number: int) -> None:
        measures: dict[str, Callable[[], None]] = {
            **{name: partial(self._through, name) for name in self.gateways},
            _SINGLE: lambda: self._note(_SINGLE, self._get(self.origin, self.written)),
            _DIRECT: self._direct,
            _BARE: self._bare,
        }
        if (juicefs := self.juicefs) is not None:
            measures[juicefs.name] = lambda: self._through_juicefs(juicefs)
        for name in turn(list(measures), number):
            progress(f"round {number + 1}: {name}")
            self.memory.touch(self.size_bytes)
            measures[name]()

    def _through(self, name: str) -> None:
        one, threads, before = self.gateways[name], self.threads[name], self.origin.settled_counts()
        threads.begin()
        seconds = self._get(one, self.unread[name].pop())
        after = self.origin.settled_counts()
        threads.end(self.size_bytes / _GIB)
        self._note(name, seconds)
        self.fetched[name].append((after.sent_bytes - before.sent_bytes) / self.size_bytes)
        self.lost[name] += after.lost - before.lost

    def _through_juicefs(self, juicefs: JuiceFS) -> None:
        juicefs.forget()
        before, cpu = self.origin.settled_counts(), juicefs.cpu_seconds()
        self._note(juicefs.name, self._get(juicefs, self.written))
        after = self.origin.settled_counts()
        self.peer_cpu.append((juicefs.cpu_seconds() - cpu) / (self.size_bytes / _GIB))
        self.fetched[juicefs.name].append((after.sent_bytes - before.sent_bytes) / self.size_bytes)

    def _direct(self) -> None:
        requests = player.parts(self.origin.address, self.written, _PART_BYTES)
        self._note(_DIRECT, player.play(self.origin.port, requests, _CONNECTIONS, spin=False).seconds)

    def _bare(self) -> None:
        with tempfile.TemporaryDirectory(prefix="forebay-load-") as directory:
            bare = bare_ranges.run(self.origin.url, self.written, _CONNECTIONS, Path(directory) / "object")
        self.bare_cpu.append(bare.cpu_seconds / (self.size_bytes / _GIB))

    def _get(self, one: Contender, of: LoadObject) -> float:
        """The client does not spin: it is rarely idle, and what it leaves of its core is the origin's."""
        request = player.parts(one.address, of, of.size_bytes)
        return player.play(one.address[1], request, 1, spin=False).seconds

    def _note(self, name: str, seconds: float) -> None:
        self.rates[name].append(self.size_bytes / 1024**2 / seconds)

    def tell(self, report: Report) -> None:
        of, rates = self.memory.of, self.rates
        one, direct = self.threads[_ONE], rates[_DIRECT]
        report.verdicts = [
            Verdict(of("rate, one worker / direct, one GET"), ratio_of(rates[_ONE], rates[_SINGLE]), at_least(3)),
            Verdict(of(f"rate, one worker / {_DIRECT}"), ratio_of(rates[_ONE], direct), at_least(0.55)),
            Verdict(of(f"rate, two workers / {_DIRECT}"), ratio_of(rates[_TWO], direct), at_least(0.85)),
            Verdict(of("workers' CPU, one worker, s/GiB"), mean_of(one.totals()), at_most(0.75)),
            Verdict(of(f"workers' CPU, one worker / {_BARE}"), ratio_of(one.totals(), self.bare_cpu)),
            Verdict(of("the loop's part of it, s/GiB"), mean_of(one.of_thread("loop")), at_most(0.4)),
            *(
                Verdict(f"bytes from the bucket / bytes asked for, {name}", mean_of(values), at_most(1.01))
                for name, values in self.fetched.items()
                if name in self.gateways
            ),
            *(
                Verdict(f"connections to the bucket lost, {name}", Interval(float(count), None, None), at_most(0))
                for name, count in self.lost.items()
            ),
        ]
        if self.juicefs is not None:
            name = self.juicefs.name
            report.verdicts += [
                Verdict(of(f"rate, one worker / {name}"), ratio_of(rates[_ONE], rates[name])),
                Verdict(of(f"CPU, one worker / {name}"), ratio_of(one.totals(), self.peer_cpu)),
            ]
            report.tables.append(Measured(of("server CPU"), "s/GiB", {name: self.peer_cpu}))
        report.tables += [Measured(of(f"CPU, {_BARE}"), "s/GiB", {_BARE: self.bare_cpu})]
        report.tables += [Measured(of("rate"), "MiB/s", rates)]
        report.tables += [
            threads.table(of(f"workers' CPU by thread, {name}"), "s/GiB") for name, threads in self.threads.items()
        ]
        report.tables.append(Measured("bytes from the bucket / bytes asked for", "times", self.fetched))
        report.notes = [*self.notes, self.memory.note()]


if __name__ == "__main__":
    command.main(test, __doc__)
