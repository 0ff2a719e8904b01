"""Server CPU of a warm GET beside what there is much of, against the same where there is little.

    python -m loadtests.flat [--seconds 3] [--rounds 5] [--scale 1] [--record]

10 million blocks of 16 bytes in the index that nobody asks for; 10,000 connections that have asked once and wait, or as
many as one process may have here (a quarter of `ulimit -n`); 40,000 keys asked in turn instead of 2,000: no process
keeps so many answers prepared, and the index has been asked for each. Objects of 4 KiB, 16 connections, each request
with its own key, date and signature; CPU of the worker alone. A gateway for each; `loadtests.many_slots` has the same
for 1,000 slots. Filling the index takes five minutes, and 4 GB of disk.
"""

from __future__ import annotations

import resource
from contextlib import ExitStack
from pathlib import Path

from gateway.blocks.settings import BlockSettings
from loadtests.harness import command, warm
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import Family
from loadtests.harness.gateway import WorkerOf, gateway
from loadtests.harness.headers_only import head_client, signed_heads
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_most
from loadtests.many_blocks import fill

_SIZE_BYTES, _BLOCK_BYTES = 4 * 1024, 16
_CAPACITY = 20 * 1024**3
_FILLS = 2
_FEW = "2,000 keys and nothing beside"


def test(options: Options) -> Report:
    few = Family("few/", 2_000, _SIZE_BYTES)
    many = Family("many/", options.of(40_000, least=20_000), _SIZE_BYTES)
    blocks = options.of(10_000_000, least=10_000)
    waiting = min(options.of(10_000, least=100), _connections_max() - 100)
    beside = {
        f"{blocks:,} more blocks": few,
        f"{waiting:,} connections that wait": few,
        f"{many.count:,} keys in turn": many,
    }
    names = [_FEW, *beside]
    report = Report("flat", "4 KiB warm GET, and what there is much of", options.command("flat"))
    result = warm.Result([warm.WHOSE_CPU])

    def fill_index(directory: Path) -> None:
        progress(f"{blocks:,} blocks: {fill(_settings(directory), blocks, _BLOCK_BYTES):.0f} µs of CPU each")

    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin([few, many]))
        contenders = []
        for name in names:
            started = stack.enter_context(
                gateway(
                    origin,
                    capacity=str(_CAPACITY),
                    server={"keep_alive_timeout": "1h"},
                    before=fill_index if name == names[1] else None,
                )
            )
            contenders.append(WorkerOf(started, name))
        works = {
            one.name: warm.Workload(beside.get(one.name, few), 8 * 1024 * 1024, connections=16, requests=0)
            for one in contenders
        }
        for one in contenders:
            progress(f"filling {one.name}")
            for _ in range(_FILLS):
                warm.fill(one, works[one.name])
        progress(f"opening {waiting:,} connections")
        client = stack.enter_context(head_client(contenders[2].address, waiting))
        for _ in range(2):
            client.once((signed_heads(contenders[2].address, few) * (1 + waiting // few.count))[:waiting])
        requests = {one.name: works[one.name].signed("{}:{}".format(*one.address)) for one in contenders}
        for number in range(options.rounds + 1):
            for one in turn(contenders, number):
                progress(f"round {number}: {one.name}")
                into = result if number else warm.Result([])  # the first one does not count
                answered = warm.round_of(one, works[one.name], requests[one.name], options.seconds, into)
                requests[one.name] = _rotated(requests[one.name], answered)
    cpu = result.cpu_microseconds
    report.verdicts = [
        Verdict(f"CPU per request, {name} / {_FEW}", ratio_of(cpu[name], cpu[_FEW]), at_most(1.1)) for name in beside
    ]
    report.tables = [
        Measured("worker's CPU per request", "µs", cpu),
        Measured("CPU per request, worker and client", "µs", result.with_client_cpu_microseconds),
        Measured("throughput", "requests/s", result.requests_per_second),
    ]
    report.notes = result.notes
    return report


def _rotated(requests: list[bytes], count: int) -> list[bytes]:
    at = count % len(requests)
    return requests[at:] + requests[:at]


def _connections_max() -> int:
    """What one process accepts here (`ServerLimits.connections_max`)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 4


def _settings(directory: Path) -> BlockSettings:
    blocks = directory / "blocks"
    blocks.mkdir(parents=True)
    return BlockSettings(blocks, _CAPACITY)


if __name__ == "__main__":
    command.main(test, __doc__)
