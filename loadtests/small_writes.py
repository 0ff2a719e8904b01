"""Small files written to a bucket that is 20 ms away: what an acknowledgement waits for, and what s3fs asks besides.

    python -m loadtests.small_writes [--rounds 5] [--scale 1] [--record]

PutObject of 4 KiB over one connection, each of a new key, straight to the bucket and through Forebay with
`write = "back"`: in a `strict` slot, in a `ttl` slot of which nothing is known, and in one with an index. Then twelve
files of 4 KiB through s3fs, where it is installed (as `make test-clients` installs it), one after another and each with
an ACL: is it there? → written → how long is it? Straight, and through the slot with the index. Requests that reach the
bucket before the first flush are counted. All processes on all cores; the bucket and the client share a process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from loadtests.harness import command
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET
from loadtests.harness.intervals import mean_of, percentile, ratio_of
from loadtests.harness.report import Measured, Report, Verdict, at_most
from loadtests.harness.saver import Part, Saver
from loadtests.harness.signed_requests import Signer
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.faults import Call, Hold
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

_AWAY_SECONDS = 0.02
_CONTENT = b"x" * 4096
_WRITES = 100
_FILES = 12
_WAIT_SECONDS_MAX = 60.0

_DIRECT, _STRICT, _UNKNOWN, _INDEXED = "direct", "forebay, strict", "forebay, ttl", "forebay, ttl with an index"
_BACK = {"mode": "read-write", "write": "back", "buffer": "1GiB"}
_SLOTS: dict[str, dict[str, Any]] = {
    _STRICT: {"consistency": "strict"},
    _UNKNOWN: {"consistency": "ttl"},
    _INDEXED: {"consistency": "ttl", "negative_ttl": "60s", "index": True, "index_refresh": "30s"},
}

_Series = dict[str, list[float]]


class _Bucket(StrictOrigin):
    """Keeps what is written, 20 ms away. While it holds them, PUTs wait, so that nothing is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.model.create_bucket(BUCKET)
        self._released = asyncio.Event()
        self._released.set()
        self.model.inject(lambda call: call.method == "PUT", Hold(self._released), times=None)

    def hold(self) -> None:
        self.run_inside(self._released.clear)

    def release(self) -> None:
        self.run_inside(self._released.set)

    def asked(self, prefix: str, is_counted: Callable[[Call], bool]) -> int:
        """Return how many such requests about keys under a prefix have come."""
        calls = self.run_inside(lambda: list(self.model.calls))
        return sum((one.key or "").startswith(prefix) and is_counted(one) for one in calls)


@dataclass(frozen=True, slots=True)
class _Through:
    """One way to the bucket. `name` is the contender's, and its keys begin with `prefix`."""

    name: str
    prefix: str
    url: str
    address: tuple[str, int]


class _Bench:
    def __init__(self, stack: ExitStack, options: Options) -> None:
        self.bucket = stack.enter_context(_Bucket())
        self.writes = options.of(_WRITES, least=10)
        self.acknowledged: _Series = defaultdict(list)
        self.asked: _Series = defaultdict(list)
        self.seconds: _Series = defaultdict(list)
        self.heads: _Series = defaultdict(list)
        url = self.bucket.endpoint_url
        self.ways = {_DIRECT: _Through(_DIRECT, "direct/", url, ("127.0.0.1", int(url.rpartition(":")[2])))}
        gateway = stack.enter_context(_gateway(self.bucket))
        host, _, port = gateway.s3_url.removeprefix("http://").rpartition(":")
        for number, name in enumerate(_SLOTS):
            self.ways[name] = _Through(name, f"s{number}/", gateway.s3_url, (host, int(port)))
        self.gateway = gateway

    def learn(self) -> None:
        """Write until the bucket is known: its first write goes through, and the first flush finds out the rest."""
        for way in self.ways.values():
            for name in ("through", "first", "second"):
                self._save(way, name)
        self._until_flushed()
        self.bucket.latency_seconds = _AWAY_SECONDS

    def round(self, number: int) -> None:
        for name in turn(list(self.ways), number):
            progress(f"round {number + 1}: {name}")
            self._puts(self.ways[name], number)
        if importlib.util.find_spec("s3fs") is not None:
            for name in turn([_DIRECT, _INDEXED], number):
                progress(f"round {number + 1}: s3fs, {name}")
                self._files(self.ways[name], number)

    def _puts(self, way: _Through, number: int) -> None:
        self._list(way)
        prefix, seconds = f"{way.prefix}r{number}/", list[float]()
        with self._held(way), closing(_Saver(way)) as saver:
            for one in range(self.writes):
                began = time.perf_counter()
                saver.put(f"{prefix}{one}", _CONTENT)
                seconds.append(time.perf_counter() - began)
            if way.name != _DIRECT:
                self.asked[way.name].append(1 + self.bucket.asked(prefix, lambda call: call.method == "HEAD"))
        self.acknowledged[way.name].append(1000 * percentile(seconds, 0.5))

    def _files(self, way: _Through, number: int) -> None:
        import s3fs

        self._list(way)
        filesystem = s3fs.S3FileSystem(
            key=ACCESS_KEY_ID,
            secret=SECRET_ACCESS_KEY,
            endpoint_url=way.url,
            client_kwargs={"region_name": "us-east-1"},
            s3_additional_kwargs={"ACL": "private"},
            skip_instance_cache=True,
            use_listings_cache=False,
        )
        directory = f"{way.prefix}fs{number}/"
        with filesystem.open(f"{BUCKET}/{way.prefix}fs", "wb") as file:
            file.write(_CONTENT)  # the first with an ACL goes through; and the client has connected
        self._until_flushed()
        self._list(way)
        began = time.perf_counter()
        for one in range(_FILES):
            path = f"{BUCKET}/{directory}{one}"
            if filesystem.exists(path):
                raise RuntimeError(f"{path} is there already")
            with filesystem.open(path, "wb") as file:
                file.write(_CONTENT)
            if filesystem.size(path) != len(_CONTENT):
                raise RuntimeError(f"{path} is not as it was written")
        self.seconds[way.name].append(time.perf_counter() - began)
        self.heads[way.name].append(
            1 + self.bucket.asked(directory, lambda call: call.method == "HEAD" and call.status == 404)
        )

    def _list(self, way: _Through) -> None:
        """Make the index as fresh as after a crawl."""
        if way.name == _INDEXED:
            with closing(_Saver(way)) as saver:
                saver.list(way.prefix)

    def _save(self, way: _Through, name: str) -> None:
        with closing(_Saver(way)) as saver:
            saver.put(f"{way.prefix}{name}", _CONTENT)

    @contextmanager
    def _held(self, way: _Through) -> Iterator[None]:
        if way.name != _DIRECT:
            self.bucket.hold()
        try:
            yield
        finally:
            self.bucket.release()
            self._until_flushed()

    def _until_flushed(self) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS_MAX
        while any(one["objects"] for one in self.gateway.status()["writeback"]["slots"]):
            if time.monotonic() > deadline:
                raise RuntimeError("the flush has not ended in time")
            time.sleep(0.1)


class _Saver(Saver):
    """Signs with the key of the bucket, and lists too."""

    def __init__(self, way: _Through) -> None:
        super().__init__(way.address, Part.of(b""))
        self._signer = Signer("{}:{}".format(*way.address), ACCESS_KEY_ID, SECRET_ACCESS_KEY)

    def list(self, prefix: str) -> None:
        """List the first thousand keys."""
        self._ask("GET", f"/{BUCKET}", f"list-type=2&prefix={quote(prefix, safe='')}")


@contextmanager
def _gateway(bucket: _Bucket) -> Iterator[GatewayProcess]:
    directory = Path(tempfile.mkdtemp(prefix="forebay-load-"))
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    slots = [
        {"name": f"s{number}", "prefix": f"s3://{BUCKET}/s{number}/"} | _BACK | slot
        for number, slot in enumerate(_SLOTS.values())
    ]
    config: dict[str, Any] = {
        "origin": {"endpoint_url": bucket.endpoint_url} | keys,
        "cache": {"capacity": "1GiB", "persistent": True},
        "slots": slots,
    }
    try:
        with GatewayProcess(config, directory=directory / "cache") as gateway:
            yield gateway
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test(options: Options) -> Report:
    title = f"Files of 4 KiB, with the bucket {1000 * _AWAY_SECONDS:g} ms away"
    report = Report("small_writes", title, options.command("small_writes"))
    with ExitStack() as stack:
        bench = _Bench(stack, options)
        bench.learn()
        for number in range(options.rounds):
            bench.round(number)
    acknowledged, asked = bench.acknowledged, bench.asked
    report.tables = [
        Measured("median of PutObject", "ms", acknowledged),
        Measured(f"HEADs at the bucket before the flush of {bench.writes} objects", "requests, and one", asked),
    ]
    report.verdicts = [
        Verdict("PutObject, nothing known, ms", mean_of(acknowledged[_UNKNOWN]), at_most(6)),
        Verdict("PutObject, with an index, ms", mean_of(acknowledged[_INDEXED]), at_most(6)),
        Verdict("PutObject, strict / direct", ratio_of(acknowledged[_STRICT], acknowledged[_DIRECT])),
        Verdict("HEADs before the flush, with an index, and one", mean_of(asked[_INDEXED]), at_most(1)),
    ]
    if bench.seconds:
        report.tables.append(Measured(f"{_FILES} files through s3fs", "s", bench.seconds))
        report.tables.append(
            Measured("HEADs at the bucket for keys that are not there", "requests, and one", bench.heads)
        )
        report.verdicts += [
            Verdict(f"{_FILES} files through s3fs, seconds", mean_of(bench.seconds[_INDEXED]), at_most(0.4)),
            Verdict("HEADs for keys that the index does not list, and one", mean_of(bench.heads[_INDEXED]), at_most(1)),
        ]
    else:
        report.notes.append("s3fs is not installed: nothing was written through it.")
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
