"""The admin port against clients that send too much, too slowly or nothing: the classes of docs/security.md."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.guard import Guard
from gateway.config import ServerSettings, Settings
from gateway.config.live import LiveSettings
from gateway.serve import background
from gateway.serve.background import AT_WORK_MAX, admin_server
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.serving import PATIENCE_SECONDS, Wire, listening_socket, request
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

HEAD = b"GET /api/v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
ASKED = request("GET", "/healthz", host="127.0.0.1")


class Port:
    """The admin port's server, for an application of one endpoint for every path and method."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.wires: list[Wire] = []

    async def connect(self) -> Wire:
        self.wires.append(Wire(*await asyncio.open_connection("127.0.0.1", self.number)))
        return self.wires[-1]

    async def status(self, method: str = "GET", target: str = "/other", body: bytes = b"") -> int:
        wire = await self.connect()
        await wire.say(request(method, target, body, host="127.0.0.1"))
        return (await wire.answer()).status


@asynccontextmanager
async def port_of(endpoint: Callable[[Request], Any], **settings: Any) -> AsyncIterator[Port]:
    guard = Guard(LiveSettings(Settings()))
    routes = [Route("/{path:path}", guard(endpoint), methods=["GET", "POST"])]
    listener = listening_socket()
    port = Port(listener.getsockname()[1])
    server = admin_server(Starlette(routes=routes), [listener], ServerSettings(**settings))
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(server.serve(stop, grace_seconds=0.0, on_ready=ready.set))
    await ready.wait()
    try:
        yield port
    finally:
        for wire in port.wires:
            wire.abort()
        stop.set()
        await serving


async def answer_path(request: Request) -> Response:
    return Response(request.path_params["path"] + request.url.query)


def test_paths_reach_the_application_decoded() -> None:
    """Slots and snapshots have names with characters that a path must escape."""

    async def scenario() -> None:
        async with port_of(answer_path) as port:
            wire = await port.connect()
            await wire.say(request("GET", "/api/v1/slots/a%20b%C3%A9?x=%41", host="127.0.0.1"))
            assert (await wire.answer()).body == "api/v1/slots/a béx=%41".encode()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "say", "status"),
    [
        ({}, HEAD + b"x" * 2**20, 400),
        ({}, b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        ({}, b"\0\r\n\r\n", 405),
        ({}, b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ({"head_timeout": "1s"}, HEAD, 400),
        ({"body_timeout": "1s"}, b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nhal", 400),
        (
            {"body_timeout": "1s"},
            b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na",
            400,
        ),
        ({}, b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_what_is_no_request_is_refused_in_the_ports_own_words(settings: Any, say: bytes, status: int) -> None:
    """A head without end, one that two parsers read differently, and heads and bodies that do not come."""

    async def read_body(request: Request) -> Response:
        await request.body()
        return Response("all of it")

    async def scenario() -> None:
        async with port_of(read_body, **settings) as port:
            wire = await port.connect()
            with suppress(ConnectionError):
                await wire.say(say)
            refused = await wire.answer()
            assert refused.status == status
            assert json.loads(refused.body)["error"]
            assert await wire.rest() == b""

    asyncio.run(scenario())


@pytest.mark.slow
def test_connections_that_wait_make_room_and_idle_ones_end() -> None:
    """However many are open, a probe is answered."""

    async def scenario() -> None:
        async with port_of(answer_path, keep_alive_timeout="1s", head_timeout="1s") as port:
            wires = [await port.connect() for _ in range(background.CONNECTIONS_MAX + 50)]
            for wire in wires:
                with suppress(ConnectionError):
                    await wire.say(HEAD)
            assert await port.status(target="/healthz") == 200
            idle = await port.connect()
            await idle.say(ASKED)
            assert (await idle.answer()).status == 200
            for wire in (*wires, idle):
                with suppress(ConnectionError):
                    await wire.rest()

    asyncio.run(scenario())


def test_few_requests_are_at_work_and_slow_clients_are_not_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind them wait for their turn, then get 503. Probes, and bodies that have not come, take no place."""
    resume, at_work, most = asyncio.Event(), 0, 0

    async def work(request: Request) -> Response:
        nonlocal at_work, most
        await request.body()
        at_work += 1
        most = max(most, at_work)
        if request.url.path == "/other":
            await resume.wait()
        at_work -= 1
        return Response("done")

    async def scenario() -> None:
        async with port_of(work) as port:
            for _ in range(2 * AT_WORK_MAX):
                slow = await port.connect()
                await slow.say(b"POST /a HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nhal")
            assert await port.status(target="/a") == 200
            asked = [asyncio.create_task(port.status()) for _ in range(2 * AT_WORK_MAX)]
            while at_work < AT_WORK_MAX:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.001)
            assert await port.status(target="/healthz") == 200
            done, waiting = await asyncio.wait(asked, timeout=PATIENCE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            assert {one.result() for one in done} == {503}
            resume.set()
            statuses = [one.result() for one in done] + list(await asyncio.gather(*waiting))
            assert sorted(set(statuses)) == [200, 503]
            assert most <= AT_WORK_MAX + 1  # the probe is beside them

    monkeypatch.setattr(background, "WAIT_SECONDS_MAX", 0.5)
    asyncio.run(scenario())


def test_a_body_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to disk as it comes, too."""

    async def read_all(request: Request) -> Response:
        async for _ in request.stream():
            pass
        return Response("all of it")

    async def scenario() -> None:
        async with port_of(read_all) as port:
            assert await port.status("POST", "/", b"x" * 1000) == 200
            assert await port.status("POST", "/", b"x" * 1001) == 413

    monkeypatch.setattr(background, "BODY_BYTES_MAX", 1000)
    asyncio.run(scenario())


def test_a_client_that_leaves_is_not_worked_for() -> None:
    """What it has asked for ends."""

    async def scenario() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def wait(_request: Request) -> Response:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError("unreachable")

        async with port_of(wait) as port:
            wire = await port.connect()
            await wire.say(request("GET", "/", host="127.0.0.1"))
            await wire.say(b"")
            async with asyncio.timeout(PATIENCE_SECONDS):
                await begun.wait()
                wire.abort()
                await ended.wait()

    asyncio.run(scenario())


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        one.model.create_bucket("bucket")
        yield one


def hold_open(port: int, count: int, say: bytes, stack: ExitStack) -> None:
    for _ in range(count):
        one = stack.enter_context(socket.socket())
        one.settimeout(ANSWER_SECONDS_MAX)
        one.connect(("127.0.0.1", port))
        with suppress(ConnectionError):
            one.sendall(say)


def ask_again_and_again(url: str, until: threading.Event) -> None:
    with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
        while not until.is_set():
            with suppress(httpx.TransportError):
                client.get(url)


@pytest.mark.slow
def test_a_flood_of_the_admin_port_stops_no_flush(origin: StrictOrigin, tmp_path: Path) -> None:
    """More connections than the process may have open files, half-sent heads among them, beside costly requests:
    what is acknowledged reaches the origin, and probes are answered."""
    config: dict[str, Any] = {
        "server": {"allow_unsigned": True},
        "origin": origin.settings,
        "cache": {"persistent": True},
        "slots": [{"name": "back", "prefix": "s3://bucket/", "write": "back"}],
    }

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))

    over, soft_hard = threading.Event(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_hard[1], soft_hard[1]))
    try:
        with (
            GatewayProcess(config, directory=tmp_path / "cache", before_exec=few_files) as gateway,
            ExitStack() as stack,
        ):
            port = int(gateway.admin_url.rpartition(":")[2])
            asking = [
                threading.Thread(target=ask_again_and_again, args=(f"{gateway.admin_url}{path}", over))
                for path in ("/metrics", "/api/v1/overview", "/api/v1/status", "/api/v1/slots")
            ]
            stack.callback(over.set)
            for thread in asking:
                thread.start()
                stack.callback(thread.join)
            stack.callback(over.set)  # the last one in is the first one called
            put = partial(httpx.put, f"{gateway.s3_url}/bucket/first", content=b"x", timeout=ANSWER_SECONDS_MAX)
            while put().headers.get("x-forebay-cache") != "absorbed":  # nothing is known of the bucket before
                pass
            hold_open(port, 500, b"", stack)
            hold_open(port, 500, HEAD + b"x" * 32_000, stack)
            with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
                for number in range(20):
                    answer = client.put(f"{gateway.s3_url}/bucket/{number}", content=b"x" * 1000)
                    assert answer.headers["x-forebay-cache"] == "absorbed"
                assert client.get(f"{gateway.admin_url}/healthz").status_code == 200
                assert client.get(f"{gateway.admin_url}/readyz").status_code == 200
                flushed = client.post(f"{gateway.admin_url}/api/v1/flush", json={"prefix": "s3://bucket/"})
                assert flushed.status_code < 300
            eventually(lambda: len(origin.model.buckets["bucket"].objects) == 21)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft_hard)
