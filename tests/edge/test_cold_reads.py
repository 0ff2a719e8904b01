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
from tests.edge.test_prepared import _ERROR_IDS, _IDENTITY, SLOTS, Asked, ChangingKeyring, Pair, both_ports, head_of
from tests.origin.test_short_answers import ANSWERS, BODY, BROKEN, LINES
from tests.origin.told_origin import Exchange, Request, ToldOrigin, forever, head, told_origin
from tests.support.gateway_app import BLOCK_SIZE_BYTES, gateway_app
from tests.support.serving import until
from tests.support.set_clock import SetClock

PLAIN = head(*LINES, "Content-Range: bytes 0-99/100", status="206 Partial Content") + BODY
KINDS: tuple[dict[str, str], ...] = ({}, {"range": "bytes=2-5"}, {"x-amz-checksum-mode": "ENABLED"})
ETAG = 'ETag: "a"'


def part(*lines: str, first: int = 0, last: int = 99, size: int = 100, content: bytes = BODY) -> bytes:
    fields = (f"Content-Length: {len(content)}", f"Content-Range: bytes {first}-{last}/{size}", *lines)
    return head(*fields, status="206 Partial Content") + content


ODD: dict[str, tuple[bytes, ...]] = {
    **{name: said for name, said in ANSWERS.items() if name != "latin"},
    "another range": (part(ETAG, first=5, last=104, size=200),),
    "a wrong range": (part(ETAG, last=98),),
    "a block": (part(ETAG, last=BLOCK_SIZE_BYTES - 1, size=BLOCK_SIZE_BYTES, content=bytes(BLOCK_SIZE_BYTES)),),
    "no ETag": (part(),),
    "a weak ETag": (part('ETag: W/"a"'),),
    "archived": (part(ETAG, "x-amz-storage-class: GLACIER"),),
    "encoded": (part(ETAG, "Content-Encoding: gzip", "Vary: accept-encoding"),),
    "a customer's key": (part(ETAG, "x-amz-server-side-encryption-customer-algorithm: AES256"),),
    "a wrong checksum": (head(*LINES, "x-amz-checksum-crc32: AAAAAA==", "x-amz-checksum-type: FULL_OBJECT") + BODY,),
    "a checksum of parts": (part(ETAG, "x-amz-checksum-crc32: AAAAAA==-2"),),
    "416": (head("Content-Length: 0", "Content-Range: bytes */100", status="416 Range Not Satisfiable"),),
}


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


def counted(both: Pair | None = None) -> list[float]:
    """What is counted of such requests, by either way; before the end of a gateway, with what it keeps back."""
    for connection in both.fast.protocols() if both is not None else ():
        if connection._prepared_heads is not None:
            connection._prepared_heads.prepared._lay()
    slots, statuses = ("fixed", "default"), ("200", "206", "403", "404", "503")
    by_status = [metrics.REQUESTS.value("GetObject", slot, one, "miss") for slot in slots for one in statuses]
    reasons = [metrics.MISSES.value("GetObject", slot, "first-read") for slot in slots]
    of_slot = (metrics.CACHE_MISS_BYTES, metrics.CACHE_HIT_BYTES)
    of_bytes = [one.value(slot) for one in of_slot for slot in slots]
    lookups = [metrics.CATALOG_LOOKUPS.value(slot, kind) for slot in slots for kind in ("hit", "miss")]
    sent = [metrics.SENT_BYTES.value("GetObject", slot) for slot in slots]
    callers = [metrics.CALLER_REQUESTS.value("ALL"), metrics.CALLER_SENT_BYTES.value("ALL")]
    return [*by_status, *reasons, *of_bytes, *lookups, *sent, *callers, metrics.REQUESTS_IN_FLIGHT.value()]


async def told_by(directory: Path, way: str, exchange: Exchange, key: str) -> list[object]:
    """What clients and the origin see of reads of some keys, each asked twice, and what is counted."""
    seen: list[object] = []
    async with gateway(directory, exchange) as (both, told):
        before = counted(both)
        for number, fields in enumerate(KINDS):
            for _ in range(2):
                asked, count = Asked("GET", f"{key}{number}", fields), len(told.requests)
                answer = await both.settled(both.said(way, head_of(asked, "first-secret", both.clock.now())))
                assert answer is not None
                calls = [(one.method, one.target, one.headers.get("range")) for one in told.requests[count:]]
                content = _ERROR_IDS.sub(b"", answer[1])
                seen.append((_IDENTITY.sub(b"", answer[0]), content, calls))
        await both.leave(way)
    seen.append([now - then for now, then in zip(counted(), before, strict=True)])
    return seen


@pytest.mark.parametrize("prefix", ["d/", "x/"], ids=["immutable", "strict"])
@pytest.mark.parametrize("name", ODD)
async def test_both_ways_say_the_same(tmp_path: Path, name: str, prefix: str, answered: list[bool]) -> None:
    """To the client and to the origin, and count the same."""

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        etag = 'ETag: W/"a"' if "weak" in name else ETAG  # of which what is shown later would void the other
        for one in ODD[name] if request.method == "GET" else (head(LINES[0], etag, *LINES[2:]),):
            writer.write(one)
            await writer.drain()
            await asyncio.sleep(0)

    fast = await told_by(tmp_path / "fast", "fast", exchange, prefix)
    count = len(answered)
    slow = await told_by(tmp_path / "slow", "slow", exchange, prefix)
    for number, (one, other) in enumerate(zip(fast, slow, strict=True)):
        assert one == other, number
    assert count
    assert len(answered) == count
    if name in ("206", "in pieces", "kept alive", "a block", "encoded"):
        assert answered[0]


async def test_what_came_of_a_larger_object_is_used(tmp_path: Path, answered: list[bool]) -> None:
    """Its first block is not asked for again."""
    content = bytes(range(250)) * 800

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.method == "HEAD":
            writer.write(head(f"Content-Length: {len(content)}", ETAG))
            return
        asked = request.headers.get("range", f"bytes=0-{len(content) - 1}")
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        asked_for = content[first : last + 1]
        writer.write(part(ETAG, first=first, last=first + len(asked_for) - 1, size=len(content), content=asked_for))

    fast = await told_by(tmp_path / "fast", "fast", exchange, "d/")
    assert answered[0] is False
    slow = await told_by(tmp_path / "slow", "slow", exchange, "d/")
    for one, other in zip(fast[:-1], slow[:-1], strict=True):
        assert one == other
        assert isinstance(one, tuple)
        assert len({asked for _, _, asked in one[2]}) == len(one[2])


@pytest.mark.parametrize("name", BROKEN)
async def test_an_answer_that_breaks_off_is_asked_for_again(tmp_path: Path, name: str, answered: list[bool]) -> None:
    asked: set[str] = set()

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.target not in asked:
            asked.add(request.target)
            writer.write(BROKEN[name])
            await writer.drain()
            writer.close()
        else:
            await saying_plain(request, writer)

    fast = await told_by(tmp_path / "fast", "fast", exchange, "d/")
    assert answered[0] is False
    asked.clear()
    slow = await told_by(tmp_path / "slow", "slow", exchange, "d/")
    assert fast == slow


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


async def test_a_stuck_read_goes_on_over_another_connection(tmp_path: Path, answered: list[bool]) -> None:
    stuck: list[int] = []

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if not stuck:
            stuck.append(request.number)
            await forever()
        await saying_plain(request, writer)

    async with gateway(tmp_path, exchange) as (both, told):
        told.origin._hedging.heads.after_seconds = 0.1
        answer = await both.ask(Asked("GET", "d/a", {}), "fast")
        assert answer is not None
        assert answer[1] == BODY
        assert answered == [False]
        assert [one.value for one in told.outcomes] == ["won"]


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

HEADS: dict[str, tuple[bytes, ...]] = {
    "the same": (head(*LINES),),
    "another request id": (head(*LINES[:-1], "x-amz-request-id: S"),),
    "another field": (head(*LINES, "x-amz-meta-d: e"),),
    "another version": (head("Content-Length: 100", 'ETag: "b"'),),
    "in pieces": (head(*LINES)[:20], head(*LINES)[20:]),
    "to be closed": (head(*LINES, "Connection: close"),),
    "no ETag": (head("Content-Length: 100"),),
    "no length": (head(*LINES[1:]),),
    "chunked": (head(*LINES[1:], "Transfer-Encoding: chunked"),),
    "twice": (head(*LINES, 'ETag: "b"'),),
    "404": (head("Content-Length: 100", status="404 Not Found"),),
    "403": (head(status="403 Forbidden"),),
    "301": (head("Location: /x", status="301 Moved Permanently"),),
    "503": (head("x-amz-request-id: R", status="503 Slow Down"),),
    "no HTTP": (b"gopher\r\n\r\n",),
    "a body": (head(*LINES) + BODY,),
    "nothing": (b"",),
}


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


async def strict_told_by(directory: Path, way: str, said: tuple[bytes, ...]) -> list[object]:
    """As `told_by`, of an object whose blocks are here."""
    seen: list[object] = []
    heads: tuple[bytes, ...] = (head(*LINES),)

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        for one in heads if request.method == "HEAD" else (PLAIN,):
            writer.write(one)
            await writer.drain()
            await asyncio.sleep(0)
        if request.method == "HEAD" and not heads[0]:
            writer.close()

    async with gateway(directory, exchange) as (both, told):
        for fields in KINDS:
            for _ in range(4):
                await both.settled(both.ask(Asked("GET", "x/a", fields), "fast"))
        before = counted(both)
        heads = said
        for fields in KINDS:
            for _ in range(2):
                count = len(told.requests)
                raw = head_of(Asked("GET", "x/a", fields), "first-secret", both.clock.now())
                answer = await both.settled(both.said(way, raw))
                assert answer is not None
                calls = [(one.method, one.headers.get("range")) for one in told.requests[count:]]
                seen.append((_IDENTITY.sub(b"", answer[0]), _ERROR_IDS.sub(b"", answer[1]), calls))
        await both.leave(way)
    seen.append([now - then for now, then in zip(counted(), before, strict=True)])
    return seen


@pytest.mark.parametrize("name", HEADS)
async def test_strict_reads_say_what_the_whole_way_says(tmp_path: Path, name: str, begun: list[bool]) -> None:
    fast = await strict_told_by(tmp_path / "fast", "fast", HEADS[name])
    assert True in begun
    if name in ("the same", "another request id", "in pieces"):
        assert begun[-6:] == [True] * 6
    slow = await strict_told_by(tmp_path / "slow", "slow", HEADS[name])
    for number, (one, other) in enumerate(zip(fast, slow, strict=True)):
        assert one == other, number


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


async def test_a_stuck_question_is_hedged(tmp_path: Path, begun: list[bool]) -> None:
    stuck: list[int] = [0]

    async def exchange(request: Request, writer: asyncio.StreamWriter) -> None:
        if not stuck:
            stuck.append(request.number)
            await forever()
        await saying_plain(request, writer)

    async with gateway(tmp_path, exchange) as (both, told):
        for _ in range(4):
            await both.settled(both.ask(Asked("GET", "x/a", {}), "fast"))
        stuck.clear()
        told.origin._hedging.heads.after_seconds = 0.1
        answer = await both.ask(Asked("GET", "x/a", {}), "fast")
        assert answer is not None
        assert answer[1] == BODY
        assert not begun[-1]
        assert [one.value for one in told.outcomes] == ["won"]
