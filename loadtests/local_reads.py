"""CPU of local reads, client and gateway together, against what the bytes themselves cost, and against HTTP clients.

    python -m loadtests.local_reads [--seconds 3] [--rounds 5] [--scale 1] [--record]

3,000 objects of 100 KiB in the page cache, read in random order by `forebay.local.Reader` with 1, 16 and 64 keys a
question, every CRC32C verified; 32 objects of 8 MiB, which are one block each. The floor is a loop of pread, or of
pread and CRC32C, over the same bytes in files of its own. The gateway runs on the server core, the client on another.
Where PyTorch and the clients are installed, a DataLoader with four workers reads the small objects through the local
socket, s3torchconnector and s3fs: its first epoch, in which the workers start, and the following ones.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from awscrt.checksums import crc32c

from forebay.local import Reader
from forebay.s3_get import Credentials
from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET, Family, load_object
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from tests.support.gateway_process import ORIGIN_KEYS

_SMALL_BYTES, _LARGE_BYTES, _CHUNK_BYTES = 100 * 1024, 8 * 1024**2, 64 * 1024
_LOCAL = {count: f"local, {count} keys a question" for count in (1, 16, 64)}
_PREAD, _PREAD_CRC = "pread", "pread and CRC32C"
_LARGE, _LARGE_PREAD = "8 MiB, local", "8 MiB, pread"
_WORKERS, _BATCH = 4, 64


class _Floor:
    """Reads the same bytes from files of 16 MiB, and asks no gateway."""

    def __init__(self, directory: Path, objects: Family) -> None:
        self._size_bytes = objects.size_bytes
        self._per_file = max(1, 16 * 1024**2 // objects.size_bytes)
        self._files = []
        for first in range(0, objects.count, self._per_file):
            path = directory / f"{objects.size_bytes}-{first}"
            with path.open("wb") as file:
                for number in range(first, min(first + self._per_file, objects.count)):
                    file.write(whole(objects, number))
            self._files.append(os.open(path, os.O_RDONLY))

    def read(self, numbers: Sequence[int]) -> None:
        size_bytes = self._size_bytes
        for number in numbers:
            file, place = divmod(number, self._per_file)
            os.pread(self._files[file], size_bytes, place * size_bytes)

    def read_verified(self, numbers: Sequence[int]) -> None:
        size_bytes = self._size_bytes
        for number in numbers:
            file, place = divmod(number, self._per_file)
            content = memoryview(os.pread(self._files[file], size_bytes, place * size_bytes))
            for start in range(0, size_bytes, _CHUNK_BYTES):
                crc32c(content[start : start + _CHUNK_BYTES])

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def whole(objects: Family, number: int) -> bytes:
    made, parts, done = load_object(objects.path(number), objects.size_bytes), list[bytes](), 0
    while done < made.size_bytes:
        parts.append(bytes(made.piece(done, made.size_bytes - done)))
        done += len(parts[-1])
    return b"".join(parts)


def test(options: Options) -> Report:
    small = Family("small/", options.of(3000, least=300), _SMALL_BYTES)
    large = Family("large/", options.of(32, least=8), _LARGE_BYTES)
    cpu: dict[str, list[float]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    report = Report("local_reads", f"Local reads of 100 KiB over {small.count:,} keys, page cache warm", "")
    report.command = options.command("local_reads")
    with tempfile.TemporaryDirectory(prefix="forebay-load-") as name, LoadOrigin([small, large]) as origin:
        path = Path(name, "read.sock")
        with gateway(origin, server={"local_socket": str(path)}) as running:
            reader = Reader(socket_path=str(path), endpoint_url=running.url, credentials=Credentials(*ORIGIN_KEYS))
            for objects in (small, large):
                progress(f"filling {objects}")
                _fill(reader, objects)
            floors = {objects.size_bytes: _Floor(Path(name), objects) for objects in (small, large)}
            by_http = reader.http_reads
            ways = _ways(reader, small, large, floors, running)
            for number in range(options.rounds):
                for way in turn(list(ways), number):
                    progress(f"round {number + 1}: {way}")
                    read, objects, at_once = ways[way]
                    _measure(way, read, objects, at_once, running, options.seconds, cpu, seconds)
            assert (reader.http_reads - by_http) * 100 < reader.local_reads, "reads came by HTTP"
            for floor in floors.values():
                floor.close()
            reader.close()
            _loaders(report, running, small, path, options)
    ours = {count: cpu[name] for count, name in _LOCAL.items()}
    report.verdicts += [
        Verdict("reads a second and core, 16 keys", ratio_of([1e6] * options.rounds, ours[16]), at_least(40_000)),
        Verdict("reads a second and core, 64 keys", ratio_of([1e6] * options.rounds, ours[64]), at_least(40_000)),
        Verdict("CPU per read, one key, µs", ratio_of(ours[1], [1.0] * options.rounds), at_most(45)),
        Verdict(f"CPU per read, 64 keys / {_PREAD_CRC}", ratio_of(ours[64], cpu[_PREAD_CRC])),
        Verdict("CPU per read, boto3 / local, 64 keys", ratio_of(cpu["boto3"], ours[64])),
        Verdict("8 MiB: speed, local / pread", ratio_of(seconds[_LARGE_PREAD], seconds[_LARGE]), at_least(0.9)),
    ]
    report.tables += [
        Measured("CPU per read, client and gateway", "µs", cpu),
        Measured("time per read", "µs", seconds),
    ]
    return report


_Way = tuple[Callable[[Sequence[int]], Any], Family, int]
"""Reads objects by their numbers; which objects; how many of them at once."""


def _ways(reader: Reader, small: Family, large: Family, floors: dict[int, _Floor], running: Gateway) -> dict[str, _Way]:
    def local(objects: Family) -> Callable[[Sequence[int]], Any]:
        keys = [f"{BUCKET}/{objects.key(number)}" for number in range(objects.count)]
        return lambda numbers: reader.read_many([keys[number] for number in numbers])

    ways: dict[str, _Way] = {name: (local(small), small, count) for count, name in _LOCAL.items()}
    of_small, of_large = floors[_SMALL_BYTES], floors[_LARGE_BYTES]
    ways |= {_PREAD: (of_small.read, small, 64), _PREAD_CRC: (of_small.read_verified, small, 64)}
    ways |= {
        _LARGE: (local(large), large, 1),
        _LARGE_PREAD: (of_large.read, large, 1),
        "8 MiB, pread and CRC32C": (of_large.read_verified, large, 1),
    }
    import boto3

    given = {"aws_access_key_id": ORIGIN_KEYS[0], "aws_secret_access_key": ORIGIN_KEYS[1]}
    client = boto3.client("s3", endpoint_url=running.url, region_name="us-east-1", **given)

    def by_boto3(numbers: Sequence[int]) -> None:
        for number in numbers:
            client.get_object(Bucket=BUCKET, Key=small.key(number))["Body"].read()

    return ways | {"boto3": (by_boto3, small, 1)}


def _fill(reader: Reader, objects: Family) -> None:
    keys = [f"{BUCKET}/{objects.key(number)}" for number in range(objects.count)]
    deadline = time.monotonic() + 300
    while True:
        before = reader.http_reads
        for begin in range(0, objects.count, 64):
            found = reader.read_many(keys[begin : begin + 64])
            assert bytes(found[0]) == whole(objects, begin)
        if reader.http_reads == before:
            return
        assert time.monotonic() < deadline, "objects do not come from files"
        time.sleep(0.2)


def _measure(
    way: str,
    read: Callable[[Sequence[int]], Any],
    objects: Family,
    at_once: int,
    running: Gateway,
    seconds: float,
    cpu: dict[str, list[float]],
    times: dict[str, list[float]],
) -> None:
    dice = random.Random(way)
    questions = [[dice.randrange(objects.count) for _ in range(at_once)] for _ in range(1024)]
    read(questions[0])
    own, of_gateway = time.process_time(), machine.cpu_seconds(running.worker_pid)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() < begun + seconds:
        read(questions[count % 1024])
        count += 1
    elapsed, reads = time.perf_counter() - begun, count * at_once
    used = time.process_time() - own
    if _PREAD not in way:
        used += machine.cpu_seconds(running.worker_pid) - of_gateway
    cpu[way].append(used / reads * 1e6)
    times[way].append(elapsed / reads * 1e6)


# A DataLoader


class _Samples:
    """A data set for a DataLoader, which asks it for one sample or for a batch."""

    def __init__(self, make: Callable[[], Callable[[Sequence[int]], list[Any]]], count: int) -> None:
        self._make, self._count = make, count
        self._read: Callable[[Sequence[int]], list[Any]] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        if self._read is None:
            self._read = self._make()  # in the worker
        return self._read(numbers)


def _loaders(report: Report, running: Gateway, objects: Family, path: Path, options: Options) -> None:
    """Samples a second and core, through each client that is installed."""
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        report.notes.append("The DataLoader was not measured: PyTorch is not installed.")
        return
    parts = urlsplit(running.url)
    os.environ |= {"AWS_ACCESS_KEY_ID": ORIGIN_KEYS[0], "AWS_SECRET_ACCESS_KEY": ORIGIN_KEYS[1]}
    os.environ |= {"AWS_ENDPOINT_URL_S3": running.url, "AWS_REGION": "us-east-1"}
    keys = [objects.key(number) for number in range(objects.count)]

    def local() -> Callable[[Sequence[int]], list[Any]]:
        reader = Reader(socket_path=str(path), endpoint_url=running.url, credentials=Credentials(*ORIGIN_KEYS))
        return lambda numbers: reader.read_many([f"{BUCKET}/{keys[number]}" for number in numbers])

    def connector() -> Callable[[Sequence[int]], list[Any]]:
        from s3torchconnector._s3client import S3Client

        client = S3Client("us-east-1", endpoint=f"http://{parts.netloc}")
        return lambda numbers: [client.get_object(BUCKET, keys[number]).read() for number in numbers]

    def s3fs() -> Callable[[Sequence[int]], list[Any]]:
        from s3fs import S3FileSystem

        files = S3FileSystem(endpoint_url=running.url)
        return lambda numbers: [files.cat_file(f"{BUCKET}/{keys[number]}") for number in numbers]

    first, later = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    makers = {"local": local, "s3torchconnector": connector, "s3fs": s3fs}
    for number in range(options.rounds):
        for name in turn(list(makers), number):
            progress(f"DataLoader, round {number + 1}: {name}")
            how: dict[str, Any] = {"batch_size": _BATCH, "num_workers": _WORKERS, "persistent_workers": True}
            samples = _Samples(makers[name], objects.count)
            loader = DataLoader(samples, shuffle=True, collate_fn=_lengths, **how)
            first[name].append(_rate(loader, running, 0))
            later[name].append(_rate(loader, running, options.seconds))
    for name, least in (("s3torchconnector", 8), ("s3fs", 30)):
        what = f"DataLoader, samples a second and core: local / {name}"
        report.verdicts.append(Verdict(what, ratio_of(later["local"], later[name]), at_least(least)))
        report.verdicts.append(Verdict(f"{what}, first epoch", ratio_of(first["local"], first[name])))
    report.tables.append(Measured("DataLoader, 4 workers", "samples a second and core", later))
    report.tables.append(Measured("DataLoader, first epoch", "samples a second and core", first))


def _rate(loader: Any, running: Gateway, seconds: float) -> float:
    """Samples a second and core of whole epochs, as many as it takes."""
    before, begun, read = _cpu_seconds(running), time.perf_counter(), 0
    while not read or time.perf_counter() < begun + seconds:
        read += sum(len(sizes) for sizes in loader)
    return read / (_cpu_seconds(running) - before)


def _lengths(batch: Sequence[Any]) -> list[int]:
    return [len(one) for one in batch]


def _cpu_seconds(running: Gateway) -> float:
    """Return the CPU seconds of this process, its workers and the gateway."""
    pids = [os.getpid(), running.worker_pid, *(one.pid for one in multiprocessing.active_children() if one.pid)]
    return sum(machine.cpu_nanoseconds_by_thread(pid).total() for pid in pids) / 1e9


if __name__ == "__main__":
    command.main(test, __doc__)
