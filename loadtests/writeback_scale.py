"""Write-back with much of something: parts, pending objects, latency of the bucket.

    python -m loadtests.writeback_scale [--rounds 5] [--scale 1] [--record]

A running gateway with a slot that writes back, in front of the strict origin of the tests, which verifies everything.
Both share the cores with the clients, so that CPU says more than time. An object of 10,000 parts has 512 MiB in each,
by what the journal says; no byte of them is anywhere. Pending objects (4 KiB, 100,000 at scale 1 against 1,000) are put
into the buffer of a stopped gateway, which then starts, and is kept from flushing by 503s. "Turn" is the longest time
for which the event loop of a process did nothing else, in CPU time of its thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import logging
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from gateway.core.clock import Moment
from gateway.core.model import ObjectKey
from gateway.core.steps import in_steps
from gateway.operations.writeback.uploads import complete
from gateway.s3.xml import CompletedPart
from gateway.writeback import DIRECTORY
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import ExpectedVersion, Part, State, Write, WriteSpec, parts_digest
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.staged_file import StagedFile, Staging
from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.content import BUCKET
from loadtests.harness.intervals import mean_of, percentile, ratio_of
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.signed_requests import Signer
from loadtests.writeback_parts import WRITES_BACK
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.faults import Answer, Call
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

_PARTS = 10_000
_PART_BYTES = 512 * 1024**2
_MIB = 1024**2
_FEW, _MANY = 1_000, 100_000
_SMALL = b"x" * 4096
_FLUSHED = 1_000
_BEFORE_PER_SECOND = 22.0
"""Small objects flushed at 100 ms to the bucket, by the version before the reconciler."""

_FLUSH_LATENCY_SECONDS = 0.1
_WAIT_SECONDS_MAX = 120.0
_POLL_SECONDS = 0.01
_UNSIGNED = "UNSIGNED-PAYLOAD"

_Series = dict[str, list[float]]


class _Origin(StrictOrigin):
    """Takes no PUT while `holds` is set."""

    def __init__(self) -> None:
        super().__init__(keep_bodies=False)
        self.holds = False
        self.model.create_bucket(BUCKET)
        logging.getLogger("uvicorn.error").disabled = True  # requests that are waiting when it stops
        self.model.inject(self._is_held, Answer(503, "SlowDown"), times=None)

    def _is_held(self, call: Call) -> bool:
        return self.holds and call.method == "PUT"

    def count(self, prefix: str) -> int:
        """How many objects it has under a prefix."""
        return self.run_inside(lambda: sum(1 for key in self.model.buckets[BUCKET].objects if key.startswith(prefix)))

    def until_it_has(self, prefix: str, count: int) -> float:
        """When it has so many (monotonic). RuntimeError when that takes too long."""
        _until(lambda: self.count(prefix) >= count)
        return time.monotonic()


def _until(reached: Callable[[], bool]) -> None:
    """RuntimeError when it takes too long."""
    deadline = time.monotonic() + _WAIT_SECONDS_MAX
    while not reached():
        if time.monotonic() > deadline:
            raise RuntimeError("it never came to it")
        time.sleep(_POLL_SECONDS)


class _Client:
    """One connection to a gateway. RuntimeError for any answer but a 2xx."""

    def __init__(self, gateway: GatewayProcess) -> None:
        parts = urlsplit(gateway.s3_url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
        self._signer = Signer(f"{parts.hostname}:{parts.port}", ACCESS_KEY_ID, SECRET_ACCESS_KEY)

    def ask(self, method: str, key: str, query: str = "", body: bytes = b"") -> tuple[float, bytes]:
        """How long it took, and the answer's body."""
        path = f"/{BUCKET}/{key}" if key else f"/{BUCKET}"
        headers = self._signer.headers(method, path, query, _UNSIGNED)
        began = time.perf_counter()
        self._connection.request(method, f"{path}?{query}" if query else path, body, headers)
        answer = self._connection.getresponse()
        content = answer.read()
        seconds = time.perf_counter() - began
        if answer.status // 100 != 2:
            why = answer.headers.get("x-forebay-not-absorbed")
            raise RuntimeError(f"{method} {path}?{query}: {answer.status} {why} {content[:300]!r}")
        return seconds, content

    def seconds_of(
        self, count: int, method: str, key: Callable[[int], str], query: str = "", body: bytes = b""
    ) -> list[float]:
        return [self.ask(method, key(number), query, body)[0] for number in range(count)]

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="forebay-load-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def _gateway(origin: _Origin, directory: Path) -> Iterator[GatewayProcess]:
    """One worker, on all cores; what its bucket is like is known."""
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    config: dict[str, Any] = {
        "origin": {"endpoint_url": origin.endpoint_url} | keys,
        "cache": {"capacity": "1GiB", "persistent": True},
        "slots": [{"name": "load", "prefix": f"s3://{BUCKET}/"} | WRITES_BACK],
    }
    with GatewayProcess(config, directory=directory / "cache", is_prepared=False) as gateway:
        with closing(_Client(gateway)) as client:
            for name in ("through", "first"):  # the first write to a bucket goes through, and tells what it is like
                client.ask("PUT", f"{directory.name}/{name}", body=b"x")
        origin.until_it_has(f"{directory.name}/", 2)
        yield gateway


def _processes(gateway: GatewayProcess) -> dict[str, int]:
    """Their ids, by name."""
    return {one["name"]: one["process_id"] for one in gateway.status()["gateway"]["processes"]}


# An object of many parts


def _file(number: int) -> StagedFile:
    return StagedFile(f"w0/{number:032x}", _PART_BYTES, hashlib.md5(b"%d" % number, usedforsecurity=False).digest())


async def _put_parts(journal: Journal, upload_id: str, count: int) -> None:
    parts = [Part(number, _file(number), time.time(), {}, '"there"') for number in range(1, count + 1)]
    for first in range(0, count, 250):
        some = parts[first : first + 250]
        now = time.time()
        await asyncio.gather(*(journal.change(partial(_put_part, upload_id, part, now)) for part in some))


def _put_part(upload_id: str, part: Part, now: float, tx: JournalTransaction) -> None:
    if not tx.uploads.put_part(upload_id, part, Moment(now)):
        raise RuntimeError("no such upload")


@contextmanager
def _longest_turns() -> Iterator[list[float]]:
    """Of this thread's event loop inside of the block: what each of its callbacks took, in milliseconds of CPU."""
    turns, run = list[float](), asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        turns.append((time.thread_time() - began) * 1000)

    asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]
    try:
        yield turns
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


def _look_ups(count: int) -> dict[str, float]:
    """The longest turn of each look-up of an object of many parts, in milliseconds, in this process."""
    with _directory() as directory:
        (directory / DIRECTORY).mkdir()
        journal = Journal(directory / DIRECTORY, lambda _: None)
        try:
            return asyncio.run(_timed_look_ups(journal, count))
        finally:
            journal.close()


async def _timed_look_ups(journal: Journal, count: int) -> dict[str, float]:
    key = ObjectKey(BUCKET, "many")
    opened = Write(
        WriteSpec(key, {}, "load"), ExpectedVersion(absent=True), 1.0, State.OPEN, upload_id="upload", multipart=True
    )
    upload = await journal.change(lambda tx: tx.uploads.begin(opened))
    await _put_parts(journal, "upload", count)
    listed = [CompletedPart(number, _file(number).etag, {}) for number in range(1, count + 1)]
    stored = {part.number: part for part in await journal.parts(upload.id)}

    async def page() -> None:
        await journal.parts(upload.id, count - 1000, 1001)

    async def all_parts() -> None:
        await journal.parts(upload.id)

    async def made() -> None:
        await in_steps(complete(upload, {}, stored, listed))
        await in_steps(parts_digest(listed))

    async def upload_now() -> None:
        journal.read(lambda tx: tx.uploads.upload("upload"))

    async def listing() -> None:
        journal.read(lambda tx: tx.writes.listing(BUCKET, b"", None, 1000))

    looks = {
        "ListParts": page,
        "all its parts": all_parts,
        "what Complete makes": made,
        "upload": upload_now,
        "LIST": listing,
    }
    found = {}
    for name, look in looks.items():
        with _longest_turns() as turns:
            await asyncio.create_task(look())
        found[name] = max(0.001, *turns)
    return found


class _Prober:
    """`with _Prober(gateway, key) as milliseconds:` HEADs a pending object all the time."""

    def __init__(self, gateway: GatewayProcess, key: str) -> None:
        self._client, self._key = _Client(gateway), key
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._milliseconds: list[float] = []

    def __enter__(self) -> list[float]:
        self._thread.start()
        return self._milliseconds

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._milliseconds.append(self._client.ask("HEAD", self._key)[0] * 1000)


def _reset_peak(pid: int) -> int:
    """Have VmHWM begin anew (proc(5), clear_refs); what is resident now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    return machine.peak_memory_bytes(pid)


def _many_parts(report: Report, options: Options) -> None:
    count = options.of(_PARTS, least=1000)
    turns: _Series = defaultdict(list)
    beside: _Series = defaultdict(list)
    grown: _Series = defaultdict(list)
    for number in range(options.rounds):
        progress(f"round {number + 1}: {count} parts, looked up")
        for name, value in _look_ups(count).items():
            turns[name].append(value)
        progress(f"round {number + 1}: {count} parts, through a gateway")
        with _Origin() as origin, _directory() as directory, _gateway(origin, directory) as gateway:
            _one_of_many_parts(gateway, origin, directory, count, beside, grown)
    of = f"an object of {count:,} parts"
    report.tables += [
        Measured(f"longest turn of the event loop, {of}", "ms of CPU", turns),
        Measured("a HEAD of something else", "ms", beside),
        Measured(f"more memory at the peak, {of}", "MiB", grown),
    ]
    report.verdicts += [
        Verdict(f"longest turn for {of}: {name}, ms", mean_of(values), at_most(1)) for name, values in turns.items()
    ]
    report.verdicts += [
        Verdict(f"memory of {name} for {of}, MiB", mean_of(values), at_most(64)) for name, values in grown.items()
    ]


def _one_of_many_parts(
    gateway: GatewayProcess, origin: _Origin, directory: Path, count: int, beside: _Series, grown: _Series
) -> None:
    processes = _processes(gateway)
    worker, background = processes["worker0"], processes["background"]
    client = _Client(gateway)
    key, small = f"{directory.name}/many", f"{directory.name}/small"
    origin.holds = True
    client.ask("PUT", small, body=_SMALL)
    upload_id = _text(client.ask("POST", key, "uploads=")[1], "UploadId")
    journal = Journal(directory / "cache" / DIRECTORY, lambda _: None)
    try:
        asyncio.run(_put_parts(journal, upload_id, count))
    finally:
        journal.close()
    listed = "".join(
        f"<Part><PartNumber>{n}</PartNumber><ETag>{_file(n).etag}</ETag></Part>" for n in range(1, count + 1)
    )
    query = f"uploadId={quote(upload_id, safe='')}"
    with _Prober(gateway, small) as alone:
        time.sleep(1.0)
    before = {pid: _reset_peak(pid) for pid in (worker, background)}
    with _Prober(gateway, small) as while_listed:
        for marker in range(0, count, 1000):
            client.ask("GET", key, f"part-number-marker={marker}&{query}")
    with _Prober(gateway, small) as while_completed:
        client.ask("POST", key, query, f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode())
        _until(lambda: any(line.startswith(b"POST") and b"uploadId" in line for line in origin.request_lines))
    for name, found in (("alone", alone), ("beside ListParts", while_listed), ("beside Complete", while_completed)):
        beside[f"{name}, median"].append(percentile(found, 0.5))
        beside[f"{name}, p99"].append(percentile(found, 0.99))
    for name, pid in (("the worker", worker), ("the process that flushes", background)):
        grown[name].append(max(0.1, (machine.peak_memory_bytes(pid) - before[pid]) / _MIB))
    client.close()


def _text(document: bytes, name: str) -> str:
    return document.decode().partition(f"<{name}>")[2].partition("<")[0]


# A bucket that takes its time, or says nothing


def _slow_bucket(report: Report, options: Options) -> None:
    count = options.of(100, least=20)
    taken: _Series = defaultdict(list)
    body = os.urandom(_MIB)
    with _Origin() as origin, _directory() as directory, _gateway(origin, directory) as gateway:
        clients = [_Client(gateway) for _ in range(4)]
        for number in range(options.rounds):
            for name, latency_seconds in (("at 15 s", 15.0), ("silent", 3600.0)):
                progress(f"round {number + 1}: PUTs of 1 MiB, the bucket {name}")
                origin.latency_seconds = latency_seconds
                prefix, found = f"{directory.name}/{name[:2]}{number}", list[float]()
                threads = [
                    threading.Thread(target=partial(_put_some, client, f"{prefix}-{at}-", count // 4, body, found))
                    for at, client in enumerate(clients)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                if len(found) != count // 4 * 4:
                    raise RuntimeError(f"{len(found)} of {count} PUTs were acknowledged")
                taken[f"{name}, median"].append(percentile(found, 0.5))
                taken[f"{name}, p99"].append(percentile(found, 0.99))
        for client in clients:
            client.close()
    report.tables.append(Measured("acknowledged PUT of 1 MiB, the bucket", "s", taken))
    report.verdicts += [
        Verdict(f"acknowledged PUT of 1 MiB, the bucket {name}, p99, s", mean_of(taken[f"{name}, p99"]), at_most(1.5))
        for name in ("at 15 s", "silent")
    ]


def _put_some(client: _Client, prefix: str, count: int, body: bytes, found: list[float]) -> None:
    found += client.seconds_of(count, "PUT", lambda number: f"{prefix}{number}", body=body)


# Much that is pending


async def _fill(buffer: Path, prefix: str, count: int) -> None:
    """Small objects, each with a file of its own, acknowledged in the journal. Nothing is synced but that."""
    staging = Staging(buffer, 0)
    staging.prepare()
    writer = staging.create()
    writer.write(memoryview(_SMALL))
    sealed = staging.seal(writer, hashlib.md5(_SMALL, usedforsecurity=False).digest())
    content, now = staging.path(sealed).read_bytes(), time.time()
    staging.remove(sealed.name)
    journal = Journal(buffer, lambda _: None)
    try:
        for first in range(0, count, 250):
            writes = []
            for number in range(first, min(first + 250, count)):
                file = StagedFile(f"w0/{secrets.token_hex(16)}", sealed.size_bytes, sealed.md5)
                staging.path(file).write_bytes(content)
                key, parts = ObjectKey(BUCKET, f"{prefix}{number:06d}"), (Part(1, file, now),)
                expected = ExpectedVersion(absent=True, asked_at=now)
                spec = WriteSpec(key, {}, "load")
                writes.append(
                    Write(spec, expected, now, etag=file.etag, size_bytes=len(_SMALL), parts=parts, acknowledged_at=now)
                )
            await asyncio.gather(*(journal.change(partial(_acknowledge, one)) for one in writes))
    finally:
        journal.close()


def _acknowledge(write: Write, tx: JournalTransaction) -> None:
    tx.writes.acknowledge(write)


class _Side:
    """A gateway with so much pending, under `prefix`."""

    def __init__(self, origin: _Origin, gateway: GatewayProcess, directory: Path, count: int) -> None:
        self.origin, self.gateway, self.count = origin, gateway, count
        self.prefix = f"{directory.name}/pending/"
        self.other = f"{directory.name}/other/"
        gateway.terminate()
        asyncio.run(_fill(directory / "cache" / DIRECTORY, self.prefix, count))
        began = time.monotonic()
        gateway.start()
        self.start_seconds = time.monotonic() - began
        self.client = _Client(gateway)
        self._numbers = 0

    def acknowledge(self, count: int) -> tuple[float, float]:
        """Milliseconds of a PUT in the middle, and of the worker's CPU for each."""
        pid = self.gateway.worker_pids()[0] or 0
        before, self._numbers = machine.cpu_seconds(pid), self._numbers + count
        first = self._numbers
        found = self.client.seconds_of(count, "PUT", lambda number: f"{self.other}{first + number}", body=_SMALL)
        used = max(machine.cpu_seconds(pid) - before, 0.01)  # a tick
        return percentile(found, 0.5) * 1000, used / count * 1000

    def list(self, count: int, prefix: str) -> float:
        """Milliseconds of a LIST of a page, in the middle."""
        query = f"list-type=2&max-keys=500&prefix={quote(prefix, safe='')}"
        return percentile(self.client.seconds_of(count, "GET", lambda _: "", query), 0.5) * 1000

    def status(self, count: int) -> float:
        """Milliseconds of the summary that `forebay writeback` shows, in the middle."""
        found = list[float]()
        with httpx.Client(base_url=self.gateway.admin_url, trust_env=False, timeout=60) as client:
            for _ in range(count):
                began = time.perf_counter()
                client.get("/api/v1/writeback").raise_for_status()
                found.append(time.perf_counter() - began)
        return percentile(found, 0.5) * 1000

    def flush(self, count: int) -> tuple[float, float]:
        """Objects per second, from a tenth of so many to so many, and milliseconds of CPU for each."""
        pid = _processes(self.gateway)["background"]
        self.origin.holds = False
        began = self.origin.until_it_has(self.prefix, count // 10)
        had, before = self.origin.count(self.prefix), machine.cpu_seconds(pid)
        ended = self.origin.until_it_has(self.prefix, count)
        return (count - had) / (ended - began), (machine.cpu_seconds(pid) - before) / (count - had) * 1000


def _much_pending(report: Report, options: Options) -> None:
    counts = {"few": _FEW, "many": options.of(_MANY, least=2 * _FEW)}
    series: _Series = defaultdict(list)
    figures = ("PUT of 4 KiB, ms", "CPU of a PUT, ms", "LIST beside, ms", "LIST of pending, ms", "status, ms")
    asked = options.of(200, least=20)
    for number in range(options.rounds):
        for name in ("few", "many") if number % 2 == 0 else ("many", "few"):
            progress(f"round {number + 1}: {counts[name]} pending")
            with _Origin() as origin, _directory() as directory, _gateway(origin, directory) as gateway:
                origin.holds = True
                side = _Side(origin, gateway, directory, counts[name])
                side.acknowledge(20)
                found = [
                    *side.acknowledge(asked),
                    side.list(asked // 4, side.other),
                    side.list(asked // 4, side.prefix),
                ]
                found.append(side.status(asked // 4))
                for what, value in zip(figures, found, strict=True):
                    series[f"{what}, {name}"].append(value)
                series[f"start, s, {name}"].append(side.start_seconds)
                origin.latency_seconds = _FLUSH_LATENCY_SECONDS
                rate, used = side.flush(_FLUSHED)
                series[f"flushed at 100 ms, objects/s, {name}"].append(rate)
                series[f"CPU of a flush, ms, {name}"].append(used)
                if name == "few":
                    side.client.close()
                    _remains(series, gateway, directory)
    report.tables.append(Measured(f"{counts['few']:,} (few) and {counts['many']:,} (many) pending", "as said", series))
    for what in (*figures, "start, s", "CPU of a flush, ms"):
        ratio = ratio_of(series[f"{what}, many"], series[f"{what}, few"])
        report.verdicts.append(Verdict(f"{what}, many / few pending", ratio, at_most(1.1)))
    rates = {name: series[f"flushed at 100 ms, objects/s, {name}"] for name in counts}
    report.verdicts += [
        Verdict("flushed at 100 ms, many / few pending", ratio_of(rates["many"], rates["few"]), at_least(0.9)),
        Verdict(
            f"small objects flushed at 100 ms, / {_BEFORE_PER_SECOND:g} a second",
            mean_of([rate / _BEFORE_PER_SECOND for rate in rates["few"]]),
            at_least(10),
        ),
    ]


def _remains(series: _Series, gateway: GatewayProcess, directory: Path) -> None:
    """What the journal has of keys that were flushed, some minutes later at most."""
    journal = directory / "cache" / DIRECTORY / "journal"
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as connection:
        query = "SELECT (SELECT count(*) FROM writes WHERE state = 5), (SELECT count(*) FROM origin)"
        _until(lambda: not connection.execute("SELECT 1 FROM writes WHERE pending = 1 LIMIT 1").fetchall())
        ended, origin = connection.execute(query).fetchone()
        [size_bytes] = connection.execute("SELECT sum(length(record) + length(key)) FROM origin").fetchone()
        series["rows left of ended uploads"].append(max(ended, 0.001))
        series["bytes left of a flushed key"].append(size_bytes / origin)


def test(options: Options) -> Report:
    report = Report("writeback_scale", "Write-back with much of something", options.command("writeback_scale"))
    _many_parts(report, options)
    _slow_bucket(report, options)
    _much_pending(report, options)
    report.notes.append(
        "What remains of a flushed key is one row for ten minutes, of 50,000 keys at most; of an upload, one for "
        "a day, of 50,000 at most."
    )
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
