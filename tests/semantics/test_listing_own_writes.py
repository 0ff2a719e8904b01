"""Clauses 2.1 and 2.3 of docs/semantics.md, for LIST: own writes are in every page."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.disk.lmdb_environment import NEW_ENGINE
from gateway.edge.asgi import S3App
from gateway.metadata.listing import index as listing_index
from gateway.metadata.listing.dirty_keys import PAGE_SECONDS_MAX
from gateway.operations.list_sources import TRUTHS_MAX
from gateway.origin.client import OriginRequest, OriginResponse
from gateway.s3.requests import Operation
from tests.origin.origins import xml
from tests.semantics.test_consistency import OWN_WRITES, md5_of
from tests.support.asgi import call
from tests.support.gateway_app import GatewayApp
from tests.support.listing_scenarios import (
    IMMUTABLE,
    LIST,
    TTL,
    another_worker,
    ask,
    keys,
    names,
    playing,
    source,
    write,
)
from tests.support.memory_origin.faults import Hold, Unreachable, on
from tests.support.stopped_process import stopped_writer


@pytest.mark.parametrize("change", ["a write begins", "a write ends", "the bucket changes", "time passes"])
async def test_2_1_a_question_from_before_answers_nobody_after(tmp_path: Path, change: str) -> None:
    """2.1, 3.9 Before a write, or before metadata_ttl: who comes later asks for himself."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        late = Late(gateway)
        app = dataclasses.replace(gateway.app, services=dataclasses.replace(gateway.app.services, origin=late))
        index = gateway.catalog.listing
        if change == "a write ends":
            own = await index.begin_write("bucket", ["new"])
        first = asyncio.create_task(call(app, "GET", LIST, sign=False))
        await late.reached.wait()
        gateway.origin.put("bucket", "new", b"")
        if change == "a write begins":
            own = await index.begin_write("bucket", ["new"])
        elif change == "a write ends":
            await index.end_write(own)
        elif change == "the bucket changes":
            gateway.catalog.forget_bucket("bucket")
        else:
            await clock.advance(60.0)
        second = asyncio.create_task(call(app, "GET", LIST, sign=False))
        late.held.set()
        assert "new" not in names(await first)
        assert "new" in names(await second)
        await gateway.catalog.settle()


async def check(gateway: GatewayApp, *apps: S3App, targets: Sequence[str] = (LIST, "/bucket?delimiter=/")) -> None:
    """Every application lists what the origin lists."""
    for target in targets:
        query = [tuple(pair.split("=")) for pair in target.partition("?")[2].split("&")]
        async with await gateway.origin.send(OriginRequest("GET", "bucket", None, query)) as response:  # type: ignore[arg-type]
            expected = xml(await response.read(2**20))
        for app in apps:
            found = xml((await ask(gateway, target, app=app)).body)
            for tag in ("Contents", "CommonPrefixes"):
                assert [texts(node) for node in found.iter(tag)] == [texts(node) for node in expected.iter(tag)]


def texts(node: object) -> list[str]:
    return [one.text or "" for one in node.iter()]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("method", "target", "headers", "body"), OWN_WRITES)
async def test_2_1_own_writes_are_listed_at_once_on_every_worker(
    tmp_path: Path, method: str, target: str, headers: dict[str, str], body: bytes
) -> None:
    """2.1, 2.2 Created, changed, deleted: the next LIST has it, from whichever worker, as the origin would say it."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, clock):
        gateway.origin.put("bucket", "source", b"source")
        gateway.origin.put("bucket", "k", b"old")
        if "delete" in target:
            headers["content-md5"] = md5_of(body)
        async with another_worker(gateway, clock) as other:
            await check(gateway, gateway.app, other)
            await clock.advance(5.0)
            answer = await call(gateway.app, method, target, headers, body, sign=False)
            assert answer.status in (200, 204)
            await check(gateway, other, gateway.app)
            before = gateway.origin.count()
            await ask(gateway)
            assert gateway.origin.count() == before, "the write is settled: the index knows"


@pytest.mark.parametrize(("method", "target", "headers", "body"), OWN_WRITES)
async def test_2_1_own_writes_are_listed_at_once_while_a_process_is_stopped(
    tmp_path: Path,
    method: str,
    target: str,
    headers: dict[str, str],
    body: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2.1 Though the process holds the lock that notes own writes: they are answered, and every worker lists them."""
    monkeypatch.setattr(listing_index, "NOTE_SECONDS_MAX", 0.1)
    async with playing(tmp_path, IMMUTABLE) as (gateway, clock):
        gateway.origin.put("bucket", "source", b"source")
        gateway.origin.put("bucket", "k", b"old")
        if "delete" in target:
            headers["content-md5"] = md5_of(body)
        async with another_worker(gateway, clock) as other:
            await check(gateway, gateway.app, other)
            with stopped_writer(tmp_path / "catalog" / "dirty", engine=NEW_ENGINE):
                for _ in range(2):
                    await clock.advance(1.0)
                    answer = await call(gateway.app, method, target, headers, body, sign=False)
                    assert answer.status in (200, 204)
                    await check(gateway, other, gateway.app)
            await check(gateway, other, gateway.app)


async def test_2_1_a_write_in_flight_is_neither_guessed_nor_forgotten(tmp_path: Path) -> None:
    """While the origin works, LIST says what the origin says; and what it then learns does not outlive the write."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway)
        held, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(Operation.PUT_OBJECT), Hold(held, reached))
        writing = asyncio.create_task(call(gateway.app, "PUT", "/bucket/new", body=b"new", sign=False))
        await reached.wait()
        for _ in range(2):
            answer = await ask(gateway)
            assert (source(answer), "new" in names(answer)) == ("partial", False)
        held.set()
        assert (await writing).status == 200
        assert "new" in await keys(gateway)


@pytest.mark.parametrize("expired", [False, True])
async def test_2_3_a_page_asked_for_before_an_own_write_does_not_undo_it(tmp_path: Path, expired: bool) -> None:
    """2.3 A page of the origin that arrives behind own writes, even settled ones, says nothing about their keys."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        await ask(gateway)
        await clock.advance(61.0)
        async with another_worker(gateway, clock) as other:
            late = Late(gateway)
            slow = dataclasses.replace(other, services=dataclasses.replace(other.services, origin=late))
            listing = asyncio.create_task(call(slow, "GET", LIST, sign=False))
            await late.reached.wait()
            await write(gateway, "PUT", "/bucket/a/1", b"newer")
            await write(gateway, "DELETE", "/bucket/b")
            await write(gateway, "PUT", "/bucket/new", b"new")
            await check(gateway, gateway.app)
            if expired:
                await clock.advance(PAGE_SECONDS_MAX + 1)
                await write(gateway, "PUT", "/bucket/another", b"")
                await check(gateway, gateway.app)
            late.held.set()
            assert names(await listing) == ["a/1", "a/2", "b", "c/1"]
            await other.services.catalog.settle()
            await check(gateway, gateway.app, other)


class Late:
    """An origin whose first answer is held on its way."""

    def __init__(self, gateway: GatewayApp) -> None:
        self.gateway, self.held, self.reached = gateway, asyncio.Event(), asyncio.Event()

    async def send(self, request: OriginRequest) -> OriginResponse:
        response = await self.gateway.origin.send(request)
        self.reached.set()
        await self.held.wait()
        return response

    async def aclose(self) -> None:
        return


async def test_2_3_a_page_asked_for_before_the_bucket_changed_is_not_learned(tmp_path: Path) -> None:
    """2.3 Nor is what was known before believed, when a forwarded change names no key."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        late = Late(gateway)
        slow = dataclasses.replace(gateway.app, services=dataclasses.replace(gateway.app.services, origin=late))
        listing = asyncio.create_task(call(slow, "GET", LIST, sign=False))
        await late.reached.wait()
        await ask(gateway, f"{LIST}&prefix=a")
        form = {"content-type": "multipart/form-data; boundary=b"}
        await call(gateway.app, "POST", "/bucket", form, b"x", sign=False)
        gateway.origin.put("bucket", "a/new", b"stored by the form, for all the gateway knows")
        late.held.set()
        assert "a/new" not in names(await listing)
        await gateway.catalog.settle()
        assert source(await ask(gateway)) == "miss"
        assert "a/new" in await keys(gateway, f"{LIST}&prefix=a")


async def test_2_1_many_writes_are_settled_by_one_page_of_the_origin(tmp_path: Path) -> None:
    """2.1 A page in which more keys were written than are asked about one by one is asked for."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway)
        for number in range(TRUTHS_MAX + 5):
            await write(gateway, "PUT", f"/bucket/many/{number:02}", b"")
        before = len(gateway.origin.calls)
        assert len(await keys(gateway)) == TRUTHS_MAX + 9
        assert len(gateway.origin.calls) == before + 1
        answer = await ask(gateway)
        assert (source(answer), len(names(answer))) == ("hit", TRUTHS_MAX + 9)


async def test_2_1_writes_under_a_common_prefix_that_is_there_anyway_cost_nothing(tmp_path: Path) -> None:
    """A directory that has another object is listed without asking about those just written."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway)
        catalog = gateway.catalog.listing
        many = [f"a/1{number:03}" for number in range(1000)]
        own = await catalog.begin_write("bucket", many)  # as DeleteObjects does
        await catalog.end_write(own)
        for number in range(5):
            await write(gateway, "PUT", f"/bucket/a/0{number}", b"")
        answer = await ask(gateway, "/bucket?list-type=2&delimiter=/")
        assert (source(answer), names(answer)) == ("hit", ["a/", "b", "c/"])


async def test_2_1_a_write_whose_answer_is_lost_is_looked_for(tmp_path: Path) -> None:
    """2.1 The origin may have carried it out."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway)
        gateway.origin.inject(on(Operation.PUT_OBJECT), Unreachable(late=True))
        assert (await call(gateway.app, "PUT", "/bucket/new", body=b"new", sign=False)).status == 503
        assert "new" in await keys(gateway)
