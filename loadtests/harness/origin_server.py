"""The load origin: GET, HEAD and LIST of made-up objects and of files, with latency, pace and rate, in raw asyncio.

    python -m loadtests.harness.origin_server [HOST:]PORT PREFIX:COUNT:SIZE ... KEY=FILE ...

What is PUT it keeps in memory and gives back, but does not list: for peers that keep objects in a format of their own.
It verifies no signature, so that it is never the bottleneck where it need not be. Started by `origin.LoadOrigin`, which
sets latency and rates over `/.shape?...` and reads the counters at `/.counters`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs

from loadtests.harness.content import BUCKET, Family, LoadObject, family, file_object, load_object
from loadtests.harness.origin_answers import Answer, Listing, object_answer, plain

_PIECE_BYTES = 256 * 1024
_FINEST_SLEEP_SECONDS = 0.001
_SAVED_SECONDS = 0.25
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
_BUCKETS = (
    b"<ListAllMyBucketsResult><Owner><ID>load</ID></Owner><Buckets><Bucket><Name>load</Name>"
    b"<CreationDate>2026-11-21T00:00:00.000Z</CreationDate></Bucket></Buckets></ListAllMyBucketsResult>"
)


@dataclass(slots=True)
class Shape:
    """0 is none and unlimited. The requests per second are those of all connections from one address together. Of all
    bodies, every `stall_every`th stops half way, for ever. What comes beyond `taken_per_second`, of all connections, is
    answered 503 SlowDown; a quarter of a second's worth is saved up.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    requests_per_second: float = 0.0
    stall_every: float = 0.0
    taken_per_second: float = 0.0


@dataclass(slots=True)
class Counters:
    """Since the start."""

    gets: int = 0
    heads: int = 0
    lists: int = 0
    sent_bytes: int = 0
    stalled: int = 0
    refused: int = 0
    lost: int = 0
    """Connections that ended within an answer."""


@dataclass(slots=True)
class OriginState:
    """Everything that the connections share."""

    objects: dict[str, LoadObject]
    listing: Listing
    shape: Shape = field(default_factory=Shape)
    counters: Counters = field(default_factory=Counters)
    next_turn: dict[str, float] = field(default_factory=dict)
    level: float = 0.0
    level_at: float = 0.0

    def wait_seconds(self, address: str, now: float) -> float:
        """How long the answer of a request that arrived now has to wait for its first byte."""
        wait = self.shape.latency_seconds
        if self.shape.requests_per_second:
            turn = max(now, self.next_turn.get(address, 0.0))
            self.next_turn[address] = turn + 1 / self.shape.requests_per_second
            wait += turn - now
        return wait

    def takes(self, now: float) -> bool:
        """Whether a request that arrived now is not one too many."""
        rate = self.shape.taken_per_second
        if not rate:
            return True
        self.level = min(rate * _SAVED_SECONDS, self.level + rate * (now - self.level_at))
        self.level_at = now
        if self.level < 1:
            self.counters.refused += 1
            return False
        self.level -= 1
        return True

    def answer(self, method: str, target: str, head: bytes, body: bytes = b"") -> Answer:
        path, _, query = target.partition("?")
        if method == "PUT" and path.count("/") > 1:
            self.objects[path] = file_object(path, body)
            return plain("200 OK", b"", method)
        if method == "DELETE":
            self.objects.pop(path, None)
            return plain("204 No Content", b"", method)
        found = self.objects.get(path)
        if found is not None or path.rstrip("/") not in ("", f"/{BUCKET}", "/.shape", "/.counters"):
            return self._object(found, method, head)
        if path == "/.counters":
            return plain("200 OK", json.dumps(asdict(self.counters)).encode(), method, "application/json")
        if path == "/.shape":
            self.shape = Shape(**{name: float(values[0]) for name, values in parse_qs(query).items()})
            self.next_turn.clear()
            return plain("200 OK", b"", method)
        if path == "/":
            return plain("200 OK", _BUCKETS, method)
        self.counters.lists += 1
        return plain("200 OK", self.listing.answer(query), method)

    def _object(self, found: LoadObject | None, method: str, head: bytes) -> Answer:
        answer = object_answer(found, method, head)
        if method == "HEAD":
            self.counters.heads += 1
        else:
            self.counters.gets += 1
        return answer


class OriginConnection(asyncio.Protocol):
    """One connection: a request at a time, each answered after its wait, its body at its pace."""

    def __init__(self, state: OriginState) -> None:
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._busy = False
        self._writable = True
        self._answer: Answer | None = None
        self._at = 0
        self._free_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1024 * 1024)
        self._address = str(transport.get_extra_info("peername")[0])

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def _next(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if self._busy or end < 0:
            return
        head = bytes(self._buffer[: end + 4])
        length = _LENGTH.search(head)
        stop = end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < stop:
            return
        body = bytes(self._buffer[end + 4 : stop])
        del self._buffer[:stop]
        method, target, _ = head[: head.index(b"\r\n")].decode("latin-1").split(" ")
        self._busy = True
        if target.startswith("/."):
            self._begin(method, target, head, body)
            return
        now = self._loop.time()
        if not self._state.takes(now):
            answer = plain("503 Slow Down", _SLOW_DOWN, method)
            self._transport.write(answer.head + answer.body)
            self._over()
            return
        wait = self._state.wait_seconds(self._address, now)
        if wait > 0:
            self._loop.call_later(wait, self._begin, method, target, head, body)
        else:
            self._begin(method, target, head, body)

    def _begin(self, method: str, target: str, head: bytes, body: bytes) -> None:
        if self._transport.is_closing():
            return
        answer = self._state.answer(method, target, head, body)
        self._free_at = self._loop.time()
        if answer.of is None:
            self._transport.write(answer.head + answer.body)
            self._over()
            return
        self._answer, self._at = answer, answer.first
        self._transport.write(answer.head)
        if self._stalls():
            self._state.counters.stalled += 1
            self._transport.write(answer.of.piece(self._at, (answer.end - self._at) // 2))
            return
        self._go_on()

    def _stalls(self) -> bool:
        every = self._state.shape.stall_every
        return bool(every) and self._state.counters.gets % every == 0

    def _go_on(self) -> None:
        answer = self._answer
        while answer is not None and answer.of is not None and self._writable and not self._transport.is_closing():
            if self._at >= answer.end:
                self._over()
                return
            wait = self._free_at - self._loop.time()
            if wait > _FINEST_SLEEP_SECONDS:
                self._loop.call_later(wait, self._go_on)
                return
            piece = answer.of.piece(self._at, min(_PIECE_BYTES, answer.end - self._at))
            self._at += len(piece)
            self._state.counters.sent_bytes += len(piece)
            if self._state.shape.bytes_per_second:
                self._free_at += len(piece) / self._state.shape.bytes_per_second
            self._transport.write(piece)

    def _over(self) -> None:
        self._busy, self._answer = False, None
        if self._buffer:
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.counters.lost += self._answer is not None

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._go_on()


def listening_on(text: str) -> tuple[str, int]:
    """`PORT`, of this machine, or `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    return host or "127.0.0.1", int(port)


def state_of(families: list[Family], files: Mapping[str, Path] | None = None) -> OriginState:
    """An origin's state with all objects of `families`, and with `files` by key; each file is read once."""
    objects = {path: load_object(path, one.size_bytes) for one in families for path in one.paths()}
    contents = {file: file.read_bytes() for file in set((files or {}).values())}
    for key, file in (files or {}).items():
        objects[f"/{BUCKET}/{key}"] = file_object(f"/{BUCKET}/{key}", contents[file])
    return OriginState(objects, Listing(BUCKET, objects.values()))


async def serve(host: str, port: int, families: list[Family], files: Mapping[str, Path]) -> None:
    """Until the process is told to end."""
    state = state_of(families, files)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: OriginConnection(state), host, port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    given = [text for text in sys.argv[2:] if "=" in text]
    found = {key: Path(file) for key, _, file in (text.partition("=") for text in given)}
    asyncio.run(serve(*listening_on(sys.argv[1]), [family(text) for text in sys.argv[2:] if text not in given], found))
