"""HDFS as a store: files are objects, and nothing is written.

A version is the file's id, its time of modification and its length. HDFS never changes bytes that are there: it appends
and truncates, which changes length or time, and gives no id twice. There is no reading under a condition, so the status
is looked at again behind the last byte, before that is handed on.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

from gateway.core.clock import Clock
from gateway.core.errors import OriginBodyError, OriginBusy, OriginUnreachable, S3Error
from gateway.core.model import ByteRange, ObjectKey
from gateway.origin.client import OriginSettings
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.origin.stores.store import Found, FoundUpload, Page, listed_entry
from gateway.origin.stores.webhdfs.rest import FileStatus, WebHdfs
from gateway.origin.stores.webhdfs.walk import may_be, walk
from gateway.s3.error_codes import s3_error
from gateway.s3.list_result import ListedEntry

_TOKEN = struct.Struct("<qqq")
_BUCKET = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class WebHdfsStore:
    """As `Store`. Each directory in the endpoint's path is a bucket."""

    def __init__(self, settings: OriginSettings, clock: Clock) -> None:
        self._hdfs = WebHdfs(settings, clock)

    async def buckets(self) -> Sequence[tuple[str, float]]:
        found, after = list[tuple[str, float]](), b""
        while True:
            listed, following = await self._hdfs.children(b"", after)
            found += [
                (one.name.decode(), one.modified / 1000)
                for one in listed
                if one.is_directory and _BUCKET.fullmatch(one.name)
            ]
            if following is None:
                return found
            after = following

    async def check_bucket(self, bucket: str) -> None:
        found = await self._hdfs.status(bucket.encode())
        if found is None or not found.is_directory:
            raise s3_error("NoSuchBucket", BucketName=bucket)

    def refusal(self, key: ObjectKey) -> S3Error | None:
        return _read_only()

    async def check_place(self, key: ObjectKey) -> None:
        raise _read_only()

    async def head(self, key: ObjectKey) -> Found:
        is_path = not key.key.endswith("/") and may_be(key.key.encode())
        found = await self._hdfs.status(_path(key)) if is_path else None
        if found is None or found.is_directory:
            await self.check_bucket(key.bucket)
            raise s3_error("NoSuchKey", Key=key.key)
        return _found(key.key, found)

    async def open(self, key: ObjectKey, wanted: tuple[int, int | None]) -> HdfsReading:
        return HdfsReading(await self.head(key), key, self, self._hdfs)

    async def list(self, bucket: str, prefix: bytes, after: bytes, delimiter: bytes, limit: int) -> Page:
        if delimiter not in (b"", b"/"):
            raise s3_error("NotImplemented", "The origin is HDFS: a listing's delimiter must be /.")
        await self.check_bucket(bucket)
        directory, slash, start = prefix.rpartition(b"/")
        lead = directory + slash
        if (after > prefix and not after.startswith(prefix)) or (lead and not may_be(directory)):
            return Page((), is_truncated=False)
        entries = list[ListedEntry | bytes]()
        base = b"/".join(filter(None, (bucket.encode(), directory)))
        behind = after.removeprefix(lead) if after.startswith(lead) else b""
        async with aclosing(walk(self._hdfs, base, start, behind, deep=not delimiter)) as walked:
            async for name, status in walked:
                if len(entries) == limit:
                    return Page(entries, is_truncated=True)
                found = None if status.is_directory else _found((lead + name).decode(), status)
                entries.append(lead + name if found is None else listed_entry(found))
        return Page(entries, is_truncated=False)

    async def uploads(self, bucket: str, prefix: str) -> Sequence[FoundUpload]:
        await self.check_bucket(bucket)
        return ()

    async def put(self, *_: Any) -> NoReturn:
        raise _read_only()

    async def delete(self, *_: Any) -> NoReturn:
        raise _read_only()

    async def begin(self, *_: Any) -> NoReturn:
        raise _read_only()

    async def began(self, *_: Any) -> NoReturn:
        raise _read_only()

    async def put_part(self, *_: Any) -> NoReturn:
        raise _read_only()

    async def parts(self, *_: Any) -> NoReturn:
        raise s3_error("NoSuchUpload")

    async def complete(self, *_: Any) -> NoReturn:
        raise s3_error("NoSuchUpload")

    async def abort(self, *_: Any) -> NoReturn:
        raise s3_error("NoSuchUpload")

    async def aclose(self) -> None:
        await self._hdfs.aclose()


class HdfsReading:
    """As `Reading`: of one version, from any datanode that has it."""

    def __init__(self, found: Found, key: ObjectKey, store: WebHdfsStore, hdfs: WebHdfs) -> None:
        self.found = found
        self._key = key
        self._store = store
        self._hdfs = hdfs

    def whole(self, wanted: ByteRange) -> memoryview | None:
        return None

    async def pieces(self, wanted: ByteRange, buffer: ReceiveBuffer) -> AsyncIterator[bytes]:
        at, end, held, excluded, series = wanted.first, wanted.last + 1, b"", list[str](), self._hdfs.series()
        while at < end:
            began = at
            try:
                response, host = await self._hdfs.open(_path(self._key), at, end - at, excluded)
                async with response:
                    try:
                        async for piece in response.stream():
                            if held:
                                yield held
                            held = bytes(piece[: end - at])
                            at += len(held)
                        if at < end:
                            raise OriginBodyError(f"a datanode sent {end - at} bytes less than it was asked for")
                    except OriginBodyError:
                        excluded.append(host)
                        raise
            except OriginBusy:
                raise
            except (OriginUnreachable, OriginBodyError) as error:
                series = self._hdfs.series() if at > began else series
                await self._hdfs.pause(series, error)
            except S3Error as error:
                raise OriginBodyError(f"the file cannot be read any more: {error.message}") from error
        series.succeeded()
        if not await self._is_same():
            raise OriginBodyError("the file was changed while it was read")
        yield held

    async def _is_same(self) -> bool:
        try:
            return (await self._store.head(self._key)).etag == self.found.etag
        except S3Error:
            return False

    async def aclose(self) -> None:
        """Nothing is open between two pieces."""


def _path(key: ObjectKey) -> bytes:
    return f"{key.bucket}/{key.key}".encode()


def _found(key: str, status: FileStatus) -> Found:
    packed = _TOKEN.pack(status.file_id, status.modified, status.size_bytes)
    digest = hashlib.blake2b(packed, digest_size=15).digest()
    etag = f'"{base64.urlsafe_b64encode(digest).decode()}.h"'
    return Found(key, status.size_bytes, etag, status.modified / 1000)


def _read_only() -> S3Error:
    return s3_error("AccessDenied", "The origin is HDFS, which Forebay only reads.")
