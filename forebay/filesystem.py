"""An fsspec file system, `forebay://bucket/key`: reads from the gateway's files, everything else by s3fs.

fsspec finds it by the wheel's entry point; `fsspec.filesystem("forebay")` takes the options of `s3fs.S3FileSystem`, and
`reader`, a dictionary of options of `forebay.local.Reader`.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from fsspec.caching import BaseCache, register_cache
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from forebay.local import Reader
from forebay.s3_get import Credentials
from forebay.wire import CHUNK_BYTES

BLOCK_BYTES = 4 * 1024**2
_LEAST_BYTES = 256 * 1024
_DIRECT_BYTES = 256 * 1024
"""Reads of so many bytes go past the cache of small ones."""


class ForebayFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Reads are local; what else there is, LIST, HEAD and writes, s3fs does through the gateway."""

    protocol = "forebay"
    cachable = True

    def __init__(self, reader: Mapping[str, Any] | None = None, **s3fs_options: Any) -> None:
        super().__init__(**s3fs_options)
        self._reader_options = dict(reader or {})
        self._s3fs_options = s3fs_options
        self._lock = threading.Lock()
        self._made: tuple[Reader, Any] | None = None
        self._process = 0

    @property
    def reader(self) -> Reader:
        return self._parts()[0]

    @property
    def s3(self) -> Any:
        """The s3fs behind it."""
        return self._parts()[1]

    def _parts(self) -> tuple[Reader, Any]:
        with self._lock:
            if self._made is None or self._process != os.getpid():  # a fork's child needs an s3fs of its own
                from s3fs import S3FileSystem

                given, own = self._s3fs_options, dict(self._reader_options)
                if given.get("key") and "credentials" not in own:
                    own["credentials"] = Credentials(given["key"], given["secret"], given.get("token") or "")
                if given.get("endpoint_url"):
                    own.setdefault("endpoint_url", given["endpoint_url"])
                reader = self._made[0] if self._made is not None else Reader(**own)
                self._made, self._process = (reader, S3FileSystem(**given)), os.getpid()
            return self._made

    # Reads

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return bytes(self.cat_ranges([path], [start], [end], on_error="raise")[0])

    def cat_ranges(
        self,
        paths: Sequence[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **options: Any,
    ) -> list[Any]:
        count = len(paths)
        starts = list(starts) if isinstance(starts, Sequence) else [starts] * count
        ends = list(ends) if isinstance(ends, Sequence) else [ends] * count
        asked: list[tuple[str, int, int] | None] = []
        for path, start, end in zip(map(self._strip_protocol, paths), starts, ends, strict=True):
            if (start or 0) < 0 or (end or 0) < 0:
                size = self.size(path)
                start, end = max(0, size + start) if (start or 0) < 0 else start, size + end if (end or 0) < 0 else end
            first = start or 0
            asked.append(None if end is not None and end <= first else (path, first, end - first if end else 0))
        found: list[Any] = [b""] * count
        try:
            wanted = [one for one in asked if one is not None]
            bodies = iter(self.reader.read_many(wanted))
            return [b"" if one is None else bytes(next(bodies)) for one in asked]
        except OSError:
            if on_error == "raise":
                raise
        for number, one in enumerate(asked):  # which of them failed?
            if one is not None:
                try:
                    found[number] = bytes(self.reader.read(*one))
                except OSError as error:
                    found[number] = error
        return found

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **options: Any) -> Any:
        paths = self.expand_path(path, recursive=recursive)
        if isinstance(path, str) and not recursive and paths == [self._strip_protocol(path)]:
            return self.cat_file(paths[0])
        found = self.cat_ranges(paths, None, None, on_error="raise" if on_error == "raise" else "return")
        both = zip(paths, found, strict=True)
        return {name: body for name, body in both if on_error != "omit" or not isinstance(body, Exception)}

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode != "rb":
            return self.s3.open(path, mode, block_size=block_size, **options)
        options.setdefault("cache_type", _Windows.name)
        return ForebayFile(self, path, mode, block_size or BLOCK_BYTES, **options)

    # Everything else

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.s3.ls(self._strip_protocol(path), detail=detail, **options)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self.s3.cp_file(self._strip_protocol(path1), self._strip_protocol(path2), **options)

    def put_file(self, lpath: str, rpath: str, *arguments: Any, **options: Any) -> None:
        self.s3.put_file(lpath, self._strip_protocol(rpath), *arguments, **options)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.s3.invalidate_cache(path)


def _by_s3fs(name: str) -> Any:
    """Return a method that s3fs carries out."""

    def method(self: ForebayFileSystem, path: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(self.s3, name)(self._strip_protocol(path), *arguments, **options)

    return method


for _name in (
    "info",
    "exists",
    "find",
    "pipe_file",
    "rm_file",
    "rm",
    "mkdir",
    "makedirs",
    "rmdir",
    "created",
    "modified",
    "sign",
):
    setattr(ForebayFileSystem, _name, _by_s3fs(_name))


class _Windows(BaseCache):  # type: ignore[misc]
    """The bytes around the last small reads: few where a file is read here and there, ever more where it is in order.

    There are two, for readers of archives, which go to the end of a member and back.
    """

    name = "forebay"

    def __init__(self, blocksize: int, fetcher: Any, size: int) -> None:
        super().__init__(blocksize, fetcher, size)
        self._count = _LEAST_BYTES
        self._held = [(0, memoryview(b"")), (0, memoryview(b""))]

    def hold(self, first: int, content: bytes | memoryview) -> None:
        self._held = [(first, memoryview(content)), self._held[0]]

    def take(self, start: int, stop: int) -> memoryview:
        for first, held in self._held:
            if first <= start and stop <= first + len(held):
                return held[start - first : stop - first]
        last, held = self._held[0]
        is_near = abs(start - last) <= 2 * len(held)
        self._count = min(4 * self._count, max(self.blocksize, _LEAST_BYTES)) if is_near else _LEAST_BYTES
        first = start - start % CHUNK_BYTES
        self.hold(first, self.fetcher(first, min(self.size, max(stop, first + self._count))))
        return self._held[0][1][start - first : stop - first]

    def _fetch(self, start: int | None, stop: int | None) -> bytes:
        return bytes(self.take(start or 0, self.size if stop is None else min(stop, self.size)))


register_cache(_Windows, clobber=True)


class ForebayFile(AbstractBufferedFile):  # type: ignore[misc]
    """An object that is read. A change of the object while it is open is an error, not a mixture.

    What is in files here needs no HEAD: its first bytes come with ETag and size.
    """

    def __init__(self, fs: ForebayFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        begun = fs.reader.begin(path, _LEAST_BYTES)
        super().__init__(fs, path, *arguments, **options | ({"size": begun[1]} if begun else {}))
        self._etag: str = begun[0] if begun else self.details["ETag"]
        self._windows = self.cache if isinstance(self.cache, _Windows) else None
        if begun and self._windows is not None:
            self._windows.hold(0, begun[2])

    def _fetch_range(self, start: int, end: int) -> bytes:
        buffer = io.BytesIO(bytes(end - start))  # its bytes can be filled, and taken without a copy
        with buffer.getbuffer() as target:
            self.fs.reader.read_into(target, self.path, start, etag=self._etag)
        return buffer.getvalue()

    def read(self, length: int | None = -1) -> bytes:
        """Return the next bytes; many of them without the cache of small reads."""
        size = self._count(self.size if length is None or length < 0 else length)
        if not size:
            return b""
        fetch = self.cache._fetch if size < _DIRECT_BYTES else self._fetch_range
        content = bytes(fetch(self.loc, self.loc + size))
        self.loc += size
        return content

    def readinto(self, target: Any) -> int:
        """Fill a buffer as `read` does."""
        view = memoryview(target).cast("B")
        size = self._count(len(view))
        if size >= _DIRECT_BYTES:
            self.fs.reader.read_into(view[:size], self.path, self.loc, etag=self._etag)
        elif size and self._windows is not None:
            view[:size] = self._windows.take(self.loc, self.loc + size)
        else:
            view[:size] = self.read(size)
            return size
        self.loc += size
        return size

    def _count(self, wanted: int) -> int:
        if self.closed:
            raise ValueError("I/O operation on a closed file")
        return max(0, min(wanted, int(self.size) - int(self.loc)))
