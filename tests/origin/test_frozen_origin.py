"""An origin that stands still in any phase: its name is known, and a connection, a tunnel, a handshake or an answer
never comes. And one that fails single requests only."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.core.errors import OriginUnreachable
from gateway.origin.client import OriginRequest
from gateway.origin.s3 import S3Origin
from tests.origin.origins import ask, s3_origin
from tests.origin.told_origin import Request, forever, head, told_origin
from tests.support.connections import answering
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import until

NEVER = 60.0
REQUESTS = [
    OriginRequest("GET", "bucket", "key"),
    OriginRequest("HEAD", "bucket", "key"),
    OriginRequest("PUT", "bucket", "key", body=b"x"),
    OriginRequest("GET", "bucket", None, [("list-type", "2")]),
    OriginRequest("DELETE", "bucket", "key"),
]


class Valve:
    """Passes bytes on in both directions. Shut, it takes connections and bytes, and passes nothing on, as a process
    that was stopped."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections = 0
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await self.is_open.wait()
        upstream, downstream = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._copy(reader, downstream), self._copy(upstream, writer))
        finally:
            downstream.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(64 * 1024):
                await self.is_open.wait()
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def _valve(port: int) -> AsyncIterator[tuple[Valve, int]]:
    valve = Valve(port)
    async with answering(lambda reader, writer: valve.serve(reader, writer)) as at:
        yield valve, at


async def _answers(origin: S3Origin) -> None:
    """Wait until it does: to wait a second for an answer is little on a busy machine."""
    while True:
        try:
            assert (await ask(origin, "HEAD", "bucket", "key")).status in (200, 404)
            return
        except OriginUnreachable:
            await asyncio.sleep(0.02)


async def _found_out(origin: S3Origin, first: OriginRequest, connections: Callable[[], int]) -> None:
    """The first is told long before any patience of its own ends; those behind it do not even begin a connection."""
    with pytest.raises(OriginUnreachable):
        await origin.send(first)
    begun = connections()
    for request in REQUESTS:
        with pytest.raises(OriginUnreachable, match="lately"):
            await origin.send(request)
    assert connections() - begun < len(REQUESTS)  # a question of the gateway's own, now and then


def _play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.slow
@pytest.mark.parametrize("warm", [pytest.param(True, id="old connection"), pytest.param(False, id="new connection")])
@pytest.mark.parametrize("request_", [REQUESTS[0], REQUESTS[2], REQUESTS[3]], ids=["read", "write", "list"])
@pytest.mark.parametrize("way", ["http", "https", "https by proxy"])
def test_a_frozen_origin_is_found_out_whatever_is_asked(
    way: str, request_: OriginRequest, warm: bool, tmp_path: Path
) -> None:
    """In the request, the handshake or the tunnel; and it is found again when it goes on."""

    async def scenario(strict: StrictOrigin, bundle: str | None) -> None:
        strict.model.put("bucket", "key", b"data")
        settings: dict[str, Any] = {
            "first_byte_timeout_seconds": 1.0,
            "connect_timeout_seconds": NEVER,
            "read_timeout_seconds": NEVER,
            "slow_timeout_seconds": NEVER,
            "ca_bundle": bundle,
        }
        scheme, _, at = strict.endpoint_url.partition("://")
        async with _valve(int(at.rpartition(":")[2])) as (valve, port):
            url = f"{scheme}://127.0.0.1:{port}"
            if way.endswith("proxy"):
                url, settings["proxy"] = strict.endpoint_url, f"http://127.0.0.1:{port}"
                valve.serve = _tunnel(valve)  # type: ignore[method-assign, assignment]
            origin = s3_origin(url, **settings)
            try:
                if warm:
                    await _answers(origin)
                valve.is_open.clear()
                await _found_out(origin, request_, lambda: valve.connections)
                valve.is_open.set()
                await _answers(origin)
            finally:
                await origin.aclose()

    with ExitStack() as stack:
        certificate = bundle = None
        if way != "http":
            authority = trustme.CA()
            certificate, bundle = str(tmp_path / "server.pem"), str(tmp_path / "ca.pem")
            authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(certificate)
            authority.cert_pem.write_to_path(bundle)
        strict = stack.enter_context(StrictOrigin(certificate_file=certificate))
        _play(lambda: scenario(strict, bundle))


def _tunnel(valve: Valve) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
    passing = valve.serve

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if valve.is_open.is_set():
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await passing(reader, writer)

    return serve


def test_an_origin_whose_queue_of_connections_is_full_is_found_out() -> None:
    """Nothing comes back, not even of the first packet."""

    async def scenario() -> None:
        with ExitStack() as stack:
            full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            origin = s3_origin(
                f"http://127.0.0.1:{full.getsockname()[1]}",
                first_byte_timeout_seconds=0.5,
                connect_timeout_seconds=NEVER,
            )
            try:
                await _found_out(origin, REQUESTS[0], lambda: 0)
            finally:
                await origin.aclose()

    _play(scenario)


def test_who_waits_for_a_turn_or_a_connection_is_told_when_the_origin_is_given_up() -> None:
    """Not one connection's patience after the other."""

    async def scenario() -> None:
        connections = 0

        async def silent(*_: object) -> None:
            nonlocal connections
            connections += 1
            await forever()

        async with answering(silent) as port:
            origin = s3_origin(f"https://127.0.0.1:{port}", first_byte_timeout_seconds=1.0, max_connections=2)
            try:
                ends = await asyncio.gather(*(origin.send(REQUESTS[0]) for _ in range(12)), return_exceptions=True)
                assert all(isinstance(end, OriginUnreachable) for end in ends)
                assert connections <= 5  # two, two more while the question was asked, and the question
            finally:
                await origin.aclose()

    _play(scenario)


@pytest.mark.parametrize("how", ["reset", pytest.param("silent", marks=pytest.mark.slow)])
def test_requests_that_the_origin_fails_shut_out_nobody_else(how: str) -> None:
    """It lives: it answers a question of the gateway's own."""

    async def poisoned(request: Request, writer: asyncio.StreamWriter) -> None:
        if "poison" not in request.target:
            writer.write(head("Content-Length: 0"))
        elif how == "silent":
            await forever()
        else:
            wire = writer.get_extra_info("socket")
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            raise ConnectionResetError

    async def scenario() -> None:
        patience = {} if how == "reset" else {"first_byte_timeout_seconds": 1.0}
        async with told_origin(poisoned, max_attempts=4, **patience) as told:

            async def poison(number: int) -> None:
                for attempt in range(3):
                    with pytest.raises(OriginUnreachable):
                        await told.origin.send(OriginRequest("GET", "b", f"poison{number}-{attempt}"))

            async with asyncio.TaskGroup() as group:
                poisoning = [group.create_task(poison(number)) for number in range(8)]
                while not all(task.done() for task in poisoning):
                    async with await told.origin.send(OriginRequest("HEAD", "b", "healthy")) as answer:
                        assert answer.status == 200
                    await asyncio.sleep(0.05)

    _play(scenario)


def test_a_refused_connection_is_no_proof_for_requests_that_are_under_way() -> None:
    """An origin that is about to stop takes no new ones, and carries out those it has."""

    async def scenario() -> None:
        stopping = asyncio.Event()

        async def slow(request: Request, writer: asyncio.StreamWriter) -> None:
            await stopping.wait()
            writer.write(head("Content-Length: 0"))

        async with told_origin(slow, first_byte_timeout_seconds=5.0) as told:
            sending = asyncio.create_task(told.origin.send(OriginRequest("PUT", "b", "k", body=b"x")))
            await until(lambda: bool(told.requests))
            breaker = told.origin._breaker(f"127.0.0.1:{told.port}")
            breaker.probe_failed(told.origin._clock.monotonic(), silent=False)
            await asyncio.sleep(0.2)
            stopping.set()
            async with await sending as answer:
                assert answer.status == 200

    _play(scenario)
