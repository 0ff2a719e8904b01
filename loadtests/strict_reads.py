"""CPU of the gateway per warm 100 KiB GET in a strict slot, against what a bare client takes for a HEAD.

    python -m loadtests.strict_reads [--seconds 3] [--rounds 5] [--scale 1] [--record]

In a `strict` slot each GET asks the origin whether the version is current. 1,000 keys six times over 16 connections,
each request with its own key, date and signature, which Forebay verifies; it signs its questions, too. The client is
written in C and spins, so that Forebay does not pay for waking it. The bare client, which runs for `--seconds`, is
aiohttp: it asks the same origin about the same objects, 16 at once, without a signature, and answers nobody. In turns,
each on the server core.
"""

from __future__ import annotations

from loadtests.harness import bare_heads, command, warm
from loadtests.harness.cold import WorkerThreads
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import Family
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_most

_CONNECTIONS = 16
_SIZE_BYTES = 100 * 1024
_REPEATED = 6
_BARE = "bare aiohttp, HEAD"


def test(options: Options) -> Report:
    objects = Family("small/", options.of(1000, least=100), _SIZE_BYTES)
    work = warm.Workload(objects, 8 * 1024 * 1024, _CONNECTIONS, requests=0)
    result = warm.Result([])
    with (
        LoadOrigin([objects]) as origin,
        gateway(origin, name=warm.STRICT, slot={"consistency": "strict"}) as strict,
        gateway(origin, name=warm.IMMUTABLE) as immutable,
    ):
        contenders = {one.name: one for one in (strict, immutable)}
        threads = WorkerThreads(strict)
        requests = {
            name: [(request, _SIZE_BYTES) for request in work.signed("{}:{}".format(*one.address))] * _REPEATED
            for name, one in contenders.items()
        }
        for one in contenders.values():
            progress(f"filling {one.name}")
            for _ in range(2):
                warm.fill(one, work)
        for number in range(options.rounds):
            for name in turn([*contenders, _BARE], number):
                progress(f"round {number + 1}: {name}")
                if name == _BARE:
                    bare = bare_heads.run(origin.url, objects, _CONNECTIONS, options.seconds)
                    result.cpu_microseconds[name].append(bare.cpu_seconds / bare.answered * 1e6)
                else:
                    threads.begin()
                    warm.played(contenders[name], requests[name], _CONNECTIONS, result)
                    if name == warm.STRICT:
                        threads.end(len(requests[name]) / 1e6)
    return _report(objects, options, result, threads)


def _report(objects: Family, options: Options, result: warm.Result, threads: WorkerThreads) -> Report:
    title = f"Strict 100 KiB warm GET over {objects.count:,} keys, 16 connections"
    report = Report("strict_reads", title, options.command("strict_reads"))
    cpu = result.cpu_microseconds
    report.verdicts = [
        Verdict("CPU per GET, strict / a bare client's HEAD", ratio_of(cpu[warm.STRICT], cpu[_BARE]), at_most(1.5)),
        Verdict("CPU per GET, strict / immutable", ratio_of(cpu[warm.STRICT], cpu[warm.IMMUTABLE])),
    ]
    report.tables = [
        Measured("CPU per GET, or HEAD", "µs", cpu),
        threads.table("worker CPU per strict GET by thread", "µs"),
        Measured("throughput", "requests/s", result.requests_per_second),
        Measured("99th percentile", "ms", result.p99_milliseconds),
    ]
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
