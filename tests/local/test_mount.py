"""The read-only mount without FUSE: which version a file is, what is read ahead, and which error a failure becomes."""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from forebay import mount as module
from forebay.local import Reader
from forebay.mount import AHEAD_BYTES_MAX, AHEAD_BYTES_MAX_IN_ALL, Mount, serve
from forebay.s3_get import ReadError
from forebay.tree import DIRECTORY_SECONDS, Entry, Tree

KIB = 1024
REQUEST_BYTES = 128 * KIB
"""Of a read, as the kernel sends it."""


class Bucket:
    """What S3 answers, as botocore's client, the reader and its HTTP side show it."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[str, bytes]] = {}
        self.reads: list[tuple[str, int, int]] = []
        self.heads = self.lists = 0
        self.fails: Exception | None = None
        self.http = self

    def put(self, key: str, content: bytes, etag: str = '"1"') -> None:
        self.objects[key] = etag, content

    def head(self, name: str) -> dict[str, str]:
        self.heads += 1
        self._fail()
        etag, content = self._found(name)
        modified = "Sun, 29 Nov 2026 12:00:00 GMT"
        return {"ETag": etag, "Content-Length": str(len(content)), "Last-Modified": modified}

    def read(self, name: str, first: int, count: int, *, etag: str) -> memoryview:
        self.reads.append((name, first, count))
        self._fail()
        if self._found(name)[0] != etag:
            raise ReadError("another version", 412)
        return memoryview(self._found(name)[1])[first : first + count]

    def list_objects_v2(self, *, Prefix: str, **_: Any) -> dict[str, Any]:
        self.lists += 1
        self._fail()
        return {"KeyCount": int(any(key.startswith(Prefix) for key in self.objects))}

    def get_paginator(self, _: str) -> Bucket:
        return self

    def paginate(self, *, Prefix: str, **of: Any) -> list[dict[str, Any]]:
        """A page for each name, as those of one directory may come on several."""
        self.lists += 1
        self._fail()
        pages: list[dict[str, Any]] = []
        for key, (etag, content) in sorted(self.objects.items()):
            if key.startswith(Prefix):
                name, slash, _ = key[len(Prefix) :].partition("/")
                modified = datetime(2026, 11, 29, 12, 0, 0, 345_000, tzinfo=UTC)
                one: dict[str, Any] = {"Key": key, "ETag": etag, "Size": len(content), "LastModified": modified}
                pages.append({"CommonPrefixes": [{"Prefix": f"{Prefix}{name}/"}]} if slash else {"Contents": [one]})
        return pages

    def _fail(self) -> None:
        if self.fails is not None:
            raise self.fails

    def _found(self, name: str) -> tuple[str, bytes]:
        found = self.objects.get(name.partition("/")[2])
        if found is None:
            raise FileNotFoundError(name)
        return found


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time forward."""
    time = [0.0]
    monkeypatch.setattr("forebay.tree.time.monotonic", lambda: time[0])

    def forward(seconds: float) -> None:
        time[0] += seconds

    return forward


def mounted(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, remember_seconds: float = 1.0) -> Mount:
    monkeypatch.setattr(module, "s3_client", lambda _: bucket)
    mount = Mount("b", "", remember_seconds, lambda: bucket)  # type: ignore[arg-type, return-value]
    mount.init("/")
    return mount


def errno_of(operation: Callable[[], object]) -> int | None:
    with pytest.raises(OSError) as caught:
        operation()
    return caught.value.errno


def opened(mount: Mount, path: str) -> int:
    mount.getattr(path)
    return mount.open(path, os.O_RDONLY)


def test_names(bucket: Bucket) -> None:
    """Keys that are no paths have no file; an object takes its path even where other keys begin with its own."""
    for key in ("a", "a-x", "a/b", "dir/z", "dir/", "/odd", "dir//odd", "dir/../odd", "n" * 256, "é/x"):
        bucket.put(key, b"x")
    tree = Tree(bucket, bucket, "b", "")  # type: ignore[arg-type]
    assert {name: entry.is_directory for name, entry in tree.list("").items()} == {
        "a": False,
        "a-x": False,
        "dir": True,
        "é": True,
    }
    assert list(tree.list("dir")) == ["z"]
    for path, there in (("a", True), ("a/b", True), ("dir", True), ("dir/z", True), ("no", False), ("dir/..", False)):
        assert (tree.entry(path, 0.0) is not None) == there, path
    heads = bucket.heads
    for no_key in ("a/" + "n" * 256, "a/\udcff", "/".join(["n" * 250] * 5)):
        assert tree.entry(no_key, 0.0) is None
    assert bucket.heads == heads


def test_a_check_asks_in_both_ways(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """LISTs and HEADs go by different libraries, of which one may reach the gateway and the other not."""
    tree = Tree(bucket, bucket, "b", "images/")  # type: ignore[arg-type]
    tree.check()
    assert (bucket.lists, bucket.heads) == (1, 1)
    monkeypatch.setattr(bucket, "head", Mock(side_effect=ReadError("CERTIFICATE_VERIFY_FAILED", 0)))
    with pytest.raises(ReadError):
        tree.check()


def test_what_is_known_is_not_asked_for(bucket: Bucket, now: Callable[[float], None]) -> None:
    """Within the time that is granted; a listing tells of files, and of none that was learned later."""
    bucket.put("dir/a", b"x")
    tree = Tree(bucket, bucket, "b", "")  # type: ignore[arg-type]
    tree.list("dir")
    assert tree.entry("dir/a", 1.0) == tree.entry("dir/a", 1.0)
    assert bucket.heads == 0
    now(1.5)
    assert tree.entry("dir/a", 1.0) == Entry('"1"', 1, datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp())
    assert bucket.heads == 1
    for seconds, heads in ((0.0, 2), (DIRECTORY_SECONDS - 1, 2), (2.0, 3)):
        now(seconds)
        entry = tree.entry("dir", 0.0)
        assert entry is not None
        assert entry.is_directory
        assert bucket.heads == heads


def test_a_listing_and_a_head_show_the_same_version(
    bucket: Bucket, now: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although some buckets list parts of seconds: what one program has open, the next can open."""
    bucket.put("k", b"x")
    mount = mounted(bucket, monkeypatch)
    mount.readdir("/", 0)
    opened(mount, "/k")
    assert bucket.heads == 0
    now(2.0)
    opened(mount, "/k")
    assert bucket.heads == 1


def test_a_size_that_the_kernel_may_not_have_taken_is_asked_for_anew(
    bucket: Bucket, now: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two answers that overlap the kernel may keep the older one: it must not cut the newer version off there."""
    mount, forgotten = mounted(bucket, monkeypatch), list[str]()
    mount.forget = forgotten.append
    bucket.put("k", b"short", '"1"')
    mount.release("/k", opened(mount, "/k"))
    assert forgotten == []
    bucket.put("k", b"longer than that", '"2"')
    now(2.0)
    first = opened(mount, "/k")
    assert forgotten == ["/k"]
    second = opened(mount, "/k")
    for file in (first, second):
        mount.release("/k", file)
    mount.release("/k", opened(mount, "/k"))
    assert forgotten == ["/k"]


def test_what_is_remembered_here_and_in_the_kernel_is_no_older_than_granted(
    bucket: Bucket, now: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has half of the time. And the kernel's library is libfuse 3, though s3fs brings the other one."""
    options: dict[str, Any] = {}
    library = SimpleNamespace(FUSE=lambda *_, **given: options.update(given), fuse_version_minor=14)
    monkeypatch.setitem(sys.modules, "mfusepy", library)
    monkeypatch.setenv("FUSE_LIBRARY_NAME", "")
    monkeypatch.delenv("FUSE_LIBRARY_NAME")
    mount = mounted(bucket, monkeypatch, 60.0)
    serve(mount, "/mnt", foreground=True, allow_other=False)
    assert {options[name] for name in ("attr_timeout", "entry_timeout", "negative_timeout")} == {30.0}
    assert os.environ["FUSE_LIBRARY_NAME"] == "fuse3"
    bucket.put("k", b"x")
    mount.readdir("/", 0)
    for seconds, heads in ((29.0, 0), (2.0, 1)):
        now(seconds)
        mount.getattr("/k")
        assert bucket.heads == heads


@pytest.mark.parametrize(("code", "is_mounted"), [(1, False), (4, False), (8, True)])
def test_a_signal_ends_a_mount_that_was_there(monkeypatch: pytest.MonkeyPatch, code: int, is_mounted: bool) -> None:
    def ended(*_: Any, **__: Any) -> None:
        raise RuntimeError(code)

    monkeypatch.setitem(sys.modules, "mfusepy", SimpleNamespace(FUSE=ended, fuse_version_minor=10))
    mount = Mount("b", "", 1.0, Reader)
    with nullcontext() if is_mounted else pytest.raises(RuntimeError):
        serve(mount, "/mnt", foreground=True, allow_other=False)


def test_a_version_that_fails_is_not_opened_again(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that opens the file anew gets the next version at once."""
    mount = mounted(bucket, monkeypatch, 60.0)
    bucket.put("k", b"first", '"1"')
    file = opened(mount, "/k")
    bucket.put("k", b"second", '"2"')
    assert errno_of(lambda: mount.read("/k", 4096, 0, file)) == errno.ESTALE
    mount.release("/k", file)
    assert errno_of(lambda: mount.open("/k", os.O_RDONLY)) == errno.ESTALE
    assert mount.read("/k", 4096, 0, opened(mount, "/k")) == b"second"


def test_a_change_is_never_mixed_in(
    bucket: Bucket, now: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of an open file are of its version or fail, and its size stays; it can be opened anew once it is closed."""
    mount = mounted(bucket, monkeypatch)
    bucket.put("k", b"first version", '"1"')
    file = opened(mount, "/k")
    bucket.put("k", b"second", '"2"')
    now(2.0)
    assert mount.getattr("/k")["st_size"] == len(b"first version")
    assert errno_of(lambda: mount.read("/k", 4096, 0, file)) == errno.ESTALE
    assert errno_of(lambda: mount.open("/k", os.O_RDONLY)) == errno.ESTALE
    mount.release("/k", file)
    assert errno_of(lambda: mount.open("/k", os.O_RDONLY)) == errno.ESTALE, "the kernel knows the size of the first"
    assert mount.getattr("/k")["st_size"] == len(b"second")
    assert mount.read("/k", 4096, 0, mount.open("/k", os.O_RDONLY)) == b"second"


def test_a_listing_does_not_tell_the_kernel_of_sizes(
    bucket: Bucket, now: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a version that only a listing has shown is not opened: reads would end at the size of the one before."""
    mount = mounted(bucket, monkeypatch, 60.0)
    bucket.put("k", b"short", '"1"')
    mount.getattr("/k")
    bucket.put("k", b"longer than that", '"2"')
    now(2.0)
    mount.readdir("/", 0)
    assert errno_of(lambda: mount.open("/k", os.O_RDONLY)) == errno.ESTALE


def test_what_was_removed_is_stale(
    bucket: Bucket, now: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = mounted(bucket, monkeypatch)
    bucket.put("k", b"x")
    file = opened(mount, "/k")
    del bucket.objects["k"]
    now(2.0)
    assert errno_of(lambda: mount.read("/k", 4096, 0, file)) == errno.ESTALE
    mount.release("/k", file)
    assert errno_of(lambda: mount.open("/k", os.O_RDONLY)) == errno.ESTALE
    assert errno_of(lambda: mount.getattr("/k")) == errno.ENOENT


def test_a_file_that_is_read_in_order_is_read_ahead(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time twice as much, up to a bound, also where the kernel's requests overtake each other."""
    content = random.Random(1).randbytes(20 * 1024 * KIB + 5)
    bucket.put("k", content)
    mount = mounted(bucket, monkeypatch)
    file, found = opened(mount, "/k"), bytearray(len(content))
    starts = list(range(0, len(content), REQUEST_BYTES))
    for at in range(0, len(starts) - 1, 2):
        starts[at], starts[at + 1] = starts[at + 1], starts[at]
    for start in starts:
        part = mount.read("/k", REQUEST_BYTES, start, file)
        found[start : start + len(part)] = part
    assert found == content
    assert max(count for _, _, count in bucket.reads) == AHEAD_BYTES_MAX
    assert len(bucket.reads) < len(starts) / 3
    mount.release("/k", file)
    assert mount._ahead_bytes == 0


def test_random_reads_fetch_no_more_than_is_asked_for(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(2).randbytes(50 * 1024 * KIB)
    bucket.put("k", content)
    mount = mounted(bucket, monkeypatch)
    file = opened(mount, "/k")
    for start in (30 * 1024 * KIB, 5 * 1024 * KIB, 40 * 1024 * KIB, 20 * 1024 * KIB):
        assert mount.read("/k", 4096, start, file) == content[start : start + 4096]
    assert {count for _, _, count in bucket.reads} == {4096}
    assert mount.read("/k", 4096, len(content), file) == b""


def test_what_is_read_ahead_is_bounded_over_all_files(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound files are read as they are asked for; a read that fails takes no room."""
    monkeypatch.setattr(module, "AHEAD_BYTES_MAX_IN_ALL", 1024 * KIB)
    mount = mounted(bucket, monkeypatch)
    for number in range(10):
        bucket.put(f"k{number}", bytes([number]) * 1024 * KIB)
    files = [opened(mount, f"/k{number}") for number in range(10)]
    for start in range(0, 1024 * KIB, REQUEST_BYTES):
        for number, file in enumerate(files):
            found = mount.read(f"/k{number}", REQUEST_BYTES, start, file)
            assert found == bytes([number]) * REQUEST_BYTES
            assert mount._ahead_bytes <= 1024 * KIB
    assert AHEAD_BYTES_MAX_IN_ALL > 1024 * KIB
    held = mount._ahead_bytes
    bucket.put("new", b"x" * REQUEST_BYTES)
    file = opened(mount, "/new")
    bucket.fails = ReadError("no answer", 0)
    assert errno_of(lambda: mount.read("/new", 4096, 0, file)) == errno.EIO
    assert mount._ahead_bytes == held


def test_open_files_hold_no_more_than_is_counted(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was read whole holds nothing; else all of the memory counts, which the reader rounds up."""
    mount = mounted(bucket, monkeypatch)
    monkeypatch.setattr(bucket, "read", lambda _, first, count, **__: memoryview(bytearray(256 * KIB))[:count])
    bucket.put("small", b"x" * 1000)
    bucket.put("other", b"x" * 140 * KIB)
    small, other = opened(mount, "/small"), opened(mount, "/other")
    mount.read("/small", 4096, 0, small)
    assert mount._ahead_bytes == 0
    mount.read("/other", REQUEST_BYTES, 0, other)
    assert mount._ahead_bytes == 256 * KIB
    mount.release("/other", other)
    assert mount._ahead_bytes == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError("HTTP 403"), errno.EACCES),
        (ClientError({"Error": {}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "ListObjectsV2"), errno.EACCES),
        (ClientError({"Error": {}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "ListObjectsV2"), errno.EIO),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), errno.EIO),
        (ReadError("HTTP 500", 500), errno.EIO),
        (ReadError("HTTP 416", 416), errno.ESTALE),
    ],
    ids=str,
)
def test_failures_are_errors_of_a_file_system(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: int
) -> None:
    mount = mounted(bucket, monkeypatch, 0.0)
    bucket.put("k", b"x")
    file = opened(mount, "/k")
    bucket.fails = error
    for operation in (lambda: mount.read("/k", 1, 0, file), lambda: mount.readdir("/", 0)):
        assert errno_of(operation) == expected


def test_nothing_is_opened_to_be_written(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = mounted(bucket, monkeypatch)
    bucket.put("k", b"x")
    mount.getattr("/k")
    assert errno_of(lambda: mount.open("/k", os.O_RDWR)) == errno.EROFS
