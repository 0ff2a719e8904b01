"""Parts of 8 MiB received, hashed, written and fsynced, against the least that can do the same.

    python -m loadtests.receiving [--rounds 5] [--scale 1] [--record]

Over one connection and over eight, UNSIGNED-PAYLOAD. The bare server has a thread for each connection, a blocking
socket and one buffer; both do MD5, `pwrite` and `fsync`, which is most of the work.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from loadtests.harness import command
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import Contender, turn
from loadtests.harness.intervals import difference_of, ratio_of
from loadtests.harness.receiving_server import ReceivingServer
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.uploader import upload_seconds

_PART_BYTES = 8 * 1024**2
_GIB = 1024**3

_Series = dict[str, list[float]]


def test(options: Options) -> Report:
    title = "Parts of 8 MiB received, hashed, written and fsynced"
    report = Report("receiving", title, options.command("receiving"))
    with ReceivingServer("forebay") as ours, ReceivingServer("bare") as bare:
        for connections in (1, 8):
            progress(f"{connections} connections")
            rates, cpu = _measure([ours, bare], connections, options)
            _judge(report, connections, rates, cpu)
    return report


def _measure(servers: Sequence[Contender], connections: int, options: Options) -> tuple[_Series, _Series]:
    part, parts = os.urandom(_PART_BYTES), options.of(256 // connections, least=2)
    gibibytes = connections * parts * len(part) / _GIB
    rates: _Series = {server.name: [] for server in servers}
    cpu: _Series = {server.name: [] for server in servers}
    for number in range(options.rounds):
        for server in turn(servers, number):
            before = server.cpu_seconds()
            seconds = upload_seconds(server, connections=connections, parts=parts, part=part)
            rates[server.name].append(gibibytes * 1024 / seconds)
            cpu[server.name].append((server.cpu_seconds() - before) / gibibytes)
    return rates, cpu


def _judge(report: Report, connections: int, rates: _Series, cpu: _Series) -> None:
    over = "one connection" if connections == 1 else f"{connections} connections"
    report.tables += [Measured(f"rate over {over}", "MiB/s", rates), Measured(f"CPU over {over}", "s/GiB", cpu)]
    more = difference_of(cpu["forebay"], cpu["bare"])
    report.verdicts += [
        Verdict(f"rate over {over}, forebay / bare", ratio_of(rates["forebay"], rates["bare"]), at_least(0.85)),
        Verdict(f"CPU over {over}, forebay - bare, s/GiB", more, at_most(0.4)),
    ]


if __name__ == "__main__":
    command.main(test, __doc__)
