"""Checksums of parts: what is acknowledged is nothing that S3 would refuse at the flush."""

from __future__ import annotations

import base64
import zlib

import pytest

from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.memory_origin.faults import Answer, Call
from tests.support.slots import Slot
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, Client, with_a_client

CHECKSUM = "x-amz-checksum-crc32"

SMALL = Slot("back", Prefix.parse("s3://bucket/back/"), write="back", buffer_bytes=10_000)


def crc32_of(body: bytes) -> str:
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def _is_refused(call: Call) -> bool:
    """As S3 does with what Create has not announced ("expected checksum Type: null, actual checksum Type: crc32")."""
    return call.operation is Operation.UPLOAD_PART and CHECKSUM in call.headers


@with_a_client()
async def test_a_checksum_that_create_has_not_announced_is_not_sent_on(client: Client) -> None:
    """It is verified and answered here; S3, which takes no such part, gets the flush all the same."""
    await client.learn()
    client.origin.inject(_is_refused, Answer(400, "InvalidRequest"), times=None)
    upload_id = await client.create("back/m")
    target = f"back/m?partNumber=1&uploadId={upload_id}"
    await client.ask("PUT", target, b"body", {CHECKSUM: crc32_of(b"other")}, status=400)
    answer = await client.ask("PUT", target, b"body", {CHECKSUM: crc32_of(b"body")})
    assert answer.headers[CHECKSUM] == crc32_of(b"body")
    await client.complete("back/m", upload_id, {1: answer.headers["etag"]})
    async with client.flushing():
        await until(lambda: client.pending("back/m") is None)
    assert client.origin.data("bucket", "back/m") == b"body"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["COMPOSITE", "FULL_OBJECT"])
@with_a_client()
async def test_parts_with_checksums_are_numbered_without_a_gap(client: Client, kind: str) -> None:
    """Anything else S3 refuses for good (S3 API, "CompletedPart"): so it is not acknowledged either."""
    headers = {"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": kind}
    upload_id = await client.create("back/m", headers)
    bodies = {number: bytes([number]) * PART_BYTES for number in (1, 2, 3)}
    etags = {
        number: await client.part("back/m", upload_id, number, body, x_amz_checksum_crc32=crc32_of(body))
        for number, body in bodies.items()
    }
    for numbers in ([2], [1, 3], [2, 3]):
        refused = await client.complete("back/m", upload_id, {n: etags[n] for n in numbers}, status=400)
        assert b"InvalidPartOrder" in refused.body
    await client.complete("back/m", upload_id, {n: etags[n] for n in (1, 2)})
    await client.flush()
    assert client.origin.data("bucket", "back/m") == bodies[1] + bodies[2]


FULL = {"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "FULL_OBJECT"}
COMPOSITE = {"x-amz-checksum-algorithm": "CRC32"}
WRONG = "AAAAAA=="


@pytest.mark.parametrize("checked", [(), (1,), (1, 2)], ids=str)
@pytest.mark.parametrize(
    ("create", "said", "status"),
    [
        (FULL, {CHECKSUM: WRONG}, 400),
        (FULL, {CHECKSUM: "right"}, 200),
        ({}, {CHECKSUM: WRONG, "x-amz-checksum-type": "FULL_OBJECT"}, 400),
        ({}, {"x-amz-checksum-crc64nvme": "AAAAAAAAAAA="}, 400),
        (FULL, {"x-amz-checksum-crc32c": WRONG}, 400),
        (FULL, {"x-amz-checksum-type": "COMPOSITE"}, 400),
        (FULL, {"x-amz-checksum-type": "FULL_OBJECT"}, 200),
        ({}, {}, 200),
    ],
    ids=str,
)
@with_a_client()
async def test_a_checksum_of_the_whole_is_verified_by_somebody(
    client: Client, create: dict[str, str], said: dict[str, str], status: int, checked: tuple[int, ...]
) -> None:
    """By the parts' own here, or by the origin, which has the bytes: nothing else is acknowledged, or made."""
    bodies = {1: b"1" * PART_BYTES, 2: b"the rest"}
    content = b"".join(bodies.values())
    upload_id = await client.create("back/m", create)
    announced = {number: {"x_amz_checksum_crc32": crc32_of(bodies[number])} for number in checked if create}
    etags = {
        number: await client.part("back/m", upload_id, number, body, **announced.get(number, {}))
        for number, body in bodies.items()
    }
    headers = {name: crc32_of(content) if value == "right" else value for name, value in said.items()}
    async with client.flushing():
        answer = await client.complete("back/m", upload_id, etags, status, headers)
        if status == 200:
            await until(lambda: client.pending("back/m") is None)
            assert client.origin.data("bucket", "back/m") == content
        else:
            assert any(code in answer.body for code in (b"BadDigest", b"InvalidRequest"))
            assert "back/m" not in client.origin.buckets["bucket"].objects
            await client.complete("back/m", upload_id, etags)  # nothing was lost by it


@pytest.mark.parametrize(
    ("create", "said"),
    [({}, "COMPOSITE"), (FULL, "COMPOSITE"), (COMPOSITE, "FULL_OBJECT"), (COMPOSITE, "full_object"), (FULL, "BOTH")],
    ids=str,
)
@pytest.mark.parametrize("condition", [{}, {"If-None-Match": "*"}], ids=str)
@with_a_client()
async def test_another_type_of_checksum_than_creates_is_refused_here(
    client: Client, create: dict[str, str], said: str, condition: dict[str, str]
) -> None:
    """As S3 refuses it: not every origin does, so none is asked."""
    upload_id = await client.create("back/m", create)
    checksum = {"x_amz_checksum_crc32": crc32_of(b"x")} if create else {}
    etags = {1: await client.part("back/m", upload_id, 1, b"x", **checksum)}
    answer = await client.complete("back/m", upload_id, etags, 400, {"x-amz-checksum-type": said, **condition})
    assert b"<Code>InvalidRequest</Code>" in answer.body
    assert client.origin.count(Operation.COMPLETE_MULTIPART_UPLOAD) == 0
    await client.complete("back/m", upload_id, etags)


@pytest.mark.parametrize("in_trailer", [False, True])
@with_a_client(slots=[SMALL])
async def test_a_part_past_a_full_buffer_carries_no_checksum_that_was_not_announced(
    client: Client, *, in_trailer: bool
) -> None:
    """Whether an upload succeeds does not hang on how full the buffer is."""
    await client.learn()
    client.origin.inject(_is_refused, Answer(400, "InvalidRequest"), times=None)
    upload_id = await client.create("back/m")
    body = b"x" * (SMALL.buffer_bytes or 0) + b"more"
    headers = {"x-amz-sdk-checksum-algorithm": "CRC32", CHECKSUM: crc32_of(body)}
    sent = body
    if in_trailer:
        headers = {
            "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
            "x-amz-decoded-content-length": str(len(body)),
            "content-encoding": "aws-chunked",
            "x-amz-trailer": CHECKSUM,
        }
        sent = b"%x\r\n%b\r\n0\r\n%b:%b\r\n\r\n" % (len(body), body, CHECKSUM.encode(), crc32_of(body).encode())
    target = f"back/m?partNumber=1&uploadId={upload_id}"
    answer = await client.ask("PUT", target, sent, headers)
    assert answer.headers["x-forebay-not-absorbed"] == "size"
    calls = [call for call in client.origin.calls if call.operation is Operation.UPLOAD_PART]
    assert not any("checksum" in name or name == "x-amz-trailer" for call in calls for name in call.headers)
    await client.complete("back/m", upload_id, {1: answer.headers["etag"]})
    assert client.origin.data("bucket", "back/m") == body
