"""Bodies that are received whole: many of them at once are bounded together."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.errors import S3Error
from gateway.operations.buffers import BUFFERED_SIZE_BYTES_MAX_TOTAL, Buffers
from gateway.operations.payload import BUFFERED_SIZE_BYTES_MAX
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app

BODY = b"b" * BUFFERED_SIZE_BYTES_MAX


def test_what_is_held_is_given_back() -> None:
    """By those that were completed and by those that failed, each what it had taken."""
    buffers = Buffers(10)
    with buffers.holding() as first:
        first.grow(6)
        with buffers.holding() as second:
            second.grow(3)
            with pytest.raises(S3Error, match="SlowDown"):
                second.grow(2)
            assert buffers.held_bytes == 9
        assert buffers.held_bytes == 6
    assert buffers.held_bytes == 0


def test_one_body_too_many_is_told_to_slow_down(tmp_path: Path) -> None:
    """503 SlowDown, which every SDK tries again, and nothing is stored; the next one finds room."""

    async def put(gateway: GatewayApp) -> Answer:
        return await call(gateway.app, "PUT", "/bucket/k", {}, [BODY[:1000], BODY[1000:]])

    async def scenario() -> None:
        async with gateway_app(tmp_path) as gateway:
            buffers = gateway.app.services.buffers
            with buffers.holding() as others:
                others.grow(BUFFERED_SIZE_BYTES_MAX_TOTAL - len(BODY) + 1)
                refused = await put(gateway)
                assert (refused.status, b"<Code>SlowDown</Code>" in refused.body) == (503, True)
                assert "k" not in gateway.origin.buckets["bucket"].objects
            assert (await put(gateway)).status == 200
            assert buffers.held_bytes == 0

    asyncio.run(scenario())
