"""GetObject: which bytes, which headers, and when the cache is left aside."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.s3.requests import Operation
from tests.support.asgi import Answer, call
from tests.support.gateway_app import BLOCK_SIZE_BYTES, gateway_app
from tests.support.memory_origin.faults import AlterHeaders, on

BODY = bytes(range(256)) * 1024
"""Four blocks exactly."""

HEADERS = {"content-type": "image/jpeg", "cache-control": "max-age=5", "x-amz-meta-label": "cat"}


def get(directory: Path, target: str = "/bucket/k", headers: dict[str, str] | None = None) -> Answer:
    """The second answer to the same request: the first one has warmed the cache."""

    async def scenario() -> Answer:
        async with gateway_app(directory) as gateway:
            gateway.origin.put("bucket", "k", BODY, HEADERS)
            gateway.origin.put("bucket", "empty", b"")
            cold = await call(gateway.app, "GET", target, headers)
            await gateway.blocks.settle()
            warm = await call(gateway.app, "GET", target, headers)
            assert cold.status == warm.status
            assert cold.status >= 300 or cold.body == warm.body
            return warm

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=65535-65536", 65535, 65536),
        ("bytes=10-", 10, len(BODY) - 1),
        ("bytes=-7", len(BODY) - 7, len(BODY) - 1),
        (f"bytes=5-{len(BODY) * 2}", 5, len(BODY) - 1),
        (f"bytes=-{len(BODY) * 2}", 0, len(BODY) - 1),
    ],
)
def test_a_range_is_answered_with_its_bytes_only(tmp_path: Path, asked: str, first: int, last: int) -> None:
    """206 with Content-Range and exact length, clamped to the object, from cache as from the origin."""
    answer = get(tmp_path, headers={"Range": asked})
    assert (answer.status, answer.body) == (206, BODY[first : last + 1])
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(BODY)}"
    assert answer.headers["content-length"] == str(last - first + 1)
    assert answer.headers["x-forebay-cache"] == "hit"


@pytest.mark.parametrize("asked", ["bytes=0-1,3-4", "bytes=5-1", "lines=0-1", "bytes=a-b"])
def test_a_header_that_is_no_single_range_is_ignored(tmp_path: Path, asked: str) -> None:
    """9.2 Several ranges, other units and nonsense give the whole object with 200: the origin has the word."""
    answer = get(tmp_path, headers={"Range": asked})
    assert (answer.status, answer.headers["x-forebay-cache"], answer.body) == (200, "bypass", BODY)


@pytest.mark.parametrize(("target", "asked"), [("/bucket/k", f"bytes={len(BODY)}-"), ("/bucket/empty", "bytes=0-")])
def test_a_range_behind_the_end_cannot_be_satisfied(tmp_path: Path, target: str, asked: str) -> None:
    """9.2 416 with the object's size in Content-Range."""
    answer = get(tmp_path, target, {"Range": asked})
    assert (answer.status, b"<Code>InvalidRange</Code>" in answer.body) == (416, True)
    assert answer.headers["content-range"] in (f"bytes */{len(BODY)}", "bytes */0")


def test_a_cached_answer_has_every_header_of_the_object(tmp_path: Path) -> None:
    """Metadata, content type and cache control come with a hit as with a miss."""
    answer = get(tmp_path)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert answer.headers["accept-ranges"] == "bytes"
    assert {"etag", "last-modified", "x-amz-request-id"} <= answer.headers.keys()


def test_overrides_replace_headers_of_the_answer(tmp_path: Path) -> None:
    """`response-*` parameters of a signed request replace what the object has."""
    answer = get(tmp_path, "/bucket/k?response-content-type=text%2Fplain&response-expires=never")
    assert (answer.headers["content-type"], answer.headers["expires"]) == ("text/plain", "never")
    assert answer.headers["x-forebay-cache"] == "hit"


def test_overrides_need_a_signature(tmp_path: Path) -> None:
    """An anonymous request with overrides is refused (S3 API, GetObject)."""

    async def scenario() -> Answer:
        async with gateway_app(tmp_path, allow_unsigned=True) as gateway:
            gateway.origin.put("bucket", "k", BODY)
            return await call(gateway.app, "GET", "/bucket/k?response-content-type=text%2Fplain", sign=False)

    answer = asyncio.run(scenario())
    assert (answer.status, b"<Code>InvalidRequest</Code>" in answer.body) == (400, True)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"If-Match": '"wrong"'}, 412),
        ({"If-Match": "*"}, 200),
        ({"If-None-Match": "*"}, 304),
        ({"If-None-Match": '"wrong"'}, 200),
        ({"If-Unmodified-Since": "Sat, 01 Jan 2000 00:00:00 GMT"}, 412),
        ({"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT"}, 200),
        ({"If-Range": '"wrong"', "Range": "bytes=0-0"}, 200),
    ],
)
def test_conditions_are_judged_before_any_byte_is_sent(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    """Preconditions hold against the current version, whether or not its bytes are cached."""
    answer = get(tmp_path, headers=headers)
    assert answer.status == status
    if status == 304:
        assert answer.body == b""
        assert "etag" in answer.headers


def test_the_checksum_of_the_object_never_comes_with_a_part_of_it(tmp_path: Path) -> None:
    """Clients check every x-amz-checksum-* against the bytes that they got."""

    async def scenario() -> tuple[Answer, Answer]:
        async with gateway_app(tmp_path) as gateway:
            stored = {"x-amz-checksum-crc32": "NSRBwg==", "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
            assert (await call(gateway.app, "PUT", "/bucket/k", stored, b"abc")).status == 200
            mode = {"x-amz-checksum-mode": "ENABLED"}
            whole = await call(gateway.app, "GET", "/bucket/k", mode)
            return whole, await call(gateway.app, "GET", "/bucket/k", {**mode, "Range": "bytes=0-1"})

    whole, part = asyncio.run(scenario())
    assert whole.headers["x-amz-checksum-crc32"] == "NSRBwg=="
    assert not [name for name in part.headers if name.startswith("x-amz-checksum-")]


def test_part_numbers_are_answered_from_blocks_where_the_origin_says_where_they_lie(tmp_path: Path) -> None:
    """`partNumber=1` of an object in one part is the whole object; a missing part is the origin's error."""
    answer = get(tmp_path, "/bucket/k?partNumber=1")
    assert answer.body == BODY
    assert get(tmp_path / "2", "/bucket/k?partNumber=2").status == 416


def test_an_object_without_etag_is_not_cached(tmp_path: Path) -> None:
    """What cannot be pinned to a version is read from the origin."""

    async def scenario() -> Answer:
        async with gateway_app(tmp_path) as gateway:
            gateway.origin.put("bucket", "k", BODY)
            gateway.origin.inject(lambda _: True, AlterHeaders({"etag": None}), times=None)
            return await call(gateway.app, "GET", "/bucket/k")

    answer = asyncio.run(scenario())
    assert (answer.headers["x-forebay-cache"], answer.body) == ("bypass", BODY)


@pytest.mark.parametrize(
    "change", [{"content-length": "some"}, {"content-range": "bytes 0--1/0"}], ids=["no-length", "strange-part"]
)
def test_a_head_that_makes_no_sense_leaves_the_answer_to_the_origin(
    tmp_path: Path, change: dict[str, str | None]
) -> None:
    """What cannot be cached is still answered as the origin answers it."""

    async def scenario() -> Answer:
        async with gateway_app(tmp_path) as gateway:
            gateway.origin.put("bucket", "k", BODY)
            gateway.origin.inject(on(Operation.HEAD_OBJECT), AlterHeaders(change), times=None)
            return await call(gateway.app, "GET", "/bucket/k?partNumber=1")

    answer = asyncio.run(scenario())
    assert (answer.status, answer.headers["x-forebay-cache"], answer.body) == (206, "bypass", BODY)


def test_a_request_of_a_web_page_is_answered_by_the_origin(tmp_path: Path) -> None:
    """9.2 CORS rules go by origin and method: what HEAD answers to a page says nothing about GET."""
    assert get(tmp_path, headers={"origin": "https://page.example"}).headers["x-forebay-cache"] == "bypass"


def test_a_range_fetches_its_blocks_only(tmp_path: Path) -> None:
    """One byte of a large object costs one block, not the object."""

    async def scenario() -> list[str]:
        async with gateway_app(tmp_path) as gateway:
            gateway.origin.put("bucket", "k", BODY)
            await call(
                gateway.app, "GET", "/bucket/k", {"Range": f"bytes={2 * BLOCK_SIZE_BYTES}-{2 * BLOCK_SIZE_BYTES}"}
            )
            return [seen.headers["range"] for seen in gateway.origin.calls if seen.operation is Operation.GET_OBJECT]

    assert asyncio.run(scenario()) == [f"bytes={2 * BLOCK_SIZE_BYTES}-{3 * BLOCK_SIZE_BYTES - 1}"]


@pytest.mark.parametrize("value", ["a%0D%0AX-Evil%3A%201", "a%00b", "%0A", "%E2%82%AC"])
def test_an_override_that_no_header_can_carry_is_refused(tmp_path: Path, value: str) -> None:
    """A line break in `response-content-type` would forge a header: 400, from cache as from the origin."""
    answer = get(tmp_path, f"/bucket/k?response-content-type={value}")
    assert (answer.status, b"<Code>InvalidArgument</Code>" in answer.body) == (400, True)


def test_an_override_in_latin_1_arrives_as_it_is(tmp_path: Path) -> None:
    """What a header can carry is not refused."""
    answer = get(tmp_path, "/bucket/k?response-content-disposition=attachment%3B%20filename%3Dcaf%C3%A9")
    assert (answer.status, answer.headers["content-disposition"]) == (200, "attachment; filename=caf\xe9")
