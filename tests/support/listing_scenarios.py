"""Scenarios of LIST through a gateway with an index: what the tests of its clauses have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.edge.asgi import S3App
from gateway.metadata.catalog import Catalog
from gateway.policy.slots import Prefix
from tests.origin.origins import xml
from tests.support.asgi import Answer, call
from tests.support.cache_label import cache_label
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot

PREFIX = Prefix.parse("s3://bucket/")
TTL = Slot("t", PREFIX, "read-write", "ttl", 60.0)
IMMUTABLE = Slot("i", PREFIX, "read-write", "immutable")
PATIENT = Slot("p", PREFIX, "read-write", "ttl", 60.0, stale_if_unreachable_seconds=100.0)
STRICT_PART = Slot("s", Prefix.parse("s3://bucket/strict/"), "read-write", "strict")
SHORT_PART = Slot("short", Prefix.parse("s3://bucket/short/"), "read-write", "ttl", 10.0)
LIST = "/bucket?list-type=2"


@asynccontextmanager
async def playing(directory: Path, *slots: Slot) -> AsyncIterator[tuple[GatewayApp, ManualClock]]:
    """A gateway with a few keys at the origin. Requests are unsigned, for their clock is not the test's."""
    clock = ManualClock()
    async with gateway_app(directory, slots=slots, clock=clock, allow_unsigned=True) as gateway:
        for key in ("a/1", "a/2", "b", "c/1"):
            gateway.origin.put("bucket", key, b"old")
        yield gateway, clock


async def ask(
    gateway: GatewayApp, target: str = LIST, headers: dict[str, str] | None = None, *, app: S3App | None = None
) -> Answer:
    """One LIST, and what is learned from it kept."""
    answer = await call(app or gateway.app, "GET", target, headers, sign=False)
    await gateway.catalog.settle()
    return answer


async def keys(gateway: GatewayApp, target: str = LIST, *, app: S3App | None = None) -> list[str]:
    return names(await ask(gateway, target, app=app))


def names(answer: Answer) -> list[str]:
    """Keys and common prefixes as they are listed."""
    assert answer.status == 200, answer.body
    return sorted(
        node.findtext("Key") or node.findtext("Prefix") or "?"
        for node in xml(answer.body)
        if node.tag in ("Contents", "CommonPrefixes")
    )


def source(answer: Answer) -> str:
    return cache_label(answer)


def token_of(answer: Answer) -> str:
    token = xml(answer.body).findtext("NextContinuationToken")
    assert token
    return token


async def write(gateway: GatewayApp, method: str, target: str, body: bytes = b"") -> None:
    assert (await call(gateway.app, method, target, body=body, sign=False)).status in (200, 204)


@asynccontextmanager
async def another_worker(gateway: GatewayApp, clock: ManualClock) -> AsyncIterator[S3App]:
    """A second process's application, as far as one process can have one: the same files, queues of its own."""
    catalog = Catalog(gateway.origin, gateway.catalog._opened, clock)
    try:
        yield dataclasses.replace(gateway.app, services=dataclasses.replace(gateway.app.services, catalog=catalog))
    finally:
        await catalog.settle()
        await catalog.listing.close()
