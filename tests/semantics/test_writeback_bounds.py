"""The bounds of `write = "back"`: clauses 5.9 to 5.11 of docs/semantics.md."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Literal

import pytest

from gateway.s3.headers import multipart_etag
from gateway.s3.requests import Operation
from tests.support.asgi import call
from tests.support.memory_origin.faults import Unreachable
from tests.support.slots import slot_with
from tests.support.write_back_gateway import PART_BYTES, SLOTS, a_client
from tests.support.writeback import body_bytes

KIB = 1024
BUFFER_BYTES = 100 * KIB
BOUNDED = slot_with(SLOTS[0], buffer_bytes=BUFFER_BYTES)


def staged_bytes(directory: Path) -> int:
    return body_bytes(directory / "writeback" / "staged")


@pytest.mark.slow
@pytest.mark.parametrize("full", ["through", "slow-down"])
async def test_5_9_never_more_than_the_buffer(
    tmp_path: Path, full: Literal["through", "slow-down"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """5.9 However many bodies come at once; who finds no room is acknowledged by the origin, or by nobody."""
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_BEFORE_THROUGH_SECONDS", 0.1)
    bodies = {f"back/k{number}": os.urandom((7 + number) * KIB) for number in range(20)}
    async with a_client(tmp_path, [slot_with(BOUNDED, when_buffer_full=full)]) as client:
        await client.learn()
        asked = {name: call(client.gateway.app, "PUT", f"/bucket/{name}", {}, body) for name, body in bodies.items()}
        answers = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
        assert 3 * KIB < staged_bytes(tmp_path) <= BUFFER_BYTES
        for name, answer in answers.items():
            if answer.status == 200:
                assert (await client.ask("GET", name)).body == bodies[name]
            else:
                assert (answer.status, full) == (503, "slow-down")
                await client.ask("GET", name, status=404)
        await client.flush()
        kept = {name for name, answer in answers.items() if answer.status == 200}
        assert {name: client.origin.data("bucket", name) for name in kept} == {name: bodies[name] for name in kept}


@pytest.mark.slow
async def test_5_10_an_upload_larger_than_the_buffer(tmp_path: Path) -> None:
    """5.10 Its ETag is the one that the origin shows; when Complete is answered, the origin has it."""
    parts = {number: os.urandom(PART_BYTES) for number in (1, 2, 3)}
    async with a_client(tmp_path, [slot_with(BOUNDED, buffer_bytes=PART_BYTES + 1)]) as client:
        upload_id = await client.create("back/m")
        etags = {number: await client.part("back/m", upload_id, number, body) for number, body in parts.items()}
        assert staged_bytes(tmp_path) == PART_BYTES
        done = await client.complete("back/m", upload_id, etags)
        assert done.headers["x-forebay-cache"] == "forwarded"
        assert client.origin.data("bucket", "back/m") == b"".join(parts.values())
        assert client.origin.buckets["bucket"].object("back/m").etag == multipart_etag(list(etags.values()))


@pytest.mark.slow
async def test_5_10_slow_down_where_nothing_can_go_through(tmp_path: Path) -> None:
    """5.10 The origin is away: the part is answered 503 with the time to wait, and the upload goes on later."""
    async with a_client(tmp_path, [BOUNDED]) as client:
        upload_id = await client.create("back/m")
        etags = {1: await client.part("back/m", upload_id, 1, bytes(80 * KIB))}
        away = client.origin.inject(lambda _: True, Unreachable(), times=None)
        refused = await client.ask("PUT", f"back/m?partNumber=2&uploadId={upload_id}", bytes(50 * KIB), status=503)
        assert b"<Code>SlowDown</Code>" in refused.body
        assert int(refused.headers["retry-after"]) > 0
        etags[2] = await client.part("back/m", upload_id, 2, bytes(KIB))
        await client.complete("back/m", upload_id, {2: etags[2]})
        away.times = 0
        await client.flush()
        assert client.origin.data("bucket", "back/m") == bytes(KIB)


async def test_5_11_beyond_the_exposure_nothing_more_is_promised(tmp_path: Path) -> None:
    """5.11 The origin acknowledges what comes then; when the flush has caught up, this node does again."""
    async with a_client(tmp_path, [slot_with(BOUNDED, unflushed_bytes_max=50 * KIB)]) as client:
        await client.learn()
        labels = []
        for number in range(4):
            answer = await client.ask("PUT", f"back/k{number}", bytes(20 * KIB))
            labels.append(answer.headers["x-forebay-cache"])
        assert labels == ["absorbed", "absorbed", "forwarded", "forwarded"]
        assert client.origin.count(Operation.PUT_OBJECT) == 3
        await client.flush()
        answer = await client.ask("PUT", "back/k4", bytes(20 * KIB))
        assert answer.headers["x-forebay-cache"] == "absorbed"
