"""What a write-back buffer must hold by what its writers have said (buffer_worker.py), and whether it does."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gateway.objects import ByteRange, ObjectKey
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.records import Ended, Part, PendingObject
from tests.support.buffer_worker import content

_ROOT = Path(__file__).parents[2]

Bytes = list[list[int]]
"""Seed and size of each part; what an object or part is made of."""


class Expected:
    """What one worker's keys and uploads are, by what it has said; `doing` may have happened or not."""

    def __init__(self) -> None:
        self.objects: dict[str, Bytes | None] = {}
        self.uploads: dict[str, dict[int, Bytes]] = {}
        self.doing: dict[str, Any] | None = None

    def hear(self, kind: str, what: dict[str, Any]) -> None:
        if kind == "do":
            self.doing = what
        elif self.doing is not None:
            self.apply(self.doing)
            self.doing = None

    def apply(self, what: dict[str, Any]) -> None:
        match what["what"]:
            case "put":
                self.objects[what["key"]] = what["seeds"]
            case "delete":
                self.objects[what["key"]] = None
            case "create":
                self.uploads[what["upload"]] = {}
            case "part":
                self.uploads[what["upload"]][what["number"]] = what["seeds"]
            case "complete":
                parts = self.uploads.pop(what["upload"])
                self.objects[what["key"]] = [one for number in sorted(parts) for one in parts[number]]
            case "abort":
                del self.uploads[what["upload"]]

    def states(self) -> Iterator[tuple[dict[str, Bytes | None], dict[str, dict[int, Bytes]]]]:
        """What may be there."""
        yield self.objects, self.uploads
        if self.doing is not None:
            after = Expected()
            after.objects = dict(self.objects)
            after.uploads = {name: dict(parts) for name, parts in self.uploads.items()}
            after.apply(self.doing)
            yield after.objects, after.uploads


def start_writers(directory: Path, dice: random.Random, count: int, *options: str) -> list[subprocess.Popen[bytes]]:
    """So many writers at once, each with keys of its own."""
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.buffer_worker",
                str(directory),
                str(number),
                str(dice.randrange(2**32)),
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,
        )
        for number in range(count)
    ]


def listen(writer: subprocess.Popen[bytes], of: Expected, lines: int) -> None:
    """Hear so many lines of a writer."""
    assert writer.stdout is not None
    for _ in range(lines):
        line = writer.stdout.readline()
        if not line:
            raise RuntimeError("the writer has ended by itself")
        of.hear(*json.loads(line))


def hear_the_rest(writer: subprocess.Popen[bytes], of: Expected) -> None:
    """What a writer that is dead had said."""
    assert writer.stdout is not None
    for line in writer.stdout.read().splitlines(keepends=True):
        if line.endswith(b"\n"):
            of.hear(*json.loads(line))
    writer.wait()
    writer.stdout.close()


async def check(directory: Path, expected: Sequence[Expected]) -> None:
    """Each worker's keys and uploads are as it has said; the uploads are ended, as the next process knows none."""
    buffer = await WritebackBuffer.open(directory, 0)
    try:
        for number, of in enumerate(expected):
            found = await _found(buffer, f"w{number}/", f"u{number}-")
            states = [_bytes_of(*state) for state in of.states()]
            assert found in states
            of.objects, of.uploads = list(of.states())[states.index(found)]
            of.doing = None
            _abort_all(of, await _end_uploads(buffer, f"u{number}-"))
        named = buffer.look(lambda book: {name for name in buffer.staging.names() if book.knows_file(name)})
        assert set(buffer.staging.names()) == named
    finally:
        await buffer.close()


def _bytes_of(objects: dict[str, Bytes | None], uploads: dict[str, dict[int, Bytes]]) -> object:
    def joined(seeds: Bytes) -> bytes:
        return b"".join(content(seed, size) for seed, size in seeds)

    return (
        {key: None if seeds is None else joined(seeds) for key, seeds in objects.items()},
        {name: {number: joined(seeds) for number, seeds in parts.items()} for name, parts in uploads.items()},
    )


async def _found(buffer: WritebackBuffer, keys: str, uploads: str) -> object:
    objects: dict[str, bytes | None] = {}
    for one in buffer.look(lambda book: book.listing("bucket", keys.encode(), keys.encode() + b"\xff", 100)):
        pending = buffer.pending(ObjectKey("bucket", one.key.key))
        assert pending is not None
        objects[one.key.key] = None if pending.deleted else await _read(buffer, pending)
    opened = buffer.look(
        lambda book: {one.upload_id: list(book.parts(one.upload_id)) for one in book.uploads("bucket")}
    )
    found = {}
    for name, parts in opened.items():
        if name.startswith(uploads):
            found[name] = {part.number: await _read_part(buffer, part) for part in parts}
    return objects, found


async def _read(buffer: WritebackBuffer, pending: PendingObject) -> bytes:
    if not pending.size_bytes:
        return b""
    pieces = buffer.pieces(pending, ByteRange(0, pending.size_bytes - 1))
    return b"".join([bytes(piece) async for piece in pieces])


async def _read_part(buffer: WritebackBuffer, part: Part) -> bytes:
    descriptor = buffer.staging.open(part.file)
    try:
        return os.pread(descriptor, part.file.size_bytes, 0)
    finally:
        os.close(descriptor)


async def _end_uploads(buffer: WritebackBuffer, uploads: str) -> list[str]:
    """A new process knows nothing of the uploads of the one before."""
    opened = buffer.look(lambda book: [one for one in book.uploads("bucket") if one.upload_id.startswith(uploads)])
    for one in opened:
        await buffer.abort(Ended(one.upload_id, one.fixed.key, 1.0, None))
    return [one.upload_id for one in opened]


def _abort_all(of: Expected, names: list[str]) -> None:
    for name in names:
        del of.uploads[name]
