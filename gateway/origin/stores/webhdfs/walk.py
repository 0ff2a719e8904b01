"""The files below a directory of HDFS, in S3's order.

A namenode lists names in the order of their bytes, and S3's keys have a `/` behind those of directories: `a-b` comes
before `a/x`, and that before `a0`. So a directory is held back until a name that is behind it. Where a page begins,
directories may come behind a name that they are a beginning of: the namenode is asked for each that there may be.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from heapq import heappop, heappush

from gateway.core.errors import S3Error
from gateway.origin.stores.directory import key_paths
from gateway.origin.stores.webhdfs.rest import FileStatus, WebHdfs

_SLASH = ord("/")


async def walk(
    hdfs: WebHdfs, directory: bytes, start: bytes, after: bytes, *, deep: bool
) -> AsyncGenerator[tuple[bytes, FileStatus]]:
    """Yield files by their names from `directory` on, which begin with `start` and are behind `after`.

    With `deep`, those of all directories below; else the directories, with a slash.
    """
    async with aclosing(_children(hdfs, directory, start, after)) as children:
        async for name, child in children:
            if not child.is_directory or not deep:
                if name > after:
                    yield name, child
                continue
            rest = after.removeprefix(name) if after.startswith(name) else b""
            if name + rest < after:
                continue  # all of it comes before
            async with aclosing(walk(hdfs, directory + b"/" + child.name, b"", rest, deep=True)) as below:
                async for key, status in below:
                    yield name + key, status


async def _children(
    hdfs: WebHdfs, directory: bytes, start: bytes, after: bytes
) -> AsyncGenerator[tuple[bytes, FileStatus]]:
    """Yield the children, directories with a slash, in the order of these keys; perhaps some before `after`."""
    cursor = max(start, after.partition(b"/")[0])
    held = list[tuple[bytes, FileStatus]]()
    for size in range(max(1, len(start)), len(cursor) + 1):
        if size == len(cursor) or cursor[size] < _SLASH:
            found = await hdfs.status(directory + b"/" + cursor[:size]) if may_be(cursor[:size]) else None
            if found is not None:
                _hold(held, found._replace(name=cursor[:size]))
    following: bytes | None = cursor
    while following is not None:
        try:
            listed, following = await hdfs.children(directory, following)
        except S3Error as error:
            if error.code != "NoSuchKey":
                raise
            return  # it was deleted, or never there
        for child in listed:
            while held and held[0][0] < child.name:
                yield heappop(held)
            if child.name.startswith(start) and child.name:
                _hold(held, child)
            elif child.name > start:
                following = None
                break
    while held:
        yield heappop(held)


def may_be(path: bytes) -> bool:
    """Return whether a file or directory can have this path. HDFS has no names with a colon."""
    return key_paths.refusal(path.decode()) is None and b":" not in path


def _hold(held: list[tuple[bytes, FileStatus]], child: FileStatus) -> None:
    heappush(held, (child.name + b"/" if child.is_directory else child.name, child))
