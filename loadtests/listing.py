"""LIST from the index: a page's CPU against a bare loop, a listing against the origin, delimiters, bytes per key.

    python -m loadtests.listing [--rounds 5] [--scale 1] [--record]

Pages of 1,000 keys of a prefix of 1 M, learned by listing them once through the gateway. The bare loop reads the same
records from the same LMDB file and formats the same XML, in this process. boto3 lists through the gateway, and out of
the same pages in its own process: what it takes for itself. The origin has 30 ms latency where it is compared. Common
prefixes: 1,000 with 10,000 keys each, in an index of its own, without a server.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import lmdb

from gateway.core.clock import SystemClock
from gateway.core.model import Homes
from gateway.metadata.listing.index import FoundPage, ListingIndex
from gateway.metadata.listing.pages import END, ListRequest, key_successor
from gateway.metadata.listing.ranges import Batch, KeyBound
from gateway.metadata.listing.records import contents_xml, encoded, pack
from gateway.metadata.opening import open_directory
from gateway.s3.list_result import EntryTemplate, ListedEntry
from loadtests.harness import command, machine
from loadtests.harness.boto_lister import BotoLister, Canned
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import in_turns
from loadtests.harness.content import BUCKET, Family
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.lister import Lister, lister
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most

PREFIX = "imagenet/train/n00000000/ILSVRC2012_train_images_"
"""Keys of 59 bytes."""

PAGE_KEYS = 1000
_LATENCY_SECONDS = 0.030
_BOTO_PAGES = 20
_BOTO_TURNS = 4
"""Short turns and many of them: boto3 takes fifty times as long as the server."""
_PREFIXES = 1000
_MAP_BYTES = 2**37
_RECORD = struct.Struct("<IHHQ16s")
_TEMPLATE = EntryTemplate("", None, "<StorageClass>STANDARD</StorageClass>")


def test(options: Options) -> Report:
    count = options.of(1_000_000, least=20_000)
    report = Report("listing", f"LIST of {count:,} keys from the index", options.command("listing"))
    family = Family(PREFIX, count, 1000)
    cpu: dict[str, list[float]] = {"forebay": [], "bare loop": []}
    rates: dict[str, list[float]] = {"forebay": [], "origin": []}
    with (
        LoadOrigin([family]) as origin,
        gateway(origin) as ours,
        lister(ours.address, BUCKET) as through,
        lister(origin.address, BUCKET) as direct,
    ):
        progress("learning")
        learning = _cpu_milliseconds(ours.worker_pid, through, None)
        bare = _BareLoop(ours.process.directory / "catalog" / "listing")
        pages = min(300, count // PAGE_KEYS)
        for number in range(options.rounds):
            progress(f"round {number + 1}")
            cpu["forebay"].append(_cpu_milliseconds(ours.worker_pid, through, pages))
            cpu["bare loop"].append(bare.cpu_milliseconds(pages))
        progress("boto3")
        few = min(_BOTO_PAGES, pages)
        client, canned = BotoLister(ours.url, PREFIX, few), Canned(through, PREFIX, few)
        turns = {"through forebay": client.seconds, "parsing alone": lambda: client.seconds(canned)}
        boto = in_turns(turns, _BOTO_TURNS * options.rounds)
        origin.shape(latency_seconds=_LATENCY_SECONDS)
        for number in range(options.rounds):
            progress(f"against the origin, round {number + 1}")
            rates["forebay"].append(_keys_per_second(through, 100))
            rates["origin"].append(_keys_per_second(direct, 50))
        bytes_per_key = bare.size_bytes() / count
        bare.close()
    report.verdicts = [
        Verdict("server CPU per page, forebay / bare loop", ratio_of(cpu["forebay"], cpu["bare loop"]), at_most(2.5)),
        Verdict(
            "keys per second, forebay / origin with 30 ms", ratio_of(rates["forebay"], rates["origin"]), at_least(15)
        ),
        Verdict(
            "boto3's time, through forebay / parsing the same pages alone",
            ratio_of(boto["through forebay"], boto["parsing alone"]),
            at_most(1.05),
        ),
        Verdict("bytes per key, learned in order", mean_of([bytes_per_key]), at_most(130)),
        *_delimited(options),
    ]
    report.tables = [
        Measured("CPU per page", "ms", cpu),
        Measured("listed", "keys/s", rates),
        Measured("boto3", "s", boto),
    ]
    report.notes = [f"Learning a page of the origin costs the worker {learning:.1f} ms CPU."]
    return report


def _cpu_milliseconds(pid: int, through: Lister, pages: int | None) -> float:
    """The server's, per page."""
    before, listed = machine.cpu_seconds(pid), 0
    for _ in through.pages(PREFIX, pages):
        listed += 1
    return (machine.cpu_seconds(pid) - before) / listed * 1e3


def _keys_per_second(through: Lister, pages: int) -> float:
    started, listed = time.perf_counter(), 0
    for body in through.pages(PREFIX, pages):
        listed += PAGE_KEYS if len(body) > PAGE_KEYS * len(PREFIX) else 0
    return listed / (time.perf_counter() - started)


class _BareLoop:
    """What nobody can do without: read the records, format them."""

    def __init__(self, directory: Path) -> None:
        self._environment = lmdb.open(str(directory), readonly=True, max_dbs=4, map_size=_MAP_BYTES, lib_version=1)
        self._entries = self._environment.open_db(b"entries", create=False)

    def cpu_milliseconds(self, pages: int) -> float:
        started, after = time.process_time(), b"\0\0\0\0"
        for _ in range(pages):
            after, _ = self._page(after)
        return (time.process_time() - started) / pages * 1e3

    def size_bytes(self) -> int:
        with self._environment.begin() as transaction:
            table = transaction.stat(self._entries)
        return int(table["psize"]) * int(table["branch_pages"] + table["leaf_pages"])

    def close(self) -> None:
        self._environment.close()

    def _page(self, after: bytes) -> tuple[bytes, bytes]:
        pieces, dates = [], dict[int, str]()
        with self._environment.begin() as transaction:
            cursor = transaction.cursor(db=self._entries)
            cursor.set_range(after)
            for place, record in itertools.islice(cursor, PAGE_KEYS):
                seconds, milliseconds, _, size, digest = _RECORD.unpack(record)
                if seconds not in dates:
                    dates[seconds] = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
                pieces.append(
                    f"<Contents><Key>{quote(place[4:], safe='/-_.~')}</Key>"
                    f"<LastModified>{dates[seconds]}.{milliseconds:03}Z</LastModified><ETag>&quot;{digest.hex()}&quot;"
                    f"</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
                )
        return bytes(place) + b"\0", "".join(pieces).encode()


def _delimited(options: Options) -> list[Verdict]:
    """A page of a thousand common prefixes over many keys, without a server, and the size of the index they lie in."""
    keys = options.of(10_000, least=100)
    progress(f"building {_PREFIXES * keys:,} keys under {_PREFIXES:,} prefixes")
    with tempfile.TemporaryDirectory(prefix="forebay-load-") as directory:
        opened = open_directory(Path(directory) / "catalog", Homes("origin"))
        clock = SystemClock()
        index = ListingIndex(opened, opened.epochs, clock)
        asyncio.run(_build(index, keys))
        size_bytes = opened.listing.statistics()["size_bytes"] / (_PREFIXES * keys)
        milliseconds = [_rolled_up(index) for _ in range(options.rounds)]
        asyncio.run(index.close())
        opened.close()
    what = f"delimiter over {_PREFIXES * keys:,} keys, one page of 1,000 prefixes, ms"
    return [
        Verdict(what, mean_of(milliseconds), at_most(10)),
        Verdict("bytes per key of 55 bytes after a sorted build", mean_of([size_bytes]), at_most(130)),
    ]


async def _build(index: ListingIndex, keys: int) -> None:
    """In order, as a crawl would."""
    place = b""
    for number in range(_PREFIXES):
        for first in range(0, keys, PAGE_KEYS):
            listed = [_listed(number, one, keys) for one in range(first, min(first + PAGE_KEYS, keys))]
            is_last = number == _PREFIXES - 1 and first + PAGE_KEYS >= keys
            stop = END if is_last else key_successor(listed[-1][0])
            await index.land(Batch(BUCKET, place, stop, listed, [_TEMPLATE], index.asked(BUCKET), 1e9))
            place = stop


def _listed(number: int, one: int, keys: int) -> tuple[bytes, bytes]:
    key = b"class-%05d/image-of-the-training-set-%012d.JPEG" % (number, one)
    etag = f'"{number * keys + one:032x}"'
    return key, pack(ListedEntry(key, "2026-01-01T00:00:00.000Z", etag, one, _TEMPLATE), 0)


def _rolled_up(index: ListingIndex) -> float:
    """Milliseconds for the page and its XML."""
    started = time.perf_counter()
    found = index.find(BUCKET, ListRequest(delimiter=b"/"), KeyBound(1e9, 1e9), with_owner=False)
    if not isinstance(found, FoundPage) or len(found.page.prefixes) != _PREFIXES:
        raise RuntimeError("the index does not give the page that it must know")
    contents_xml(found.page.keys, found.templates, url=True, owner=False)
    for prefix in found.page.prefixes:
        encoded(prefix, url=True)
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    command.main(test, __doc__)
