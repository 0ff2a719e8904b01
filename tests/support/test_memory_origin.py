"""What `MemoryOrigin` does beyond the common suite: faults, records, generated objects, S3's finer points."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.origin.client import OriginRequest, Purpose, StreamedBody
from gateway.s3.requests import Operation
from tests.origin.origins import Answer as Whole
from tests.origin.origins import ask
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.content import BytesContent, Content, GeneratedContent, JoinedContent, SlicedContent
from tests.support.memory_origin.digests import ALGORITHMS, encoded
from tests.support.memory_origin.faults import AlterBody, AlterHeaders, Answer, CutBody, Delay, Hold, Unreachable, on

MEBIBYTE = 1024 * 1024
GET = Operation.GET_OBJECT


def origin_with(key: str = "key", data: bytes = b"0123456789") -> MemoryOrigin:
    origin = MemoryOrigin(ManualClock())
    origin.put("bucket", key, data)
    return origin


def get(origin: MemoryOrigin, key: str = "key", **headers: str) -> Whole:
    return asyncio.run(ask(origin, "GET", "bucket", key, headers=headers))


async def test_calls_are_recorded() -> None:
    """Tests count what reached the origin, by operation and key, and see why it was asked."""
    origin = origin_with()
    await ask(origin, "GET", "bucket", "key")
    async with await origin.send(OriginRequest("HEAD", "bucket", "none", purpose=Purpose.REFRESH)):
        pass
    assert (origin.count(), origin.count(GET), origin.count(key="none")) == (2, 1, 1)
    assert [(call.number, call.status, call.purpose) for call in origin.calls] == [
        (1, 200, Purpose.LIVE),
        (2, 404, Purpose.REFRESH),
    ]


def test_an_answer_fault_hits_as_often_as_it_says() -> None:
    """Twice 503, then the object."""
    origin = origin_with()
    origin.inject(on(GET), Answer(503, "SlowDown"), times=2)
    assert [get(origin).status for _ in range(3)] == [503, 503, 200]


def test_a_late_fault_loses_the_answer_only() -> None:
    """The operation was carried out; the caller cannot know."""
    origin = origin_with()
    origin.inject(on(Operation.PUT_OBJECT), Unreachable(late=True))
    with pytest.raises(OriginUnreachable):
        asyncio.run(ask(origin, "PUT", "bucket", "new", body=b"x"))
    assert origin.data("bucket", "new") == b"x"


async def test_a_delay_takes_the_clocks_time() -> None:
    """No answer before the clock has moved."""
    clock = ManualClock()
    origin = MemoryOrigin(clock)
    origin.put("bucket", "key", b"x")
    origin.inject(on(GET), Delay(5))
    task = asyncio.create_task(ask(origin, "GET", "bucket", "key"))
    await clock.advance(0)  # the request has arrived
    await clock.advance(4.5)
    assert not task.done()
    await clock.advance(0.5)
    assert (await task).status == 200


async def test_a_held_request_waits_for_its_event() -> None:
    """Races are scripted: the request is inside, and stays there until the test lets it go."""
    origin = origin_with()
    hold = Hold(asyncio.Event(), asyncio.Event())
    origin.inject(on(GET), hold)
    task = asyncio.create_task(ask(origin, "GET", "bucket", "key"))
    assert hold.reached is not None
    await hold.reached.wait()
    origin.put("bucket", "key", b"newer")
    hold.until.set()
    assert (await task).body == b"newer"


async def test_a_cut_body_is_short() -> None:
    """The head is right; the bytes end early."""
    origin = origin_with()
    origin.inject(on(GET), CutBody(4))
    async with await origin.send(OriginRequest("GET", "bucket", "key")) as response:
        assert response.headers["content-length"] == "10"
        stream = response.stream()
        assert await anext(stream) == b"0123"
        with pytest.raises(OriginBodyError):
            await anext(stream)


def test_lies_in_headers_and_bodies() -> None:
    """A wrong ETag, no Content-Range, other bytes."""
    origin = origin_with()
    origin.inject(on(GET), AlterHeaders({"etag": '"other"', "content-range": None}))
    origin.inject(on(GET), AlterBody(bytes.upper))
    answer = get(origin, range="bytes=0-3")
    assert (answer.status, answer.headers["etag"], "content-range" in answer.headers) == (206, '"other"', False)


@given(
    size=st.integers(0, 3 * MEBIBYTE),
    seed=st.integers(0, 3),
    offset=st.integers(0, 3 * MEBIBYTE),
    count=st.integers(0, 2 * MEBIBYTE),
)
def test_generated_bytes_depend_on_their_offset_only(size: int, seed: int, offset: int, count: int) -> None:
    """Any range is the same as that range of the whole."""
    content = GeneratedContent(size, seed)
    assert content.read(offset, count) == content.read(0, size)[offset : offset + count]


def test_generated_blocks_differ() -> None:
    """Two blocks of a large object, and two objects, are never alike."""
    content = GeneratedContent(10 * 1024 * MEBIBYTE)
    blocks = {content.read(number * 8 * MEBIBYTE, 1024) for number in range(1280)}
    assert len(blocks) == 1280
    assert GeneratedContent(1024, seed=1).read(0, 1024) not in blocks


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    offset=st.integers(0, 200),
    count=st.integers(0, 200),
    data=st.data(),
)
def test_joined_and_sliced_contents_read_like_bytes(
    sizes: list[int], offset: int, count: int, data: st.DataObject
) -> None:
    """Putting contents together and cutting them gives what bytes would."""
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]
    whole = b"".join(parts)
    joined: Content = JoinedContent([BytesContent(part) for part in parts])
    assert joined.size_bytes == len(whole)
    assert joined.read(offset, count) == whole[offset : offset + count]
    first = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - first))
    assert (
        SlicedContent(joined, first, length).read(offset, count)
        == whole[first : first + length][offset : offset + count]
    )


def test_discarded_bodies_leave_size_and_etag() -> None:
    """An upload of any size takes no memory, and is still checked and hashed."""
    origin = MemoryOrigin(ManualClock(), keep_bodies=False)
    origin.create_bucket("bucket")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * MEBIBYTE

    body = StreamedBody(chunks(), 64 * MEBIBYTE)
    put = asyncio.run(ask(origin, "PUT", "bucket", "key", body=body))
    digest = hashlib.md5()
    for _ in range(64):
        digest.update(b"x" * MEBIBYTE)
    assert put.headers["etag"] == f'"{digest.hexdigest()}"'
    head = asyncio.run(ask(origin, "HEAD", "bucket", "key"))
    assert head.headers["content-length"] == str(64 * MEBIBYTE)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-md5": base64.b64encode(hashlib.md5(b"other").digest()).decode()}, b"BadDigest"),
        ({"content-md5": "nonsense"}, b"InvalidDigest"),
        ({"x-amz-checksum-crc32": "AAAAAA=="}, b"BadDigest"),
        ({"x-amz-checksum-sha256": "AAAAAA=="}, b"InvalidRequest"),
        ({"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-sha1": "A"}, b"InvalidRequest"),
        ({"if-match": '"none"'}, b"NoSuchKey"),
        ({"if-none-match": '"etag"'}, b"NotImplemented"),
    ],
)
def test_puts_that_are_refused_store_nothing(headers: dict[str, str], code: bytes) -> None:
    """Digests and conditions are judged before anything is visible."""
    origin = origin_with()
    answer = asyncio.run(ask(origin, "PUT", "bucket", "new", headers=headers, body=b"data"))
    assert code in answer.body
    assert "new" not in origin.buckets["bucket"].objects


def upload(origin: MemoryOrigin, parts: list[bytes], create_headers: dict[str, str], algorithm: str | None) -> Whole:
    """A whole multipart upload; parts carry a checksum of `algorithm`."""

    async def scenario() -> Whole:
        created = await ask(origin, "POST", "bucket", "big", query=[("uploads", None)], headers=create_headers)
        upload_id = created.body.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
        listed = ""
        for number, part in enumerate(parts, 1):
            headers = {}
            if algorithm is not None:
                digest = ALGORITHMS[algorithm]()
                digest.update(part)
                headers[f"x-amz-checksum-{algorithm}"] = encoded(digest.digest())
            query = [("partNumber", str(number)), ("uploadId", upload_id)]
            done = await ask(origin, "PUT", "bucket", "big", query=query, headers=headers, body=part)
            listed += f"<Part><PartNumber>{number}</PartNumber><ETag>{done.headers['etag']}</ETag></Part>"
        document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        first = await ask(origin, "POST", "bucket", "big", query=[("uploadId", upload_id)], body=document)
        again = await ask(origin, "POST", "bucket", "big", query=[("uploadId", upload_id)], body=document)
        assert again.body == first.body, "a repeated Complete gives the same answer"
        return first

    return asyncio.run(scenario())


def test_a_composite_checksum_is_that_of_the_parts_digests() -> None:
    """S3's own example: SHA-256 of three parts of 5 MiB of A, B and C."""
    origin = origin_with()
    parts = [letter * (5 * MEBIBYTE) for letter in (b"A", b"B", b"C")]
    answer = upload(origin, parts, {"x-amz-checksum-algorithm": "SHA256"}, "sha256")
    assert b"<ChecksumSHA256>uWBwpe1dxI4Vw8Gf0X9ynOdw/SS6VBzfWm9giiv1sf4=-3</ChecksumSHA256>" in answer.body
    assert b"&quot;b2add96cc9702bbf4efb0ccdfc6b7747-3&quot;" in answer.body


def test_a_full_object_checksum_is_that_of_the_bytes() -> None:
    """CRC64NVME of 1,024 times A, in one part."""
    answer = upload(origin_with(), [b"A" * 1024], {"x-amz-checksum-algorithm": "CRC64NVME"}, "crc64nvme")
    assert b"<ChecksumCRC64NVME>Qeh8oXvGiSo=</ChecksumCRC64NVME>" in answer.body


def test_part_numbers_of_an_object_can_be_read() -> None:
    """partNumber gives that part, its place, and how many there are."""
    origin = origin_with()
    upload(origin, [b"a" * (5 * MEBIBYTE), b"tail"], {}, None)
    part = asyncio.run(ask(origin, "GET", "bucket", "big", query=[("partNumber", "2")]))
    assert (part.status, part.body, part.headers["x-amz-mp-parts-count"]) == (206, b"tail", "2")
    assert part.headers["content-range"] == f"bytes {5 * MEBIBYTE}-{5 * MEBIBYTE + 3}/{5 * MEBIBYTE + 4}"
    beyond = asyncio.run(ask(origin, "GET", "bucket", "big", query=[("partNumber", "3")]))
    assert beyond.status == 416


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_last_part_of_no_bytes_is_read_as_nothing(method: str) -> None:
    """Not as the whole object."""
    origin = origin_with()
    upload(origin, [b"a" * (5 * MEBIBYTE), b""], {}, None)
    part = asyncio.run(ask(origin, method, "bucket", "big", query=[("partNumber", "2")]))
    assert (part.status, part.headers["content-length"], part.body) == (206, "0", b"")
    assert part.headers["x-amz-mp-parts-count"] == "2"


@pytest.mark.parametrize(
    ("query", "entries"),
    [
        ({"delimiter": "/", "start-after": "a/b"}, ["b"]),
        ({"delimiter": "/", "start-after": "a"}, ["a/", "b"]),
        ({"prefix": "a/"}, ["a/b", "a/c"]),
        ({"max-keys": "0"}, []),
        ({"prefix": "a/", "delimiter": "c"}, ["a/b", "a/c"]),
    ],
)
def test_listing_corner_cases(query: dict[str, str], entries: list[str]) -> None:
    """A common prefix that is not behind start-after is left out; a delimiter may be any string."""
    origin = MemoryOrigin(ManualClock())
    for key in ("a/b", "a/c", "b"):
        origin.put("bucket", key, b"")
    answer = asyncio.run(ask(origin, "GET", "bucket", query=[("list-type", "2"), *query.items()]))
    assert sorted(re.findall(r"<(?:Contents><Key|CommonPrefixes><Prefix)>([^<]*)<", answer.body.decode())) == entries


def test_a_renamed_object_is_the_same_under_another_key() -> None:
    """RenameObject: the source is gone, ETag and bytes stay; conditions hold for the source and for what is there."""
    origin = origin_with()
    etag = get(origin).headers["etag"]

    def rename(key: str, **headers: str) -> int:
        named = {"x-amz-rename-source": "/bucket/key", **headers}
        query = (("renameObject", None),)
        return asyncio.run(ask(origin, "PUT", "bucket", key, query=query, headers=named)).status

    assert rename("new", **{"x-amz-rename-source-if-match": '"another"'}) == 412
    assert rename("new") == 200
    assert (get(origin).status, get(origin, "new").body) == (404, b"0123456789")
    assert get(origin, "new").headers["etag"] == etag
    assert rename("other") == 404
