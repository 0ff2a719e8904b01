"""A directory as the origin, against what its file system takes without a gateway.

    python -m loadtests.directory [--rounds 5] [--scale 1] [--record]

A cold object of 1 GiB in one GET against `cat` of it, its pages dropped before each; cold objects of 100 KiB, which the
page cache has, by 8 readers; warm GETs in a `strict` slot against an `immutable` one; a directory of a million names,
listed page by page; PUTs of 100 KiB one after another against write, fsync, rename and fsync. The gateway has one
worker on the first core. Complete is measured without a server, of parts of 8 MiB that make 10 GiB, whose bytes are
holes: what is written at Complete does not depend on them.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path

from gateway.core.model import ObjectKey
from gateway.origin.stores.directory.files import Files
from gateway.origin.stores.directory.uploads import Uploads
from gateway.origin.stores.directory.writes import Writer
from gateway.s3.xml import CompletedPart
from loadtests.harness import command, machine, player, warm
from loadtests.harness.cold import Memory
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET, Family, LoadObject, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import mean_of, ratio_of
from loadtests.harness.lister import lister
from loadtests.harness.reader import WrongAnswer
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.signed_requests import Signer

_SMALL_BYTES = 100 * 1024
_GIB = 1024**3
_PART_BYTES = 8 * 1024**2
_PAGE_KEYS = 1000
_BARE = "write, fsync, rename, fsync"
_READERS, _CONNECTIONS, _REPEATED = 8, 16, 6
_STRICT = (warm.STRICT, warm.IMMUTABLE)
_SETTLED_SECONDS = 3.0
"""A younger file is served and not kept."""


def test(options: Options) -> Report:
    report = Report("directory", "A directory as the origin", options.command("directory"))
    with ExitStack() as stack:
        bench = _Bench(stack, options)
        for number in range(options.rounds):
            bench.round(number)
        bench.list_names()
        bench.tell(report)
    return report


class _Bench:
    """The directory, the gateways in front of it, and what was found."""

    def __init__(self, stack: ExitStack, options: Options) -> None:
        self.root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-load-")))
        rounds, count = options.rounds, options.of(4000, least=200)
        self.large = [load_object(f"/{BUCKET}/large-{number}", options.of(_GIB, 2**26)) for number in range(rounds)]
        self.small = [Family(f"small-{number}/", count, _SMALL_BYTES) for number in range(rounds)]
        self.warm = Family("warm/", options.of(1000, least=100), _SMALL_BYTES)
        self.names, self.puts = options.of(1_000_000, least=20_000), options.of(300, least=50)
        self.parts = options.of(10 * _GIB // _PART_BYTES, least=20)
        self.memory, self.found = Memory(), defaultdict[str, list[float]](list)
        self._write_files()
        buckets = [{"name": BUCKET, "endpoint_url": f"file://{self.root}"}]
        made = {warm.IMMUTABLE: "immutable", warm.STRICT: "strict"}
        self.gateways = {
            name: stack.enter_context(gateway(None, name=name, buckets=buckets, slot={"consistency": consistency}))
            for name, consistency in made.items()
        }
        self.ours: Gateway = self.gateways[warm.IMMUTABLE]
        work = warm.Workload(self.warm, _PART_BYTES, _CONNECTIONS, requests=0)
        for one in [*self.gateways.values()] * 2:
            warm.fill(one, work)
        self.warm_requests = {
            name: [(request, _SMALL_BYTES) for request in work.signed("{}:{}".format(*one.address))] * _REPEATED
            for name, one in self.gateways.items()
        }

    def _write_files(self) -> None:
        progress("writing files")
        of_families = [load_object(path, _SMALL_BYTES) for one in (*self.small, self.warm) for path in one.paths()]
        for one in (*self.large, *of_families):
            path = self.root / one.path.removeprefix("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                offset = 0
                while offset < one.size_bytes:
                    offset += file.write(one.piece(offset, min(_PART_BYTES, one.size_bytes - offset)))
        (self.root / BUCKET / "names").mkdir()
        directory = os.open(self.root / BUCKET / "names", os.O_RDONLY)
        for number in range(self.names):
            name = f"image-{number * 7919 % self.names:09}.jpg"
            os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=directory))
        os.close(directory)
        os.sync()
        time.sleep(_SETTLED_SECONDS)

    def round(self, number: int) -> None:
        for what in turn([self._cat, self._stream], number):
            progress(f"round {number + 1}: {what.__name__}")
            one = self.large[number]
            self.memory.touch(2 * one.size_bytes)
            machine.forget_file(self.root / one.path.removeprefix("/"))
            what(one)
        progress(f"round {number + 1}: small objects")
        self._read_small(self.small[number])
        for name in turn(list(self.gateways), number):
            before = self.gateways[name].cpu_seconds()
            requests = self.warm_requests[name]
            player.play(self.gateways[name].address[1], requests, _CONNECTIONS)
            self._note(name, (self.gateways[name].cpu_seconds() - before) / len(requests) * 1e6)
        for put in turn([self._put_bare, self._put], number):
            progress(f"round {number + 1}: {put.__name__}")
            put(number)
        self._complete(number)

    def _note(self, what: str, value: float) -> None:
        self.found[what].append(value)

    def _cat(self, one: LoadObject) -> None:
        started = time.perf_counter()
        subprocess.run(["cat", str(self.root / one.path.removeprefix("/"))], stdout=subprocess.DEVNULL, check=True)
        self._note("cat", one.size_bytes / 1024**2 / (time.perf_counter() - started))

    def _stream(self, one: LoadObject) -> None:
        before = self.ours.cpu_seconds()
        played = player.play(self.ours.address[1], player.parts(self.ours.address, one, one.size_bytes), 1, spin=False)
        self._note("one GET", one.size_bytes / 1024**2 / played.seconds)
        self._note("CPU of one GET", (self.ours.cpu_seconds() - before) / (one.size_bytes / _GIB))

    def _read_small(self, objects: Family) -> None:
        self.memory.touch(objects.count * objects.size_bytes)
        before = self.ours.cpu_seconds()
        played = player.play(self.ours.address[1], player.whole(self.ours.address, objects), _READERS)
        self._note("small objects", objects.count / (self.ours.cpu_seconds() - before))
        self._note("small objects a second", objects.count / played.seconds)

    def _put_bare(self, number: int) -> None:
        (self.root / f"bare-{number}").mkdir()
        directory, body = os.open(self.root / f"bare-{number}", os.O_RDONLY), os.urandom(_SMALL_BYTES)
        seconds = []
        for one in range(self.puts):
            started = time.perf_counter()
            file = os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=directory)
            os.write(file, body)
            os.fsync(file)
            os.close(file)
            os.rename("new", str(one), src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)
            seconds.append(time.perf_counter() - started)
        os.close(directory)
        self._note(_BARE, statistics.median(seconds) * 1e3)

    def _put(self, number: int) -> None:
        signer, body = Signer("{}:{}".format(*self.ours.address)), os.urandom(_SMALL_BYTES)
        seconds, before = [], self.ours.cpu_seconds()
        with closing(HTTPConnection(*self.ours.address)) as connection:
            for one in range(self.puts):
                path = f"/{BUCKET}/put-{number}/{one}"
                headers = signer.headers("PUT", path, "", "UNSIGNED-PAYLOAD")
                started = time.perf_counter()
                connection.request("PUT", path, body, headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    raise WrongAnswer(f"PUT: {answer.status}")
                seconds.append(time.perf_counter() - started)
        self._note("PUT", statistics.median(seconds) * 1e3)
        self._note("CPU of a PUT", (self.ours.cpu_seconds() - before) / self.puts * 1e3)

    def _complete(self, number: int) -> None:
        (self.root / "parts").mkdir(exist_ok=True)
        files = Files(self.root, lambda _: None)
        uploads, key = Uploads(files, Writer(files)), ObjectKey("parts", f"object-{number}")
        upload_id, listed = uploads.begin(key, {}), []
        for part in range(1, self.parts + 1):
            new = uploads.begin_part(key, upload_id, part, _PART_BYTES)
            done = uploads.finish_part(new, os.urandom(16), _PART_BYTES, {})
            listed.append(CompletedPart(part, done.etag, {}))
        started = time.perf_counter()
        uploads.complete(key, upload_id, listed, {}, lambda _: None)
        self._note("Complete", (time.perf_counter() - started) * 1e3)

    def list_names(self) -> None:
        progress("listing")
        before, pages = self.ours.cpu_seconds(), 0
        with lister(self.ours.address, BUCKET) as through:
            started = time.perf_counter()
            for _ in through.pages("names/"):
                self._note("later pages" if pages else "first page", (time.perf_counter() - started) * 1e3)
                pages, started = pages + 1, time.perf_counter()
        self._note("keys listed", self.names / (self.ours.cpu_seconds() - before))

    def tell(self, report: Report) -> None:
        of, found = self.memory.of, self.found
        size = f"{self.large[0].size_bytes / 1024**2:,.0f} MiB"
        first, later = [found["first page"][0] / 1e3], [statistics.median(found["later pages"] or [0])]
        report.verdicts = [
            Verdict(of(f"rate, one GET of {size} / cat"), ratio_of(found["one GET"], found["cat"]), at_least(0.7)),
            Verdict(of("100 KiB cold, requests/s of a core"), mean_of(found["small objects"]), at_least(3000)),
            Verdict(
                "CPU of a warm GET, strict / immutable",
                ratio_of(found[warm.STRICT], found[warm.IMMUTABLE]),
                at_most(1.3),
            ),
            Verdict(f"first page of {self.names:,} names, s", mean_of(first), at_most(3)),
            Verdict("later pages, median, ms", mean_of(later), at_most(15)),
            Verdict("keys listed, a second of a core", mean_of(found["keys listed"]), at_least(60_000)),
            Verdict(f"PUT / {_BARE}", ratio_of(found["PUT"], found[_BARE]), at_most(1.3)),
            Verdict(f"Complete of {self.parts:,} parts, ms", mean_of(found["Complete"]), at_most(50)),
        ]
        report.tables = [
            Measured(of("rate"), "MiB/s", {name: found[name] for name in ("one GET", "cat")}),
            Measured(of("CPU"), "s/GiB", {"one GET": found["CPU of one GET"]}),
            Measured(of("100 KiB cold, 8 readers"), "requests/s", {"forebay": found["small objects a second"]}),
            Measured("CPU of a warm GET", "µs", {name: found[name] for name in self.gateways}),
            Measured("PUT of 100 KiB", "ms", {name: found[name] for name in ("PUT", _BARE)}),
            Measured("CPU of a PUT of 100 KiB", "ms", {"forebay": found["CPU of a PUT"]}),
            Measured("Complete", "ms", {"in process": found["Complete"]}),
        ]
        report.notes = [self.memory.note()]


if __name__ == "__main__":
    command.main(test, __doc__)
