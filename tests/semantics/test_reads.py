"""Clauses 1, 2 and 3 of docs/semantics.md."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.asgi import call
from tests.support.blocks import MIB
from tests.support.cache_label import cache_label
from tests.support.gateway_app import BLOCK_SIZE_BYTES, gateway_app
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import AlterBody, AlterHeaders, CutBody, Hold, on
from tests.support.memory_origin.store import StoredObject
from tests.support.slots import Slot

TTL = Slot("t", Prefix.parse("s3://bucket/"), consistency="ttl")

OLD = b"o" * (3 * BLOCK_SIZE_BYTES + 17)
NEW = b"n" * (3 * BLOCK_SIZE_BYTES + 17)


async def test_1_1_an_object_that_changes_before_the_first_byte_is_looked_up_again(tmp_path: Path) -> None:
    """1.1 Bytes of two versions are never mixed; a change before the first byte only costs a second look."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", OLD)
        held, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(Operation.GET_OBJECT), Hold(held, reached))
        reading = asyncio.create_task(call(gateway.app, "GET", "/bucket/k"))
        await reached.wait()
        etag = gateway.origin.put("bucket", "k", NEW)
        held.set()
        answer = await reading
        assert (answer.status, answer.body, answer.headers["etag"]) == (200, NEW, etag)


@pytest.mark.parametrize("size_bytes", [1000, 3 * MIB])
async def test_1_1_an_object_that_changes_while_a_cut_body_is_asked_for_again_is_looked_up_again(
    tmp_path: Path, size_bytes: int
) -> None:
    """1.1 The origin's answer was good, and broke off before the first byte that the client wants."""
    async with gateway_app(tmp_path, block_size_bytes=2 * MIB) as gateway:  # too large to be received as a whole
        gateway.origin.put("bucket", "k", b"o" * size_bytes)
        await call(gateway.app, "HEAD", "/bucket/k")
        held, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(Operation.GET_OBJECT), CutBody(10), times=1)
        gateway.origin.inject(lambda seen: seen.headers.get("range", "").startswith("bytes=10-"), Hold(held, reached))
        reading = asyncio.create_task(call(gateway.app, "GET", "/bucket/k", {"Range": f"bytes=500-{size_bytes - 1}"}))
        await reached.wait()
        etag = gateway.origin.put("bucket", "k", b"n" * size_bytes)
        held.set()
        answer = await reading
        assert (answer.status, answer.body, answer.headers["etag"]) == (206, b"n" * (size_bytes - 500), etag)


async def test_1_1_a_change_behind_the_first_byte_ends_the_connection(tmp_path: Path) -> None:
    """1.1 An object that changes after the first byte has left ends the connection: no mixed answer is complete."""
    async with gateway_app(tmp_path) as gateway:
        size = 40 * BLOCK_SIZE_BYTES
        gateway.origin.put("bucket", "k", b"o" * size)
        held, reached = asyncio.Event(), asyncio.Event()
        far = f"bytes={20 * BLOCK_SIZE_BYTES}-"
        gateway.origin.inject(lambda seen: seen.headers.get("range", "").startswith(far), Hold(held, reached))
        reading = asyncio.create_task(call(gateway.app, "GET", "/bucket/k"))
        await reached.wait()
        gateway.origin.put("bucket", "k", b"n" * size)
        held.set()
        answer = await reading
        assert answer.status == 200
        assert not answer.complete
        assert set(answer.body) == {ord("o")}


async def test_1_3_a_short_body_of_the_origin_is_never_a_complete_answer_and_never_cached(tmp_path: Path) -> None:
    """1.3 A body that ends early is retried or breaks the answer off; the next reader gets the right bytes."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", OLD)
        fault = gateway.origin.inject(on(Operation.GET_OBJECT), CutBody(1000), times=None)
        broken = await call(gateway.app, "GET", "/bucket/k")
        assert not broken.complete
        assert OLD.startswith(broken.body)
        fault.times = 0
        whole = await call(gateway.app, "GET", "/bucket/k")
        assert (whole.body, whole.complete) == (OLD, True)


async def test_1_3_a_range_without_a_length_is_counted_by_its_content_range(tmp_path: Path) -> None:
    """1.3 As it comes from the origin: an end of its connection in the midst of it is no end of the answer."""
    bypass = {"Range": "bytes=10-1009", "Origin": "http://page.example"}
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", OLD)
        gateway.origin.inject(on(Operation.GET_OBJECT), AlterBody(lambda body: body[:500]))
        gateway.origin.inject(on(Operation.GET_OBJECT), AlterHeaders({"content-length": ""}), times=2)
        broken = await call(gateway.app, "GET", "/bucket/k", bypass)
        assert (broken.headers["x-forebay-cache"], broken.body, broken.complete) == ("bypass", OLD[10:510], False)
        whole = await call(gateway.app, "GET", "/bucket/k", bypass)
        assert (whole.status, whole.body, whole.complete) == (206, OLD[10:1010], True)


async def test_1_3_an_answer_with_another_etag_is_refused(tmp_path: Path) -> None:
    """1.3 A fill that comes with another ETag than asked for is not cached and not served: the client gets the origin's
    own answer, past the cache."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", OLD)
        await call(gateway.app, "GET", "/bucket/k", {"Range": "bytes=131072-131072"})
        await gateway.blocks.settle()
        fault = gateway.origin.inject(on(Operation.GET_OBJECT), AlterHeaders({"etag": '"another"'}), times=None)
        answer = await call(gateway.app, "GET", "/bucket/k")
        assert (answer.status, answer.body, answer.headers["etag"]) == (200, OLD, '"another"')
        assert answer.headers["x-forebay-cache"] == "bypass"
        gateway.origin.put("bucket", "k", NEW)
        fault.times = 0
        assert (await call(gateway.app, "GET", "/bucket/k")).body == NEW


async def test_1_3_an_untyped_checksum_of_an_object_of_parts_is_no_checksum(tmp_path: Path) -> None:
    """1.3 Nor is one of an object whose ETag does not tell. It is neither believed, though the origin may send it with
    the whole object, nor handed on: not by GET or HEAD, nor by a request that is forwarded, nor later from memory. One
    that says what it is of is."""
    untyped = {"x-amz-checksum-crc32": "AAAAAA=="}
    mode = {"x-amz-checksum-mode": "ENABLED"}
    async with gateway_app(tmp_path, slots=[TTL]) as gateway:
        for key, etag, checksums in (
            ("parts", '"0123456789abcdef0123456789abcdef-2"', untyped),
            ("without-number", '"QUJDREVGR0hJSktMTU5PUA"', untyped),
            ("composite", '"0123456789abcdef0123456789abcdef-2"', {"x-amz-checksum-crc32": "AAAAAA==-2"}),
            ("typed", '"0123456789abcdef0123456789abcdef-2"', {**untyped, "x-amz-checksum-type": "COMPOSITE"}),
        ):
            stored = StoredObject(key, BytesContent(b"small"), etag, 1.0, {}, checksums)
            gateway.origin.buckets["bucket"].put(stored)
            for number in range(10):
                gateway.origin.put("bucket", f"other-{number}", b"x")
                await call(gateway.app, "GET", f"/bucket/other-{number}", mode)
            answers = [await call(gateway.app, method, f"/bucket/{key}", mode) for method in ("GET", "HEAD", "GET")]
            answers.append(await call(gateway.app, "GET", f"/bucket/{key}", {**mode, "Origin": "http://page"}))
            handed_on = {} if checksums == untyped else checksums
            for answer in answers:
                assert (answer.status, answer.complete) == (200, True)
                found = {name: value for name, value in answer.headers.items() if "x-amz-checksum" in name}
                assert found == handed_on
            assert [answer.body for answer in answers] == [b"small", b"", b"small", b"small"]


async def test_2_1_a_put_is_visible_when_it_is_answered(tmp_path: Path) -> None:
    """2.1 GET, HEAD and LIST see a PUT at once, even where an older version is cached."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", OLD)
        await call(gateway.app, "GET", "/bucket/k")
        stored = await call(gateway.app, "PUT", "/bucket/k", body=b"new")
        read = await call(gateway.app, "GET", "/bucket/k")
        head = await call(gateway.app, "HEAD", "/bucket/k")
        listed = await call(gateway.app, "GET", "/bucket?list-type=2")
        assert read.body == b"new"
        assert read.headers["etag"] == head.headers["etag"] == stored.headers["etag"]
        assert b"<Size>3</Size>" in listed.body


async def test_2_2_a_deleted_object_is_gone_though_its_blocks_were_cached(tmp_path: Path) -> None:
    """2.2 After a DELETE has been answered nobody serves the object."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", OLD)
        await call(gateway.app, "GET", "/bucket/k")
        assert (await call(gateway.app, "DELETE", "/bucket/k")).status == 204
        gone = await call(gateway.app, "GET", "/bucket/k")
        assert gone.status == 404
        assert b"<Code>NoSuchKey</Code>" in gone.body


async def test_3_1_what_others_write_is_visible_at_once_and_current_bytes_come_from_here(tmp_path: Path) -> None:
    """3.1 One HEAD per GET finds the current version; its bytes are not asked for twice."""
    async with gateway_app(tmp_path) as gateway:
        gateway.origin.put("bucket", "k", OLD)
        first = await call(gateway.app, "GET", "/bucket/k")
        fetched = gateway.origin.count(Operation.GET_OBJECT)
        second = await call(gateway.app, "GET", "/bucket/k")
        assert (cache_label(first), cache_label(second)) == ("miss", "hit")
        assert second.body == OLD
        assert gateway.origin.count(Operation.GET_OBJECT) == fetched
        gateway.origin.put("bucket", "k", NEW)
        assert (await call(gateway.app, "GET", "/bucket/k")).body == NEW


async def test_3_2_absence_is_not_remembered(tmp_path: Path) -> None:
    """3.2 An object that others create is there at the next request."""
    async with gateway_app(tmp_path) as gateway:
        assert (await call(gateway.app, "HEAD", "/bucket/k")).status == 404
        assert (await call(gateway.app, "GET", "/bucket/k")).status == 404
        gateway.origin.put("bucket", "k", NEW)
        assert (await call(gateway.app, "GET", "/bucket/k")).body == NEW
