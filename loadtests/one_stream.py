"""One stream of 1 GiB: warm against a bare `sendfile` server; off the disk against fio, also eight of 256 MiB at once;
and the hits meanwhile.

    python -m loadtests.one_stream [--seconds 3] [--rounds 5] [--scale 1] [--record]

The client is a blocking socket. "Page cache dropped" drops the server's own files only. The hits are 100 KiB objects
over one connection of `wrk`, with and without streams off the disk beside them; the one worker serves both. The same
streams from the bare server tell what of it is the machine: streams, hits and their clients share its cores.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from loadtests.harness import command, fio, machine, tools, wrk
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import in_turns
from loadtests.harness.content import Family, LoadObject, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.sendfile_server import BareSendfile, write_object
from loadtests.harness.signed_requests import Signer
from loadtests.harness.stream import stream_seconds

_HITS = Family("hits/", 16, 100 * 1024)
_STREAMS = 8


def test(options: Options) -> Report:
    big = Family("big/", 1, options.of(1024**3, least=64 * 1024**2))
    several = Family("several/", _STREAMS, options.of(256 * 1024**2, least=64 * 1024**2))
    of = load_object(big.path(0), big.size_bytes)
    all_of = [load_object(path, several.size_bytes) for path in several.paths()]
    mebibytes = big.size_bytes / 1024**2
    report = Report("one_stream", f"One stream of {mebibytes:,.0f} MiB", options.command("one_stream"))
    with ExitStack() as stack:
        origin = stack.enter_context(LoadOrigin([big, several, _HITS]))
        bare = stack.enter_context(BareSendfile([of]))
        ours = stack.enter_context(gateway(origin))
        _fill(ours, of, *all_of)
        progress("warm streams")
        rates = in_turns(
            {
                "forebay": lambda: mebibytes / stream_seconds(ours.address, of),
                "bare sendfile": lambda: mebibytes / stream_seconds(bare.address, of),
            },
            options.rounds,
        )
        report.tables.append(Measured("warm stream", "MiB/s", rates))
        ratio = ratio_of(rates["forebay"], rates["bare sendfile"])
        report.verdicts.append(Verdict("warm stream, forebay / bare sendfile", ratio, at_least(0.9)))
        _off_the_disk(report, ours, "stream off the disk", [of], options)
        _off_the_disk(report, ours, f"{_STREAMS} streams off the disk", all_of, options)
        _hits_meanwhile(report, ours, bare, of, options)
    return report


def _fill(ours: Gateway, *streams: LoadObject) -> None:
    progress("filling forebay")
    for one in (*streams, *(load_object(path, _HITS.size_bytes) for path in _HITS.paths())):
        for _ in range(2):
            stream_seconds(ours.address, one)


def _off_the_disk(report: Report, ours: Gateway, name: str, streams: list[LoadObject], options: Options) -> None:
    if absent := tools.missing("fio"):
        report.notes += absent
        return
    files = [ours.process.directory.parent / f"fio-{number}.data" for number in range(len(streams))]
    for file, one in zip(files, streams, strict=True):
        write_object(file, one)
    mebibytes = sum(one.size_bytes for one in streams) / 1024**2

    def dropped() -> float:
        ours.forget_pages()
        with ThreadPoolExecutor(len(streams)) as clients:
            started = time.perf_counter()
            for _ in clients.map(lambda one: stream_seconds(ours.address, one), streams):
                pass
            return mebibytes / (time.perf_counter() - started)

    progress(name)
    rates = in_turns(
        {
            "forebay, page cache dropped": dropped,
            "fio, direct": lambda: fio.sequential_read_bytes_per_second(*files) / 1024**2,
        },
        options.rounds,
    )
    report.tables.append(Measured(name, "MiB/s", rates))
    ratio = ratio_of(rates["forebay, page cache dropped"], rates["fio, direct"])
    report.verdicts.append(Verdict(f"{name}, forebay / fio", ratio, at_least(0.85)))


def _hits_meanwhile(report: Report, ours: Gateway, bare: BareSendfile, of: LoadObject, options: Options) -> None:
    host = "{}:{}".format(*ours.address)
    signer, now = Signer(host), time.time()
    requests = [signer.get(_HITS.path(n % _HITS.count), at=now - n % 600) for n in range(2000)]

    def p99_milliseconds() -> float:
        seen = wrk.run(ours.url, requests, connections=1, seconds=options.seconds, body_bytes=_HITS.size_bytes)
        return seen.p99_seconds * 1e3

    def beside_streams(address: tuple[str, int], forget_pages: Callable[[], None]) -> float:
        stop = threading.Event()
        streams = threading.Thread(target=_stream_until, args=(stop, address, forget_pages, of))
        streams.start()
        try:
            return p99_milliseconds()
        finally:
            stop.set()
            streams.join()

    progress("hits beside streams off the disk")
    beside, beside_bare = "beside streams off the disk", "beside the same streams of the bare server"
    series = in_turns(
        {
            "alone": p99_milliseconds,
            beside: lambda: beside_streams(ours.address, ours.forget_pages),
            beside_bare: lambda: beside_streams(bare.address, lambda: machine.forget_pages(bare.directory)),
        },
        options.rounds,
    )
    report.tables.append(Measured("99th percentile of 100 KiB hits", "ms", series))
    report.verdicts += [
        Verdict(
            "p99 of hits, beside streams off the disk / alone", ratio_of(series[beside], series["alone"]), at_most(2)
        ),
        Verdict(
            "p99 of hits, beside streams off the disk / beside the bare server's",
            ratio_of(series[beside], series[beside_bare]),
            at_most(1.1),
        ),
    ]


def _stream_until(
    stop: threading.Event, address: tuple[str, int], forget_pages: Callable[[], None], of: LoadObject
) -> None:
    while not stop.is_set():
        forget_pages()
        stream_seconds(address, of)


if __name__ == "__main__":
    command.main(test, __doc__)
