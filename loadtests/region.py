"""A Forebay for a region: nodes whose origin is one gateway, whose origin is a bucket 100 ms and 10 MB/s away.

    python -m loadtests.region [--rounds 3] [--scale 1] [--record]

Each round has objects that nobody has read. The first node reads them once: all comes from the bucket. The second node
reads them: they come from the region. Both over 16 connections. Then the first one reads them again, from its own disk.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from loadtests.harness import command
from loadtests.harness.command import Options, progress
from loadtests.harness.content import Family
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict
from loadtests.replica import read

_LATENCY_SECONDS = 0.1
_BYTES_PER_SECOND = 10e6
_SIZE_BYTES = 1024**2
_DIRECT, _FIRST, _SECOND, _AGAIN = "a node without it", "first node", "second node", "first node again"


def test(options: Options) -> Report:
    report = Report("region", "A Forebay for the region, bucket 100 ms and 10 MB/s away", options.command("region"))
    rounds = [Family(f"r{number}/", options.of(100, least=20), _SIZE_BYTES) for number in range(options.rounds)]
    seconds: dict[str, list[float]] = {name: [] for name in (_DIRECT, _FIRST, _SECOND, _AGAIN)}
    crossing: list[float] = []
    with ExitStack() as stack:
        bucket = stack.enter_context(LoadOrigin(rounds))
        region = stack.enter_context(gateway(bucket, name="region", capacity="16GiB"))
        nodes = [stack.enter_context(gateway(region, name=name, capacity="16GiB")) for name in (_FIRST, _SECOND)]
        alone = stack.enter_context(gateway(bucket, name=_DIRECT, capacity="16GiB"))
        bucket.shape(latency_seconds=_LATENCY_SECONDS, bytes_per_second=_BYTES_PER_SECOND)
        for number, family in enumerate(rounds):
            progress(f"round {number + 1}")
            seconds[_DIRECT].append(_timed(alone, family))
            before = bucket.settled_counts().sent_bytes
            seconds[_FIRST].append(_timed(nodes[0], family))
            seconds[_SECOND].append(_timed(nodes[1], family))
            sent = bucket.settled_counts().sent_bytes - before
            crossing.append(sent / (family.count * family.size_bytes))
            seconds[_AGAIN].append(_timed(nodes[0], family))
    report.verdicts = [
        Verdict("bytes from the bucket for two nodes, of the objects' bytes", mean_of(crossing)),
        Verdict("first epoch, first node / a node without a region", ratio_of(seconds[_FIRST], seconds[_DIRECT])),
        Verdict("first epoch, second node / a node without a region", ratio_of(seconds[_SECOND], seconds[_DIRECT])),
    ]
    report.tables = [Measured(f"an epoch of {rounds[0].count} objects of 1 MiB", "s", seconds)]
    return report


def _timed(one: Gateway, family: Family) -> float:
    started = time.monotonic()
    read(one, family)
    return time.monotonic() - started


if __name__ == "__main__":
    command.main(test, __doc__)
