"""What a write-back buffer must hold by what its writers have said (buffer_worker.py), and whether it does."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.core.model import ByteRange, ObjectKey
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import Part, Write
from tests.support.buffer_worker import content

_ROOT = Path(__file__).parents[2]

Bytes = list[list[int]]
"""Seed and size of each part; what an object or part is made of."""


class Expected:
    """What one worker's keys and uploads are, by what it has said; `maybe` are steps that may have happened or not."""

    def __init__(self) -> None:
        self.objects: dict[str, Bytes | None] = {}
        self.uploads: dict[str, dict[int, Bytes]] = {}
        self.maybe: list[dict[str, Any]] = []

    def hear(self, kind: str, what: dict[str, Any]) -> None:
        """A step begins (`do`), or the last one was acknowledged (`ok`)."""
        if kind == "do":
            self.maybe.append(what)
        else:
            self.apply(self.maybe.pop(0))

    def hear_after_the_cut(self, kind: str, what: dict[str, Any]) -> None:
        """The same when the power was just going: no acknowledgement counts any more."""
        if kind == "do":
            self.maybe.append(what)

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

    def states(self) -> Iterator[Expected]:
        """What may be there: without any of the steps that may have happened, or with the first ones of them."""
        state = self
        yield state
        for step in self.maybe:
            before, state = state, Expected()
            state.objects = dict(before.objects)
            state.uploads = {name: dict(parts) for name, parts in before.uploads.items()}
            state.apply(step)
            yield state

    def settle(self, state: Expected) -> None:
        """It turned out to be this one."""
        self.objects, self.uploads, self.maybe = state.objects, state.uploads, []


class Hearing:
    """What a writer says, line by line, into what is expected of its work."""

    def __init__(self, writer: subprocess.Popen[bytes], of: Expected) -> None:
        assert writer.stdout is not None
        self.writer = writer
        self._pipe = writer.stdout.fileno()
        self._of = of
        self._unheard = b""

    def lines(self, count: int) -> None:
        """Wait for so many lines."""
        while self._unheard.count(b"\n") < count:
            data = os.read(self._pipe, 65_536)
            if not data:
                raise RuntimeError("the writer has ended by itself")
            self._unheard += data
        for _ in range(count):
            line, _, self._unheard = self._unheard.partition(b"\n")
            self._of.hear(*json.loads(line))

    def so_far(self) -> None:
        """All that was said before this."""
        while select.select([self._pipe], [], [], 0)[0] and (data := os.read(self._pipe, 65_536)):
            self._unheard += data
        self.lines(self._unheard.count(b"\n"))

    def rest(self, hear: Callable[[str, dict[str, Any]], None]) -> None:
        """What else a writer that is dead had said."""
        while data := os.read(self._pipe, 65_536):
            self._unheard += data
        for line in self._unheard.split(b"\n")[:-1]:
            hear(*json.loads(line))
        self.writer.wait()
        assert self.writer.stdout is not None
        self.writer.stdout.close()


def start_writers(
    directory: Path, dice: random.Random, count: int, *options: str, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """So many writers at once, each with keys of its own. Several of them need a buffer that is there (`recover`)."""
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
            cwd=_ROOT,
            env=environment,
        )
        for number in range(count)
    ]


async def check(directory: Path, expected: Sequence[Expected]) -> None:
    """Each worker's keys and uploads are as it has said; the uploads are ended, as the next process knows none."""
    buffer = await WritebackBuffer.open(directory, 0)
    try:
        for number, of in enumerate(expected):
            found = await _found(buffer, f"w{number}/", f"u{number}-")
            states = list(of.states())
            matching = [state for state in states if _bytes_of(state.objects, state.uploads) == found]
            assert matching, _difference(found, _bytes_of(of.objects, of.uploads), of.maybe)
            of.settle(matching[0])
            _abort_all(of, await _end_uploads(buffer, f"u{number}-"))
        named = buffer.look(lambda tx: {name for name in buffer.staging.names() if tx.files.knows(name)})
        assert set(buffer.staging.names()) == named
    finally:
        await buffer.close()


def _difference(found: Any, expected: Any, doing: object) -> str:
    """In what they differ, without the bytes themselves."""
    lines = [
        f"{what} {name}: found {_short(one, name)}, not {_short(other, name)}"
        for what, one, other in zip(("object", "upload"), found, expected, strict=True)
        for name in sorted(one.keys() | other.keys())
        if one.get(name, "none") != other.get(name, "none")
    ]
    return "; ".join([*lines, f"under way: {doing}"])


def _short(values: Any, name: str) -> str:
    value = values.get(name, "nothing")
    return repr({number: hash(one) for number, one in value.items()} if isinstance(value, dict) else value)[:60]


def _bytes_of(objects: dict[str, Bytes | None], uploads: dict[str, dict[int, Bytes]]) -> object:
    def joined(seeds: Bytes) -> bytes:
        return b"".join(content(seed, size) for seed, size in seeds)

    return (
        {key: None if seeds is None else joined(seeds) for key, seeds in objects.items()},
        {name: {number: joined(seeds) for number, seeds in parts.items()} for name, parts in uploads.items()},
    )


async def _found(buffer: WritebackBuffer, keys: str, uploads: str) -> object:
    objects: dict[str, bytes | None] = {}
    for one in buffer.look(lambda tx: tx.writes.listing("bucket", keys.encode(), keys.encode() + b"\xff", 100)):
        pending = buffer.pending(ObjectKey("bucket", one.key.key))
        assert pending is not None
        objects[one.key.key] = None if pending.deleted else await _read(buffer, pending)
    opened = buffer.look(
        lambda tx: {one.upload_id or "": list(tx.parts.of(one.id)) for one in tx.uploads.under("bucket")}
    )
    found = {}
    for name, parts in opened.items():
        if name.startswith(uploads):
            found[name] = {part.number: await _read_part(buffer, part) for part in parts}
    return objects, found


async def _read(buffer: WritebackBuffer, pending: Write) -> bytes:
    if not pending.size_bytes:
        return b""
    pieces = buffer.pieces(pending, ByteRange(0, pending.size_bytes - 1))
    return b"".join([bytes(piece) async for piece in pieces])


async def _read_part(buffer: WritebackBuffer, part: Part) -> bytes:
    with buffer.staging.open(part.file) as opened:
        return os.pread(opened.descriptor, part.file.size_bytes, 0)


async def _end_uploads(buffer: WritebackBuffer, uploads: str) -> list[str]:
    """A new process knows nothing of the uploads of the one before."""
    opened = buffer.look(lambda tx: [one.upload_id or "" for one in tx.uploads.under("bucket")])
    ours = [one for one in opened if one.startswith(uploads)]
    for one in ours:
        await buffer.abort(one)
    return ours


def _abort_all(of: Expected, names: list[str]) -> None:
    for name in names:
        del of.uploads[name]
