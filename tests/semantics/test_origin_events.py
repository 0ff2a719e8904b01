"""Clause 3.12 of docs/semantics.md: events of the origin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.core.model import ObjectKey
from gateway.operations.visibility import OriginEvents
from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix
from gateway.s3.events import ObjectEvent
from gateway.s3.requests import Operation
from tests.origin.origins import xml
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import Hold, on
from tests.support.slots import Slot

PREFIX = Prefix.parse("s3://bucket/")
TTL = Slot("t", PREFIX, "read-write", "ttl", 60.0, negative_ttl_seconds=60.0)
IMMUTABLE = Slot("i", PREFIX, "read-write", "immutable", negative_ttl_seconds=60.0)


@asynccontextmanager
async def playing(directory: Path, slot: Slot) -> AsyncIterator[GatewayApp]:
    clock = ManualClock()
    async with gateway_app(directory, slots=[slot], clock=clock, allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "k", b"old")
        gateway.origin.put("bucket", "other", b"other")
        yield gateway


async def ask(gateway: GatewayApp, method: str, target: str = "/bucket/k", body: bytes = b"") -> Answer:
    answer = await call(gateway.app, method, target, body=body, sign=False)
    await gateway.catalog.settle()
    await gateway.blocks.settle()
    return answer


async def listed(gateway: GatewayApp) -> dict[str, int]:
    answer = await ask(gateway, "GET", "/bucket?list-type=2")
    assert answer.status == 200
    return {node.findtext("Key") or "": int(node.findtext("Size") or 0) for node in xml(answer.body).iter("Contents")}


async def event(gateway: GatewayApp, name: str = "ObjectCreated:Put", key: str = "k", etag: str | None = None) -> None:
    services = gateway.app.services
    events = OriginEvents(gateway.catalog, gateway.blocks, services.slots)
    assert await events.apply([ObjectEvent("here", name, "bucket", key, etag)]) == [None]


async def outside(gateway: GatewayApp, method: str, key: str, body: bytes = b"") -> None:
    async with await gateway.origin.send(OriginRequest(method, "bucket", key, body=body)) as response:
        assert response.status in (200, 204)


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
async def test_3_12_a_change_is_seen_when_its_event_has_been_applied(tmp_path: Path, slot: Slot) -> None:
    """3.12 GET, HEAD and LIST show an outside write at once, in immutable slots too; other keys ask nothing."""
    async with playing(tmp_path, slot) as gateway:
        await listed(gateway)
        for key in ("k", "other"):
            await ask(gateway, "GET", f"/bucket/{key}")
        await outside(gateway, "PUT", "k", b"newer")
        assert (await ask(gateway, "GET")).body == b"old"
        await event(gateway)
        assert (await ask(gateway, "HEAD")).headers["content-length"] == "5"
        assert (await ask(gateway, "GET")).body == b"newer"
        assert (await listed(gateway))["k"] == 5
        asked = len(gateway.origin.calls)
        assert (await ask(gateway, "HEAD", "/bucket/other")).status == 200
        assert (await ask(gateway, "GET")).body == b"newer"
        assert await listed(gateway) == {"k": 5, "other": 5}
        assert len(gateway.origin.calls) == asked, gateway.origin.calls[asked:]


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
async def test_3_12_so_are_removals_and_new_objects(tmp_path: Path, slot: Slot) -> None:
    """3.12 An object that has gone is gone; one that was remembered as absent is there."""
    async with playing(tmp_path, slot) as gateway:
        await listed(gateway)
        await ask(gateway, "HEAD")
        assert (await ask(gateway, "HEAD", "/bucket/new")).status == 404
        await outside(gateway, "DELETE", "k")
        await outside(gateway, "PUT", "new", b"new")
        assert (await ask(gateway, "HEAD", "/bucket/new")).status == 404
        await event(gateway, "ObjectRemoved:Delete")
        await event(gateway, key="new")
        assert (await ask(gateway, "HEAD")).status == 404
        assert (await ask(gateway, "HEAD", "/bucket/new")).status == 200
        assert await listed(gateway) == {"new": 3, "other": 5}


async def test_3_12_what_was_asked_before_the_event_brings_nothing_back(tmp_path: Path) -> None:
    """3.12 A page and a HEAD that were answered before the change, and land after its event, are not remembered."""
    async with playing(tmp_path, IMMUTABLE) as gateway:
        until = asyncio.Event()
        held = HeldAnswers(gateway, until)
        tasks = [asyncio.create_task(held.head()), asyncio.create_task(held.list())]
        await held.answered.wait()
        await outside(gateway, "PUT", "k", b"newer")
        await event(gateway)
        until.set()
        await asyncio.gather(*tasks)
        await gateway.catalog.settle()
        assert (await ask(gateway, "HEAD")).headers["content-length"] == "5"
        assert (await listed(gateway))["k"] == 5


class HeldAnswers:
    """Learns from the origin what it says now, and tells the gateway later: an answer that is long on its way."""

    def __init__(self, gateway: GatewayApp, until: asyncio.Event) -> None:
        self._gateway = gateway
        self._until = until
        self._send = gateway.origin.send
        self._left = 2
        self.answered = asyncio.Event()
        gateway.origin.send = self._late  # type: ignore[method-assign, assignment]

    async def _late(self, request: OriginRequest) -> object:
        response = await self._send(request)
        if request.method == "PUT" or self._until.is_set():
            return response
        self._left -= 1
        if not self._left:
            self.answered.set()
        await self._until.wait()
        return response

    async def head(self) -> None:
        assert (await call(self._gateway.app, "HEAD", "/bucket/k", sign=False)).headers["content-length"] == "3"

    async def list(self) -> None:
        assert (await call(self._gateway.app, "GET", "/bucket?list-type=2", sign=False)).status == 200


@pytest.mark.parametrize("name", ["ObjectCreated:Put", "ObjectRemoved:Delete", "LifecycleExpiration:Delete"])
async def test_3_12_events_that_are_late_double_or_wrong_do_no_harm(tmp_path: Path, name: str) -> None:
    """3.12 An event is believed to the extent that the origin is asked: what is answered is what is there."""
    async with playing(tmp_path, IMMUTABLE) as gateway:
        await listed(gateway)
        await ask(gateway, "GET")
        for _ in range(2):
            await event(gateway, name, etag="0123")
            await event(gateway, name, key="never")
            assert (await ask(gateway, "GET")).body == b"old"
            assert await listed(gateway) == {"k": 3, "other": 5}
            assert (await ask(gateway, "GET", "/bucket/never")).status == 404


async def test_3_12_an_event_during_an_own_write_does_not_end_its_mark(tmp_path: Path) -> None:
    """2.1, 3.12 A page asked for while the write is under way is not believed, whatever events come in between."""
    async with playing(tmp_path, IMMUTABLE) as gateway:
        await listed(gateway)
        until, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(operation=Operation.PUT_OBJECT), Hold(until, reached))
        writing = asyncio.create_task(ask(gateway, "PUT", body=b"own"))
        await reached.wait()
        await event(gateway)
        assert (await listed(gateway))["k"] == 3
        until.set()
        assert (await writing).status == 200
        assert (await listed(gateway))["k"] == len(b"own")
        assert (await ask(gateway, "GET")).body == b"own"


async def test_3_12_blocks_of_old_versions_go_those_of_this_one_stay(tmp_path: Path) -> None:
    """3.12 The event of a write that is known already costs a HEAD, and not the object's bytes."""
    async with playing(tmp_path, IMMUTABLE) as gateway:
        etag = (await ask(gateway, "GET")).headers["etag"].strip('"')
        used = gateway.blocks.usage().used_bytes
        assert used > 0
        await event(gateway, etag=etag)
        assert gateway.blocks.usage().used_bytes == used
        fetched = sum(one.operation is Operation.GET_OBJECT for one in gateway.origin.calls)
        assert (await ask(gateway, "GET")).headers["x-forebay-cache"] == "hit"
        assert sum(one.operation is Operation.GET_OBJECT for one in gateway.origin.calls) == fetched
        await event(gateway, etag="another")
        assert gateway.catalog.last_known(ObjectKey("bucket", "k")) is None
        assert gateway.blocks.usage().used_bytes < used
