"""Parts acknowledged by a slot with `write = "back"`: verified, synced, journaled; against the least, and rclone.

    python -m loadtests.writeback_parts [--rounds 5] [--scale 1] [--record]

Uploads in parts of 8 MiB, UNSIGNED-PAYLOAD, over one connection and over eight; all processes on all cores. The bare
receiver does `recv_into`, MD5, `pwrite` and `fsync` for each part, and keeps the files, too; it knows no signatures,
names or uploads.

rclone is measured from CreateMultipartUpload to Complete, as it holds parts in memory until then, and JuiceFS's gateway
(`--writeback`) in the same way; neither syncs anything. The origin takes next to nothing meanwhile (1 MB/s), so that
what is measured is the acknowledgement; between the rounds everything is flushed. CPU is that of all processes of a
server.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import Contender, those_installed, turn
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import difference_of, ratio_of
from loadtests.harness.peers import JuiceFS, Rclone
from loadtests.harness.receiving_server import ReceivingServer
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.saver import Part, Saver, at_once
from loadtests.harness.sink import SinkOrigin
from loadtests.harness.uploader import upload_seconds

OURS, BARE, RCLONE, JUICEFS = "forebay", "bare", Rclone.name, JuiceFS.name
WRITES_BACK = {"mode": "read-write", "write": "back", "consistency": "strict", "buffer": "16GiB"}
"""A slot that does."""

_PART_BYTES = 8 * 1024**2
_GIB = 1024**3
_PARTS = 64
_HELD = 1e6
_FLUSHED_SECONDS_MAX = 300.0

_Series = dict[str, list[float]]


@dataclass(slots=True)
class _Found:
    """By contender and round: of the parts, and of the whole upload."""

    rates: _Series = field(default_factory=lambda: defaultdict(list))
    cpu: _Series = field(default_factory=lambda: defaultdict(list))
    whole_rates: _Series = field(default_factory=lambda: defaultdict(list))
    whole_cpu: _Series = field(default_factory=lambda: defaultdict(list))


class _Bench:
    """Everything that is started."""

    def __init__(self, stack: ExitStack, options: Options) -> None:
        self.origin = stack.enter_context(SinkOrigin())
        self.bare = stack.enter_context(ReceivingServer("keeping"))
        cores = machine.all_cores()
        peers, self.notes = stack.enter_context(
            those_installed(
                [
                    lambda: Rclone(self.origin, takes_writes=True, cores=cores),
                    lambda: JuiceFS(self.origin, writes_back=True, cores=cores),
                ]
            )
        )
        ours = gateway(self.origin, slot=WRITES_BACK, cache={"persistent": True}, cores=cores)
        self.savers: list[Contender] = [stack.enter_context(ours), *peers]
        self.contenders: list[Contender] = [*self.savers, self.bare]
        self.part = Part.of(os.urandom(_PART_BYTES))
        self.parts = options.of(_PARTS, least=4)

    def learn(self) -> None:
        """The first write to a bucket goes through."""
        saver = Saver(self.savers[0].address, self.part)
        saver.put("first", b"x")
        saver.close()

    def round(self, number: int, connections: int, found: _Found) -> None:
        for one in turn(self.contenders, number):
            progress(f"round {number + 1}, {connections} connections: {one.name}")
            if one is self.bare:
                self._receive(connections, found)
            else:
                self._save(one, f"{connections}/{number}", connections, found)

    def _receive(self, connections: int, found: _Found) -> None:
        before, parts = self.bare.cpu_seconds(), self.parts // connections
        took = upload_seconds(self.bare, connections=connections, parts=parts, part=self.part.content)
        self._note(found.rates, found.cpu, BARE, parts * connections, took, self.bare.cpu_seconds() - before)
        self.bare.forget()

    def _save(self, one: Contender, prefix: str, connections: int, found: _Found) -> None:
        self.origin.pace(_HELD)
        kept = self.origin.kept_bytes()
        savers = [Saver(one.address, self.part) for _ in range(connections)]
        parts = self.parts // connections
        start = one.cpu_seconds()
        took = at_once([partial(saver.begin, f"{prefix}/{n}") for n, saver in enumerate(savers)])
        began = one.cpu_seconds()
        sending = at_once([partial(saver.send, parts) for saver in savers])
        sent = one.cpu_seconds()
        took += sending + at_once([saver.complete for saver in savers])
        end = one.cpu_seconds()
        self._note(found.rates, found.cpu, one.name, parts * connections, sending, sent - began)
        self._note(found.whole_rates, found.whole_cpu, one.name, parts * connections, took, end - start)
        self.origin.pace(0)
        if one.name != RCLONE:  # it waits for longer than this test
            self.origin.until_it_keeps(kept + connections * parts * _PART_BYTES, _FLUSHED_SECONDS_MAX)

    def _note(self, rates: _Series, cpu: _Series, name: str, parts: int, seconds: float, used: float) -> None:
        gibibytes = parts * _PART_BYTES / _GIB
        rates[name].append(gibibytes * 1024 / seconds)
        cpu[name].append(used / gibibytes)


def test(options: Options) -> Report:
    title = "Parts of 8 MiB acknowledged by a slot that writes back"
    report = Report("writeback_parts", title, options.command("writeback_parts"))
    with ExitStack() as stack:
        bench = _Bench(stack, options)
        bench.learn()
        report.notes += bench.notes
        for connections in (1, 8):
            found = _Found()
            for number in range(options.rounds):
                bench.round(number, connections, found)
            _judge(report, "one connection" if connections == 1 else f"{connections} connections", found)
    return report


def _judge(report: Report, over: str, found: _Found) -> None:
    alone = {name: found.rates[name] for name in (OURS, BARE)}
    alone_cpu = {name: found.cpu[name] for name in (OURS, BARE)}
    report.tables += [
        Measured(f"parts over {over}", "MiB/s", alone),
        Measured(f"CPU of parts over {over}", "s/GiB", alone_cpu),
        Measured(f"whole uploads over {over}", "MiB/s", found.whole_rates),
        Measured(f"CPU of whole uploads over {over}", "s/GiB", found.whole_cpu),
    ]
    report.verdicts += [
        Verdict(f"rate of parts over {over}, forebay / bare", ratio_of(alone[OURS], alone[BARE]), at_least(0.85)),
        Verdict(
            f"CPU of parts over {over}, forebay - bare, s/GiB",
            difference_of(alone_cpu[OURS], alone_cpu[BARE]),
            at_most(0.4 * _GIB / 1e9),
        ),
        *_against_peers(over, found),
    ]


def _against_peers(over: str, found: _Found) -> Iterator[Verdict]:
    for peer in (RCLONE, JUICEFS):
        if peer not in found.whole_rates:
            continue
        rate = ratio_of(found.whole_rates[OURS], found.whole_rates[peer])
        cpu = ratio_of(found.whole_cpu[OURS], found.whole_cpu[peer])
        targets = (at_least(1.5), at_most(0.75)) if peer == RCLONE else (None, None)
        yield Verdict(f"rate of uploads over {over}, forebay / {peer}", rate, targets[0])
        yield Verdict(f"CPU of uploads over {over}, forebay / {peer}", cpu, targets[1])


if __name__ == "__main__":
    command.main(test, __doc__)
