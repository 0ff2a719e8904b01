"""Clients that leave before their answer: what they asked for is not done in their place, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.core import cancellation
from gateway.core.clock import SystemClock
from gateway.edge.access import ConfiguredKeyring, Key
from gateway.origin.client import Origin, OriginRequest, OriginResponse, OriginSettings
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from gateway.policy.slots import EVERYTHING, Prefix
from tests.origin.origins import STRICT_PAIR
from tests.support.asgi import signed_headers
from tests.support.descriptors import open_descriptors
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Fault, Hold
from tests.support.rest_is_slow import rest_is_slow
from tests.support.serving import Serving, Wire, request, serving
from tests.support.slots import Slot
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import until

LEAVERS = 200
ONE_ACCOUNTS_SHARE = 3
"""Of four connections: one is left to others."""

DELETE_DOCUMENT = b"<Delete><Object><Key>deleted</Key></Object></Delete>"
DELETE_HEADERS = (("content-md5", base64.b64encode(hashlib.md5(DELETE_DOCUMENT).digest()).decode()),)


@dataclass(frozen=True)
class Asked:
    """A request; `changes` is a key that it changes at the origin."""

    method: str
    target: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    changes: str | None = None

    def bytes(self, access_key_id: str | None = None) -> bytes:
        pair = {"access_key_id": access_key_id, "secret_access_key": "secret"} if access_key_id else {}
        signed = signed_headers(self.method, self.target, dict(self.headers), self.body, **pair)
        lines = [f"{name}: {value}" for name, value in signed.items() if name != "Host"]
        return request(self.method, self.target, self.body, *lines, host=signed["Host"])


READS = {
    "get": Asked("GET", "/bucket/key"),
    "range": Asked("GET", "/bucket/key", headers=(("range", "bytes=7-70000"),)),
    "get of a part": Asked("GET", "/bucket/key?partNumber=1"),
    "head": Asked("HEAD", "/bucket/key"),
    "list": Asked("GET", "/bucket?list-type=2&prefix=k"),
    "old list": Asked("GET", "/bucket?prefix=k"),
    "uploads": Asked("GET", "/bucket?uploads"),
    "location": Asked("GET", "/bucket?location"),
    "forwarded": Asked("GET", "/bucket/key?tagging"),
}
WRITES = {
    "put": Asked("PUT", "/bucket/new", b"new", changes="new"),
    "large put": Asked("PUT", "/bucket/new", bytes(600_000), changes="new"),
    "copy": Asked("PUT", "/bucket/new", headers=(("x-amz-copy-source", "bucket/key"),), changes="new"),
    "delete": Asked("DELETE", "/bucket/deleted", changes="deleted"),
    "delete several": Asked("POST", "/bucket?delete", DELETE_DOCUMENT, DELETE_HEADERS, changes="deleted"),
    "create upload": Asked("POST", "/bucket/new?uploads"),
}


class Queued:
    """Where requests wait for a connection to the origin, as long as `closed` lasts."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.open = asyncio.Event()
        self.waiting = 0

    async def send(self, asked: OriginRequest) -> OriginResponse:
        with cancellation.turn():
            self.waiting += 1
            try:
                await self.open.wait()
            finally:
                self.waiting -= 1
        return await self.origin.send(asked)

    async def aclose(self) -> None:
        await self.origin.aclose()


@dataclass
class Scene:
    """A gateway behind its own server, and the queue before its origin."""

    port: Serving
    gateway: GatewayApp
    queue: Queued
    origin: MemoryOrigin

    def left_behind(self) -> tuple[int, int, int]:
        """Tasks, descriptors and buffered bytes."""
        buffers = self.gateway.app.services.buffers
        return len(asyncio.all_tasks()), len(open_descriptors()), buffers.held_bytes

    async def ask(self, asked: Asked) -> int:
        """The status of a request that is answered."""
        wire = await self.port.connect()
        await wire.say(asked.bytes())
        answer = await wire.answer(to_head=asked.method == "HEAD")
        await wire.close()
        await self.port.connections(0)
        return answer.status


@asynccontextmanager
async def scene(directory: Path, slots: Sequence[Slot] = (), *, writeback: bool = False) -> AsyncIterator[Scene]:
    origin = MemoryOrigin(SystemClock())
    origin.put("bucket", "key", bytes(200_000))
    origin.put("bucket", "deleted", b"still here")
    queue = Queued(origin)
    async with (
        gateway_app(directory, origin=origin, through=queue, slots=slots, writeback=writeback) as gateway,
        serving(gateway.app) as port,
    ):
        yield Scene(port, gateway, queue, origin)


@asynccontextmanager
async def playing(directory: Path, *slots: Slot, writeback: bool = False) -> AsyncIterator[Scene]:
    async with scene(directory, slots, writeback=writeback) as played:
        yield played


async def leave(wire: Wire) -> None:
    """As a process that is killed: the kernel says that no more will come, and resets what is sent."""
    await wire.close()


BUCKET = Prefix("bucket", "")
SLOTS = {"strict": Slot("kept", BUCKET), "ttl": Slot("kept", BUCKET, consistency="ttl")}


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", rest_is_slow([*READS, *WRITES], *[*READS, *WRITES][::4]))
async def test_who_leaves_the_queue_is_not_served(name: str, slot: str, tmp_path: Path) -> None:
    """A request that waits for a connection to the origin ends with its client; the origin never hears of it."""
    asked = (READS | WRITES)[name]

    async def left(played: Scene) -> tuple[int, int, int]:
        wire = await played.port.connect()
        await wire.say(asked.bytes())
        await until(lambda: played.queue.waiting == 1)
        await leave(wire)
        await played.port.requests(0)
        await until(lambda: played.queue.waiting == 0)
        await played.port.connections(0)
        return played.left_behind()

    async with playing(tmp_path, SLOTS[slot]) as played:
        first = await left(played)  # what is opened once stays open
        await left(played)
        assert await left(played) <= first
        assert not played.origin.calls
        played.queue.open.set()
        assert await played.ask(asked) < 300


@pytest.mark.parametrize("name", READS)
async def test_a_read_that_the_origin_has_begun_ends_with_its_client(name: str, tmp_path: Path) -> None:
    """The request ends though the origin does not answer; what is shared goes on, and whoever comes next is served."""
    asked = READS[name]
    async with playing(tmp_path, SLOTS["ttl"]) as played:
        played.queue.open.set()
        held, reached = asyncio.Event(), asyncio.Event()
        played.origin.faults.append(Fault(lambda _: True, Hold(held, reached)))
        wire = await played.port.connect()
        await wire.say(asked.bytes())
        await asyncio.wait_for(reached.wait(), 10)
        await leave(wire)
        await played.port.requests(0)
        held.set()
        assert await played.ask(asked) < 300


@pytest.mark.parametrize("name", [name for name, asked in WRITES.items() if asked.changes])
async def test_a_write_that_the_origin_has_begun_is_seen(name: str, tmp_path: Path) -> None:
    """What was remembered of the key before is not believed after a write whose client has left."""
    asked = WRITES[name]
    head = Asked("HEAD", f"/bucket/{asked.changes}")
    async with playing(tmp_path, SLOTS["ttl"]) as played:
        played.queue.open.set()
        before = await played.ask(head)
        held, reached = asyncio.Event(), asyncio.Event()
        played.origin.faults.append(Fault(lambda call: call.method == asked.method, Hold(held, reached)))
        wire = await played.port.connect()
        await wire.say(asked.bytes())
        await asyncio.wait_for(reached.wait(), 10)
        await leave(wire)
        await played.port.connections(0)
        held.set()
        await played.port.requests(0)
        after = await played.ask(head)
        assert after == (200 if asked.changes in played.origin.buckets["bucket"].objects else 404)
        assert after != before or name == "large put", "all of a small body had come"


@pytest.mark.parametrize("name", ["put", "large put", "delete"])
async def test_a_buffered_write_is_whole_or_not_at_all(name: str, tmp_path: Path) -> None:
    """A client that leaves behind the last byte of its write: the node answers all readers alike, and is in order."""
    asked = WRITES[name]
    head = Asked("HEAD", f"/bucket/{asked.changes}")
    async with playing(tmp_path, Slot("kept", BUCKET, write="back"), writeback=True) as played:
        played.queue.open.set()
        assert await played.ask(Asked("PUT", "/bucket/first", b"the bucket's profile is learned")) == 200
        for _ in range(5):
            wire = await played.port.connect()
            await wire.say(asked.bytes())
            await leave(wire)
            await played.port.connections(0)
            await played.port.requests(0)
        status = await played.ask(head)
        assert [await played.ask(head) for _ in range(3)] == [status] * 3
        assert await played.ask(asked) in (200, 204)
        assert await played.ask(head) == (404 if name == "delete" else 200)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head", "get", "list", "delete"])
def test_a_crowd_that_leaves_costs_the_origin_nothing(name: str, tmp_path: Path) -> None:
    """200 clients ask and leave, four connections to the origin: whoever stays is served next."""

    async def scenario(strict: StrictOrigin) -> None:
        settings = OriginSettings(endpoint_url=strict.endpoint_url, max_connections=4)
        origin = S3Origin(settings, StaticCredentials(STRICT_PAIR), SystemClock(), instance_id="gateway-1")
        async with (
            gateway_app(tmp_path, origin=strict.model, through=origin) as gateway,
            serving(gateway.app) as port,
        ):
            wires = []
            for number in range(LEAVERS):
                wire = await port.connect()
                await wire.say(crowd_asks(name, number).bytes())
                wires.append(wire)
            await port.requests(LEAVERS)
            await until(lambda: len(strict.model.calls) == ONE_ACCOUNTS_SHARE)
            for wire in wires:
                wire.writer.close()
            await port.connections(0)
            await until(lambda: port.server.requests_in_flight <= 4)
            strict.run_inside(held.set)
            wire = await port.connect()
            await wire.say(Asked("HEAD", "/bucket/key").bytes())
            assert (await wire.answer(to_head=True)).status == 200
            await port.requests(0)
        await origin.aclose()

    with StrictOrigin() as strict:
        strict.model.put("bucket", "key", b"here")
        held = strict.run_inside(asyncio.Event)
        strict.model.faults.append(Fault(lambda call: "crowd" in str(call), Hold(held), times=None))
        asyncio.run(scenario(strict))
        strict.settle()
        assert len(strict.model.calls) <= LEAVERS // 4


def test_one_credential_leaves_connections_to_others(tmp_path: Path) -> None:
    """One key's questions that the origin does not answer take their share; another key's are answered meanwhile."""

    async def scenario(strict: StrictOrigin) -> None:
        settings = OriginSettings(endpoint_url=strict.endpoint_url, max_connections=4)
        origin = S3Origin(settings, StaticCredentials(STRICT_PAIR), SystemClock(), instance_id="gateway-1")
        keyring = ConfiguredKeyring([Key(name, "secret", None, EVERYTHING) for name in ("crowd", "other")])
        async with (
            gateway_app(tmp_path, origin=strict.model, through=origin, keyring=keyring) as gateway,
            serving(gateway.app) as port,
        ):
            for number in range(20):
                wire = await port.connect()
                await wire.say(crowd_asks("head", number).bytes("crowd"))
            await port.requests(20)
            await until(lambda: len(strict.model.calls) == ONE_ACCOUNTS_SHARE)
            wire = await port.connect()
            await wire.say(Asked("HEAD", "/bucket/key").bytes("other"))
            assert (await wire.answer(to_head=True)).status == 200
            assert len(strict.model.calls) == ONE_ACCOUNTS_SHARE + 1
            strict.run_inside(held.set)
        await origin.aclose()

    with StrictOrigin() as strict:
        strict.model.put("bucket", "key", b"here")
        held = strict.run_inside(asyncio.Event)
        strict.model.faults.append(Fault(lambda call: "crowd" in str(call.key), Hold(held), times=None))
        asyncio.run(scenario(strict))
        strict.settle()


def crowd_asks(name: str, number: int) -> Asked:
    if name == "list":
        return Asked("GET", f"/bucket?list-type=2&prefix=crowd-{number}")
    return Asked({"head": "HEAD", "get": "GET", "delete": "DELETE"}[name], f"/bucket/crowd-{number}")
