"""Whatever an origin sends instead of an object's bytes: never cached, never a complete answer (semantics, 1.3).

Every fault in every situation in which bytes come from the origin: alone, in the midst of an object, for a crowd that
shares the fill, past a cache that takes nothing, without any cache, and for readers in other processes.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from gateway.blocks.cache import PassthroughCache
from gateway.core.clock import SystemClock
from gateway.core.errors import OriginError, StoreUnavailable
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.origin.client import Purpose
from gateway.s3.requests import Operation
from tests.support.asgi import Answer, call
from tests.support.blocks import bytes_of
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterBody, AlterHeaders, Call, CutBody, Effect, on
from tests.support.strict_origin import StrictOrigin

SIZE_BYTES = 5 * BLOCK_SIZE_BYTES + 4321
CONTENT = os.urandom(SIZE_BYTES)
CROWD = 3

EFFECTS: dict[str, Effect] = {
    "short": CutBody(1000),
    "reset": CutBody(10_000, reset=True),
    "another ETag": AlterHeaders({"etag": '"0123456789abcdef0123456789abcdef"'}),
    "another range": AlterHeaders({"content-range": f"bytes 1-2/{SIZE_BYTES}"}),
    "another size": AlterHeaders({"content-range": f"bytes 0-{BLOCK_SIZE_BYTES - 1}/{SIZE_BYTES + 1}"}),
    "another length": AlterHeaders({"content-length": "17"}),
    "more bytes": AlterBody(lambda body: body + b"x"),
    "fewer bytes": AlterBody(lambda body: body[:-1]),
    "nothing": AlterBody(lambda _: b""),
}


WITHHELD = frozenset({"another ETag", "another range", "another size"})
"""Faults that look like ranges that the origin withholds (9.8): the right answer to a plain GET is handed on."""


class Hurried(SystemClock):
    """Pauses between tries pass at once."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0 if seconds < 1 else seconds)


def late(seen: Call) -> bool:
    """A GET of bytes behind the second block."""
    first = seen.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
    return seen.operation is Operation.GET_OBJECT and int(first) >= 2 * BLOCK_SIZE_BYTES


async def alone(gateway: GatewayApp, path: str) -> list[Answer]:
    return [await call(gateway.app, "GET", path)]


async def crowd(gateway: GatewayApp, path: str) -> list[Answer]:
    return list(await asyncio.gather(*(call(gateway.app, "GET", path) for _ in range(CROWD))))


async def past_the_cache(gateway: GatewayApp, path: str) -> list[Answer]:
    full = StoreUnavailable("full")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    gateway.blocks.isolation.note(full)
    return [await call(gateway.app, "GET", path)]


Situation: TypeAlias = Callable[[GatewayApp, str], Awaitable[list[Answer]]]
SITUATIONS: dict[str, tuple[Situation, Callable[[Call], bool]]] = {
    "alone": (alone, on(Operation.GET_OBJECT)),
    "in the midst": (alone, late),
    "a crowd": (crowd, on(Operation.GET_OBJECT)),
    "a crowd in the midst": (crowd, late),
    "past the cache": (past_the_cache, on(Operation.GET_OBJECT)),
}


@pytest.mark.parametrize("situation", SITUATIONS)
async def test_1_3_no_answer_is_complete_and_nothing_is_kept(tmp_path: Path, situation: str) -> None:
    """1.3 An error, or right bytes that break off; when the origin is right again, so is the answer."""
    ask, when = SITUATIONS[situation]
    async with gateway_app(tmp_path, clock=Hurried()) as gateway:
        for number, (name, effect) in enumerate(EFFECTS.items()):
            path, bucket = f"/bucket-{number}/k", f"bucket-{number}"  # what one has learned is of no other
            gateway.origin.create_bucket(bucket)
            gateway.origin.put(bucket, "k", CONTENT)
            fault = gateway.origin.inject(when, effect, times=None)
            for answer in await ask(gateway, path):
                if answer.status == 200:
                    is_plain = (
                        name in WITHHELD and answer.headers["x-forebay-cache"] == "bypass" and answer.body == CONTENT
                    )
                    assert not answer.complete or is_plain, name
                    assert CONTENT.startswith(answer.body), name
                else:
                    assert answer.status >= 500, name
            fault.times = 0
            for _ in range(2):
                answer = await call(gateway.app, "GET", path)
                assert (answer.status, answer.complete) == (200, True), name
                assert answer.body == CONTENT, name


CHECKSUMS = {
    "x-amz-checksum-crc32c": "AAAAAA==",
    "x-amz-checksum-crc64nvme": "AAAAAAAAAAA=",
    "x-amz-checksum-sha256": "A" * 43 + "=",
}


async def test_1_3_a_body_without_the_checksum_that_came_with_it(tmp_path: Path) -> None:
    """1.3 What the origin itself says of a whole object must hold, or the last of it is withheld and nothing kept."""
    small = CONTENT[: BLOCK_SIZE_BYTES - 5]
    async with gateway_app(tmp_path, clock=Hurried()) as gateway:
        for kept, (name, value) in enumerate(CHECKSUMS.items()):
            path = f"/bucket/{name}"
            gateway.origin.put("bucket", name, small)
            fault = gateway.origin.inject(on(Operation.GET_OBJECT), AlterHeaders({name: value}), times=None)
            answer = await call(gateway.app, "GET", path)
            assert answer.status >= 500 or (not answer.complete and len(answer.body) < len(small))
            await gateway.blocks.settle()
            assert gateway.blocks.usage().blocks == kept
            fault.effect = AlterHeaders({name: value + "-3"})
            answer = await call(gateway.app, "GET", path)
            assert (answer.status, answer.complete, answer.body) == (200, True, small)
            await gateway.blocks.settle()
            fault.times = 0


@pytest.mark.parametrize("effect", EFFECTS)
async def test_1_3_without_any_cache_too(effect: str) -> None:
    """1.3 The way that reads take when the cache directory cannot be used checks as much."""
    origin = MemoryOrigin(Hurried())
    origin.create_bucket("bucket")
    etag = origin.put("bucket", "k", CONTENT)
    version = ObjectVersion(ObjectKey("bucket", "k"), etag, SIZE_BYTES)
    cache = PassthroughCache.without_directory(origin, Hurried())

    async def read() -> bytes:
        reader = await cache.open_range(version, ByteRange(0, SIZE_BYTES - 1))
        return b"".join([bytes_of(piece) async for piece in reader.body()])

    fault = origin.inject(on(Operation.GET_OBJECT), EFFECTS[effect], times=None)
    with pytest.raises(OriginError):
        await read()
    fault.times = 0
    assert await read() == CONTENT


async def test_1_3_what_is_fetched_ahead_of_readers_is_not_kept_either(tmp_path: Path) -> None:
    """1.3 Warming meets the same origin."""
    async with gateway_app(tmp_path, clock=Hurried()) as gateway:
        etag = gateway.origin.put("bucket", "k", CONTENT)
        version = ObjectVersion(ObjectKey("bucket", "k"), etag, SIZE_BYTES)
        for name, effect in EFFECTS.items():
            fault = gateway.origin.inject(on(Operation.GET_OBJECT), effect, times=None)
            for piece in list(gateway.blocks.pieces(version, "default"))[:2]:
                with pytest.raises(OriginError):
                    await gateway.blocks.fetch(version, piece, slot="default", purpose=Purpose.WARM)
            await gateway.blocks.settle()
            assert gateway.blocks.usage().blocks == 0, name
            fault.times = 0


@pytest.fixture
def two_workers() -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        config: dict[str, Any] = {
            "server": {"workers": 2, "allow_unsigned": True},
            "origin": origin.settings,
            "cache": {"block_size": "64KiB"},
        }
        with GatewayProcess(config) as gateway:
            yield gateway, origin


@pytest.mark.slow
async def test_1_3_readers_in_all_processes_over_real_connections(
    two_workers: tuple[GatewayProcess, StrictOrigin],
) -> None:
    """1.3 Leaders and followers in two workers, bodies cut and reset on the wire: no complete answer is a wrong one."""
    gateway, origin = two_workers
    origin.latency_seconds = 0.05

    async def get(client: httpx.AsyncClient, key: str) -> str:
        try:
            answer = await client.get(f"{gateway.s3_url}/{key}")
        except httpx.TransportError:
            return "broken off"
        if answer.status_code >= 500:
            return "refused"
        assert answer.status_code == 200
        assert answer.content == CONTENT
        return "right"

    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(trust_env=False, timeout=30, limits=limits) as client:
        for number, (effect, faulty) in enumerate((e, f) for e in EFFECTS for f in (True, False)):
            bucket, key = f"bucket-{number // 2}", f"bucket-{number // 2}/k"
            if faulty:
                origin.model.create_bucket(bucket)
                origin.model.put(bucket, "k", CONTENT)
                fault = origin.model.inject(late, EFFECTS[effect], times=None)
            found = await asyncio.gather(*(get(client, key) for _ in range(CROWD)))
            fault.times = 0
            if not faulty:
                assert set(found) == {"right"}, (effect, found)
            elif effect not in WITHHELD:
                assert "right" not in found, (effect, found)
