"""Prepared reads of `strict` slots: the origin is asked as the whole way asks it, each time, once."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from gateway.core.model import ObjectKey
from gateway.s3.requests import Operation
from gateway.telemetry.metrics import PREPARED_REQUESTS, REQUESTS, REQUESTS_IN_FLIGHT
from tests.edge.both_ways import Asked, Pair, head_of, pair
from tests.edge.test_prepared import damage
from tests.support.gateway_app import BLOCK_SIZE_BYTES
from tests.support.memory_origin.faults import Hold, on

KEY = "x/a"
_ORIGINS_ID = re.compile(rb"\r\nx-forebay-origin-request-id: ORIGIN(\d+)\r\n")
_ERROR_IDS = re.compile(rb"<(RequestId|HostId|ServerTime)>[^<]*<")


def counted(status: str, cache: str) -> float:
    return REQUESTS.value("GetObject", "default", status, cache)


@asynccontextmanager
async def warm(directory: Path, size_bytes: int = 1000) -> AsyncIterator[Pair]:
    """A key whose GET has been prepared on the port that knows of such."""
    async with pair(directory, random.Random(1), sizes=(size_bytes,)) as both:
        await both.read(KEY, times=4)
        yield both


def raw(both: Pair, asked: Asked) -> bytes:
    return head_of(asked, both.keyring.secrets[asked.who], both.clock.now())


# While the origin is asked


@asynccontextmanager
async def asking(both: Pair) -> AsyncIterator[Hold]:
    """The next question waits at the origin."""
    hold = Hold(asyncio.Event(), asyncio.Event())
    both.gateway.origin.inject(on(Operation.HEAD_OBJECT, key=KEY), hold)
    yield hold
    hold.until.set()


async def reached(hold: Hold) -> None:
    assert hold.reached is not None
    await asyncio.wait_for(hold.reached.wait(), 60)


async def test_who_leaves_while_the_origin_is_asked_leaves_nothing(tmp_path: Path) -> None:
    """The question is given up, the request counted as one whose client left, the next one answered."""
    before = counted("client-left", "none")
    async with warm(tmp_path) as both, asking(both) as hold:
        in_flight = REQUESTS_IN_FLIGHT.value()
        wire = await both.fast.connect()
        await wire.say(raw(both, Asked("GET", KEY, {})))
        await reached(hold)
        assert REQUESTS_IN_FLIGHT.value() == in_flight + 1
        wire.abort()
        await both.fast.requests(0)
        assert REQUESTS_IN_FLIGHT.value() == in_flight
        assert both.gateway.catalog.joined_calls._under_way == {}
        assert len(await both.read(KEY)) == 1000
    assert counted("client-left", "none") == before + 1


async def test_a_server_that_drains_meanwhile_says_that_the_connection_ends(tmp_path: Path) -> None:
    async with warm(tmp_path) as both, asking(both) as hold:
        wire = await both.fast.connect()
        await wire.say(raw(both, Asked("GET", KEY, {})))
        await reached(hold)
        questions = both.gateway.origin.count(Operation.HEAD_OBJECT)
        both.fast.stop.set()
        await wire_closed(both)
        hold.until.set()
        answer = await wire.answer()
        assert (answer.status, answer.headers["connection"], len(answer.body)) == (200, "close", 1000)
        assert await wire.rest() == b""
        assert both.gateway.origin.count(Operation.HEAD_OBJECT) == questions


async def wire_closed(both: Pair) -> None:
    """Until the server has told its connections that it drains: the one that waited for a request is closed."""
    assert await both.wires["fast"].rest() == b""


async def test_a_client_that_ends_its_side_gets_its_answer(tmp_path: Path) -> None:
    async with warm(tmp_path) as both, asking(both) as hold:
        wire = await both.fast.connect()
        await wire.say(raw(both, Asked("GET", KEY, {})))
        await reached(hold)
        wire.writer.write_eof()
        status, _ = await wire.head()
        assert status == 100  # it is asked whether it is there
        hold.until.set()
        answer = await wire.answer()
        assert (answer.status, len(answer.body)) == (200, 1000)
        assert await wire.rest() == b""


async def test_requests_behind_it_wait_for_their_turn(tmp_path: Path) -> None:
    async with warm(tmp_path) as both, asking(both) as hold:
        wire = await both.fast.connect()
        await wire.say(raw(both, Asked("GET", KEY, {"range": "bytes=0-9"})))
        await reached(hold)
        await wire.say(raw(both, Asked("GET", KEY, {"range": "bytes=10-29"})) + raw(both, Asked("HEAD", KEY, {})))
        hold.until.set()
        assert [len((await wire.answer()).body) for _ in range(2)] == [10, 20]
        assert (await wire.answer(to_head=True)).headers["content-length"] == "1000"


async def test_questions_at_once_are_one(tmp_path: Path) -> None:
    """Those that come while one is under way share the next."""
    async with warm(tmp_path) as both, asking(both) as hold:
        wires = [await both.fast.connect() for _ in range(5)]
        before = both.gateway.origin.count(Operation.HEAD_OBJECT)
        await wires[0].say(raw(both, Asked("GET", KEY, {})))
        await reached(hold)
        for number, wire in enumerate(wires[1:], 2):
            await wire.say(raw(both, Asked("GET", KEY, {})))
            await both.fast.requests(number)
        hold.until.set()
        assert [len((await wire.answer()).body) for wire in wires] == [1000] * 5
        assert both.gateway.origin.count(Operation.HEAD_OBJECT) == before + 2


async def test_what_is_written_while_the_origin_is_asked_is_not_mixed(tmp_path: Path) -> None:
    """The answer is of the version that the origin names, and whole, whatever was prepared before."""
    async with warm(tmp_path) as both, asking(both) as hold:
        wire = await both.fast.connect()
        await wire.say(raw(both, Asked("GET", KEY, {})))
        await reached(hold)
        both.gateway.origin.put("bucket", KEY, b"of another writer")
        hold.until.set()
        answer = await wire.answer()
        assert answer.body == b"of another writer"


def test_bytes_that_nobody_vouches_for_any_more_are_checked_first(tmp_path: Path) -> None:
    """And the origin is not asked again."""

    async def scenario() -> None:
        async with warm(tmp_path) as both, asking(both) as hold:
            wire = await both.fast.connect()
            await wire.say(raw(both, Asked("GET", KEY, {})))
            await reached(hold)
            questions = both.gateway.origin.count(Operation.HEAD_OBJECT)
            for lease in list(both.gateway.blocks._dependencies.open_files._leases.values()):
                damage(Path(f"/proc/self/fd/{lease.file.descriptor}"))
                lease.file.distrust()
            prepared = PREPARED_REQUESTS.value("GetObject", "default")
            hold.until.set()
            answer = await wire.answer()
            assert (answer.status, answer.body) == (200, both.gateway.origin.data("bucket", KEY))
            assert both.gateway.origin.count(Operation.HEAD_OBJECT) == questions
            assert PREPARED_REQUESTS.value("GetObject", "default") == prepared


async def test_what_is_evicted_while_the_origin_is_asked_is_gone(tmp_path: Path) -> None:
    """An origin may take its time: no file is held meanwhile, whose room others have been given."""
    async with warm(tmp_path, BLOCK_SIZE_BYTES) as both, asking(both) as hold:
        wire = await both.fast.connect()
        await wire.say(raw(both, Asked("GET", KEY, {})))
        await reached(hold)
        questions = both.gateway.origin.count(Operation.HEAD_OBJECT)
        files = inodes(tmp_path / "data")
        assert files & inodes("/proc/self/fd")
        await both.gateway.blocks.invalidate(ObjectKey("bucket", KEY))
        assert not both.gateway.blocks.has_blocks_of(ObjectKey("bucket", KEY))
        assert not files & inodes("/proc/self/fd")
        hold.until.set()
        answer = await wire.answer()
        assert (answer.status, answer.body) == (200, both.gateway.origin.data("bucket", KEY))
        assert both.gateway.origin.count(Operation.HEAD_OBJECT) == questions


def inodes(directory: str | Path) -> set[int]:
    """Of the files below a directory, or behind its links."""
    found = set()
    for path in Path(directory).rglob("*"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(path.stat().st_ino)
    return found
