"""Objects under a prefix as files in directories: what lies where, as LIST and HEAD through the gateway say."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from forebay.s3_get import HttpReads

NAME_BYTES_MAX = 255
KEY_BYTES_MAX = 1024
REMEMBERED_MAX = 200_000
"""Names that are remembered at a time."""

DIRECTORY_SECONDS = 60.0
"""Seconds for which a directory is remembered at least: it has neither size nor time, and is there while keys are."""


class Entry(NamedTuple):
    """A file, or a directory: then it has no ETag."""

    etag: str
    size_bytes: int
    modified_at: float

    @property
    def is_directory(self) -> bool:
        return not self.etag


DIRECTORY = Entry("", 0, 0.0)


class Tree:
    """Paths are relative, without a slash at either end; the empty one is the prefix itself. Threads may share it.

    A key that is no path (an empty name, `.`, `..`, a name of more than 255 bytes) has no file. Where an object's key
    is also the beginning of others (`a` and `a/b`), the path is the object's file, and the others have none. All that
    ask raise botocore's errors, and those of `HttpReads.get`.
    """

    def __init__(self, client: Any, http: HttpReads, bucket: str, prefix: str) -> None:
        """`client` is botocore's, for S3, which takes ten times as long for a HEAD; `prefix` is empty or ends in /."""
        self._http = http
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, Entry | None]] = OrderedDict()
        """By path, when it was learned what is there, and that; the oldest first."""

    def key(self, path: str) -> str:
        return self._prefix + path

    def check(self) -> None:
        """Ask for the prefix, in both ways."""
        self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1)
        with suppress(FileNotFoundError):
            self._http.head(f"{self._bucket}/{self._prefix}")

    def entry(self, path: str, within_seconds: float) -> Entry | None:
        """Return what was at a path, so many seconds ago at most; None: nothing."""
        if not path:
            return DIRECTORY
        with self._lock:
            learned_at, entry = self._known.get(path, (-math.inf, None))
        if entry is DIRECTORY:
            within_seconds = max(within_seconds, DIRECTORY_SECONDS)
        if time.monotonic() - learned_at > within_seconds:
            began_at, entry = time.monotonic(), self._asked(path)
            self._learn(began_at, {path: entry})
        return entry

    def forget(self, path: str) -> None:
        with self._lock:
            self._known.pop(path, None)

    def list(self, path: str) -> dict[str, Entry]:
        """Return what is in a directory, by name."""
        above = f"{path}/" if path else ""
        key, found, began_at = self.key(above), dict[str, Entry](), time.monotonic()
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=key, Delimiter="/")
        for page in pages:
            for one in page.get("Contents", ()):
                modified_at = int(one["LastModified"].timestamp())  # HEAD tells no parts of a second
                found[one["Key"][len(key) :]] = Entry(one["ETag"], one["Size"], modified_at)
            for one in page.get("CommonPrefixes", ()):
                found.setdefault(one["Prefix"][len(key) : -1], DIRECTORY)
        found = {name: entry for name, entry in found.items() if is_name(name)}
        self._learn(began_at, {above + name: entry for name, entry in found.items()})
        return found

    def _asked(self, path: str) -> Entry | None:
        if not all(map(is_name, path.split("/"))) or len(self.key(path).encode()) > KEY_BYTES_MAX:
            return None
        try:
            found = self._http.head(f"{self._bucket}/{self.key(path)}")
        except FileNotFoundError:
            below = self._client.list_objects_v2(Bucket=self._bucket, Prefix=f"{self.key(path)}/", MaxKeys=1)
            return DIRECTORY if below["KeyCount"] else None
        modified_at = parsedate_to_datetime(found["Last-Modified"]).timestamp()
        return Entry(found["ETag"], int(found["Content-Length"]), modified_at)

    def _learn(self, at: float, found: Mapping[str, Entry | None]) -> None:
        with self._lock:
            for path, entry in found.items():
                if self._known.pop(path, (at, None))[0] <= at:
                    self._known[path] = at, entry
            while len(self._known) > REMEMBERED_MAX:
                self._known.popitem(last=False)


def is_name(name: str) -> bool:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:  # bytes that are no UTF-8, as keys are
        return False
    return name not in ("", ".", "..") and "\0" not in name and size <= NAME_BYTES_MAX
