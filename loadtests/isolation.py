"""Slot B reads while 64 clients burst into slot A, which flushes at its full rate; beside that, nginx in A's place.

    python -m loadtests.isolation [--seconds 3] [--rounds 5] [--scale 1] [--record]

Each 1.25 s each of the clients of A writes a MiB: 54 MB/s, for a link of 50. A writes back; B reads objects of
100 KiB, which are cached, over 16 connections, one request after another in each. In A's place there are, in turns:

- nginx that takes the same uploads at the same rate, into files. It computes no MD5, syncs nothing and flushes nothing,
  so it takes less of the CPU;
- the same nginx, and beside it a burner that uses what A takes more: per upload what the workers do, at the upload, by
  two threads as nginx has two workers; and steadily what the flush takes. What that is is measured with A alone and
  with nginx alone. That is the nginx as hungry for CPU as A;
- nothing.

The gateway that B reads from is the same one in all of them. It has two workers, on one core with whatever is in A's
place; clients and origin have the others. Then B, of weight 2, and A, of weight 1, read what is not cached, eight
readers each, over a link of 30 MB/s, while the clients of A burst and it flushes.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from loadtests.harness import command, machine, warm, wrk
from loadtests.harness.burner import Burner, Fuel
from loadtests.harness.bursts import Bursts
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET, Family
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.link import WINDOW_SECONDS, Readers, at_work, counted, farthest, rates, watched
from loadtests.harness.peers import NginxUploads
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.saver import Part, Saver
from loadtests.harness.sink import SinkOrigin
from loadtests.writeback_parts import WRITES_BACK

SLOT_A, AS_HUNGRY, NGINX, NOTHING = "slot A", "nginx as hungry", "nginx", "nothing"

_CLIENTS = 64
_PERIOD_SECONDS = 1.25
_UPLOAD_BYTES = 1024**2
_LINK = {"read": 30e6, "write": 50e6}
_WEIGHTS = {"a": 1, "b": 2}
_CONNECTIONS = 16
_WARM_BYTES = 100 * 1024
_WARM = 2_000
_COLD_BYTES = 8 * 1024**2
_COLD = 100
_READERS = 8
_SETTLING_SECONDS = 1.5
_IDLE_SECONDS = 2.0
_ALONE_SECONDS = 5.0
_FLUSHED_SECONDS_MAX = 300.0
_NONE = 1e-6


@dataclass(frozen=True, slots=True)
class _Cpu:
    """What the workers take for an upload, in CPU seconds, and what the background process takes in each second."""

    upload: float
    background: float


class _Bench:
    """Everything that is started."""

    def __init__(self, stack: ExitStack, options: Options) -> None:
        self.warm = Family("b/warm/", options.of(_WARM, least=200), _WARM_BYTES)
        cold = [Family(f"{name}/cold/", _COLD, _COLD_BYTES) for name in _WEIGHTS]
        self.origin = stack.enter_context(SinkOrigin([self.warm, *cold], cores=machine.client_cores()))
        self.nginx = stack.enter_context(NginxUploads())
        self.burner = stack.enter_context(Burner())
        slots = {"a": WRITES_BACK | {"buffer": "4GiB"}, "b": {"consistency": "immutable", "capacity": "1GiB"}}
        self.ours = stack.enter_context(
            gateway(
                self.origin,
                capacity="4GiB",
                link={f"{way}_bandwidth": f"{rate / 1e6:g}MB/s" for way, rate in _LINK.items()},
                server={"workers": 2},
                cache={"persistent": True, "readahead": 0},
                slot=WRITES_BACK,
                more_slots=[
                    {"name": name, "prefix": f"s3://{BUCKET}/{name}/", "weight": weight, **slots[name]}
                    for name, weight in _WEIGHTS.items()
                ],
            )
        )
        self.cold = [Readers(self.ours, family, _READERS) for family in cold]
        self.seconds = options.seconds
        self.content = os.urandom(_UPLOAD_BYTES)
        self.more: _Cpu | None = None
        """What A takes more than nginx."""

        self._flushed = 0
        self._prefixes = (f"a/burst-{number}/" for number in itertools.count())

    def learn(self) -> None:
        """The first write to a bucket goes through; what B reads is cached."""
        saver = Saver(self.ours.address, Part.of(b"x"))
        saver.put("first", b"x")
        saver.close()
        self._flushed = 1
        work = warm.Workload(self.warm, _WARM_BYTES, _CONNECTIONS, 0)
        for _ in range(2):  # the second time compares the checksums
            warm.fill(self.ours, work)
        self.read_warm()  # each worker prepares its answers

    @contextmanager
    def bursting(self, address: tuple[str, int], cpu_of_upload: float | None = None) -> Iterator[Bursts]:
        """64 clients, as long as the context lasts; then what A has taken is flushed."""
        fuel = (self.burner.address, cpu_of_upload) if cpu_of_upload is not None else None
        bursts = Bursts(
            address, next(self._prefixes), _CLIENTS, self.content, period_seconds=_PERIOD_SECONDS, fuel=fuel
        )
        with bursts:
            time.sleep(_SETTLING_SECONDS)
            yield bursts
        if address == self.ours.address:
            self._flushed += bursts.taken
            self.origin.until_it_has(self._flushed, _FLUSHED_SECONDS_MAX)
        self.nginx.forget()

    @contextmanager
    def as_hungry(self) -> Iterator[Bursts]:
        """nginx, and a burner for what A takes more."""
        assert self.more is not None
        with Fuel(self.burner.address) as fuel:
            fuel.burn_steadily(self.more.background)
            with self.bursting(self.nginx.address, self.more.upload) as bursts:
                yield bursts

    def cpu_in_place_of_a(self) -> float:
        """CPU seconds that nginx and the burner have taken."""
        return self.nginx.cpu_seconds() + self.burner.cpu_seconds()

    def measure_cpu(self) -> dict[str, _Cpu]:
        """Of A and of nginx, each with nothing beside it."""
        progress("CPU time of each alone")
        idle_workers, idle_background = self._cpu_between(partial(time.sleep, _IDLE_SECONDS))
        found = {}
        with self.bursting(self.ours.address) as bursts:
            before = bursts.taken
            workers, background = self._cpu_between(partial(time.sleep, _ALONE_SECONDS))
            workers -= idle_workers / _IDLE_SECONDS * _ALONE_SECONDS
            background -= idle_background / _IDLE_SECONDS * _ALONE_SECONDS
            found[SLOT_A] = _Cpu(workers / (bursts.taken - before), background / _ALONE_SECONDS)
        with self.bursting(self.nginx.address) as bursts:
            before, cpu = bursts.taken, self.nginx.cpu_seconds()
            time.sleep(_ALONE_SECONDS)
            found[NGINX] = _Cpu((self.nginx.cpu_seconds() - cpu) / (bursts.taken - before), 0.0)
        self.more = _Cpu(max(0.0, found[SLOT_A].upload - found[NGINX].upload), max(0.0, found[SLOT_A].background))
        return found

    def _cpu_between(self, work: Callable[[], None]) -> tuple[float, float]:
        """Of the workers, and of the background process."""
        processes = self.ours.process.status()["gateway"]["processes"]
        pids = {one["name"]: int(one["process_id"]) for one in processes}
        before = {name: machine.cpu_seconds(pid) for name, pid in pids.items()}
        work()
        used = {name: machine.cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        background = used.pop("background")
        return sum(used.values()), background

    def read_warm(self) -> wrk.WrkFigures:
        """B, in a closed loop. RuntimeError when anything had to be asked of the origin."""
        requests = warm.Workload(self.warm, _WARM_BYTES, _CONNECTIONS, 0).signed("{}:{}".format(*self.ours.address))
        asked = self.origin.gets()
        found = wrk.run(self.ours.url, requests, connections=_CONNECTIONS, seconds=self.seconds, body_bytes=_WARM_BYTES)
        if self.origin.gets() != asked:
            raise RuntimeError(f"{self.origin.gets() - asked} of B's warm reads went to the origin")
        return found

    def read_cold(self) -> list[dict[str, float]]:
        """Rates of A and B in each span of five seconds."""
        with self.bursting(self.ours.address), at_work(*self.cold):
            time.sleep(_SETTLING_SECONDS)
            samples = watched({"": partial(counted, self.ours, "read")}, WINDOW_SECONDS + 1)[""]
        return rates(samples)


def test(options: Options) -> Report:
    title = f"B reads beside A, which flushes at full rate with {_CLIENTS} clients bursting into it"
    report = Report("isolation", title, options.command("isolation"))
    p99, rate = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    uploads, cpu_there = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with ExitStack() as stack:
        bench = _Bench(stack, options)
        bench.learn()
        cpu = bench.measure_cpu()
        places: dict[str, Callable[[], AbstractContextManager[Bursts | None]]] = {
            SLOT_A: partial(bench.bursting, bench.ours.address),
            AS_HUNGRY: bench.as_hungry,
            NGINX: partial(bench.bursting, bench.nginx.address),
            NOTHING: nullcontext,
        }
        for number in range(options.rounds):
            for name in turn(list(places), number):
                progress(f"round {number + 1}: {name}")
                with places[name]() as bursts:
                    before, cpu_before, began = (
                        bursts.taken if bursts else 0,
                        bench.cpu_in_place_of_a(),
                        time.monotonic(),
                    )
                    found = bench.read_warm()
                    seconds = time.monotonic() - began
                    if bursts is not None:
                        uploads[name].append((bursts.taken - before) * _UPLOAD_BYTES / 1e6 / seconds)
                    if name in (AS_HUNGRY, NGINX):
                        cpu_there[name].append((bench.cpu_in_place_of_a() - cpu_before) / seconds)
                p99[name].append(found.p99_seconds * 1e3)
                rate[name].append(found.requests_per_second)
        progress("cold reads of A and B")
        spans = bench.read_cold()
    shares = {
        f"{slot}, weight {weight}": farthest(
            [one[slot] / (_LINK["read"] * weight / sum(_WEIGHTS.values())) for one in spans]
        )
        for slot, weight in _WEIGHTS.items()
    }
    for peer, target in ((AS_HUNGRY, at_most(1.2, whole_interval=True)), (NGINX, None), (NOTHING, None)):
        ratio = ratio_of(p99[SLOT_A], p99[peer])
        report.verdicts.append(Verdict(f"p99 of B's warm reads, beside slot A / beside {peer}", ratio, target))
        ratio = ratio_of(rate[peer], rate[SLOT_A])
        report.verdicts.append(Verdict(f"throughput of B's warm reads, beside {peer} / beside slot A", ratio, target))
    for name, share in shares.items():
        off = mean_of([max(abs(share - 1), _NONE)])
        report.verdicts.append(Verdict(f"cold reads of {name}: off its share, in the worst 5 s", off, at_most(0.05)))
    used = min(sum(one[slot] for slot in _WEIGHTS) for one in spans) / _LINK["read"]
    report.verdicts.append(Verdict("cold reads: of the link, in the worst 5 s", mean_of([used]), at_least(0.95)))
    report.notes.append("Cold reads have shares by weight only while the link is full: see how much of it was used.")
    report.tables = [
        Measured("p99 of B's warm reads, beside", "ms", p99),
        Measured("B's warm reads, beside", "requests/s", rate),
        Measured("uploads meanwhile, to", "MB/s", uploads),
        Measured("CPU of what is in A's place", "s/s", cpu_there),
        Measured("CPU of an upload of a MiB", "ms", {name: [one.upload * 1e3] for name, one in cpu.items()}),
        Measured("CPU of the flush", "s/s", {SLOT_A: [cpu[SLOT_A].background]}),
    ]
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
