"""What was flushed stays cached, and is what every read finds."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gateway.policy.slots import Prefix, Slot
from gateway.s3.requests import Operation
from tests.support.absorbing import PART_BYTES, Client, with_client
from tests.support.asgi import call
from tests.support.gateway_app import BLOCK_SIZE_BYTES, gateway_app


def test_flushed_bytes_are_cached_without_being_fetched(tmp_path: Path) -> None:
    """Of a single body all of it; of an upload every block that lies in one part."""

    async def scenario(client: Client) -> None:
        await client.learn()
        single, parts = os.urandom(3 * BLOCK_SIZE_BYTES + 5), [os.urandom(PART_BYTES), os.urandom(100_000)]
        await client.ask("PUT", "back/single", single)
        upload_id = await client.create("back/multi")
        etags = {n: await client.part("back/multi", upload_id, n, body) for n, body in enumerate(parts, 1)}
        await client.complete("back/multi", upload_id, etags)
        await client.flush()
        for name, content in (("single", single), ("multi", b"".join(parts))):
            answer = await client.ask("GET", f"back/{name}")
            assert answer.body == content
            assert answer.headers["x-forebay-cache"] == "hit"
        assert client.origin.count(Operation.GET_OBJECT) == 0

    with_client(tmp_path, scenario)


@pytest.mark.parametrize("consistency", ["ttl", "immutable"])
def test_what_was_remembered_before_is_void(tmp_path: Path, consistency: str) -> None:
    """In slots that remember: the flushed version is the one that is found, and a deleted object is gone."""
    slot = Slot("back", Prefix.parse("s3://bucket/back/"), consistency=consistency, write="back")  # type: ignore[arg-type]

    async def scenario() -> None:
        async with gateway_app(tmp_path, slots=[slot], writeback=True) as gateway:
            client = Client(gateway)
            await client.learn()
            gateway.origin.put("bucket", "back/k", b"old")
            assert (await client.ask("GET", "back/k")).body == b"old"
            await client.ask("PUT", "back/k", b"new")
            assert (await client.ask("GET", "back/k")).body == b"new"
            await client.flush()
            assert (await client.ask("GET", "back/k")).body == b"new"
            assert (await client.ask("HEAD", "back/k")).headers["content-length"] == "3"
            await client.ask("PUT", "back/k", b"newer")
            async with client.flushing():
                await client.ask("DELETE", "back/k", status=204)
            assert (await call(gateway.app, "GET", "/bucket/back/k")).status == 404

    asyncio.run(scenario())
