"""Stores that are nearly S3: what each row of the table makes of a request, against a store that behaves so.

The stores are the strict origin's (tests/support/strict_dialects.py), reached as a proxy reaches them, by their hosts.
"""

from __future__ import annotations

import gzip
import hashlib
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import get_args
from zlib import crc32

import pytest

from gateway.config.fields import DIALECT_NAMES, DialectName
from gateway.core.errors import OutcomeUnknown
from gateway.origin.client import Origin, OriginRequest, OriginResponse, OriginSettings, Purpose, StreamedBody
from gateway.origin.conditional_writes import send_in
from gateway.origin.dialects import DIALECTS, dialect_of
from gateway.origin.signing import Addressing
from gateway.s3.requests import Operation
from tests.origin.clients import pieces
from tests.origin.origins import ask, s3_origin
from tests.support.memory_origin.faults import Unreachable, on
from tests.support.strict_dialects import strict_dialects
from tests.support.strict_origin import StrictOrigin

HOSTS = {dialect_of("auto", host).name: host for host in strict_dialects()}


def crc(data: bytes) -> str:
    return b64encode(crc32(data).to_bytes(4, "big")).decode()


@pytest.fixture(scope="module")
def stores() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        origin.dialects = strict_dialects()
        yield origin


@pytest.fixture
def strict(stores: StrictOrigin) -> StrictOrigin:
    stores.model.buckets.clear()
    stores.model.create_bucket("bucket")
    stores.model.calls.clear()
    stores.model.faults.clear()
    return stores


@asynccontextmanager
async def reached(strict: StrictOrigin, name: str) -> AsyncIterator[Origin]:
    origin = s3_origin(f"http://{HOSTS[name]}", proxy=strict.endpoint_url)
    try:
        yield origin
    finally:
        await origin.aclose()


def test_the_configuration_knows_every_row() -> None:
    """And every row is reached by a store of the tests, but S3."""
    assert {"auto", *(one.name for one in DIALECTS)} == set(get_args(DialectName))
    assert ", ".join(get_args(DialectName)[:-1]) + f" or {get_args(DialectName)[-1]}" == DIALECT_NAMES
    assert set(HOSTS) == {one.name for one in DIALECTS} - {"s3"}


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("s3.eu-west-1.amazonaws.com", "s3"),
        ("storage.googleapis.com", "gcs"),
        ("storage.us-east1.rep.googleapis.com", "gcs"),
        ("us-east1-storage.googleapis.com", "gcs"),
        ("bigquerystorage.googleapis.com", "s3"),
        ("storage.googleapis.com.example", "s3"),
        ("s3.oss-cn-hangzhou.aliyuncs.com", "oss"),
        ("oss-accelerate.aliyuncs.com", "oss"),
        ("cos-internal.ap-tokyo.tencentcos.cn", "cos"),
        ("objects.example", "s3"),
        ("127.0.0.1", "s3"),
    ],
)
def test_a_dialect_is_found_by_its_host(host: str, name: str) -> None:
    """Not by a part of a name that somebody else may have."""
    assert dialect_of("auto", host).name == name


def test_a_named_dialect_beats_the_host() -> None:
    """As behind a proxy of one's own; and AWS under its own name is still addressed as AWS."""
    assert dialect_of("gcs", "objects.example").name == "gcs"
    assert dialect_of("s3", "storage.googleapis.com").name == "s3"
    assert dialect_of("s3", "s3.eu-west-1.amazonaws.com").auto_addressing == "virtual"


@pytest.mark.parametrize("name", HOSTS)
async def test_what_goes_to_s3_goes_to_it(strict: StrictOrigin, name: str) -> None:
    """Reads, ranges, listings, small writes with a checksum, streamed ones with a trailer, parts, deletions."""
    data, large = b"0123456789" * 10, b"x" * (5 * 2**20)
    async with reached(strict, name) as origin:
        sums = {"x-amz-checksum-crc32": crc(data), "x-amz-sdk-checksum-algorithm": "CRC32", "x-amz-meta-step": "1"}
        assert (await ask(origin, "PUT", "bucket", "a/../small €", headers=sums, body=data)).status == 200
        trailing = StreamedBody(
            pieces(large), len(large), trailer_name="x-amz-checksum-crc32", trailer_value=lambda: crc(large)
        )
        assert (await ask(origin, "PUT", "bucket", "large", body=trailing)).status == 200
        assert strict.model.data("bucket", "large") == large
        part = await ask(
            origin, "GET", "bucket", "a/../small €", headers={"range": "bytes=3-5", "x-amz-checksum-mode": "ENABLED"}
        )
        assert (part.status, part.body, part.headers["x-amz-meta-step"]) == (206, b"345", "1")
        head = await ask(origin, "HEAD", "bucket", "large")
        assert head.headers["content-length"] == str(len(large))
        assert head.headers["x-amz-request-id"]
        listed = await ask(origin, "GET", "bucket", query=[("list-type", "2"), ("fetch-owner", "true")])
        assert listed.body.count(b"<Key>") == 2
        await upload(origin, "parts", [large, data])
        assert strict.model.data("bucket", "parts") == large + data
        document = b"<Delete><Object><Key>large</Key></Object><Object><Key>parts</Key></Object></Delete>"
        sums = {"x-amz-checksum-crc32": crc(document), "content-type": "application/xml"}
        assert (
            await ask(origin, "POST", "bucket", query=[("delete", None)], headers=sums, body=document)
        ).status == 200
        assert (await ask(origin, "DELETE", "bucket", "a/../small €")).status == 204
    assert not strict.model.buckets["bucket"].objects


async def upload(origin: Origin, key: str, parts: list[bytes], headers: Mapping[str, str] | None = None) -> int:
    """As boto3 uploads: with checksums of parts, and in the document of the Complete."""
    created = await ask(
        origin, "POST", "bucket", key, query=[("uploads", None)], headers={"x-amz-checksum-algorithm": "CRC32"}
    )
    assert created.status == 200, created.body
    upload_id = created.body.partition(b"<UploadId>")[2].partition(b"<")[0].decode()
    document = b""
    for number, body in enumerate(parts, 1):
        sent = await ask(
            origin,
            "PUT",
            "bucket",
            key,
            query=[("partNumber", str(number)), ("uploadId", upload_id)],
            headers={"x-amz-checksum-crc32": crc(body)},
            body=body,
        )
        assert sent.status == 200, sent.body
        document += (
            f"<Part><PartNumber>{number}</PartNumber><ETag>{sent.headers['etag']}</ETag>"
            f"<ChecksumCRC32>{crc(body)}</ChecksumCRC32></Part>"
        ).encode()
    document = b"<CompleteMultipartUpload>" + document + b"</CompleteMultipartUpload>"
    hashed = hashlib.sha256(document).hexdigest()
    completed = await ask(
        origin,
        "POST",
        "bucket",
        key,
        query=[("uploadId", upload_id)],
        headers=headers or {},
        body=StreamedBody(pieces(document), len(document), hashed),
    )
    assert completed.status == 200 or headers, completed.body
    return completed.status


async def test_checksums_of_parts_stay_here_where_the_store_has_none(strict: StrictOrigin) -> None:
    """In the document of a Complete, too: the store has never heard of them."""
    async with reached(strict, "b2") as origin:
        await upload(origin, "parts", [b"x" * 5 * 2**20, b"y"])
    assert not strict.model.buckets["bucket"].objects["parts"].checksums


PUT_CONDITIONS = [
    # store, what it makes of If-None-Match: * and of If-Match with an ETag that is another's, over an object
    ("gcs", 412, 412),
    ("oss", 412, 501),
    ("cos", 412, 501),
    ("obs", 412, 501),
    ("bos", 200, 200),
    ("tos", 200, 200),
    ("r2", 412, 412),
    ("b2", 501, 501),
]


@pytest.mark.parametrize(("name", "new", "other"), PUT_CONDITIONS)
async def test_conditions_of_a_put(strict: StrictOrigin, name: str, new: int, other: int) -> None:
    """What fails changes nothing, and is told as S3 tells it; what a store is known to overlook is refused. Where
    nothing is known, the store's answer is passed on."""
    etag = strict.model.put("bucket", "k", b"old")
    async with reached(strict, name) as origin:
        refused = await ask(origin, "PUT", "bucket", "k", headers={"if-none-match": "*"}, body=b"new")
        assert refused.status == new
        if new == 412:
            assert b"<Code>PreconditionFailed</Code>" in refused.body
            assert strict.model.data("bucket", "k") == b"old"
            made = await ask(origin, "PUT", "bucket", "fresh", headers={"if-none-match": "*"}, body=b"new")
            assert made.status == 200
        strict.model.put("bucket", "k", b"old")
        changed = await ask(origin, "PUT", "bucket", "k", headers={"if-match": f'"{"0" * 32}"'}, body=b"new")
        assert changed.status == other
        if other == 412:
            assert (await ask(origin, "PUT", "bucket", "k", headers={"if-match": etag}, body=b"new")).status == 200
            gone = await ask(origin, "PUT", "bucket", "none", headers={"if-match": etag}, body=b"new")
            assert gone.status == 404
            assert strict.model.data("bucket", "k") == b"new"


@pytest.mark.parametrize(("name", "expected"), [("gcs", 501), ("oss", 412), ("cos", 412), ("obs", 412), ("r2", 412)])
async def test_conditions_of_a_complete(strict: StrictOrigin, name: str, expected: int) -> None:
    """Google's takes no notice of any: it is not asked to."""
    strict.model.put("bucket", "k", b"old")
    async with reached(strict, name) as origin:
        assert await upload(origin, "k", [b"new"], {"if-none-match": "*"}) == expected
        assert strict.model.data("bucket", "k") == b"old"
        if expected == 412:
            assert await upload(origin, "fresh", [b"new"], {"if-none-match": "*"}) == 200


@pytest.mark.parametrize(("name", "other", "same"), [("gcs", 412, 204), ("oss", 501, 501), ("r2", 412, 204)])
async def test_conditions_of_a_deletion(strict: StrictOrigin, name: str, other: int, same: int) -> None:
    """As of a PUT."""
    etag = strict.model.put("bucket", "k", b"old")
    async with reached(strict, name) as origin:
        assert (await ask(origin, "DELETE", "bucket", "k", headers={"if-match": '"0"'})).status == other
        assert strict.model.data("bucket", "k") == b"old"
        assert (await ask(origin, "DELETE", "bucket", "k", headers={"if-match": etag})).status == same


@pytest.mark.parametrize("name", ["gcs", "oss", "cos", "obs", "r2"])
async def test_conditions_of_a_copy(strict: StrictOrigin, name: str) -> None:
    """Its target's. R2 has headers of their own for these, and would overlook S3's."""
    strict.model.put("bucket", "from", b"new")
    strict.model.put("bucket", "to", b"old")
    copied = {"x-amz-copy-source": "/bucket/from", "x-amz-metadata-directive": "COPY", "if-none-match": "*"}
    async with reached(strict, name) as origin:
        assert (await ask(origin, "PUT", "bucket", "to", headers=copied)).status == 412
        assert strict.model.data("bucket", "to") == b"old"
        assert (await ask(origin, "PUT", "bucket", "fresh", headers=copied)).status == 200
        assert strict.model.data("bucket", "fresh") == b"new"


async def test_another_generation_with_the_same_bytes_is_another_version(strict: StrictOrigin) -> None:
    """Somebody who comes between the look and the write is not overwritten, whatever he writes."""
    etag = strict.model.put("bucket", "k", b"old")
    async with reached(strict, "gcs") as origin:

        async def send(request: OriginRequest) -> OriginResponse:
            answer = await origin.send(request)
            if request.method == "HEAD":
                strict.model.put("bucket", "k", b"old")
            return answer

        request = OriginRequest("PUT", "bucket", "k", headers={"if-match": etag}, body=b"new")
        async with await send_in(dialect_of("gcs", ""), request, send) as answer:
            assert answer.status == 412
    assert strict.model.data("bucket", "k") == b"old"


@pytest.mark.parametrize("name", ["gcs", "oss", "r2"])
async def test_a_lost_answer_to_a_conditional_write_is_not_tried_again(strict: StrictOrigin, name: str) -> None:
    """The second one would be refused for what the first has done."""
    strict.model.inject(on(Operation.PUT_OBJECT), Unreachable(late=True))
    async with reached(strict, name) as origin:
        with pytest.raises(OutcomeUnknown):
            await ask(origin, "PUT", "bucket", "k", headers={"if-none-match": "*"}, body=b"new")
    assert strict.model.count(Operation.PUT_OBJECT) == 1


async def test_what_google_may_overlook_does_not_go_with_a_condition(strict: StrictOrigin) -> None:
    """Its own names are for what is known to be the same there: encryption is not."""
    encrypted = {"x-amz-server-side-encryption": "AES256", "if-none-match": "*"}
    kept = {"x-amz-meta-a": "1", "x-amz-storage-class": "STANDARD", "if-none-match": "*"}
    async with reached(strict, "gcs") as origin:
        assert (await ask(origin, "PUT", "bucket", "k", headers=encrypted, body=b"new")).status == 501
        assert (await ask(origin, "PUT", "bucket", "k", headers=kept, body=b"new")).status == 200
        assert (await ask(origin, "HEAD", "bucket", "k")).headers["x-amz-meta-a"] == "1"


async def test_the_front_end_of_google_may_change_accept_encoding(strict: StrictOrigin) -> None:
    """It is not signed; with it, what was stored with gzip comes as it is stored, in ranges, and has a length."""
    data = gzip.compress(b"0123456789" * 100)
    strict.model.put("bucket", "k", data, {"content-encoding": "gzip"})
    async with reached(strict, "gcs") as origin:
        whole = await ask(origin, "GET", "bucket", "k", headers={"accept-encoding": "identity"})
        assert (whole.body, whole.headers["content-encoding"]) == (data, "gzip")
        part = await ask(origin, "GET", "bucket", "k", headers={"range": "bytes=2-5"})
        assert (part.status, part.body) == (206, data[2:6])
        assert (await ask(origin, "HEAD", "bucket", "k")).headers["content-length"] == str(len(data))


async def test_uploads_that_are_not_listed_are_not_asked_for(strict: StrictOrigin) -> None:
    """The flush is told so at once; a client is told what the store says."""
    async with reached(strict, "oss") as origin:
        request = OriginRequest("GET", "bucket", None, [("uploads", ""), ("prefix", "k")], purpose=Purpose.FLUSH)
        async with await origin.send(request) as answer:
            assert answer.status == 501
            assert b"<Code>NotImplemented</Code>" in await answer.read(4096)
        assert not strict.model.calls
        assert (await ask(origin, "GET", "bucket", query=[("uploads", "")])).status == 501


@pytest.mark.parametrize(("name", "style"), [("oss", "path"), ("gcs", "virtual")])
def test_the_configured_style_beats_the_dialect(name: str, style: str) -> None:
    """Some have a gateway of their own in between."""
    settings = OriginSettings(endpoint_url=f"http://{HOSTS[name]}", addressing_style=style)  # type: ignore[arg-type]
    target = Addressing(settings).target("bucket", "k", ())
    assert target.host == (f"bucket.{HOSTS[name]}" if style == "virtual" else HOSTS[name])
