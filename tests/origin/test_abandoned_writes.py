"""Writes whose client has left before they were sent."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core import cancellation
from gateway.core.errors import ClientDisconnected
from gateway.origin.client import OriginRequest
from tests.origin.told_origin import Request, told_origin

PUT = OriginRequest("PUT", "bucket", "key", body=b"x")


async def done(_: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("has_idle_connection", [True, False])
async def test_a_write_that_nobody_waits_for_is_not_sent(has_idle_connection: bool) -> None:
    """Be its turn there at once, or not: what has not begun ends there."""
    async with told_origin(done) as told:

        async def write() -> None:
            cancellation.register_request(anywhere=False)
            task = asyncio.current_task()
            assert task is not None
            cancellation.abandon(task)
            async with await told.origin.send(PUT):
                raise AssertionError("it was sent")

        if has_idle_connection:
            async with await told.origin.send(PUT) as answer:
                assert answer.status == 200
        with pytest.raises(ClientDisconnected):
            await asyncio.create_task(write())
        assert len(told.requests) == has_idle_connection
