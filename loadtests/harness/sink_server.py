"""An S3 origin that takes objects and throws their bytes away: PutObject, uploads in parts, HEAD, DELETE; no LIST.

    python -m loadtests.harness.sink_server [HOST:]PORT [PREFIX:COUNT:SIZE ...]

A body's MD5 is taken from `Content-MD5`, and the bytes do not even leave the kernel: so the origin takes next to
nothing of the machine that it shares with what is measured. Without that header the MD5 is computed. No signature is
verified. What all connections bring together is held to a rate, set over `/.shape?bytes_per_second=...`; `/.counters`
tells what has come. One bucket, `load`, which looks empty to LIST. Besides, it has the made-up objects of the families
that it is given, which can be read.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote

from loadtests.harness.content import LoadObject, family, load_object
from loadtests.harness.origin_answers import object_answer
from loadtests.harness.origin_server import listening_on

_BUFFER_BYTES = 256 * 1024
_HEAD_BYTES_MAX = 64 * 1024
_DATE = "Sat, 21 Nov 2026 00:00:00 GMT"
_BUCKETS = (
    b"<ListAllMyBucketsResult><Owner><ID>load</ID></Owner><Buckets><Bucket><Name>load</Name>"
    b"<CreationDate>2026-11-21T00:00:00.000Z</CreationDate></Bucket></Buckets></ListAllMyBucketsResult>"
)
_EMPTY_LIST = (
    b"<ListBucketResult><Name>load</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
)


class Pace:
    """Spreads the bytes of all connections over time, as one link would."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, count: int) -> None:
        """Return when the link has carried so much more."""
        if not self.bytes_per_second:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = free_at = max(self._free_at, now) + count / self.bytes_per_second
        if free_at > now:
            time.sleep(free_at - now)


@dataclass(slots=True)
class State:
    """What all connections share."""

    pace: Pace = field(default_factory=Pace)
    objects: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Path → ETag, length."""
    parts: dict[str, dict[int, tuple[str, int]]] = field(default_factory=dict)
    """Upload id → number → ETag, length."""
    made_up: Mapping[str, LoadObject] = field(default_factory=dict)
    """Path → what can be read."""
    received_bytes: int = 0
    gets: int = 0
    requests: int = 0
    """That are about an object."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    kept_bytes: int = 0
    """Lengths of all objects together."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keep(self, path: str, etag: str, size_bytes: int) -> None:
        self.drop(path)
        with self._lock:
            self.objects[path] = etag, size_bytes
            self.kept_bytes += size_bytes

    def drop(self, path: str) -> None:
        with self._lock:
            _, size_bytes = self.objects.pop(path, ("", 0))
            self.kept_bytes -= size_bytes

    def counters(self) -> bytes:
        counters = {"objects": len(self.objects), "received_bytes": self.received_bytes, "gets": self.gets}
        counters |= {"requests": self.requests, "kept_bytes": self.kept_bytes}
        return json.dumps(counters).encode()


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    head: bytes

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", "0"))


class Connection:
    """One client's, a request after another."""

    def __init__(self, wire: socket.socket, state: State) -> None:
        self._wire = wire
        self._state = state
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._arrived = b""

    def run(self) -> None:
        """Until the client leaves."""
        self._wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._wire:
            try:
                while (request := self._head()) is not None:
                    self._serve(request)
            except ConnectionError:
                return

    def _head(self) -> _Request | None:
        while (end := self._arrived.find(b"\r\n\r\n")) < 0:
            if not (piece := self._wire.recv(_HEAD_BYTES_MAX)):
                return None
            self._arrived += piece
        head, self._arrived = self._arrived[: end + 4], self._arrived[end + 4 :]
        lines = head[:end].decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        path, _, query = target.partition("?")
        fields = (line.partition(":") for line in lines[1:])
        headers = {name.lower(): value.strip() for name, _, value in fields}
        values = {name: found[0] for name, found in parse_qs(query, keep_blank_values=True).items()}
        return _Request(method, unquote(path), values, headers, head)

    def _serve(self, request: _Request) -> None:
        if request.headers.get("expect", "").lower() == "100-continue":
            self._wire.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if request.path.startswith("/."):
            self._tell(request)
            return
        self._state.requests += request.path.rstrip("/").count("/") > 1
        if request.method == "PUT":
            self._put(request)
        elif request.method == "POST":
            self._post(request)
        elif request.method == "DELETE":
            self._state.drop(request.path)
            self._answer(204)
        else:
            self._look(request)

    def _tell(self, request: _Request) -> None:
        if request.path == "/.shape":
            self._state.pace.bytes_per_second = float(request.query["bytes_per_second"])
        self._answer(200, self._state.counters())

    def _put(self, request: _Request) -> None:
        etag, size_bytes = self._take(request), request.length
        if "partNumber" in request.query:
            upload = self._state.parts.setdefault(request.query["uploadId"], {})
            upload[int(request.query["partNumber"])] = etag, size_bytes
        else:
            self._state.keep(request.path, etag, size_bytes)
        self._answer(200, etag=etag)

    def _post(self, request: _Request) -> None:
        self._take(request)
        if "uploads" in request.query:
            upload_id = f"upload-{next(self._state.numbers)}"
            self._answer(200, f"<R><UploadId>{upload_id}</UploadId></R>".encode())
            return
        parts = self._state.parts.pop(request.query["uploadId"], None)
        if parts is None:
            self._answer(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            return
        digests = b"".join(bytes.fromhex(etag.strip('"')) for _, (etag, _) in sorted(parts.items()))
        etag = f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'
        self._state.keep(request.path, etag, sum(size_bytes for _, size_bytes in parts.values()))
        self._answer(200, f"<R><ETag>{etag}</ETag></R>".encode())

    def _look(self, request: _Request) -> None:
        if request.path.count("/") < 2 or request.path.endswith("/"):
            listing = _BUCKETS if request.path == "/" else _EMPTY_LIST
            self._answer(200, listing if request.method == "GET" else b"")
            return
        made_up, found = self._state.made_up.get(request.path), self._state.objects.get(request.path)
        if made_up is not None:
            self._send(made_up, request)
        elif found is None:
            self._answer(404, length=0)
        else:
            self._answer(200, etag=found[0], length=found[1])

    def _send(self, made_up: LoadObject, request: _Request) -> None:
        self._state.gets += request.method == "GET"
        answer = object_answer(made_up, request.method, request.head)
        self._wire.sendall(answer.head + answer.body)
        at = answer.first
        while answer.of is not None and at < answer.end:
            at += len(piece := answer.of.piece(at, min(_BUFFER_BYTES, answer.end - at)))
            self._wire.sendall(piece)

    def _take(self, request: _Request) -> str:
        """Receive the body; the ETag that it has."""
        given = request.headers.get("content-md5")
        digest = hashlib.md5(usedforsecurity=False)
        left = request.length
        piece = memoryview(self._arrived)[:left]
        self._arrived = self._arrived[left:]
        while True:
            if given is None:
                digest.update(piece)
            left -= len(piece)
            self._state.received_bytes += len(piece)
            self._state.pace.carry(len(piece))
            if not left:
                break
            count = self._receive(min(left, _BUFFER_BYTES), keep=given is None)
            piece = self._buffer[:count]
        return f'"{base64.b64decode(given).hex() if given is not None else digest.hexdigest()}"'

    def _receive(self, count_max: int, *, keep: bool) -> int:
        """(MSG_TRUNC: tcp(7), the bytes are thrown away in the kernel.)"""
        count = self._wire.recv_into(self._buffer, count_max, 0 if keep else socket.MSG_TRUNC)
        if not count:
            raise ConnectionError("the client left")
        return count

    def _answer(self, status: int, body: bytes = b"", *, etag: str | None = None, length: int | None = None) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body) if length is None else length}\r\n"
        head += f"Last-Modified: {_DATE}\r\n" + (f"ETag: {etag}\r\n" if etag else "")
        self._wire.sendall(head.encode("latin-1") + b"\r\n" + body)


def serve(listener: socket.socket, state: State) -> None:
    """Until the process is told to end: a thread for each connection."""
    while True:
        wire, _ = listener.accept()
        threading.Thread(target=Connection(wire, state).run, daemon=True).start()


def main(host: str, port: int, families: Sequence[str]) -> None:
    made_up = {path: load_object(path, one.size_bytes) for one in map(family, families) for path in one.paths()}
    with socket.create_server((host, port), backlog=128) as listener:
        # What lies in the kernel has not crossed the link.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        serve(listener, State(made_up=made_up))


if __name__ == "__main__":
    main(*listening_on(sys.argv[1]), sys.argv[2:])
