"""Server CPU per warm 8 MiB range GET over 8 connections: Forebay (SigV4 verified) against nginx, Varnish and rclone.

    python -m loadtests.warm_ranges [--seconds 3] [--rounds 5] [--record]

64 ranges of 8 objects, each request with its own date and signature, cached and in the page cache. rclone verifies
signatures too; nginx and Varnish verify nothing. Servers run on one core, `wrk` on the rest.
"""

from __future__ import annotations

from loadtests.harness import command, warm
from loadtests.harness.command import Options
from loadtests.harness.content import Family
from loadtests.harness.intervals import lowest, ratio_of
from loadtests.harness.report import Measured, Report, Verdict, at_most

_RANGE_BYTES = 8 * 1024 * 1024


def test(options: Options) -> Report:
    objects = Family("ranges/", 8, 8 * _RANGE_BYTES)
    work = warm.Workload(objects, _RANGE_BYTES, connections=8, requests=512)
    result = warm.measure(work, options)
    report = Report("warm_ranges", "8 MiB warm range GET, 8 connections", options.command("warm_ranges"))
    cpu = result.cpu_microseconds
    peers = {name: values for name, values in cpu.items() if not name.startswith("forebay")}
    if peers:
        best = lowest(peers)
        target = at_most(1.15, whole_interval=True)
        for name in (warm.IMMUTABLE, warm.STRICT):
            what = f"CPU per request, {name} / {best} (best peer)"
            report.verdicts.append(Verdict(what, ratio_of(cpu[name], peers[best]), target if name == warm.IMMUTABLE else None))
    report.tables = [
        Measured("server CPU per request", "µs", cpu),
        Measured("throughput", "requests/s", result.requests_per_second),
    ]
    report.notes = result.notes
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
