"""Server CPU per warm 100 KiB GET over 10,000 keys and 16 connections, SigV4 verified, against its peers.

    python -m loadtests.warm_small [--seconds 3] [--rounds 5] [--scale 1] [--record]

Each request has its own key, date and signature; everything is cached and in the page cache. rclone and JuiceFS verify
signatures too; nginx and Varnish verify nothing. JuiceFS reads what was written through it, in its own format. Servers
run on one core, `wrk` on the rest.
"""

from __future__ import annotations

from loadtests.harness import command, warm
from loadtests.harness.command import Options
from loadtests.harness.content import Family
from loadtests.harness.intervals import lowest, ratio_of
from loadtests.harness.peers import JuiceFS, Rclone
from loadtests.harness.report import Measured, Report, Target, Verdict, at_most

_SIZE_BYTES = 100 * 1024


def test(options: Options) -> Report:
    objects = Family("small/", options.of(10_000, least=500), _SIZE_BYTES)
    result = warm.measure(warm.Workload(objects, 8 * 1024 * 1024, connections=16, requests=0), options)
    title = f"100 KiB warm GET over {objects.count:,} keys, 16 connections"
    report = Report("warm_small", title, options.command("warm_small"))
    cpu, both = result.cpu_microseconds, result.with_client_cpu_microseconds
    ours = cpu[warm.IMMUTABLE]
    for peer, target in ((Rclone.name, at_most(0.6)), (JuiceFS.name, None)):
        if peer in cpu:
            ratio = ratio_of(ours, cpu[peer])
            report.verdicts.append(Verdict(f"CPU per request, {warm.IMMUTABLE} / {peer}", ratio, target))
    report.verdicts += _against_nginx(cpu, "CPU per request", at_most(3))
    report.verdicts += _against_nginx(both, "CPU per request, server and client", None)
    strict = ratio_of(cpu[warm.STRICT], ours)
    report.verdicts.append(Verdict("CPU per request, forebay: strict / immutable", strict))
    report.tables = [
        Measured("server CPU per request", "µs", cpu),
        Measured("CPU per request, server and client", "µs", result.with_client_cpu_microseconds),
        Measured("throughput", "requests/s", result.requests_per_second),
        Measured("99th percentile", "ms", result.p99_milliseconds),
    ]
    report.notes = result.notes
    return report


def _against_nginx(cpu: warm.Series, what: str, target: Target | None) -> list[Verdict]:
    """The better of its two settings; nothing where it is not installed."""
    nginx = {name: values for name, values in cpu.items() if name.startswith("nginx")}
    if not nginx:
        return []
    best = lowest(nginx)
    return [Verdict(f"{what}, {warm.IMMUTABLE} / {best}", ratio_of(cpu[warm.IMMUTABLE], nginx[best]), target)]


if __name__ == "__main__":
    command.main(test, __doc__)
