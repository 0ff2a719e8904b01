"""A `MemoryOrigin` over HTTP/1.1 that spoils its answers when it is told to, to the byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from gateway.core.errors import OriginUnreachable
from gateway.origin.client import OriginRequest
from gateway.s3.requests import parse_query, split_path
from tests.origin.told_origin import Request, ToldOrigin, head
from tests.support.memory_origin import MemoryOrigin
from tests.support.waiting import until


class Then(Enum):
    """What an origin does in place of the next bytes."""

    CLOSE = auto()
    STUCK = auto()
    """It says no more of this answer, so that it is asked on another connection."""
    LATE = auto()
    """It goes on when it was asked on another connection, and says nothing there."""


class Said(NamedTuple):
    """An answer before it is spoilt."""

    status: str
    fields: Mapping[str, str]
    body: bytes
    is_head: bool

    @property
    def head(self) -> bytes:
        return head(*[f"{name}: {value}" for name, value in self.fields.items()], status=self.status)

    @property
    def raw(self) -> bytes:
        return self.head + self.body

    def with_fields(self, **fields: str | None) -> Said:
        """With underscores for hyphens; None removes one."""
        changed = {**self.fields, **{name.replace("_", "-"): value for name, value in fields.items()}}
        return self._replace(fields={name: value for name, value in changed.items() if value is not None})


Pieces = Sequence["bytes | Then"]
Spoil = Callable[[Said, float], Pieces]
"""What is sent; the number, below 1, says where."""


def _fields(status: str | None = None, **fields: str | None) -> Spoil:
    def spoilt(said: Said, _: float) -> Pieces:
        return [said._replace(status=status or said.status).with_fields(**fields).raw]

    return spoilt


def _refused(status: str, code: str | None = None, **fields: str) -> Spoil:
    def spoilt(said: Said, _: float) -> Pieces:
        document = f"<Error><Code>{code}</Code></Error>".encode() if code is not None and not said.is_head else b""
        named = {"content-length": str(len(document)), "x-amz-request-id": "R"}
        return [Said(status, named, document, said.is_head).with_fields(**fields).raw]

    return spoilt


def _cut(*then: Then) -> Spoil:
    def spoilt(said: Said, where: float) -> Pieces:
        return [said.raw[: int(len(said.raw) * where)], *then]

    return spoilt


def _in_body(*then: Then) -> Spoil:
    return lambda said, where: [said.head + said.body[: int(len(said.body) * where)], *then]


def _late(said: Said, where: float) -> Pieces:
    at = int(len(said.raw) * where)
    return [said.raw[:at], Then.LATE, said.raw[at:]]


def _in_pieces(said: Said, where: float) -> Pieces:
    at = int(len(said.raw) * where)
    return [said.raw[:at], said.raw[at : at + 1], said.raw[at + 1 :]]


def _length(more: int, *then: Then) -> Spoil:
    def spoilt(said: Said, _: float) -> Pieces:
        length = max(0, int(said.fields.get("content-length", "0")) + more)
        return [said.with_fields(content_length=str(length)).raw, *then]

    return spoilt


def _chunked(said: Said, _: float) -> Pieces:
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(said.body), said.body) if said.body else b"0\r\n\r\n"
    spoken = said.with_fields(content_length=None, transfer_encoding="chunked").head
    return [spoken] if said.is_head else [spoken + body]


def _shifted(by: int, *, size: int = 0) -> Spoil:
    """Another Content-Range than was asked for."""

    def spoilt(said: Said, _: float) -> Pieces:
        found = said.fields.get("content-range", "").removeprefix("bytes ").replace("/", "-").split("-")
        if len(found) != 3 or not "".join(found).isdecimal():
            return [said.raw]
        first, last, whole = map(int, found)
        return [said.with_fields(content_range=f"bytes {first + by}-{last + by}/{whole + size}").raw]

    return spoilt


SPOILT: Mapping[str, Spoil] = {
    "cut": _cut(Then.CLOSE),
    "cut in the body": _in_body(Then.CLOSE),
    "nothing": lambda _, __: [Then.CLOSE],
    "in pieces": _in_pieces,
    "longer than it is": _length(7, Then.CLOSE),
    "shorter than it is": _length(-1),
    "surplus bytes": lambda said, _: [said.raw + b"more"],
    "a body to HEAD": lambda said, _: [said.raw + (b"x" * 10 if said.is_head else b"")],
    "chunked": _chunked,
    "no length": lambda said, _: [said.with_fields(content_length=None).raw, Then.CLOSE],
    "two lengths": lambda said, _: [said.head[:-2] + b"Content-Length: 3\r\n\r\n" + said.body, Then.CLOSE],
    "to be closed": _fields(connection="close"),
    "kept alive": _fields(connection="Keep-Alive", keep_alive="timeout=5"),
    "HTTP/1.0": lambda said, _: [said.raw.replace(b"HTTP/1.1", b"HTTP/1.0", 1), Then.CLOSE],
    "no HTTP": lambda _, __: [b"gopher\r\n\r\n"],
    "interim": lambda said, _: [b"HTTP/1.1 100 Continue\r\n\r\n" + said.raw],
    "folded": lambda said, _: [said.head[:-2] + b"x-amz-meta-e: a\r\n b\r\n\r\n" + said.body],
    "a long head": _fields(x_amz_meta_d="d" * 9000),
    "two ETags": lambda said, _: [said.head[:-2] + b'ETag: "b"\r\n\r\n' + said.body],
    "no ETag": _fields(etag=None),
    "a weak ETag": lambda said, _: [said.with_fields(etag=f"W/{said.fields.get('etag', '')}").raw],
    "another ETag": _fields(etag='"another"'),
    "another date": _fields(last_modified="Thu, 01 Jan 2026 00:00:00 GMT"),
    "no date": _fields(last_modified=None),
    "another field": _fields(x_amz_meta_d="e"),
    "no Content-Range": _fields(content_range=None),
    "a range that is no range": _fields(content_range="bytes 0-x/y"),
    "bytes behind those": _shifted(1),
    "a longer object": _shifted(0, size=5),
    "the whole object": _fields("200 OK"),
    "archived": _fields(x_amz_storage_class="GLACIER"),
    "encoded": _fields(content_encoding="gzip", vary="accept-encoding"),
    "a customer's key": _fields(x_amz_server_side_encryption_customer_algorithm="AES256"),
    "a wrong checksum": _fields(x_amz_checksum_crc32="AAAAAA==", x_amz_checksum_type="FULL_OBJECT"),
    "a checksum of parts": _fields(x_amz_checksum_crc32="AAAAAA==-2"),
    "204": _refused("204 No Content"),
    "301": _refused("301 Moved Permanently", location="/x"),
    "304": _refused("304 Not Modified", etag='"a"'),
    "400": _refused("400 Bad Request", "InvalidRequest"),
    "403": _refused("403 Forbidden", "AccessDenied"),
    "404": _refused("404 Not Found", "NoSuchKey"),
    "404 of a bucket": _refused("404 Not Found", "NoSuchBucket"),
    "404 of a proxy": _refused("404 Not Found"),
    "405": _refused("405 Method Not Allowed", x_amz_delete_marker="true"),
    "412": _refused("412 Precondition Failed", "PreconditionFailed"),
    "416": _refused("416 Range Not Satisfiable", "InvalidRange", content_range="bytes */100"),
    "429": _refused("429 Too Many Requests"),
    "500": _refused("500 Internal Server Error", "InternalError"),
    "501": _refused("501 Not Implemented", "NotImplemented"),
    "503": _refused("503 Slow Down", "SlowDown"),
    "503 of a proxy": _refused("503 Service Unavailable"),
    "stuck": lambda _, __: [Then.STUCK],
    "stuck in the midst": _cut(Then.STUCK),
    "stuck in the body": _in_body(Then.STUCK),
    "late": _late,
}

STUCK = ("stuck", "stuck in the midst", "stuck in the body", "late")
"""They last until the request is sent again, once."""


@dataclass
class Fault:
    """The next `times` answers to requests of a method are spoilt, unless they are probes."""

    name: str
    method: str
    times: int
    where: float = 0.5


@dataclass
class SpokenOrigin:
    """The exchange of a told origin. Its `client` hedges no request but those that are stuck here."""

    memory: MemoryOrigin
    fault: Fault | None = None
    heard: list[tuple[object, ...]] = field(default_factory=list)
    """Requests, as far as two like clients send them alike."""

    _asked_again: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _client: ToldOrigin | None = None
    _answering: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def follow(self, client: ToldOrigin) -> None:
        self._client = client
        for usual in (client.origin._hedging.heads, client.origin._hedging.bodies):
            usual.add = lambda seconds: None  # type: ignore[method-assign]
        self._hedge_after(600.0)

    def begin(self, fault: Fault | None) -> None:
        """Spoil the next answers."""
        self._over, self._asked_again = asyncio.Event(), asyncio.Event()
        self.fault, self.heard = fault, []
        assert self._client is not None
        self._client.origin._hedging._saved = 10.0
        self._hedge_after(600.0)

    async def settle(self) -> None:
        """End what is stuck; wait until no request is under way, and the client knows which connections are closed."""
        assert self._client is not None
        self._over.set()
        self._asked_again.set()
        client = self._client.origin._client
        pool, is_proxied = client._pool, client._proxy is not None

        def is_quiet() -> bool:
            self._writers = {writer for writer in self._writers if not writer.is_closing()}
            return not self._answering and not pool._busy and ours() == theirs()

        def ours() -> object:
            ports = {connection._transport.get_extra_info("sockname")[1] for connection in pool._open}
            return len(ports) if is_proxied else ports

        def theirs() -> object:
            ports = {writer.get_extra_info("peername")[1] for writer in self._writers}
            return len(ports) if is_proxied else ports

        await until(is_quiet)

    def _hedge_after(self, seconds: float) -> None:
        assert self._client is not None
        hedging = self._client.origin._hedging
        hedging.heads.after_seconds = hedging.bodies.after_seconds = seconds

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._answering += 1
        try:
            await self._answer(request, writer)
        finally:
            self._answering -= 1

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.target == "/":  # a probe
            writer.write(head("Content-Length: 0", status="403 Forbidden"))
            return
        signed = ("authorization", "x-amz-date")
        fields = {name: value for name, value in request.headers.items() if name not in signed}
        fields["host"] = fields["host"].partition(":")[0]
        self.heard.append((request.method, request.target, fields))
        over, fault = self._over, self.fault
        self._asked_again.set()
        self._asked_again = asyncio.Event()
        self._hedge_after(600.0)
        try:
            said = await self._said(request)
        except OriginUnreachable:
            writer.close()
            return
        pieces: Pieces = [said.raw]
        if fault is not None and fault.times and request.method in fault.method:
            fault.times -= 1
            pieces = SPOILT[fault.name](said, fault.where)
        for piece in pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                with suppress(ConnectionError):
                    await writer.drain()
                await asyncio.sleep(0)
            elif piece is Then.CLOSE:
                writer.close()
            elif piece is Then.STUCK:
                self._hedge_after(0.0)
                await over.wait()
                writer.close()
            else:
                self._hedge_after(0.0)
                self.fault = Fault("stuck", "GET HEAD", 1)
                await self._asked_again.wait()
                self._hedge_after(600.0)

    async def _said(self, request: Request) -> Said:
        path, _, query = request.target.removeprefix(f"http://{request.headers['host']}").partition("?")
        host_bucket, dot, _ = request.headers["host"].partition(".origin.")
        bucket, key = split_path(path.encode(), host_bucket if dot else None)
        asked = OriginRequest(request.method, bucket, key, parse_query(query.encode()), request.headers, request.body)
        answer = await self.memory.send(asked)
        body = answer.content.read(0, answer.content.size_bytes) if answer.with_body else b""
        return Said(f"{answer.status} Said", answer.headers, body, request.method == "HEAD")
