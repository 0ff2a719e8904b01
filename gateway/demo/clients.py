"""The demo's job by boto3: upload, list and read as data loaders do, save and restore as multipart uploads do."""

from __future__ import annotations

import hashlib
import io
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gateway.demo.dataset import PlannedObject, StoredObject, describe
from gateway.demo.stack import REGION, AccessKey, DemoError

_AWS_PREFIX = "AWS_"


class CacheTally:
    """Counts the `x-forebay-cache` header of every GetObject answer of one client."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def watch(self, client: Any) -> None:
        client.meta.events.register("after-call.s3.GetObject", self._count)

    def take(self) -> Counter[str]:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def _count(self, http_response: Any, **_: object) -> None:
        header = http_response.headers.get("x-forebay-cache", "none").partition(";")[0]
        with self._lock:
            self._counts[header] += 1


def hit_ratio(counts: Mapping[str, int]) -> float:
    """Return the share of GETs answered from this node's disk alone; 0 when there were none."""
    total = sum(counts.values())
    return counts.get("hit", 0) / total if total else 0.0


def s3_client(url: str, keys: AccessKey, connections: int) -> Any:
    """Return a boto3 client with nothing set but the endpoint: path style, SigV4, boto3's own checksums."""
    import boto3
    from botocore.config import Config

    config = Config(
        max_pool_connections=connections,
        retries={"mode": "standard", "total_max_attempts": 2},
        connect_timeout=5,
        read_timeout=30,
        proxies={},
    )
    session = boto3.session.Session(
        aws_access_key_id=keys.access_key_id, aws_secret_access_key=keys.secret_access_key, region_name=REGION
    )
    return session.client("s3", endpoint_url=url, config=config)


@contextmanager
def without_aws_settings() -> Iterator[None]:
    """Hide the user's own AWS profile, endpoint and CA bundle while the demo runs."""
    taken = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_AWS_PREFIX)}
    os.environ.update(AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(_AWS_PREFIX)]:
            del os.environ[name]
        os.environ.update(taken)


_CHUNK_BYTES = 1024 * 1024

Advance = Callable[[int], None]
"""Told how many bytes more are done; called from several threads."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Reading:
    """One timed pass over objects. `cache` counts the x-forebay-cache header of its GETs."""

    seconds: float
    size_bytes: int
    cache: Counter[str]


@dataclass(frozen=True, slots=True)
class Reader:
    """How a job reads: from which endpoint, and with how many objects in flight."""

    client: Any
    tally: CacheTally
    bucket: str
    readers: int

    def epoch(self, objects: Sequence[StoredObject], shuffle_seed: int, advance: Advance) -> Reading:
        """Read every object once, in the order of this seed; DemoError at the first wrong byte."""
        order = list(objects)
        random.Random(shuffle_seed).shuffle(order)
        self.tally.take()
        begun = time.perf_counter()
        sizes = in_parallel(partial(self._read, advance=advance), order, self.readers)
        return Reading(time.perf_counter() - begun, sum(sizes), self.tally.take())

    def list_all(self, prefix: str) -> tuple[float, dict[str, int]]:
        """Seconds it took, and key → size, by ListObjectsV2."""
        begun = time.perf_counter()
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        found = {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", [])}
        return time.perf_counter() - begun, found

    def _read(self, stored: StoredObject, advance: Advance) -> int:
        digest = hashlib.sha256()
        size = 0
        for chunk in self.client.get_object(Bucket=self.bucket, Key=stored.key)["Body"].iter_chunks(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            advance(len(chunk))
        if (size, digest.hexdigest()) != (stored.size_bytes, stored.sha256):
            raise DemoError(f"wrong bytes: {stored.key} has {size} bytes, SHA-256 {digest.hexdigest()}")
        return size


def upload(
    client: Any, bucket: str, planned: Sequence[PlannedObject], writers: int, advance: Advance
) -> list[StoredObject]:
    """Generate and put every object; what comes back is what the reads must find."""

    def put(one: PlannedObject) -> StoredObject:
        content = one.make()
        client.put_object(Bucket=bucket, Key=one.key, Body=content)
        advance(len(content))
        return describe(one.key, content)

    return in_parallel(put, planned, writers)


def in_parallel(work: Callable[[T], R], items: Iterable[T], workers: int) -> list[R]:
    """`work` on every item in `workers` threads; the first failure, or a signal, leaves the rest undone."""
    with _executor(workers) as executor:
        return list(executor.map(work, items))


@contextmanager
def _executor(workers: int) -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor(workers, thread_name_prefix="reader")
    try:
        yield executor
        executor.shutdown(wait=True)
    except BaseException:
        # Not waited for: what is in flight fails as soon as the processes behind it are stopped.
        executor.shutdown(wait=False, cancel_futures=True)
        raise


_PART_BYTES = 8 * 1024 * 1024
_PARTS_IN_FLIGHT = 4
_ARRIVAL_SECONDS = 60.0
_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Checkpointer:
    """Writes to and reads from one endpoint with boto3's transfer manager."""

    client: Any
    tally: CacheTally
    bucket: str
    scratch: Path

    def save(self, key: str, state: bytes, advance: Advance) -> tuple[Reading, StoredObject]:
        """Upload in parts. The reading's bytes are those written."""
        self.tally.take()
        begun = time.perf_counter()
        self.client.upload_fileobj(io.BytesIO(state), self.bucket, key, Config=_transfer_config(), Callback=advance)
        seconds = time.perf_counter() - begun
        self._require_multipart(key)
        return Reading(seconds, len(state), self.tally.take()), describe(key, state)

    def wait_for(self, saved: StoredObject, etag: str) -> None:
        """Until this endpoint has what another one has acknowledged, as the same version; DemoError if never."""
        deadline = time.monotonic() + _ARRIVAL_SECONDS
        while self._etag(saved.key) != etag:
            if time.monotonic() > deadline:
                raise DemoError(f"{saved.key} has not arrived after {_ARRIVAL_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)

    def etag(self, key: str) -> str:
        """Return the ETag of an existing object."""
        found = self._etag(key)
        if found is None:
            raise DemoError(f"{key} is not there")
        return found

    def _etag(self, key: str) -> str | None:
        page = self.client.list_objects_v2(Bucket=self.bucket, Prefix=key, MaxKeys=1)
        return next((one["ETag"] for one in page.get("Contents", []) if one["Key"] == key), None)

    def restore(self, key: str, state: bytes, advance: Advance) -> Reading:
        """Download by ranges into a file; DemoError unless it holds exactly `state`."""
        path = self.scratch / "restored"
        self.tally.take()
        begun = time.perf_counter()
        self.client.download_file(self.bucket, key, str(path), Config=_transfer_config(), Callback=advance)
        reading = Reading(time.perf_counter() - begun, path.stat().st_size, self.tally.take())
        if path.read_bytes() != state:
            raise DemoError(f"wrong bytes: the restored {key} is not what was saved")
        path.unlink()
        return reading

    def _require_multipart(self, key: str) -> None:
        etag = self.etag(key)
        if "-" not in etag:
            raise DemoError(f"{key} was not stored as a multipart upload: its ETag is {etag}")


def _transfer_config() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=_PART_BYTES,
        multipart_chunksize=_PART_BYTES,
        max_concurrency=_PARTS_IN_FLIGHT,
        preferred_transfer_client="classic",  # the CRT client, chosen on some machines, refuses plain http
    )
