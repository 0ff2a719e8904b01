"""Clause 9.8 of docs/semantics.md: what the origin cannot do is learned, and objects are read in one stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.core.model import ObjectKey
from gateway.metadata.catalog import HABITS_REREAD_SECONDS, HABITS_SECONDS
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.asgi import Answer, call
from tests.support.cache_label import cache_label
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import AlterHeaders, Call, Fault, on
from tests.support.memory_origin.faults import Answer as Refusal
from tests.support.rest_is_slow import rest_is_slow
from tests.support.slots import Slot

PREFIX = Prefix.parse("s3://bucket/")
SLOTS = [
    Slot("strict", PREFIX),
    Slot("ttl", PREFIX, "read-write", "ttl", 60.0),
    Slot("immutable", PREFIX, "read-write", "immutable"),
]
LARGE = bytes(range(251)) * (3 * BLOCK_SIZE_BYTES // 251 + 7)
FITTING = LARGE[:BLOCK_SIZE_BYTES]
CHECKSUMS = {"x-amz-checksum-mode": "ENABLED"}
RANGES = ["bytes=5-9", f"bytes={len(LARGE) - 10}-", "bytes=-7", f"bytes={BLOCK_SIZE_BYTES - 3}-{BLOCK_SIZE_BYTES + 3}"]


@asynccontextmanager
async def playing(directory: Path, slot: Slot) -> AsyncIterator[tuple[GatewayApp, ManualClock]]:
    clock = ManualClock()
    async with gateway_app(directory, slots=[slot], clock=clock, allow_unsigned=True) as gateway:
        yield gateway, clock


async def get(gateway: GatewayApp, key: str, headers: dict[str, str] | None = None) -> Answer:
    answer = await call(gateway.app, "GET", f"/bucket/{key}", headers, sign=False)
    await gateway.catalog.settle()
    await gateway.blocks.settle()
    return answer


def bodies(gateway: GatewayApp) -> int:
    return gateway.origin.count(Operation.GET_OBJECT)


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.name)
@pytest.mark.parametrize("headers", [{}, CHECKSUMS])
@pytest.mark.parametrize("size_bytes", [0, 1, BLOCK_SIZE_BYTES, BLOCK_SIZE_BYTES + 1, len(LARGE)])
async def test_9_8_weak_etags_are_read_in_one_stream(
    tmp_path: Path, slot: Slot, headers: dict[str, str], size_bytes: int
) -> None:
    """9.8 Of any size, whole and by range; from the second GET on each costs one GET of the origin."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        gateway.origin.dialect.has_weak_etags = True
        for key in ("a", "b"):
            gateway.origin.put("bucket", key, LARGE[:size_bytes])
        with capture_logs() as logs:
            for key in ("a", "a", "b", "b"):
                before = bodies(gateway)
                answer = await get(gateway, key, headers)
                assert (answer.status, answer.body, answer.complete) == (200, LARGE[:size_bytes], True)
                assert bodies(gateway) - before <= (2 if key == "a" else 1)
                assert answer.headers["etag"].startswith("W/")
        assert len([line for line in logs if "weak ETags" in str(line.get("because"))]) == 1
        if size_bytes == len(LARGE):
            for asked in RANGES:
                partial = await get(gateway, "a", {"Range": asked})
                assert (partial.status, partial.complete) == (206, True)
                first, last = partial.headers["content-range"].removeprefix("bytes ").split("/")[0].split("-")
                assert partial.body == LARGE[int(first) : int(last) + 1]


async def test_9_8_the_log_says_so_once_for_each_bucket(tmp_path: Path) -> None:
    """9.8 Also of a second bucket, and not again for what is known."""
    async with playing(tmp_path, Slot("strict", Prefix.parse("s3://"))) as (gateway, _clock):
        gateway.origin.dialect.has_weak_etags = True
        gateway.origin.create_bucket("other")
        with capture_logs() as logs:
            for bucket in ("bucket", "other"):
                gateway.origin.put(bucket, "a", b"x")
                for _ in range(2):
                    assert (await call(gateway.app, "GET", f"/{bucket}/a", sign=False)).status == 200
                    await gateway.catalog.settle()
        told = [line["bucket"] for line in logs if "weak ETags" in str(line.get("because"))]
        assert told == ["bucket", "other"]


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.name)
@pytest.mark.parametrize("headers", [{}, CHECKSUMS])
async def test_9_8_without_ranges_objects_are_read_in_one_stream(
    tmp_path: Path, slot: Slot, headers: dict[str, str]
) -> None:
    """9.8 From the first GET on; what fits in one block is cached, and after ten minutes it is found out anew."""
    async with playing(tmp_path, slot) as (gateway, clock):
        gateway.origin.dialect.knows_ranges = False
        gateway.origin.put("bucket", "fits", FITTING)
        gateway.origin.put("bucket", "large", LARGE)
        with capture_logs() as logs:
            for _ in range(3):
                answer = await get(gateway, "large", headers)
                assert (answer.status, answer.body, answer.complete) == (200, LARGE, True)
        assert len([line for line in logs if "answers a range" in str(line.get("because"))]) == 1
        for asked in RANGES:
            answer = await get(gateway, "large", {"Range": asked})
            assert (answer.status, answer.body) == (200, LARGE), "as the origin itself answers"
        labels = [(await get(gateway, "fits", headers)) for _ in range(2)]
        assert [one.body for one in labels] == [FITTING] * 2
        assert labels[1].headers["x-forebay-cache"] == "hit"
        assert (await get(gateway, "fits", {"Range": "bytes=3-5"})).body == FITTING[3:6]
        gateway.origin.dialect.knows_ranges = True
        await clock.advance(HABITS_SECONDS)
        for label in ("miss; reason=first-read", "hit"):
            answer = await get(gateway, "large")
            assert (answer.body, answer.headers["x-forebay-cache"]) == (LARGE, label)


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.name)
async def test_9_8_ranges_that_are_lost_in_the_midst_of_an_object_cut_one_body(tmp_path: Path, slot: Slot) -> None:
    """9.8 A body that has begun with blocks of this node ends early once; the next one is the origin's."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        gateway.origin.put("bucket", "k", LARGE)
        assert (await get(gateway, "k", {"Range": f"bytes=0-{BLOCK_SIZE_BYTES - 1}"})).status == 206
        gateway.origin.dialect.knows_ranges = False
        cut, whole = await get(gateway, "k"), await get(gateway, "k")
        assert not cut.complete or cut.body == LARGE
        assert (whole.status, whole.body, whole.complete) == (200, LARGE, True)


def give_one_etag(gateway: GatewayApp) -> None:
    """Every object of the bucket has the same."""
    objects = gateway.origin.buckets["bucket"].objects
    for key, stored in list(objects.items()):
        objects[key] = replace(stored, etag='"0123456789abcdef0123456789abcdef"')


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.name)
@pytest.mark.parametrize(
    "queries",
    [
        ["list-type=2"],
        [""],
        ["list-type=2&delimiter=/"],
        ["max-keys=1", "max-keys=1&marker=a"],
        ["list-type=2&max-keys=1&start-after=a", "list-type=2&max-keys=1"],
    ],
)
async def test_9_8_nothing_is_cached_under_an_etag_of_different_objects(
    tmp_path: Path, slot: Slot, queries: list[str]
) -> None:
    """9.8 Once a page has shown it, or two have: an object that is overwritten with as many bytes is read as it is,
    though it was cached before. Others of the bucket are cached."""
    async with playing(tmp_path, slot) as (gateway, clock):
        for key, content in (("a", b"old"), ("b", b"other size")):
            gateway.origin.put("bucket", key, content)
        give_one_etag(gateway)
        gateway.origin.put("bucket", "c", b"distinct")
        for _ in range(2):
            assert (await get(gateway, "a")).body == b"old"
        with capture_logs() as logs:
            for query in queries:
                await call(gateway.app, "GET", f"/bucket?{query}", sign=False)
            await gateway.catalog.settle()
        gateway.origin.put("bucket", "a", b"new")
        give_one_etag(gateway)
        gateway.origin.put("bucket", "c", b"distinct")
        assert len([line for line in logs if "same ETag" in str(line.get("because"))]) == 1
        for _ in range(2):
            await clock.advance(HABITS_REREAD_SECONDS)
            answer = await get(gateway, "a")
            assert (answer.body, answer.headers["x-forebay-cache"]) == (b"new", "bypass")
        assert [(await get(gateway, "c")).headers["x-forebay-cache"] for _ in range(2)][1] == "hit"


def asks(name: str) -> Callable[[Call], bool]:
    """Return a condition: GETs of an object that have this header."""
    return lambda call: call.operation is Operation.GET_OBJECT and name in call.headers


OTHER_ETAGS = ('W/"x"', '"x-gzip"', "x", None)
WITHHELD: dict[str, Fault] = {
    **{f"if-match {status}": Fault(asks("if-match"), Refusal(status), None) for status in (304, 400, 412, 501)},
    **{f"range {status}": Fault(asks("range"), Refusal(status), None) for status in (400, 405, 416, 501)},
    **{f"GET {etag}": Fault(on(Operation.GET_OBJECT), AlterHeaders({"etag": etag}), None) for etag in OTHER_ETAGS},
    **{f"HEAD {etag}": Fault(on(Operation.HEAD_OBJECT), AlterHeaders({"etag": etag}), None) for etag in OTHER_ETAGS},
    **{
        f"206 {told}": Fault(asks("range"), AlterHeaders({"content-range": told}), None)
        for told in (None, "bytes */7", "bytes 1-2/*", "bytes 0-9/10", "bytes 9-0/10")
    },
    "encoded": Fault(on(Operation.GET_OBJECT), AlterHeaders({"content-encoding": "br", "content-length": None}), None),
}


@pytest.mark.parametrize("slot", SLOTS[:2], ids=lambda slot: slot.name)
@pytest.mark.parametrize("headers", rest_is_slow([{}, CHECKSUMS], {}))
@pytest.mark.parametrize("fault", rest_is_slow(WITHHELD, *list(WITHHELD)[::2]))
async def test_9_8_ranges_that_are_withheld_are_learned(
    tmp_path: Path, slot: Slot, headers: dict[str, str], fault: str
) -> None:
    """9.8 Small and large objects are read as they are; a body that has begun ends early once for each object."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        gateway.origin.faults = [replace(WITHHELD[fault])]
        content = {"small": b"small", "large": LARGE, "other": LARGE[:-1]}
        with capture_logs() as logs:
            for key, body in content.items():
                gateway.origin.put("bucket", key, body)
                cut = await get(gateway, key, headers)
                assert cut.status == 200
                assert cut.body == body[: len(cut.body)]
                assert not cut.complete or len(cut.body) == len(body)
            for calls_max in (6, 3, 3):
                for key, body in content.items():
                    before = len(gateway.origin.calls)
                    answer = await get(gateway, key, headers)
                    assert (answer.status, answer.body, answer.complete) == (200, body, True)
                    assert len(gateway.origin.calls) - before <= calls_max
        assert len([line for line in logs if "gives no ranges" in str(line.get("because"))]) <= 1


def withheld(gateway: GatewayApp) -> frozenset[str]:
    return gateway.catalog.habits("bucket").withheld_etags


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.name)
async def test_9_8_an_origin_that_withholds_the_ranges_of_many_objects_withholds_all(
    tmp_path: Path, slot: Slot
) -> None:
    """9.8 From the ninth object on, no range is asked for; after ten minutes it is found out anew."""
    async with playing(tmp_path, slot) as (gateway, clock):
        gateway.origin.faults = [Fault(asks("if-match"), Refusal(501, "NotImplemented"), None)]
        for number in range(9):
            gateway.origin.put("bucket", f"{number}", LARGE + bytes([number]))
            await get(gateway, f"{number}", CHECKSUMS)
        assert withheld(gateway) == {"*"}
        gateway.origin.put("bucket", "last", LARGE)
        before = bodies(gateway)
        assert (await get(gateway, "last")).body == LARGE
        assert bodies(gateway) == before + 1
        gateway.origin.faults.clear()
        await clock.advance(HABITS_SECONDS)
        for label in ("miss", "hit"):
            answer = await get(gateway, "last")
            assert (answer.body, cache_label(answer)) == (LARGE, label)


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.name)
async def test_9_8_a_version_that_changes_is_not_withheld(tmp_path: Path, slot: Slot) -> None:
    """9.8 An object that is overwritten between its HEAD and its GET, and then again with what it had, is cached."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        gateway.origin.put("bucket", "k", LARGE)
        await get(gateway, "k", {"Range": "bytes=0-9"})
        for content in (LARGE[1:], LARGE):
            gateway.origin.put("bucket", "k", content)
            await gateway.blocks.invalidate(ObjectKey("bucket", "k"))
            if slot.consistency != "strict":
                assert (await get(gateway, "k", {"Range": "bytes=0-9"})).status == 206
            answers = [await get(gateway, "k") for _ in range(3)]
            assert (answers[-1].body, cache_label(answers[-1])) == (content, "hit")
        assert withheld(gateway) == frozenset()


async def test_9_8_what_is_refused_to_the_caller_teaches_nothing(tmp_path: Path) -> None:
    """9.8 Rights, absences and outages are no habits of the origin."""
    async with playing(tmp_path, SLOTS[0]) as (gateway, _clock):
        gateway.origin.put("bucket", "k", LARGE)
        for status in (401, 403, 404, 500):
            gateway.origin.faults = [Fault(asks("if-match"), Refusal(status), None)]
            for _ in range(3):
                await get(gateway, "k", CHECKSUMS)
        gateway.origin.faults.clear()
        assert withheld(gateway) == frozenset()
        assert [cache_label(await get(gateway, "k")) for _ in range(2)][1] == "hit"


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.name)
@pytest.mark.parametrize("length", ["0", "20"])
async def test_9_8_a_wrong_length_in_the_answer_to_head_loses_no_bytes(tmp_path: Path, slot: Slot, length: str) -> None:
    """9.8 Whole and by range, cold and warm, with checksums and without; HEAD says what the origin says."""
    async with playing(tmp_path, slot) as (gateway, clock):
        content = {"whole": LARGE, "range": LARGE[1:], "warm": b"small"}
        for key, body in content.items():
            gateway.origin.put("bucket", key, body)
        assert (await get(gateway, "warm")).body == b"small"
        gateway.origin.faults = [
            Fault(on(Operation.HEAD_OBJECT), AlterHeaders({"content-length": length, "content-encoding": "gzip"}), None)
        ]
        await clock.advance(61)
        for headers in (CHECKSUMS, {}, CHECKSUMS):
            for _ in range(2):
                for asked in ("bytes=5-9", f"bytes={len(LARGE) // 2}-"):
                    part = await get(gateway, "range", {**headers, "Range": asked})
                    first, last = part.headers["content-range"].removeprefix("bytes ").split("/")[0].split("-")
                    assert (part.status, part.body) == (206, content["range"][int(first) : int(last) + 1])
            answers = [(key, await get(gateway, key, headers)) for key in content for _ in range(2)]
            assert [len(one.body) for key, one in answers] == [len(content[key]) for key, _ in answers]
            assert all(one.complete and one.body == content[key] for key, one in answers)


@pytest.mark.parametrize("slot", SLOTS[1:], ids=lambda slot: slot.name)
@pytest.mark.parametrize("etag", [None, '"7215ee9c7d9dc229d2921a40e899ec5f-1"'])
async def test_9_8_an_object_without_bytes_is_served_from_here_if_its_etag_says_so(
    tmp_path: Path, slot: Slot, etag: str | None
) -> None:
    """9.8 With another ETag, each GET is one GET of the origin."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        gateway.origin.put("bucket", "empty", b"")
        if etag is not None:
            gateway.origin.faults = [Fault(on(), AlterHeaders({"etag": etag}), None)]
        await get(gateway, "empty")
        before = len(gateway.origin.calls)
        answer = await get(gateway, "empty")
        assert (answer.status, answer.body) == (200, b"")
        assert (cache_label(answer), len(gateway.origin.calls) - before) == (
            ("hit", 0) if etag is None else ("bypass", 1)
        )
