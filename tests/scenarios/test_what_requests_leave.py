"""Memory is bounded whatever clients ask for: a request for something new leaves no object behind."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.core.clock import SystemClock
from gateway.policy.slots import Prefix
from tests.scenarios.test_leavers import Asked
from tests.support.gateway_app import gateway_app
from tests.support.memory_origin import MemoryOrigin
from tests.support.serving import Serving, serving
from tests.support.slots import Slot

REQUESTS = 40

ASKED: dict[str, Callable[[int], Asked]] = {
    "small get": lambda number: Asked("GET", f"/bucket/small-{number}"),
    "large get": lambda number: Asked("GET", f"/bucket/large-{number}"),
    "range": lambda number: Asked("GET", f"/bucket/large-{number}", headers=(("range", "bytes=70000-70007"),)),
    "missing": lambda number: Asked("GET", f"/bucket/missing-{number}"),
    "head": lambda number: Asked("HEAD", f"/bucket/small-{number}"),
    "list": lambda number: Asked("GET", f"/bucket?list-type=2&prefix=small-{number}"),
    "forwarded": lambda number: Asked("GET", f"/bucket/small-{number}?tagging"),
    "put": lambda number: Asked("PUT", f"/bucket/new-{number}", b"new"),
    "delete": lambda number: Asked("DELETE", f"/bucket/small-{number}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["strict", "ttl"])
@pytest.mark.parametrize("name", ASKED)
async def test_requests_for_other_things_each_time_leave_no_objects(
    name: str, consistency: str, tmp_path: Path
) -> None:
    """Of no type are there more after twice as many requests: neither tasks, nor what they knew."""
    origin = MemoryOrigin(SystemClock())
    for number in range(3 * REQUESTS):
        origin.put("bucket", f"small-{number}", b"small")
        origin.put("bucket", f"large-{number}", bytes(200_000))
    slot = Slot("kept", Prefix("bucket", ""), consistency=consistency)
    async with gateway_app(tmp_path, origin=origin, slots=[slot]) as gateway, serving(gateway.app) as port:

        async def kept_after(first: int) -> Counter[str]:
            await asked(port, [ASKED[name](number) for number in range(first, first + REQUESTS)])
            await gateway.blocks.settle()
            origin.calls.clear()
            return kept()

        await kept_after(0)
        before = await kept_after(REQUESTS)
        after = await kept_after(2 * REQUESTS)
    assert {kind: count for kind, count in (after - before).items() if count >= REQUESTS // 2} == {}


async def asked(port: Serving, requests: list[Asked]) -> None:
    wire = await port.connect()
    for request in requests:
        await wire.say(request.bytes())
        assert (await wire.answer(to_head=request.method == "HEAD")).status < 500
    await wire.close()
    await port.connections(0)


def kept() -> Counter[str]:
    """The objects of this process by type, of the gateway's own and what asyncio makes for it."""
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    ours = [kind for kind in kinds if kind is asyncio.Task or str(kind.__module__).startswith("gateway.")]
    return Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in ours)
