"""First reads of small objects, and reads of `strict` slots, answered without a task: as the whole way answers them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.model import ObjectKey
from gateway.metadata.catalog import BegunHead, ObjectHead
from gateway.operations.cold_reads import ColdRead
from gateway.telemetry import metrics
from tests.edge.both_ways import SLOTS, Asked, ChangingKeyring, Pair, both_ports, head_of
from tests.origin.test_short_answers import BODY, LINES
from tests.origin.told_origin import Exchange, Request, ToldOrigin, head, told_origin
from tests.support.gateway_app import BLOCK_SIZE_BYTES, gateway_app
from tests.support.set_clock import SetClock
from tests.support.waiting import until

PLAIN = head(*LINES, "Content-Range: bytes 0-99/100", status="206 Partial Content") + BODY
KINDS: tuple[dict[str, str], ...] = ({}, {"range": "bytes=2-5"}, {"x-amz-checksum-mode": "ENABLED"})
ETAG = 'ETag: "a"'


def part(*lines: str, first: int = 0, last: int = 99, size: int = 100, content: bytes = BODY) -> bytes:
    fields = (f"Content-Length: {len(content)}", f"Content-Range: bytes {first}-{last}/{size}", *lines)
    return head(*fields, status="206 Partial Content") + content


@asynccontextmanager
async def gateway(directory: Path, exchange: Exchange, **settings: object) -> AsyncIterator[tuple[Pair, ToldOrigin]]:
    """Both ways of a gateway before an origin over HTTP. The kinds of heads are known, and a connection is open."""
    clock, keyring = SetClock(), ChangingKeyring()

    async def first(request: Request, writer: asyncio.StreamWriter) -> None:
        if "first" in request.target:
            writer.write(PLAIN if request.method == "GET" else head(*LINES))
        else:
            await exchange(request, writer)

    async with (
        told_origin(first, **settings) as told,
        gateway_app(
            directory, through=told.origin, slots=SLOTS, clock=clock, keyring=keyring, writeback=True
        ) as opened,
        both_ports(opened, clock, keyring) as both,
    ):
        for fields in KINDS:
            await both.settled(both.ask(Asked("GET", "d/first", fields), "fast"))
        for way in ("fast", "slow"):
            await both.ask(Asked("GET", "d/first", {}), way)
        yield both, told


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each cold read that ended, whether it was answered without a task."""
    found: list[bool] = []
    answer = ColdRead.answer

    def noted(read: ColdRead) -> Any:
        result = answer(read)
        found.append(result is not None)
        return result

    monkeypatch.setattr(ColdRead, "answer", noted)
    return found


async def saying_plain(request: Request, writer: asyncio.StreamWriter) -> None:
    writer.write(PLAIN if request.method == "GET" else head(*LINES))


class Holding:
    """An origin that answers GETs of one key when it is told to."""

    def __init__(self) -> None:
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        self.asked.set()
        await self.go_on.wait()
        await saying_plain(request, writer)


async def test_readers_of_one_object_share_its_get(tmp_path: Path, answered: list[bool]) -> None:
    holding = Holding()
    async with gateway(tmp_path, holding) as (both, told):
        before = len(told.requests)
        one = asyncio.create_task(both.ask(Asked("GET", "d/a", {}), "fast"))
        await holding.asked.wait()
        others = [asyncio.create_task(both.ask(Asked("GET", "d/a", {}), "slow"))]
        await both.slow.requests(1)
        holding.go_on.set()
        bodies = [answer[1] for answer in await asyncio.gather(one, *others) if answer is not None]
        assert bodies == [BODY] * 2
        assert answered == [True]
        gets = [request for request in told.requests[before:] if request.method == "GET"]
        assert len(gets) == 1


async def test_a_longer_object_is_read_though_its_version_is_learned_meanwhile(
    tmp_path: Path, answered: list[bool]
) -> None:
    """Its reader has the right to find the version out, which others wait for: it must not wait for itself."""
    content = bytes(range(256)) * (2 * BLOCK_SIZE_BYTES // 256)
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.method == "HEAD":
            writer.write(head(f"Content-Length: {len(content)}", ETAG))
            return
        asked.set()
        await go_on.wait()
        first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
        writer.write(part(ETAG, first=first, last=last, size=len(content), content=content[first : last + 1]))

    async with gateway(tmp_path, exchange) as (both, told):
        before = len(told.requests)
        reading = asyncio.create_task(both.ask(Asked("GET", "d/a", {}), "fast"))
        await asked.wait()
        await both.ask(Asked("HEAD", "d/a", {}), "slow")
        await both.gateway.catalog.settle()
        go_on.set()
        answer = await reading
        assert answer is not None
        assert answer[1] == content
        assert answered == [False]
        assert len(told.requests) - before == 3  # and no byte is asked for twice


async def test_a_client_that_leaves_ends_its_read(tmp_path: Path, answered: list[bool]) -> None:
    """It is counted as of one that left, and the next reader asks anew."""
    holding = Holding()
    left = metrics.REQUESTS.value("GetObject", "fixed", "client-left", "none")
    async with gateway(tmp_path, holding) as (both, _):
        asking = asyncio.create_task(both.ask(Asked("GET", "d/a", {}), "fast"))
        await holding.asked.wait()
        assert metrics.REQUESTS_IN_FLIGHT.value() == 1
        both.wires["fast"].abort()
        await until(lambda: metrics.REQUESTS.value("GetObject", "fixed", "client-left", "none") == left + 1)
        assert await asking is None
        assert metrics.REQUESTS_IN_FLIGHT.value() == 0
        assert answered == []
        holding.go_on.set()
        answer = await both.ask(Asked("GET", "d/a", {}), "fast")
        assert answer is not None
        assert answer[1] == BODY


async def test_a_server_that_drains_answers_and_closes(tmp_path: Path) -> None:
    holding = Holding()
    async with gateway(tmp_path, holding) as (both, _):
        asking = asyncio.create_task(both.ask(Asked("GET", "d/a", {}), "fast"))
        await holding.asked.wait()
        both.fast.stop.set()
        await until(lambda: both.fast.server.draining)
        holding.go_on.set()
        answer = await asking
        assert answer is not None
        assert b"\r\nconnection: close\r\n" in answer[0]
        assert answer[1] == BODY
        assert "fast" not in both.wires
        await both.fast.finished


async def test_bytes_that_the_client_does_not_take_at_once_follow(tmp_path: Path, answered: list[bool]) -> None:
    """Though the buffer that they came in has another's bytes by then."""
    contents = [bytes([number]) * BLOCK_SIZE_BYTES for number in range(40)]

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        content = contents[int(request.target.rpartition("/")[2])]
        writer.write(part(ETAG, last=len(content) - 1, size=len(content), content=content))

    async with gateway(tmp_path, exchange) as (both, _):
        slow = await both.fast.connect()
        for number, content in enumerate(contents):
            await slow.say(head_of(Asked("GET", f"d/{number}", {}), "first-secret", both.clock.now()))
            if number:
                assert (await slow.answer()).body == contents[number - 1]
            del content
        assert (await slow.answer()).body == contents[-1]
        assert any(answered)


async def test_what_is_known_or_limited_takes_the_whole_way(tmp_path: Path, answered: list[bool]) -> None:
    async with gateway(tmp_path, saying_plain) as (both, _):
        for asked in (
            Asked("HEAD", "d/a", {}),
            Asked("GET", "s/a", {}),
            Asked("GET", "d/b", {"if-match": '"a"'}),
            Asked("GET", "d/c", {}, "response-content-type=a"),
        ):
            await both.ask(asked, "fast")
        assert answered == []
        await both.settled(both.ask(Asked("GET", "d/d", {}), "fast"))
        await both.gateway.blocks.invalidate(ObjectKey("bucket", "d/d"))
        await both.ask(Asked("GET", "d/d", {}), "fast")
        assert answered == [True]


# Reads of strict slots


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each question that was begun without a wait, whether its answer came so."""
    found: list[bool] = []
    answer = BegunHead.answer

    def noted(question: BegunHead) -> Any:
        result = answer(question)
        found.append(isinstance(result, ObjectHead))
        return result

    monkeypatch.setattr(BegunHead, "answer", noted)
    return found


async def test_a_strict_read_that_comes_later_has_a_question_of_its_own(tmp_path: Path, begun: list[bool]) -> None:
    """One under way may have seen the origin before: those that come meanwhile share the next."""
    holding = Holding()

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.method == "HEAD" and request.number > count:
            await holding(request, writer)
        else:
            await saying_plain(request, writer)

    count = 10_000
    async with gateway(tmp_path, exchange) as (both, told):
        for way in ("fast", "slow"):
            for _ in range(4):
                await both.settled(both.ask(Asked("GET", "x/a", {}), way))
        count = len(told.requests)
        asking = [asyncio.create_task(both.ask(Asked("GET", "x/a", {}), "fast"))]
        await holding.asked.wait()
        asking += [asyncio.create_task(both.ask(Asked("GET", "x/a", {}), "slow"))]
        await both.slow.requests(1)
        assert len(told.requests) == count + 1
        holding.go_on.set()
        assert [answer is not None and answer[1] for answer in await asyncio.gather(*asking)] == [BODY] * 2
        assert len(told.requests) == count + 2
        assert begun[-1]


async def test_a_client_that_leaves_ends_its_question(tmp_path: Path, begun: list[bool]) -> None:
    holding = Holding()
    left = metrics.REQUESTS.value("GetObject", "default", "client-left", "none")
    is_held = False

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        await (holding if is_held else saying_plain)(request, writer)

    async with gateway(tmp_path, exchange) as (both, _):
        for _ in range(4):
            await both.settled(both.ask(Asked("GET", "x/a", {}), "fast"))
        is_held, before = True, len(begun)
        asking = asyncio.create_task(both.ask(Asked("GET", "x/a", {}), "fast"))
        await holding.asked.wait()
        both.wires["fast"].abort()
        await until(lambda: metrics.REQUESTS.value("GetObject", "default", "client-left", "none") == left + 1)
        assert await asking is None
        holding.go_on.set()
        answer = await both.ask(Asked("GET", "x/a", {}), "fast")
        assert answer is not None
        assert answer[1] == BODY
        assert len(begun) >= before
        assert metrics.REQUESTS_IN_FLIGHT.value() == 0
