"""Uploading, listing and reading the data set, as data loaders do: several readers, a fresh shuffle every epoch."""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gateway.demo.clients import CacheTally
from gateway.demo.dataset import PlannedObject, StoredObject, describe
from gateway.demo.errors import DemoError

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
