"""What is prepared: when, for how long, how much of it is kept, and what becomes of requests that it cannot answer.

test_both_ways.py compares its answers with those of the whole way.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.blocks import block_file, page_cache, spans
from gateway.blocks.block_file import BlockFile
from gateway.blocks.layout import unpack_extent
from gateway.blocks.spans import UnreadSpan, WarmSpan
from gateway.core.model import ObjectKey
from gateway.edge import prepared
from gateway.edge.connection import S3Protocol, _send_now
from gateway.edge.prepared import Client, ConnectionHeads, PreparedRequests, Question
from gateway.edge.request_parsing import RequestHead
from gateway.operations import prepared_reads
from gateway.operations.prepared_reads import PreparedAnswer, PreparedRead
from gateway.origin.client import OriginRequest
from gateway.shared.recent_requests import FinishedRequest, RecentRequests, recent_requests
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.metrics import CACHE_HIT_BYTES, CATALOG_LOOKUPS, PREPARED_REQUESTS, REQUESTS, REQUESTS_IN_FLIGHT
from gateway.telemetry.tracing import TRACE, RequestSpan, Tracer
from gateway.writeback.checkpoints.reads import CheckpointReads, checkpoint_id, file_id, reads_by_checkpoint
from tests.edge.both_ways import (
    SLOTS,
    Asked,
    Certificate,
    ChangingKeyring,
    Pair,
    both_ports,
    certificate_in,
    head_of,
    pair,
    presigned,
)
from tests.support.gateway_app import BLOCK_SIZE_BYTES, gateway_app
from tests.support.serving import PATIENCE_SECONDS
from tests.support.set_clock import SetClock


async def test_presigned_requests_take_the_short_way_until_they_expire(tmp_path: Path) -> None:
    before = counted("200")
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        raw = presigned(Asked("GET", "d/a", {}), both.keyring.secrets["ALL"])
        statuses = [(await both.settled(both.said("fast", raw)) or (b"", b""))[0][9:12] for _ in range(6)]
        assert statuses == [b"200"] * 6
        both.clock.ahead_seconds += 61
        refused = await both.said("fast", raw)
        assert refused is not None
        assert (refused[0][9:12], b"Request has expired" in refused[1]) == (b"403", True)
    assert counted("200")[1] - before[1] >= 3


LARGE_BYTES = 16 * 1024 * 1024


@asynccontextmanager
async def large_and_prepared(
    directory: Path, certificate: Certificate | None = None
) -> AsyncIterator[tuple[Pair, bytes]]:
    """With an object that no socket's buffers take at once, asked for so often that its answer is prepared."""
    clock, keyring = SetClock(), ChangingKeyring()
    async with gateway_app(
        directory, slots=SLOTS, clock=clock, keyring=keyring, block_size_bytes=LARGE_BYTES
    ) as gateway:
        content = random.Random(1).randbytes(LARGE_BYTES)
        gateway.origin.put("bucket", "d/large", content)
        async with both_ports(gateway, clock, keyring, certificate) as both:
            for _ in range(4):
                assert await both.read("d/large") == content
            yield both, content


def counted(status: str) -> tuple[float, float]:
    return REQUESTS.value("GetObject", "fixed", status, "hit"), PREPARED_REQUESTS.value("GetObject", "fixed")


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
async def test_what_the_kernel_does_not_take_at_once_is_sent_on(tmp_path: Path, encrypted: bool) -> None:
    """To clients that read slowly; with another request behind it, too."""
    before = counted("200")
    certificate = certificate_in(tmp_path) if encrypted else None
    async with large_and_prepared(tmp_path / "cache", certificate) as (both, content):
        asked = head_of(Asked("GET", "d/large", {}), both.keyring.secrets["ALL"], both.clock.now())
        wire = await both.fast.connect(limit=1024, **both.options)
        await wire.say(asked)
        await both.fast.requests(1)
        await wire.say(asked)  # it waits for its turn
        for _ in range(2):
            assert (await wire.answer()).body == content
    assert counted("200")[1] >= before[1] + 3


@pytest.mark.slow
@pytest.mark.parametrize("encrypted", [False, True])
async def test_who_leaves_in_the_midst_leaves_nothing(tmp_path: Path, encrypted: bool) -> None:
    """The file is let go of, the request is counted as one whose client left."""
    before, bytes_before = counted("client-left"), CACHE_HIT_BYTES.value("fixed")
    certificate = certificate_in(tmp_path) if encrypted else None
    async with large_and_prepared(tmp_path / "cache", certificate) as (both, content):
        asked = head_of(Asked("GET", "d/large", {}), both.keyring.secrets["ALL"], both.clock.now())
        wire = await both.fast.connect(limit=1024, **both.options)
        await wire.say(asked)
        await both.fast.requests(1)
        wire.abort()
        await both.fast.requests(0)
        assert await both.read("d/large") == content
    assert counted("client-left")[0] == before[0] + 1
    assert CACHE_HIT_BYTES.value("fixed") == bytes_before + 5 * LARGE_BYTES  # as by the whole way, all of the span


async def test_nothing_is_said_in_the_midst_of_a_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that ends its side while its answer has only begun is not asked whether it is there."""
    start_task = S3Protocol._start_task

    def end_first(self: S3Protocol, *arguments: Any) -> None:
        self.eof_received()
        start_task(self, *arguments)

    async with large_and_prepared(tmp_path) as (both, content):
        monkeypatch.setattr(S3Protocol, "_start_task", end_first)
        assert await both.read("d/large") == content


async def test_what_is_pending_is_asked_for_before_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is flushed is in the catalog before it is pending no more: the other order could see neither."""
    asked: list[str] = []
    for name in ("is_pending", "holds"):
        function = getattr(PreparedRead, name)

        def noted(self: PreparedRead, name: str = name, function: Any = function) -> bool:
            asked.append(name)
            return bool(function(self))

        monkeypatch.setattr(PreparedRead, name, noted)
    async with pair(tmp_path, random.Random(1)) as both:
        await both.read("w/b", times=6)
    assert asked[:2] == ["is_pending", "holds"]


async def test_what_fails_goes_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair(tmp_path, random.Random(1)) as both:
        monkeypatch.setattr(PreparedRequests, "answer", lambda *_: 1 / 0)
        assert await both.read("d/a", times=3) == both.gateway.origin.data("bucket", "d/a")


@pytest.mark.parametrize("error", [errno.EHOSTUNREACH, errno.ENOBUFS, errno.EAGAIN, errno.EPIPE])
def test_whatever_keeps_the_kernel_from_taking_it_is_found_out_by_who_goes_on(error: int) -> None:
    class Broken:
        def send(self, *_: object) -> int:
            raise OSError(error, "no")

    assert _send_now(cast("socket.socket", Broken()), b"head", None) == (0, 0)


async def test_a_draining_server_goes_the_whole_way(tmp_path: Path) -> None:
    """Which says that the connection ends."""
    async with large_and_prepared(tmp_path) as (both, content):
        wire = both.wires["fast"]
        both.fast.server._state.draining = True
        await wire.say(head_of(Asked("GET", "d/large", {}), both.keyring.secrets["ALL"], both.clock.now()))
        answer = await wire.answer()
        assert (answer.headers["connection"], answer.body) == ("close", content)


def prepared_of(both: Pair) -> PreparedRequests:
    found = both.fast.server._prepared
    assert found is not None
    return found


async def test_what_cannot_be_prepared_is_tried_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the first time, then at the 2nd, 3rd, 5th, 9th, … and 129th, and then each 128th time."""
    tried: list[int] = []
    asks: list[None] = []
    monkeypatch.setattr(PreparedRequests, "_prepared", lambda *_: tried.append(len(asks)))
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        await both.read("d/a")  # the head is learned
        for _ in range(520):
            asks.append(None)
            await both.read("x/a")
    assert tried == [2, 3, 5, 9, 17, 33, 65, 129, 257, 385, 513]


async def test_what_was_asked_for_before_is_known_of_a_million_others(tmp_path: Path) -> None:
    """What is read once an epoch is prepared in the second one, however much was read between."""
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        kept = prepared_of(both)
        await both.settled(both.ask(Asked("GET", "d/b c", {}), "fast"))  # the head is learned
        await both.read("d/a")
        kept_before = len(kept._objects)
        for number in range(200_000):
            kept._is_worth_it(number)
        await both.read("d/a")
        found = len(kept._objects) - kept_before
    assert found == 1


async def test_what_is_prepared_counts_for_its_checkpoint(tmp_path: Path) -> None:
    """Every byte once, as by the whole way; where the client leaves, what it was sent, and nothing is open."""
    content = random.Random(1).randbytes(LARGE_BYTES)
    paths = [f"{slot}/step-1/__0_0.distcp" for slot in "wy"]

    def read_of(path: str) -> tuple[int, int]:
        of_checkpoint = checkpoint_id("bucket", path.rpartition("/")[0] + "/")
        [one] = reads_by_checkpoint(tmp_path)[of_checkpoint][file_id(of_checkpoint, path)]
        return one.read_bytes, one.open

    before = [PREPARED_REQUESTS.value("GetObject", slot) for slot in ("buffered", "asked")]
    clock, keyring = SetClock(), ChangingKeyring()
    async with gateway_app(
        tmp_path / "cache",
        slots=SLOTS,
        clock=clock,
        keyring=keyring,
        writeback=True,
        block_size_bytes=LARGE_BYTES,
    ) as gateway:
        gateway.app.services.reads = counted_here = CheckpointReads(tmp_path, 0, clock)
        for path in paths:
            gateway.origin.put("bucket", path, content)
        async with both_ports(gateway, clock, keyring) as both:
            for way in ("fast", "fast", "fast", "fast", "slow"):
                for path in paths:
                    await both.settled(both.ask(Asked("GET", path, {}), way))
                    await both.settled(both.ask(Asked("HEAD", path, {}), way))
            assert [read_of(path) for path in paths] == [(5 * LARGE_BYTES, 0)] * 2
            wire = await both.fast.connect(limit=1024)
            await wire.say(head_of(Asked("GET", paths[0], {}), keyring.secrets["ALL"], clock.now()))
            await both.fast.requests(1)
            assert read_of(paths[0]) == (5 * LARGE_BYTES, 1)
            wire.abort()
            await both.fast.requests(0)
            read_bytes, opened = read_of(paths[0])
            assert 5 * LARGE_BYTES <= read_bytes < 6 * LARGE_BYTES
            assert opened == 0
        counted_here.close()
    after = [PREPARED_REQUESTS.value("GetObject", slot) for slot in ("buffered", "asked")]
    assert all(later > earlier for earlier, later in zip(before, after, strict=True))


@asynccontextmanager
async def one_prepared(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Pair, list[str]]]:
    """A gateway that has prepared `d/a`, and the paths that have gone the whole way since."""
    async with pair(directory, random.Random(1), sizes=(1000,)) as both:
        for _ in range(4):
            for fields in ({}, {"range": "bytes=10-99"}):
                await both.settled(both.ask(Asked("GET", "d/a", fields), "fast"))
        whole_way: list[str] = []
        start = S3Protocol._start_cycle

        def started(protocol: S3Protocol, head: RequestHead, raw: bytes) -> None:
            whole_way.append(raw.decode().split()[1])
            start(protocol, head, raw)

        monkeypatch.setattr(S3Protocol, "_start_cycle", started)
        yield both, whole_way


@pytest.mark.parametrize("is_open", [True, False], ids=["open file", "closed file"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in a thread"])
async def test_what_has_to_be_verified_before_does_not_go_the_whole_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool, at_once: bool
) -> None:
    """As in every epoch of a data set that is larger than memory."""
    if not at_once:
        monkeypatch.setattr(block_file, "VERIFIED_AT_ONCE_BYTES_MAX", 0)
    async with one_prepared(tmp_path, monkeypatch) as (both, whole_way):
        open_files = both.gateway.blocks._dependencies.open_files
        content = await both.ask(Asked("GET", "d/a", {}))
        assert whole_way == ["/bucket/d/a"]
        assert content is not None
        for asked in (Asked("GET", "d/a", {}), Asked("GET", "d/a", {"range": "bytes=10-99"})):
            for lease in list(open_files._leases.values()):
                lease.file.distrust()
            if not is_open:
                open_files.drop(*list(open_files._leases))
            answer = await both.ask(asked, "fast")
            assert answer is not None
            assert answer[1] == (content[1][10:100] if asked.fields else content[1])
        assert whole_way == ["/bucket/d/a"]


@pytest.mark.slow
async def test_what_comes_again_soon_is_kept_though_all_places_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small data set behind a large one; places that are random have to be taken from what nobody asks for."""
    monkeypatch.setattr(prepared, "_OBJECTS_MAX", 30)
    monkeypatch.setattr(prepared, "_SLICE", 4)
    old, new = [f"d/old-{number}" for number in range(100)], [f"d/new-{number}" for number in range(5)]
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        kept = prepared_of(both)
        kept._dice = random.Random(1)
        for key in (*old, *new):
            both.gateway.origin.put("bucket", key, b"x" * 100)
        for _ in range(3):
            for key in old:
                await both.read(key)
        assert len(kept._objects) == 30
        before = set(kept._objects)
        for key in old:
            await both.read(key)
        assert len(before & set(kept._objects)) > 20, "one in some"
        for _ in range(6):
            for key in new:
                await both.read(key)
        paths = {path.decode() for _, path in cast("dict[tuple[object, bytes], object]", kept._objects)}
        assert len(paths & {f"/bucket/{key}" for key in new}) >= 4


async def test_what_is_prepared_anew_keeps_its_place(tmp_path: Path) -> None:
    """Places are bounded: one that were taken twice would put out what is in use."""
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        kept = prepared_of(both)
        for number in range(10):
            both.gateway.origin.put("bucket", "t/a", b"x" * (100 + number))
            await both.gateway.blocks.invalidate(ObjectKey("bucket", "t/a"))
            both.gateway.catalog.forget(ObjectKey("bucket", "t/a"))
            await both.read("t/a", times=5)
        assert len(kept._places) == len(set(kept._places)) == len(kept._objects)


async def test_a_long_head_is_not_learned(tmp_path: Path) -> None:
    """What is kept of heads is bounded, whatever clients send."""
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        kept = prepared_of(both)
        for length in (9000, 100):
            assert not kept._heads
            for number in range(3):
                fields = {"accept": f"{number}" + "a" * length}
                answer = await both.settled(both.ask(Asked("GET", "d/a", fields), "fast"))
                assert answer is not None
                assert answer[0].startswith(b"HTTP/1.1 200 ")
        assert kept._heads


async def test_what_is_prepared_in_vain_is_tried_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system does not tell what stays in memory, bytes are read for the whole way, and not twice."""
    monkeypatch.setattr(page_cache, "is_supported", lambda _directory: False)
    asked: list[Question] = []
    ask = PreparedRequests.ask

    async def counted(
        kept: PreparedRequests, question: Question, began: float, client: Client | None
    ) -> PreparedAnswer | None:
        asked.append(question)
        return await ask(kept, question, began, client)

    monkeypatch.setattr(PreparedRequests, "ask", counted)
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        for _ in range(66):
            assert await both.read("d/a") == both.gateway.origin.data("bucket", "d/a")
    assert 0 < len(asked) <= 7


async def test_who_leaves_while_bytes_are_read_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where bytes are read on the whole way: the catalog has answered, and the client has left."""
    begun = asyncio.Event()

    async def for_ever(_: UnreadSpan) -> None:
        begun.set()
        await asyncio.Event().wait()

    def now() -> list[float]:
        status = REQUESTS.value("GetObject", "fixed", "client-left", "none")
        return [status, CATALOG_LOOKUPS.value("fixed", "hit"), REQUESTS_IN_FLIGHT.value()]

    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        await both.read("d/a", times=4)
        monkeypatch.setattr(UnreadSpan, "verified", for_ever)
        monkeypatch.setattr(BlockFile, "verify_at_once", lambda *_: False)
        for lease in list(both.gateway.blocks._dependencies.open_files._leases.values()):
            lease.file.distrust()
        before = now()
        wire = await both.fast.connect()
        await wire.say(head_of(Asked("GET", "d/a", {}), both.keyring.secrets["ALL"], both.clock.now()))
        await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
        wire.abort()
        await both.fast.requests(0)
        assert [after - then for after, then in zip(now(), before, strict=True)] == [1, 1, 0]


def damage(file: Path) -> None:
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in a thread"])
async def test_1_4_damage_that_is_come_upon_goes_the_whole_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Which drops the block, and asks the origin for the bytes."""
    if not at_once:
        monkeypatch.setattr(block_file, "VERIFIED_AT_ONCE_BYTES_MAX", 0)
    async with one_prepared(tmp_path, monkeypatch) as (both, whole_way):
        content = await both.read("d/a")
        assert not whole_way
        _, extent = next(iter(both.gateway.blocks._dependencies.held_rows.values()))
        damage(Path(both.gateway.blocks._dependencies.directory.store._place(unpack_extent(*extent).file)))
        asked_before = both.gateway.origin.count()
        assert await both.read("d/a") == content
        assert both.gateway.origin.count() > asked_before


def looked_at(root: object, shared: Sequence[object]) -> list[object]:
    """What the collector of cycles comes to from an object, but for what it comes to by way of what is shared."""
    passed, left, found = {id(one) for one in shared}, [root], []
    while left:
        one = left.pop()
        if id(one) not in passed and gc.is_tracked(one) and not isinstance(one, type):
            passed.add(id(one))
            found.append(one)
            left += gc.get_referents(one)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("key", ["d/", "t/", "x/"], ids=["immutable", "ttl", "strict"])
async def test_what_is_kept_is_little_to_the_collector_of_cycles(tmp_path: Path, key: str) -> None:
    """It looks at all that is kept in one go, and nothing else is done meanwhile: at 40 objects for each of 16,384
    answers that took half a second."""
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        kept, gateway = prepared_of(both), both.gateway
        await both.read(f"{key}a", times=4)
        gc.collect()  # tuples of what cannot be in a cycle are let go of
        [known] = kept._objects.values()
        assert known is not None
        shared = [
            gateway.app.services,
            gateway.app.services.writeback,
            gateway.blocks._dependencies,
            gateway.catalog._store,
            both.clock,
            known.grant,
            *kept._tally_of.values(),
            prepared_reads._TOLD_EACH_TIME,
            *SLOTS,
        ]
        found = [type(one).__name__ for one in looked_at(known, shared)]
        assert {"_KnownReads", "PreparedRead"} <= set(found)
        assert len(found) <= 8, found


class _Gathered:
    """An access log that keeps what it is told."""

    def __init__(self) -> None:
        self.requests: list[FinishedRequest] = []

    def add(self, request: FinishedRequest) -> None:
        self.requests.append(request)


async def test_what_is_prepared_is_among_the_slowest_and_in_the_access_log(tmp_path: Path) -> None:
    """As any other request; it is not looked at where it was faster than those that are kept."""
    shared = tmp_path / "shared"
    shared.mkdir()
    async with pair(tmp_path / "cache", random.Random(1), sizes=(1000,)) as both:
        kept, log = prepared_of(both), _Gathered()
        kept.app.recent, kept.app.access = RecentRequests(shared, 0), cast(AccessLog, log)
        before = PREPARED_REQUESTS.value("GetObject", "fixed")
        answers = [await both.settled(both.ask(Asked("GET", "d/b c", {}), "fast")) for _ in range(5)]
        kept._lay()
        assert PREPARED_REQUESTS.value("GetObject", "fixed") > before
        found = recent_requests(shared, 100, time.time())["slowest"]
        assert len(found) == len(log.requests) == 5
        ids = [re.search(rb"x-amz-request-id: (\w+)", answer[0]) for answer in answers if answer is not None]
        assert [one.request_id for one in log.requests] == [one[1].decode() for one in ids if one]
        assert {(one["bucket"], one["key"], one["cache"], one["caller"]) for one in found} == {
            ("bucket", "d/b c", "miss", "ALL"),
            ("bucket", "d/b c", "hit", "ALL"),
        }
        one = log.requests[-1]
        assert (one.operation, one.slot, one.status, one.sent_bytes) == ("GetObject", "fixed", "200", 1000)
        assert one.remote == "127.0.0.1"
        kept.app.access, kept.app.recent.slow_seconds = None, 60.0
        await both.read("d/b c")
        assert recent_requests(shared, 100, time.time())["slowest"] == found


class _Drawing:
    """A tracer that wants every request traced, and makes no spans."""

    def __init__(self) -> None:
        self.begun = 0

    def draws(self, _head: bytes) -> bool:
        return True

    def begin(self, _headers: object) -> None:
        self.begun += 1


@pytest.mark.parametrize("key", ["d/b c", "x/a"], ids=["known", "asked-about"])
async def test_what_is_traced_goes_the_whole_way(tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where spans are made; what was prepared is let go of."""
    made: list[WarmSpan] = []
    make = WarmSpan.__init__

    def noted(span: WarmSpan, *arguments: Any, **keywords: Any) -> None:
        make(span, *arguments, **keywords)
        made.append(span)

    monkeypatch.setattr(WarmSpan, "__init__", noted)
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        await both.read(key, times=5)
        kept, tracer = prepared_of(both), _Drawing()
        both.gateway.app.tracer = cast(Tracer, tracer)
        kept._lay()
        before = PREPARED_REQUESTS.value("GetObject", "fixed"), PREPARED_REQUESTS.value("GetObject", "default")
        assert sum(before) > 0
        for number in range(1, 4):
            assert len(await both.read(key)) == 1000
            assert tracer.begun == number
        kept._lay()
        assert before == (
            PREPARED_REQUESTS.value("GetObject", "fixed"),
            PREPARED_REQUESTS.value("GetObject", "default"),
        )
        assert len(made) > 3
        assert all(span.span.file is spans._GIVEN_BACK for span in made)


async def test_what_the_origin_is_asked_belongs_to_no_trace_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection's context has the span of its last request that was traced."""
    ask, found = PreparedRequests.ask, []

    async def asked_later(
        kept: PreparedRequests, question: Question, began: float, client: Client | None
    ) -> PreparedAnswer | None:
        TRACE.set(cast(RequestSpan, "of a request before"))
        return await ask(kept, question, began, client)

    monkeypatch.setattr(PreparedRequests, "ask", asked_later)
    before = PREPARED_REQUESTS.value("GetObject", "default")
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        send = both.gateway.origin.send

        async def seen(request: OriginRequest) -> Any:
            found.append(TRACE.get())
            return await send(request)

        monkeypatch.setattr(both.gateway.origin, "send", seen)
        await both.read("x/a", times=6)
    assert PREPARED_REQUESTS.value("GetObject", "default") > before
    assert set(found) == {None}


@pytest.mark.slow
async def test_one_that_is_not_kept_is_answered_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set that is larger than what is kept: each is prepared when it is asked for, most of those kept stay."""
    monkeypatch.setattr(prepared, "_OBJECTS_MAX", 10)
    keys, begun, begin = [f"d/{number}" for number in range(40)], [], PreparedRequests.begin

    def counted(kept: PreparedRequests, answer: PreparedAnswer) -> tuple[str, bytes]:
        begun.append(answer)
        return begin(kept, answer)

    monkeypatch.setattr(PreparedRequests, "begin", counted)
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        kept = prepared_of(both)
        kept._dice = random.Random(1)
        for key in keys:
            both.gateway.origin.put("bucket", key, key.encode() * 100)
        for _ in range(3):
            for key in keys:
                await both.read(key)
        assert len(kept._objects) == 10
        before, answered = set(kept._objects), len(begun)
        for key in keys:
            assert await both.read(key) == key.encode() * 100
        assert len(begun) - answered == len(keys), "all of them are answered by what is prepared"
        assert 5 <= len(before & set(kept._objects)) < 10, "some are others, most are not"


async def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of answers, and blocks; a path that no key has is not even noted."""
    monkeypatch.setattr(prepared, "_OBJECTS_MAX", 2)
    monkeypatch.setattr(spans, "HELD_ROWS_MAX", 2)
    monkeypatch.setattr(spans, "HELD_IDS_MAX", 1)
    async with pair(tmp_path, random.Random(1), sizes=(3 * BLOCK_SIZE_BYTES,)) as both:
        kept, tools = prepared_of(both), both.gateway.blocks._dependencies
        for key in ("d/a", "d/b c", "t/a", "d/a"):
            for first in (0, BLOCK_SIZE_BYTES, 2 * BLOCK_SIZE_BYTES):
                asked = Asked("GET", key, {"range": f"bytes={first}-{first + 9}"})
                for _ in range(3):
                    await both.settled(both.ask(asked, "fast"))
                assert len(kept._objects) <= 2
                assert len(tools.held_rows) <= 2
        kept_reads = [known.read for known in kept._objects.values() if known is not None]
        reads = [read for read in kept_reads if isinstance(read, PreparedRead)]
        assert reads
        assert all(len(read._blocks._ids) <= 1 for read in reads)
        assert tools.held_rows
        asked_before = bytes(kept._asked)
        await both.ask(Asked("GET", "n" * 4000, {"range": "bytes=0-9"}), "fast")
        assert kept._asked == asked_before


async def test_a_kind_of_head_that_is_known_is_not_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for the first time goes the whole way, and its head, of a known kind, is compared once on it."""
    looked: list[bytes] = []
    learn = ConnectionHeads.learn

    def noted(heads: ConnectionHeads, raw: bytes, *arguments: Any, **named: Any) -> None:
        looked.append(raw)
        learn(heads, raw, *arguments, **named)

    monkeypatch.setattr(ConnectionHeads, "learn", noted)
    async with pair(tmp_path, random.Random(1), sizes=(1000,)) as both:
        for key in ("d/a", "d/b c", "t/a", "t/b"):
            await both.read(key)
        assert len(looked) == 1
        await both.ask(Asked("GET", "d/a", {"x-of-another-kind": "1"}), "fast")
        assert len(looked) == 2
