"""A Complete with a condition is the origin's to judge; the parts come from here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.origin.memory.faults import Answer, Unreachable, on
from gateway.s3.requests import Operation
from tests.support.absorbing import PART_BYTES, Client, with_client
from tests.support.asgi import call

IF_ABSENT = {"If-None-Match": "*"}


async def uploaded(client: Client, name: str = "back/m") -> tuple[str, dict[int, str], bytes]:
    """An upload whose parts are here: its id, their ETags, and its bytes."""
    upload_id = await client.create(name)
    bodies = {1: os.urandom(PART_BYTES), 2: b"end"}
    etags = {number: await client.part(name, upload_id, number, body) for number, body in bodies.items()}
    return upload_id, etags, bodies[1] + bodies[2]


def test_the_200_is_the_origins(tmp_path: Path) -> None:
    """When it is sent, the object is there, nothing is pending, and nothing is left here."""

    async def scenario(client: Client) -> None:
        upload_id, etags, content = await uploaded(client)
        answer = await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
        assert answer.headers["x-forebay-cache"] == "forwarded"
        assert client.origin.data("bucket", "back/m") == content
        assert client.pending("back/m") is None
        assert list(client.buffer.staging.names()) == []
        assert not client.origin.buckets["bucket"].uploads
        again = await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
        assert again.body == answer.body

    with_client(tmp_path, scenario)


def test_a_condition_that_does_not_hold_leaves_the_upload_open(tmp_path: Path) -> None:
    """412 of the origin's; a Complete without it, later, is absorbed."""

    async def scenario(client: Client) -> None:
        upload_id, etags, content = await uploaded(client)
        client.origin.put("bucket", "back/m", b"theirs")
        answer = await client.complete("back/m", upload_id, etags, 412, headers=IF_ABSENT)
        assert b"<Code>PreconditionFailed</Code>" in answer.body
        assert client.origin.data("bucket", "back/m") == b"theirs"
        client.origin.buckets["bucket"].remove("back/m")
        await client.complete("back/m", upload_id, etags)
        await client.flush()
        assert client.origin.data("bucket", "back/m") == content
        assert client.origin.count(Operation.UPLOAD_PART) == 2

    with_client(tmp_path, scenario)


def test_own_pending_writes_count(tmp_path: Path) -> None:
    """What was acknowledged before is at the origin when the condition is judged."""

    async def scenario(client: Client) -> None:
        upload_id, etags, _ = await uploaded(client)
        await client.ask("PUT", "back/m", b"pending")
        async with client.flushing():
            await client.complete("back/m", upload_id, etags, 412, headers=IF_ABSENT)
        assert client.origin.data("bucket", "back/m") == b"pending"

    with_client(tmp_path, scenario)


@pytest.mark.parametrize("effect", [Unreachable(late=True), Answer(500, late=True)], ids=str)
def test_a_lost_answer_is_decided_by_the_etag(tmp_path: Path, effect: Unreachable | Answer) -> None:
    """The origin has done it: 200, though nobody said so."""

    async def scenario(client: Client) -> None:
        upload_id, etags, content = await uploaded(client)
        client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), effect)
        await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
        assert client.origin.data("bucket", "back/m") == content

    with_client(tmp_path, scenario)


@pytest.mark.parametrize("operation", [Operation.UPLOAD_PART, Operation.COMPLETE_MULTIPART_UPLOAD])
def test_a_failure_can_be_tried_again(tmp_path: Path, operation: Operation) -> None:
    """503 with the origin away, and what the origin has by then is not sent twice."""

    async def scenario(client: Client) -> None:
        upload_id, etags, content = await uploaded(client)
        client.origin.inject(on(operation), Unreachable())
        await client.complete("back/m", upload_id, etags, 503, headers=IF_ABSENT)
        await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
        assert client.origin.data("bucket", "back/m") == content

    with_client(tmp_path, scenario)


def test_an_upload_begun_with_the_origin_away_is_begun_there(tmp_path: Path) -> None:
    """Its parts follow."""

    async def scenario(client: Client) -> None:
        await client.learn()
        away = client.origin.inject(lambda _: True, Unreachable(), times=None)
        upload_id, etags, content = await uploaded(client)
        away.times = 0
        await client.complete("back/m", upload_id, etags, headers=IF_ABSENT)
        assert client.origin.data("bucket", "back/m") == content
        assert (await call(client.gateway.app, "GET", "/bucket/back/m")).body == content

    with_client(tmp_path, scenario)
