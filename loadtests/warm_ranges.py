"""Server CPU per warm 8 MiB range GET over 8 connections: Forebay (SigV4 verified) against its peers.

    python -m loadtests.warm_ranges [--seconds 3] [--rounds 5] [--record]

64 ranges of 8 objects, each request with its own date and signature, cached and in the page cache. rclone and JuiceFS
verify signatures too; nginx and Varnish verify nothing. Servers run on one core, `wrk` on the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadtests.harness import command, warm
from loadtests.harness.command import Options
from loadtests.harness.content import Family
from loadtests.harness.intervals import lowest, ratio_of
from loadtests.harness.report import Measured, Report, Target, Verdict, at_most

_RANGE_BYTES = 8 * 1024 * 1024


def test(options: Options) -> Report:
    objects = Family("ranges/", 8, 8 * _RANGE_BYTES)
    work = warm.Workload(objects, _RANGE_BYTES, connections=8, requests=512)
    result = warm.measure(work, options)
    report = Report("warm_ranges", "8 MiB warm range GET, 8 connections", options.command("warm_ranges"))
    cpu, both = result.cpu_microseconds, result.with_client_cpu_microseconds
    target = at_most(1.15, whole_interval=True)
    report.verdicts += _against_the_best(cpu, "CPU per request", {warm.IMMUTABLE: target, warm.STRICT: None})
    report.verdicts += _against_the_best(both, "CPU per request, server and client", {warm.IMMUTABLE: None})
    report.tables = [
        Measured("server CPU per request", "µs", cpu),
        Measured("CPU per request, server and client", "µs", result.with_client_cpu_microseconds),
        Measured("throughput", "requests/s", result.requests_per_second),
    ]
    report.notes = result.notes
    return report


def _against_the_best(cpu: warm.Series, what: str, ours: Mapping[str, Target | None]) -> list[Verdict]:
    """Nothing where no peer is installed."""
    peers = {name: values for name, values in cpu.items() if not name.startswith("forebay")}
    if not peers:
        return []
    best = lowest(peers)
    return [
        Verdict(f"{what}, {name} / {best} (best peer)", ratio_of(cpu[name], peers[best]), target)
        for name, target in ours.items()
    ]


if __name__ == "__main__":
    command.main(test, __doc__)
