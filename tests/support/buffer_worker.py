"""A process that writes to a write-back buffer until it is killed.

    python -m tests.support.buffer_worker DIRECTORY WORKER SEED [--without-sync-of=file|journal]

It says what it is about to do (`do …`) and what was acknowledged (`ok …`), a JSON line each, before it goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import structlog

from gateway.core.model import ObjectKey
from gateway.s3.headers import multipart_etag
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal import journal, schema
from gateway.writeback.journal.records import ExpectedVersion, Part, Write, WriteSpec
from gateway.writeback.staged_file import StagedFile, StagedWriter
from tests.support.writeback import md5

KEYS_PER_WORKER = 4


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Writer:
    """Does one random thing after the other."""

    def __init__(self, buffer: WritebackBuffer, worker: int, seed: int) -> None:
        self._buffer = buffer
        self._worker = worker
        self._dice = random.Random(seed)
        self._uploads: dict[str, ObjectKey] = {}

    async def step(self) -> None:
        doing = self._dice.choice([self._put, self._put, self._delete, self._create, self._part, self._complete])
        await doing()

    def _key(self) -> ObjectKey:
        return ObjectKey("bucket", f"w{self._worker}/k{self._dice.randrange(KEYS_PER_WORKER)}")

    async def _stage(self, seed: int, size: int) -> StagedFile:
        writer = self._buffer.stage()
        data = content(seed, size)
        writer.write(memoryview(data))
        return await self._buffer.seal(writer, md5(data))

    async def _put(self) -> None:
        key, seed, size = self._key(), self._dice.randrange(2**32), self._dice.choice((0, 10, 70_000))
        say("do", what="put", key=key.key, seeds=[[seed, size]])
        file = await self._stage(seed, size)
        part = Part(1, file, 1.0)
        await self._buffer.acknowledge(
            Write(
                WriteSpec(key, {}, "s"),
                ExpectedVersion(absent=True),
                1.0,
                etag=file.etag,
                size_bytes=size,
                parts=(part,),
                acknowledged_at=1.0,
            )
        )
        say("ok")

    async def _delete(self) -> None:
        key = self._key()
        say("do", what="delete", key=key.key)
        gone = Write(WriteSpec(key, {}, "s"), ExpectedVersion(), 1.0, deleted=True, acknowledged_at=1.0)
        await self._buffer.acknowledge(gone)
        say("ok")

    async def _create(self) -> None:
        if len(self._uploads) > 3:
            await self._abort()
            return
        key, upload_id = self._key(), f"u{self._worker}-{self._dice.randrange(2**62)}"
        say("do", what="create", key=key.key, upload=upload_id)
        opened = Write(WriteSpec(key, {}, "s"), ExpectedVersion(absent=True), 1.0, upload_id=upload_id)
        await self._buffer.journal.change(lambda tx: tx.uploads.begin(opened))
        self._uploads[upload_id] = key
        say("ok")

    async def _part(self) -> None:
        if not self._uploads:
            return
        upload_id, number = self._dice.choice(sorted(self._uploads)), self._dice.randrange(1, 4)
        seed, size = self._dice.randrange(2**32), self._dice.choice((1, 66_000))
        say("do", what="part", upload=upload_id, number=number, seeds=[[seed, size]])
        file = await self._stage(seed, size)
        assert await self._buffer.put_part(upload_id, Part(number, file, 1.0))
        say("ok")

    async def _complete(self) -> None:
        ready = [name for name in sorted(self._uploads) if self._parts(name)]
        if not ready:
            return
        upload_id = self._dice.choice(ready)
        key, parts = self._uploads.pop(upload_id), self._parts(upload_id)
        etag = multipart_etag([part.file.etag for part in parts]) or ""
        size_bytes = sum(part.file.size_bytes for part in parts)
        say("do", what="complete", key=key.key, upload=upload_id)
        made = Write(
            WriteSpec(key, {}, "s"),
            ExpectedVersion(absent=True),
            1.0,
            etag=etag,
            size_bytes=size_bytes,
            parts=tuple(parts),
            multipart=True,
            upload_id=upload_id,
            acknowledged_at=1.0,
        )
        await self._buffer.complete(made)
        say("ok")

    async def _abort(self) -> None:
        upload_id = self._dice.choice(sorted(self._uploads))
        self._uploads.pop(upload_id)
        say("do", what="abort", upload=upload_id)
        await self._buffer.abort(upload_id)
        say("ok")

    def _parts(self, upload_id: str) -> list[Part]:
        upload = self._buffer.look(lambda tx: tx.uploads.upload(upload_id))
        return [] if upload is None else self._buffer.look(lambda tx: list(tx.parts.of(upload.id)))


def say(kind: str, **what: Any) -> None:
    sys.stdout.write(json.dumps([kind, what]) + "\n")
    sys.stdout.flush()


def leave_out(sync: str) -> None:
    """What a mistake in the product would do."""
    if sync == "file":
        whole = StagedWriter.sync

        def unsynced(self: StagedWriter, md5: bytes) -> StagedFile:
            with mock.patch.object(os, "fsync"):
                return whole(self, md5)

        StagedWriter.sync = unsynced  # type: ignore[method-assign]
    else:
        real = schema.connect

        def connect(path: str) -> sqlite3.Connection:
            connection = real(path)
            connection.execute("PRAGMA synchronous = OFF")
            return connection

        journal.connect = connect  # type: ignore[attr-defined]


async def main(directory: Path, worker: int, seed: int) -> None:
    buffer = await WritebackBuffer.open(directory, worker)
    writer = Writer(buffer, worker, seed)
    while True:
        await writer.step()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # what is said goes to standard output
    for option in sys.argv[4:]:
        leave_out(option.removeprefix("--without-sync-of="))
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
