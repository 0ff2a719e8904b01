"""Reads that are begun without a wait: what they answer, and what they leave to `send`."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from gateway.core.errors import OriginUnreachable
from gateway.origin.client import BegunRead, OriginRequest, still_of
from gateway.origin.stores.directory import files
from tests.support.directory_origin import BUCKET, DirectoryOrigin

SOON = 0.05


async def begun(nas: DirectoryOrigin, method: str, key: str, **headers: str) -> BegunRead:
    """Begin a read, and wait until it has ended."""
    ended: asyncio.Future[BegunRead] = asyncio.get_running_loop().create_future()
    request = OriginRequest(method, BUCKET, key, headers={name.replace("_", "-"): one for name, one in headers.items()})
    read = nas.begin_read(request, ended.set_result)
    assert read is not None
    read.passes = lambda _: True
    assert await ended is read
    return read


def wait_for_a_tick(path: Path) -> None:
    """Return when a change of the file gets another ctime than it has."""
    clock = path.with_name("clock")
    while True:
        clock.write_bytes(b"")
        if clock.stat().st_ctime_ns > path.stat().st_ctime_ns:
            return


async def sent(nas: DirectoryOrigin, read: BegunRead) -> tuple[int, bytes]:
    """The answer of `send` to the same request."""
    async with await nas.send(read.onward()) as response:
        return response.status, await response.read(10**9)


@pytest.mark.usefixtures("settled")
async def test_a_small_file_comes_whole(nas: DirectoryOrigin) -> None:
    """With the head that `send` gives, and no file left open."""
    nas.write("file", b"0123456789")
    open_files = len(os.listdir("/proc/self/fd"))
    for headers, status, body in (
        ({}, 200, b"0123456789"),
        ({"range": "bytes=2-4"}, 206, b"234"),
        ({"range": "bytes=-4"}, 206, b"6789"),
    ):
        read = await begun(nas, "GET", "file", **headers)
        assert (read.is_whole, read.status, bytes(read.whole() or b"")) == (True, status, body)
        assert await sent(nas, read) == (status, body)
    head = await begun(nas, "HEAD", "file")
    assert (head.is_whole, bytes(head.whole() or b"-"), head.headers["content-length"]) == (True, b"-", "10")
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.usefixtures("settled")
async def test_what_is_not_a_small_answer_is_left_to_send(nas: DirectoryOrigin) -> None:
    """A large file, none at all, a condition that does not hold, a range that is not there."""
    data = os.urandom(files.FIRST_BYTES_MAX + 1)
    nas.write("large", data)
    nas.write("file", b"0123456789")
    for key, headers, expected in (
        ("large", {}, (200, data)),
        ("none", {}, (404, None)),
        ("file", {"range": "bytes=2-4", "if_range": '"another"'}, (200, b"0123456789")),
        ("large", {"if_match": '"another"'}, (412, None)),
        ("large", {"range": "bytes=999999999-"}, (416, None)),
    ):
        read = await begun(nas, "GET", key, **headers)
        assert not read.is_whole
        status, body = await sent(nas, read)
        assert (status, body if status == 200 else None) == expected


async def test_a_file_that_hangs_is_waited_for_once(nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    """`send` raises what the begun read has waited for."""
    nas.write("file", b"data")
    hangs, opens = threading.Event(), list[int]()

    def stuck(*_: object) -> None:
        opens.append(1)
        hangs.wait()

    monkeypatch.setattr(nas.files._files, "open", stuck)
    monkeypatch.setattr(nas.files, "_first_byte_seconds", SOON)
    read = await begun(nas, "GET", "file")
    assert not read.is_whole
    with pytest.raises(OriginUnreachable, match="has not answered"):
        await nas.send(read.onward())
    assert opens == [1]
    hangs.set()


@pytest.mark.usefixtures("settled")
async def test_an_answer_tells_whether_it_still_holds(nas: DirectoryOrigin) -> None:
    """Each change is seen: in place with its mtime put back, by another file, by attributes, by its end."""
    path = nas.write("dir/file", b"one")
    etags = set[str]()
    before = path.stat()

    def in_place() -> None:
        path.write_bytes(b"two")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def by_another() -> None:
        other = nas.write("dir/other", b"one")
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(path)

    def moved() -> None:
        path.parent.rename(nas.bucket / "moved")

    for change in (in_place, by_another, lambda: path.chmod(0o600), moved):
        read = await begun(nas, "HEAD", "dir/file")
        etags.add(read.headers["etag"])
        still = still_of(read)
        assert still is not None
        assert still()
        wait_for_a_tick(path)
        change()
        assert not still()
    assert (len(etags), (await begun(nas, "HEAD", "dir/file")).is_whole) == (4, False)


async def still_holds(nas: DirectoryOrigin, read: BegunRead) -> bool:
    """Return whether the answer is still known to hold; `send` answers in any case."""
    async with await nas.send(OriginRequest("HEAD", BUCKET, "file")) as response:
        assert response.headers["etag"].removeprefix("W/") == read.headers["etag"].removeprefix("W/")
    still = still_of(read)
    assert still is not None
    return still()


async def test_a_file_that_has_just_changed_is_looked_at_on_a_thread(nas: DirectoryOrigin) -> None:
    """It may change once more, and keep its ctime."""
    nas.write("file", b"data")
    assert not await still_holds(nas, await begun(nas, "HEAD", "file"))


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EXDEV, errno.EINVAL])
async def test_what_is_not_in_memory_is_looked_at_on_a_thread(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nor what lies on another file system, nor where the kernel cannot tell."""
    nas.write("file", b"data")
    read = await begun(nas, "HEAD", "file")

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, "no")

    assert await still_holds(nas, read)
    monkeypatch.setattr(files, "open_at_once", refuse)
    assert not await still_holds(nas, read)


@pytest.mark.usefixtures("settled")
async def test_a_bucket_on_a_file_server_is_looked_at_on_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attributes may have to be asked for."""
    monkeypatch.setattr(files, "answers_at_once", lambda _: False)
    monkeypatch.setattr(files, "open_at_once", None)
    nas = DirectoryOrigin(tmp_path)
    nas.write("file", b"data")
    assert not await still_holds(nas, await begun(nas, "HEAD", "file"))
    nas.files.threads.end()
