"""HEAD from the catalog as a LIST has shown it, and what a ttl epoch asks after a LIST.

    python -m loadtests.heads [--seconds 3] [--rounds 5] [--scale 1] [--record]

10,000 keys in turn over 16 connections, each request with its own key, date and signature, which Forebay verifies.
`as listed`: what is remembered is older than metadata_ttl, and a LIST since then has shown that it is the same. The
epoch: every object once, its metadata remembered and too old. `loadtests.price` has the price of a HEAD.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from loadtests.harness import command
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET, Family
from loadtests.harness.gateway import Gateway, WorkerOf, gateway
from loadtests.harness.headers_only import head_client, signed_heads
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.lister import lister
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict

_CONNECTIONS = 16
_SIZE_BYTES = 100 * 1024
_TTL_SECONDS = 15
"""Longer than the measurements of a round take together."""
_REMEMBERED = "forebay"
_LISTED = "forebay, as listed"

Series = dict[str, list[float]]
Address = tuple[str, int]


def test(options: Options) -> Report:
    objects = Family("small/", options.of(10_000, least=500), _SIZE_BYTES)
    report = Report("heads", f"HEAD from the catalog over {objects.count:,} keys", options.command("heads"))
    cpu: Series = {_REMEMBERED: [], _LISTED: []}
    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin([objects]))
        ours = stack.enter_context(gateway(origin))
        listed = stack.enter_context(
            gateway(origin, name=_LISTED, slot={"consistency": "ttl", "metadata_ttl": f"{_TTL_SECONDS}s"})
        )
        progress("filling")
        _once(ours.address, objects)
        _once(listed.address, objects)
        workers = [WorkerOf(ours, _REMEMBERED), WorkerOf(listed, _LISTED)]
        asked: Series = {"without a LIST": [], "after a LIST": []}
        for number in range(options.rounds):
            progress(f"round {number + 1}")
            time.sleep(_TTL_SECONDS)
            asked["without a LIST"].append(_epoch(origin, listed, objects))
            time.sleep(_TTL_SECONDS)
            _list(listed)
            asked["after a LIST"].append(_epoch(origin, listed, objects))
            for one in turn(workers, number):
                cpu[one.name].append(_cpu_microseconds(one, objects, options.seconds))
    return _finish(report, cpu, asked)


def _finish(report: Report, cpu: Series, asked: Series) -> Report:
    report.verdicts = [
        Verdict("server CPU per HEAD, as listed / remembered", ratio_of(cpu[_LISTED], cpu[_REMEMBERED])),
        Verdict("HEADs at the origin, in thousandths of a ttl epoch after a LIST", mean_of(asked["after a LIST"])),
    ]
    report.tables = [
        Measured("server CPU per HEAD", "µs", cpu),
        Measured("HEADs at the origin in a ttl epoch", "thousandths of the objects, and one", asked),
    ]
    return report


def _list(one: Gateway) -> None:
    with lister(one.address, BUCKET) as through:
        for _ in through.pages("small/"):
            pass


def _once(address: Address, objects: Family) -> list[bytes]:
    """The head of every object."""
    with head_client(address, _CONNECTIONS) as client:
        return client.once(signed_heads(address, objects))


def _epoch(origin: LoadOrigin, listed: Gateway, objects: Family) -> float:
    """Every object once; how many in a thousand the origin was asked for, and one, as no figure may be 0."""
    before = origin.counts().heads
    _once(listed.address, objects)
    return 1 + 1000 * (origin.counts().heads - before) / objects.count


def _cpu_microseconds(one: WorkerOf, objects: Family, seconds: float) -> float:
    requests = signed_heads(one.address, objects)
    with head_client(one.address, _CONNECTIONS) as client:
        before = one.cpu_seconds()
        answered = client.run(requests, seconds)
        return (one.cpu_seconds() - before) / answered * 1e6


if __name__ == "__main__":
    command.main(test, __doc__)
