"""Clause 3.1 of docs/semantics.md: identical questions at once share a call that begins after each was asked."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest

from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.faults import Answer as Failure
from tests.support.memory_origin.faults import Hold, on
from tests.support.slots import Slot
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import until

RANKS = 512
CONNECTIONS = int(os.environ.get("FOREBAY_RANKS", "128"))
LIST_TARGET = "/bucket?list-type=2&prefix=checkpoint%2F"
STRICT = Slot("s", Prefix.parse("s3://bucket/"))


async def ask(gateway: GatewayApp, method: str, target: str, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await call(gateway.app, method, target, named, sign=False)


@pytest.mark.parametrize(
    ("method", "target", "operation"),
    [
        ("GET", LIST_TARGET, Operation.LIST_OBJECTS_V2),
        ("GET", "/bucket?prefix=checkpoint%2F", Operation.LIST_OBJECTS),
        ("HEAD", "/bucket/checkpoint/done", Operation.HEAD_OBJECT),
    ],
)
async def test_3_1_any_number_of_callers_cost_two_calls(
    tmp_path: Path, method: str, target: str, operation: Operation
) -> None:
    """3.1 Those who ask while a call is under way share the next, and it shows what was there when they asked."""
    async with gateway_app(tmp_path, slots=[STRICT], allow_unsigned=True) as gateway:
        gateway.origin.create_bucket("bucket")
        reached, resume = asyncio.Event(), asyncio.Event()
        gateway.origin.put("bucket", "checkpoint/done", b"old")
        gateway.origin.inject(on(operation), Hold(resume, reached))
        first = asyncio.create_task(ask(gateway, method, target))
        await reached.wait()
        gateway.origin.put("bucket", "checkpoint/done", b"newer")
        others = [
            asyncio.create_task(ask(gateway, method, target, amz_sdk_invocation_id=f"{rank}")) for rank in range(RANKS)
        ]
        await asyncio.sleep(0.1)
        assert gateway.origin.count(operation) == 1
        resume.set()
        answers = await asyncio.gather(*others)
        assert gateway.origin.count(operation) == 2
        assert (await first).status == 200
        for answer in answers:
            assert answer.status == 200
            if method == "HEAD":
                assert answer.headers["content-length"] == "5"
            else:
                assert b"<Size>5</Size>" in answer.body


async def test_3_1_different_questions_are_not_joined(tmp_path: Path) -> None:
    """3.1 Whatever may change the answer makes it another question: conditions, owners, checksums, pages."""
    async with gateway_app(tmp_path, slots=[STRICT], allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "k", b"x")
        etag = (await ask(gateway, "HEAD", "/bucket/k")).headers["etag"]
        variants: list[dict[str, str]] = [
            {},
            {"if_none_match": etag},
            {"if_match": '"other"'},
            {"x_amz_checksum_mode": "ENABLED"},
            {"range": "bytes=0-1"},
        ]
        before = gateway.origin.count(Operation.HEAD_OBJECT)
        answers = await asyncio.gather(*(ask(gateway, "HEAD", "/bucket/k", **one) for one in variants))
        assert gateway.origin.count(Operation.HEAD_OBJECT) == before + len(variants)
        assert [answer.status for answer in answers] == [200, 304, 412, 200, 206]
        before = len(gateway.origin.calls)
        pages = [f"{LIST_TARGET}&max-keys={count}" for count in range(1, 4)]
        await asyncio.gather(*(ask(gateway, "GET", page) for page in pages))
        assert len(gateway.origin.calls) == before + 3


async def test_3_1_a_refusal_is_told_to_those_who_waited_for_it_alone(tmp_path: Path) -> None:
    """3.1 With the origin's own document; who asks while it is on its way has an answer of a later call."""
    async with gateway_app(tmp_path, slots=[STRICT], allow_unsigned=True) as gateway:
        gateway.origin.create_bucket("bucket")
        reached, resume = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(Operation.LIST_OBJECTS_V2), Hold(resume, reached))
        gateway.origin.inject(on(Operation.LIST_OBJECTS_V2), Failure(403, "AccessDenied"))
        first = asyncio.create_task(ask(gateway, "GET", LIST_TARGET))
        await reached.wait()
        others = [asyncio.create_task(ask(gateway, "GET", LIST_TARGET)) for _ in range(10)]
        await asyncio.sleep(0.05)
        resume.set()
        refused = await first
        assert (refused.status, b"<Code>AccessDenied</Code>" in refused.body) == (403, True)
        assert {answer.status for answer in await asyncio.gather(*others)} == {200}


async def test_3_1_a_caller_that_leaves_takes_nobody_along(tmp_path: Path) -> None:
    """3.1 Not even the one whose request is the one that was sent."""
    async with gateway_app(tmp_path, slots=[STRICT], allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "k", b"x")
        reached, resume = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(Operation.HEAD_OBJECT), Hold(resume, reached))
        callers = [asyncio.create_task(ask(gateway, "HEAD", "/bucket/k")) for _ in range(3)]
        await reached.wait()
        callers[0].cancel()
        await until(callers[0].done)
        resume.set()
        assert [answer.status for answer in await asyncio.gather(*callers[1:])] == [200, 200]
        assert gateway.origin.count(Operation.HEAD_OBJECT) == 1


@pytest.mark.slow
async def test_3_1_gets_of_one_object_share_the_question_which_version_is_current(tmp_path: Path) -> None:
    """3.1 Reads of a cached object ask the origin each time, and together."""
    async with gateway_app(tmp_path, slots=[STRICT], allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "k", b"x" * 100)
        assert (await ask(gateway, "GET", "/bucket/k")).status == 200
        await gateway.blocks.settle()
        before = gateway.origin.count(Operation.HEAD_OBJECT)
        answers = await asyncio.gather(*(ask(gateway, "GET", "/bucket/k") for _ in range(RANKS)))
        assert {(answer.status, answer.headers["x-forebay-cache"]) for answer in answers} == {(200, "hit")}
        assert gateway.origin.count(Operation.HEAD_OBJECT) - before <= 2


@pytest.mark.slow
def test_3_1_ranks_that_ask_at_once_cost_four_calls() -> None:
    """3.1 Connections without number, LIST and HEAD of one prefix each, with an origin at a distance."""

    async def ask_all(port: int) -> list[bytes]:
        async def one(target: str, method: str, go: asyncio.Event) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                await go.wait()
                writer.write(f"{method} {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
                return await reader.read()
            finally:
                writer.close()

        go = asyncio.Event()
        asked = [("/bucket/checkpoint/done", "HEAD"), (LIST_TARGET, "GET")]
        tasks = [asyncio.create_task(one(*asked[rank % 2], go)) for rank in range(CONNECTIONS)]
        await asyncio.sleep(0.5)  # the connections are there; what is asserted does not depend on it
        go.set()
        return await asyncio.gather(*tasks)

    with StrictOrigin() as origin:
        origin.model.put("bucket", "checkpoint/done", b"x")
        origin.latency_seconds = 0.8  # less than makes the gateway ask again, more than it takes to read them
        keys: dict[str, Any] = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        config = {"origin": {"endpoint_url": origin.endpoint_url, **keys}, "server": {"allow_unsigned": True}}
        with GatewayProcess(config) as gateway:
            match = re.search(r":(\d+)$", gateway.s3_url)
            assert match is not None
            before = len(origin.request_lines)
            answers = asyncio.run(ask_all(int(match[1])))
            assert {answer[:12] for answer in answers} == {b"HTTP/1.1 200"}
            asked = [line for line in origin.request_lines[before:] if b"checkpoint" in line]
            assert len(asked) <= 4, asked
