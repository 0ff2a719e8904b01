"""The crawl of a slot with `index = true`: against a serial LIST, own PUTs meanwhile, bytes per key, memory.

    python -m loadtests.crawl [--rounds 5] [--scale 1] [--record]

1 M keys of 55 bytes, 30 ms a page. Nothing is known at the start of each crawl. The serial LIST goes to the origin
directly. PUTs of empty objects go through the gateway from four clients, in a slot that keeps an index too, during a
crawl and without one; the origin answers them after 30 ms too. Once, 10 M keys are crawled without latency, for their
size in the index and the memory of all processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.content import BUCKET
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.lister import Lister, lister
from loadtests.harness.numbered import NumberedOrigin
from loadtests.harness.numbered_server import PREFIX
from loadtests.harness.putter import Putter
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most

PAGE_KEYS = 1000
_LATENCY_SECONDS = 0.030
_CLIENTS = 4
_PUT_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_CRAWL_SECONDS_MAX = 600.0
_INDEXED = {"mode": "read-write", "consistency": "immutable", "index": True, "prefix": f"s3://{BUCKET}/{PREFIX}"}
_NOT_INDEXED = {"mode": "read-write", "consistency": "immutable", "prefix": f"s3://{BUCKET}/{PREFIX}"}


def test(options: Options) -> Report:
    count = options.of(1_000_000, least=50_000)
    report = Report("crawl", f"Crawl of {count:,} keys", options.command("crawl"))
    rates: dict[str, list[float]] = {"crawl": [], "serial LIST": []}
    cpu: dict[str, list[float]] = {"background process": []}
    p99: dict[str, list[float]] = {"during a crawl": [], "without": []}
    with NumberedOrigin(count, latency_seconds=_LATENCY_SECONDS) as origin, lister(origin.address, BUCKET) as direct:
        for number in range(options.rounds):
            progress(f"round {number + 1}")
            rates["serial LIST"].append(_keys_per_second(direct, 100))
            with gateway(origin, slot=_INDEXED) as ours:
                rates["crawl"].append(_crawled(ours, count)[0])
                cpu["background process"].append(_background_cpu_milliseconds(ours) / (count / PAGE_KEYS))
            with gateway(origin, slot=_NOT_INDEXED) as ours:
                p99["without"].append(_put_p99_milliseconds(ours, _PUT_SECONDS))
            with gateway(origin, slot=_INDEXED) as ours:
                p99["during a crawl"].append(_put_p99_milliseconds(ours, None))
    report.verdicts = [
        Verdict("keys per second, crawl / serial LIST", ratio_of(rates["crawl"], rates["serial LIST"]), at_least(8)),
        Verdict(
            "p99 of own PUTs, during a crawl / without", ratio_of(p99["during a crawl"], p99["without"]), at_most(2)
        ),
        *_large(options),
    ]
    report.tables = [
        Measured("keys listed", "keys/s", rates),
        Measured("CPU per page of 1,000 keys", "ms", cpu),
        Measured("p99 of own PUTs", "ms", p99),
    ]
    return report


def _keys_per_second(direct: Lister, pages: int) -> float:
    started, listed = time.perf_counter(), 0
    for _ in direct.pages(PREFIX, pages):
        listed += PAGE_KEYS
    return listed / (time.perf_counter() - started)


def _crawled(ours: Gateway, count: int) -> tuple[float, dict[str, Any]]:
    """Keys per second, as the gateway tells when the crawl began and ended; and all that it tells."""
    index = _index_when_complete(ours)
    if index["keys_before"] != count:
        raise RuntimeError(f"the crawl has listed {index['keys_before']} of {count} keys")
    return count / (index["ended_at"] - index["started_at"]), index


def _index_when_complete(ours: Gateway) -> dict[str, Any]:
    deadline = time.monotonic() + _CRAWL_SECONDS_MAX
    while time.monotonic() < deadline:
        index = _index(ours)
        if index is not None and index["crawls"] and index["complete"]:
            return index
        time.sleep(_LOOK_SECONDS)
    raise RuntimeError(f"no crawl has ended in {_CRAWL_SECONDS_MAX:g} seconds")


def _index(ours: Gateway) -> dict[str, Any] | None:
    """None while the cache directory is not open."""
    return next(iter(ours.process.status()["indexes"]), None)


def _background_pid(ours: Gateway) -> int:
    processes = ours.process.status()["gateway"]["processes"]
    return int(next(one["process_id"] for one in processes if one["name"] == "background"))


def _background_cpu_milliseconds(ours: Gateway) -> float:
    """Its start is in it: about a quarter of a second."""
    return machine.cpu_seconds(_background_pid(ours)) * 1e3


def _put_p99_milliseconds(ours: Gateway, seconds: float | None) -> float:
    """For so long, or as long as the first crawl goes on."""
    with Putter(ours.address, _CLIENTS, f"{PREFIX}own-") as putter:
        if seconds is None:
            _index_when_complete(ours)
        else:
            time.sleep(seconds)
    return sorted(putter.seconds)[int(len(putter.seconds) * 0.99)] * 1e3


def _large(options: Options) -> list[Verdict]:
    """Size and memory of many keys, landed by many listers side by side."""
    count = options.of(10_000_000, least=100_000)
    progress(f"crawling {count:,} keys")
    with NumberedOrigin(count, latency_seconds=0.0) as origin, gateway(origin, slot=_INDEXED) as ours:
        with _most_memory(ours) as most:
            _crawled(ours, count)
        with lister(ours.address, BUCKET) as through:
            for _ in through.pages(PREFIX, 1000):
                most.append(machine.anonymous_bytes(ours.worker_pid))
        size_bytes = _entries_bytes(ours) / count
    return [
        Verdict(f"bytes per key of 55 bytes, crawl of {count:,}", mean_of([size_bytes]), at_most(200)),
        Verdict("memory of a process without mapped pages, MiB", mean_of([max(most) / 2**20]), at_most(250)),
    ]


@contextmanager
def _most_memory(ours: Gateway) -> Iterator[list[int]]:
    """Looks at worker and background process at the end: what a crawl takes, it has by then."""
    seen: list[int] = []
    yield seen
    seen += [machine.anonymous_bytes(pid) for pid in (_background_pid(ours), ours.worker_pid)]


def _entries_bytes(ours: Gateway) -> int:
    """Of the file: the pages of all tables, free ones included."""
    return (ours.process.directory / "catalog" / "listing" / "data.mdb").stat().st_blocks * 512


if __name__ == "__main__":
    command.main(test, __doc__)
