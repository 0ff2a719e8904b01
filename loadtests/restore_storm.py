"""Sixteen ranks, a process each, restore a checkpoint at once from the disk, the page cache dropped, against fio.

    python -m loadtests.restore_storm [--rounds 5] [--scale 1] [--record]

16 files of 128 MiB are saved in parts of 8 MiB into a slot with `write = "back"` and `consistency = "ttl"`, and
flushed. "Own files": each rank reads one of them. "The same files": all ranks read all of four of them, as ranks with
replicated state do. Each time what lies in the page cache of them is dropped before (this takes root). fio reads the
same number of bytes, direct, a job a file. What the origin is asked for meanwhile is counted. All on all cores, the
clients too, which throw away what they receive. A second gateway has two workers, and is started anew each time, since
pages that two processes have mapped cannot be dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from loadtests.harness import command, fio, machine, tools
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import Interval, mean_of, ratio_of
from loadtests.harness.ranks import Ranks, Restored, ranks
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.saver import Part, Saver, at_once
from loadtests.harness.sink import SinkOrigin

RESTORED = {"mode": "read-write", "write": "back", "consistency": "ttl", "metadata_ttl": "1h", "buffer": "16GiB"}
"""The slot for checkpoints that docs/write-back.md recommends."""

_RANKS = 16
_SHARED = 4
_PART_BYTES = 8 * 1024**2
_PARTS = 16
_FLUSHED_SECONDS_MAX = 300.0
_OWN, _SAME, _TWO, _FIO = "own files", "the same files", "own files, two workers", "fio, direct"


class _Bench:
    """Everything that is started."""

    def __init__(self, stack: ExitStack, options: Options) -> None:
        self.origin = stack.enter_context(SinkOrigin())
        cores = machine.all_cores()
        cache = {"persistent": True}
        ours = gateway(self.origin, slot=RESTORED, cache=cache, cores=cores)
        self.ours: Gateway = stack.enter_context(ours)
        two = gateway(self.origin, slot=RESTORED, cache=cache, cores=cores, server={"workers": 2})
        self.two: Gateway = stack.enter_context(two)
        os.sched_setaffinity(0, cores)  # the ranks inherit it
        self.ranks: Ranks = stack.enter_context(ranks(_RANKS, self.ours.address))
        self.parts = options.of(_PARTS)
        self.paths, self.paths_of_two = (
            [f"/{BUCKET}/{save}/__{rank}_0.distcp" for rank in range(_RANKS)] for save in ("step-100", "step-200")
        )

    def save(self) -> None:
        """Until the origin has it, and it lies in the cache."""
        for gateway_of in (self.ours, self.two):
            first = Saver(gateway_of.address, Part.of(b""))
            first.put("first", b"x")  # the first write to a bucket goes through
            first.close()
        self._save(self.ours.address, self.paths)
        self.origin.until_it_has(1 + _RANKS, _FLUSHED_SECONDS_MAX)
        self._save(self.two.address, self.paths_of_two)
        self.origin.until_it_has(1 + 2 * _RANKS, _FLUSHED_SECONDS_MAX)
        self.origin.until_quiet()

    def _save(self, address: tuple[str, int], paths: Sequence[str]) -> None:
        part = Part.of(os.urandom(_PART_BYTES))
        savers = [Saver(address, part) for _ in paths]
        keys = [path.removeprefix(f"/{BUCKET}/") for path in paths]
        at_once([partial(saver.save, key, self.parts) for saver, key in zip(savers, keys, strict=True)])
        for saver in savers:
            saver.close()

    def restore(self, paths: Sequence[Sequence[str]]) -> Restored:
        self.ours.forget_pages()
        return self.ranks.restore(paths)

    def own(self) -> Restored:
        return self.restore([[path] for path in self.paths])

    def same(self) -> Restored:
        shared = self.paths[:_SHARED]
        return self.restore([shared[rank % _SHARED :] + shared[: rank % _SHARED] for rank in range(_RANKS)])

    def own_of_two_workers(self) -> Restored:
        self.two.process.terminate()
        machine.forget_pages(self.two.process.directory)
        self.two.process.start()
        with ranks(_RANKS, self.two.address) as ready:
            return ready.restore([[path] for path in self.paths_of_two])

    def bare(self) -> float:
        """fio, of as many files of that size, which lie beside the cache."""
        files = [self.ours.process.directory.parent / f"fio-{number}.data" for number in range(_RANKS)]
        for file in files:
            if not file.exists():
                with file.open("wb") as written:
                    for _ in range(self.parts):
                        written.write(os.urandom(_PART_BYTES))
                    os.fsync(written.fileno())
        return fio.sequential_read_bytes_per_second(*files)


def test(options: Options) -> Report:
    size_gib = _RANKS * options.of(_PARTS) * _PART_BYTES / 1024**3
    title = f"{_RANKS} ranks restore {size_gib:.3g} GiB at once, page cache dropped"
    report = Report("restore_storm", title, options.command("restore_storm"))
    with ExitStack() as stack:
        bench = _Bench(stack, options)
        progress("saving")
        bench.save()
        asked = bench.origin.requests()
        found = _rounds(bench, options.rounds, report)
        asked = bench.origin.requests() - asked
    rates = {name: [value / 1024**2 for value in values] for name, values in found.items() if "spread" not in name}
    spreads = {name.removesuffix(" spread"): values for name, values in found.items() if "spread" in name}
    report.tables += [Measured("bytes to all ranks", "MiB/s", rates), Measured("last rank / first", "times", spreads)]
    if _FIO in rates:
        report.verdicts.append(Verdict("own files, forebay / fio", ratio_of(rates[_OWN], rates[_FIO]), at_least(0.8)))
        report.verdicts += [
            Verdict(f"{name}, forebay / fio", ratio_of(rates[name], rates[_FIO])) for name in (_SAME, _TWO)
        ]
    report.verdicts += [
        Verdict(f"{name}: last rank's time / first's", mean_of(values), at_most(1.5))
        for name, values in spreads.items()
    ]
    report.verdicts.append(
        Verdict("requests about objects to the origin", Interval(float(asked), None, None), at_most(0))
    )
    return report


def _rounds(bench: _Bench, rounds: int, report: Report) -> Mapping[str, list[float]]:
    found: dict[str, list[float]] = {}

    def note(name: str, restore: Callable[[], Restored]) -> None:
        restored = restore()
        found.setdefault(name, []).append(restored.bytes_per_second)
        found.setdefault(f"{name} spread", []).append(restored.spread)

    def read() -> None:
        found.setdefault(_FIO, []).append(bench.bare())

    works: dict[str, Callable[[], None]] = {
        _OWN: partial(note, _OWN, bench.own),
        _SAME: partial(note, _SAME, bench.same),
        _TWO: partial(note, _TWO, bench.own_of_two_workers),
    }
    if absent := tools.missing("fio"):
        report.notes += absent
    else:
        bench.bare()  # the files are there
        works[_FIO] = read
    for number in range(rounds):
        for name in turn(list(works), number):
            progress(f"round {number + 1}: {name}")
            works[name]()
    return found


if __name__ == "__main__":
    command.main(test, __doc__)
