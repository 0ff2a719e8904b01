"""Prepared reads in slots that several nodes write: the registry is asked each time, and no later write is missed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from gateway.telemetry.metrics import PREPARED_REQUESTS, REQUESTS_IN_FLIGHT
from tests.edge.both_ways import Asked, Talker, head_of, port_of, settle
from tests.support.asgi import ACCESS_KEY_ID, SECRET_ACCESS_KEY
from tests.support.local_reads import local_gateway
from tests.support.writing_nodes import WritingNodes, writing_nodes, writing_slot

KEY = "k"
READS_MAX = 20_000
"""Until one is prepared. It is not their number that counts: the worker must hear that nothing is pending any more."""


class Reader(Talker):
    """A client of the first node, by the short way."""

    nodes: WritingNodes

    async def read(self, method: str = "GET", **fields: str) -> tuple[bytes, bytes]:
        await settle(self.nodes.nodes[0].gateway)
        asked = Asked(method, KEY, {name.replace("_", "-"): value for name, value in fields.items()}, who=ACCESS_KEY_ID)
        raw = head_of(asked, SECRET_ACCESS_KEY, self.nodes.nodes[0].gateway.app.services.clock.now())
        answer = await self.said("fast", raw)
        assert answer is not None
        return answer

    def lay(self) -> None:
        """Have the short way count what it keeps back."""
        requests = self.ports["fast"].server._prepared
        assert requests is not None
        requests._lay()

    async def body(self, **fields: str) -> bytes:
        return (await self.read(**fields))[1]

    async def until_prepared(self, read: Callable[[], Awaitable[object]], operation: str = "GetObject") -> None:
        """Read again and again, until what was prepared answers."""
        before = prepared(operation)
        for _ in range(READS_MAX):
            await read()
            self.lay()
            if prepared(operation) > before:
                return
        pytest.fail(f"{operation} is never prepared")


@asynccontextmanager
async def reader(directory: Path, consistency: str = "ttl") -> AsyncIterator[Reader]:
    async with writing_nodes(directory, 2, slots=[writing_slot(consistency=consistency)]) as nodes:
        await nodes.learn()
        async with port_of(nodes.nodes[0].gateway, "fast", None) as port:
            client = Reader({"fast": port}, {})
            client.nodes = nodes
            yield client


def prepared(operation: str = "GetObject") -> float:
    return PREPARED_REQUESTS.value(operation, "data")


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["ttl", "immutable"])
async def test_12_4_a_prepared_read_sees_what_other_nodes_have_written(tmp_path: Path, consistency: str) -> None:
    """12.4 Pending there, just flushed, and deleted; while nothing changes, what was prepared answers."""
    async with reader(tmp_path, consistency) as client:
        nodes = client.nodes
        for number, change in enumerate(["pending", "flushed", "deleted", "pending here", "deleted there"] * 2):
            first, second = b"first %d" % number, b"second %d" % number
            assert (await nodes.put(number % 2, KEY, first)).status == 200
            await nodes.flush(number % 2)

            async def read(expected: bytes = first) -> None:
                assert await client.body() == expected
                assert await client.body(range="bytes=0-3") == expected[:4]

            await client.until_prepared(read)
            writer = int("here" not in change)
            if change.startswith("deleted"):
                assert (await nodes.ask(writer, "DELETE", f"/bucket/{KEY}")).status == 204
                assert (await client.read())[0].startswith(b"HTTP/1.1 404")
            else:
                assert (await nodes.put(writer, KEY, second)).status == 200
                if change == "flushed":
                    await nodes.flush(writer)
                assert await client.body() == second
            for node in (0, 1):  # else the next write waits for the other node's
                await nodes.flush(node)
        assert REQUESTS_IN_FLIGHT.value() == 0


async def test_the_registry_is_asked_once_for_each_read(tmp_path: Path) -> None:
    """And nobody else is: neither the bucket nor another node."""
    async with reader(tmp_path) as client:
        nodes = client.nodes
        await nodes.put(0, KEY, b"content")
        await nodes.flush(0)
        for method, operation in (("GET", "GetObject"), ("HEAD", "HeadObject")):
            await client.until_prepared(partial(client.read, method), operation)
        writes = nodes.nodes[0].gateway.app.services.cluster_writes
        assert writes is not None
        looks, look, calls = list[object](), writes.registry.look, len(nodes.origin.calls)

        async def counted(keys: object) -> object:
            looks.append(keys)
            return await look(keys)  # type: ignore[arg-type]

        writes.registry.look = counted  # type: ignore[method-assign, assignment]
        for method, operation in (("GET", "GetObject"), ("HEAD", "HeadObject")):
            before = prepared(operation)
            looks.clear()
            for _ in range(4):
                await client.read(method)
            client.lay()
            assert (len(looks), prepared(operation) - before) == (4, 4)
        assert len(nodes.origin.calls) == calls


@pytest.mark.parametrize("consistency", ["ttl", "strict"])
async def test_a_slot_that_others_begin_to_write_is_looked_up_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, consistency: str
) -> None:
    """What was prepared before another node said that it writes there answers no more."""
    async with reader(tmp_path, consistency) as client:
        nodes = client.nodes
        writes = nodes.nodes[0].gateway.app.services.cluster_writes
        assert writes is not None
        monkeypatch.setattr(writes, "asks", lambda _: False)
        nodes.origin.put("bucket", KEY, b"first")
        for _ in range(5):
            assert await client.body() == b"first"
        monkeypatch.undo()
        await nodes.put(1, KEY, b"second")
        assert await client.body() == b"second"


async def test_12_4_local_reads_see_what_other_nodes_have_written(tmp_path: Path) -> None:
    """12.4 What nobody has changed comes from files, what another node has written since by HTTP; both are right."""
    async with writing_nodes(tmp_path, 2) as nodes, local_gateway(nodes.nodes[0].gateway) as local:
        await nodes.learn()
        reader = local.reader()
        for number in range(3):
            content = b"content %d" % number * 100
            assert (await nodes.put(number % 2, KEY, content)).status == 200
            assert await local.read(reader, f"bucket/{KEY}") == [content]
            await nodes.flush(number % 2)
            await nodes.get(0, KEY)
            await settle(nodes.nodes[0].gateway)
            await local.warm(reader, f"bucket/{KEY}")
            assert await local.read(reader, f"bucket/{KEY}") == [content]
        assert reader.local_reads > 0
