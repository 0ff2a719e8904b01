"""What every origin does alike: the fake in memory, a directory, a fake of Azure Blob, our client
against a strict server and moto; and, marked azure, Azurite."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator, Callable

import pytest

from gateway.origin.client import Origin, StreamedBody
from gateway.origin.stores.azure.store import AzureOrigin
from tests.origin.origins import Scenario, ask, xml
from tests.support.directory_origin import DirectoryOrigin
from tests.support.memory_origin.digests import ALGORITHMS

MEBIBYTE = 1024 * 1024

AWKWARD_KEYS = [
    "plain",
    "a/b/c.tar",
    "odd/../z.bin",
    "..",
    "x//y.bin",
    "/leading/slash",
    "trailing/",
    "plus+plus",
    "per%2Fcent%41",
    "space in name",
    "q?a=b&c#d",
    "tilde~!*'()@:;,$",
    "€/日本/🎉",
    "n\u0303fd",
    "k" * 1024,
]


NO_PATHS = frozenset({"odd/../z.bin", "..", "x//y.bin", "/leading/slash", "trailing/", "k" * 1024})
"""Keys that no file can have, or none with bytes in it."""

NO_BLOBS = frozenset({"odd/../z.bin", ".."})
"""Keys that Azure would change."""


def md5_etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


async def pieces(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize("key", AWKWARD_KEYS, ids=lambda key: key[:12])
def test_keys_reach_the_origin_byte_for_byte(run: Callable[[Scenario], None], key: str) -> None:
    """Whatever a key looks like, the object written under it is read, listed and deleted under the same key. A
    directory refuses those that are no paths, Azure those that it would change; it lists none beyond U+FFFF."""

    async def scenario(origin: Origin, bucket: str) -> None:
        data = key.encode()
        put = await ask(origin, "PUT", bucket, key, body=data)
        if isinstance(origin, DirectoryOrigin) and key in NO_PATHS:
            assert put.status == 400
            return
        if isinstance(origin, AzureOrigin) and key in NO_BLOBS:
            assert put.status == 400
            return
        assert put.status == 200
        assert (await ask(origin, "GET", bucket, key)).body == data
        listed = await ask(origin, "GET", bucket, query=[("list-type", "2"), ("prefix", key)])
        if isinstance(origin, AzureOrigin) and max(key) > "\uffff":
            assert listed.status == 503
        else:
            assert [node.text for node in xml(listed.body).findall("Contents/Key")] == [key]
        assert (await ask(origin, "DELETE", bucket, key)).status == 204
        assert (await ask(origin, "GET", bucket, key)).status == 404

    run(scenario)


def test_put_answers_the_md5_and_get_gives_the_bytes_and_headers_back(run: Callable[[Scenario], None]) -> None:
    """Content type, user metadata and ETag come back as they were given."""

    async def scenario(origin: Origin, bucket: str) -> None:
        headers = {"content-type": "application/x-tar", "x-amz-meta-step": "17", "cache-control": "no-cache"}
        put = await ask(origin, "PUT", bucket, "key", headers=headers, body=b"data")
        assert put.headers["etag"] == md5_etag(b"data")
        for method in ("GET", "HEAD"):
            answer = await ask(origin, method, bucket, "key")
            assert answer.status == 200
            assert answer.headers["etag"] == md5_etag(b"data")
            assert answer.headers["content-length"] == "4"
            assert {name: answer.headers[name] for name in headers} == headers
            assert answer.body == (b"data" if method == "GET" else b"")

    run(scenario)


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [
        ("bytes=0-3", 206, b"0123"),
        ("bytes=5-", 206, b"56789"),
        ("bytes=-3", 206, b"789"),
        ("bytes=-30", 206, b"0123456789"),
        ("bytes=8-100", 206, b"89"),
        ("bytes=10-", 416, None),
    ],
)
def test_ranges(run: Callable[[Scenario], None], asked: str, status: int, body: bytes | None) -> None:
    """A range gives exactly its bytes and says which they are."""

    async def scenario(origin: Origin, bucket: str) -> None:
        await ask(origin, "PUT", bucket, "digits", body=b"0123456789")
        answer = await ask(origin, "GET", bucket, "digits", headers={"range": asked})
        assert answer.status == status
        if body is not None:
            first = b"0123456789".index(body)
            assert answer.body == body
            assert answer.headers["content-range"] == f"bytes {first}-{first + len(body) - 1}/10"

    run(scenario)


def test_conditional_reads(run: Callable[[Scenario], None]) -> None:
    """If-Match pins a version; If-None-Match answers 304 with the ETag and no body."""

    async def scenario(origin: Origin, bucket: str) -> None:
        etag = (await ask(origin, "PUT", bucket, "key", body=b"data")).headers["etag"]
        assert (await ask(origin, "GET", bucket, "key", headers={"if-match": etag})).body == b"data"
        assert (await ask(origin, "GET", bucket, "key", headers={"if-match": '"0"'})).status == 412
        unchanged = await ask(origin, "GET", bucket, "key", headers={"if-none-match": etag})
        assert (unchanged.status, unchanged.body) == (304, b"")

    run(scenario)


def test_missing_objects_and_buckets_are_told_apart(run: Callable[[Scenario], None]) -> None:
    """404 names what is missing; a HEAD has no body even then."""

    async def scenario(origin: Origin, bucket: str) -> None:
        assert xml((await ask(origin, "GET", bucket, "none")).body).findtext("Code") == "NoSuchKey"
        assert xml((await ask(origin, "GET", f"{bucket}-none", "none")).body).findtext("Code") == "NoSuchBucket"
        head = await ask(origin, "HEAD", bucket, "none")
        assert (head.status, head.body) == (404, b"")

    run(scenario)


def test_streamed_put_with_length(run: Callable[[Scenario], None]) -> None:
    """A body that passes through once arrives whole; pieces may be views, and of any size."""

    async def scenario(origin: Origin, bucket: str) -> None:
        data = hashlib.shake_128(b"seed").digest(3 * MEBIBYTE + 1)

        async def views() -> AsyncIterator[bytes | memoryview]:
            reused = bytearray(700_001)
            for offset in range(0, len(data), len(reused)):
                piece = data[offset : offset + len(reused)]
                reused[: len(piece)] = piece
                yield memoryview(reused)[: len(piece)]

        body = StreamedBody(views(), len(data), hashlib.sha256(data).hexdigest())
        assert (await ask(origin, "PUT", bucket, "big", body=body)).headers["etag"] == md5_etag(data)
        assert (await ask(origin, "GET", bucket, "big")).body == data

    run(scenario)


def test_streamed_put_of_nothing(run: Callable[[Scenario], None]) -> None:
    """An empty stream makes an empty object."""

    async def scenario(origin: Origin, bucket: str) -> None:
        assert (await ask(origin, "PUT", bucket, "empty", body=StreamedBody(pieces(), 0))).status == 200
        answer = await ask(origin, "GET", bucket, "empty")
        assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "0")

    run(scenario)


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "crc64nvme", "sha1", "sha256"])
def test_streamed_put_with_a_checksum_trailer(run: Callable[[Scenario], None], algorithm: str) -> None:
    """The checksum that is only known at the end goes behind the body, and the origin stores the body alone."""

    async def scenario(origin: Origin, bucket: str) -> None:
        chunks = [bytes([number]) * 70_000 for number in range(40)]
        digest = ALGORITHMS[algorithm]()
        digest.update(b"".join(chunks))
        value = base64.b64encode(digest.digest()).decode()
        name = f"x-amz-checksum-{algorithm}"
        body = StreamedBody(pieces(*chunks), 2_800_000, trailer_name=name, trailer_value=lambda: value)
        headers = {"content-encoding": "gzip", "x-amz-sdk-checksum-algorithm": algorithm.upper()}
        put = await ask(origin, "PUT", bucket, "sum", headers=headers, body=body)
        assert put.status == 200
        answer = await ask(origin, "GET", bucket, "sum", headers={"x-amz-checksum-mode": "ENABLED"})
        assert answer.body == b"".join(chunks)
        if not isinstance(origin, AzureOrigin):  # which takes metadata before the body
            assert answer.headers[name] == value
        assert answer.headers["content-encoding"] == "gzip"

    run(scenario)


def test_if_none_match_star_creates_only_once(run: Callable[[Scenario], None]) -> None:
    """A conditional create fails with 412 when the object exists, and leaves it as it is."""

    async def scenario(origin: Origin, bucket: str) -> None:
        condition = {"if-none-match": "*"}
        assert (await ask(origin, "PUT", bucket, "key", headers=condition, body=b"1")).status == 200
        assert (await ask(origin, "PUT", bucket, "key", headers=condition, body=b"2")).status == 412
        assert (await ask(origin, "GET", bucket, "key")).body == b"1"

    run(scenario)


def test_listing_pages_and_prefixes(run: Callable[[Scenario], None]) -> None:
    """Pages follow one another without gap or repetition; a common prefix counts as one entry."""

    async def scenario(origin: Origin, bucket: str) -> None:
        keys = ["a/1", "a/2", "b", "c/1", "d"]
        for key in keys:
            await ask(origin, "PUT", bucket, key, body=b"x")
        found: list[str | None] = []
        token: str | None = None
        while True:
            query = [("list-type", "2"), ("delimiter", "/"), ("max-keys", "2")]
            page = xml(
                (
                    await ask(origin, "GET", bucket, query=query + ([("continuation-token", token)] if token else []))
                ).body
            )
            entries = [node.text for node in page.findall("Contents/Key")]
            entries += [node.text for node in page.findall("CommonPrefixes/Prefix")]
            assert page.findtext("KeyCount") == str(len(entries))
            found += sorted(entries, key=str)
            token = page.findtext("NextContinuationToken")
            if page.findtext("IsTruncated") == "false":
                break
        assert found == ["a/", "b", "c/", "d"]

    run(scenario)


def test_listing_version_1(run: Callable[[Scenario], None]) -> None:
    """V1 pages by the last key, and names the next marker only where there is a delimiter."""

    async def scenario(origin: Origin, bucket: str) -> None:
        for key in ("a", "b", "c"):
            await ask(origin, "PUT", bucket, key, body=b"x")
        page = xml((await ask(origin, "GET", bucket, query=[("max-keys", "2")])).body)
        assert [node.text for node in page.findall("Contents/Key")] == ["a", "b"]
        assert page.findtext("IsTruncated") == "true"
        rest = xml((await ask(origin, "GET", bucket, query=[("marker", "b")])).body)
        assert [node.text for node in rest.findall("Contents/Key")] == ["c"]

    run(scenario)


def test_delete_objects(run: Callable[[Scenario], None]) -> None:
    """Many keys go with one request; a key that is not there counts as deleted."""

    async def scenario(origin: Origin, bucket: str) -> None:
        await ask(origin, "PUT", bucket, "a&b", body=b"x")
        document = b"<Delete><Object><Key>a&amp;b</Key></Object><Object><Key>none</Key></Object></Delete>"
        headers = {"content-md5": base64.b64encode(hashlib.md5(document).digest()).decode()}
        answer = xml((await ask(origin, "POST", bucket, query=[("delete", None)], headers=headers, body=document)).body)
        assert {node.text for node in answer.findall("Deleted/Key")} == {"a&b", "none"}
        assert (await ask(origin, "HEAD", bucket, "a&b")).status == 404

    run(scenario)


def test_buckets(run: Callable[[Scenario], None]) -> None:
    """Buckets are listed, found, and say where they are."""

    async def scenario(origin: Origin, bucket: str) -> None:
        names = [node.text for node in xml((await ask(origin, "GET")).body).findall("Buckets/Bucket/Name")]
        assert bucket in names
        assert (await ask(origin, "HEAD", bucket)).status == 200
        assert (await ask(origin, "HEAD", f"{bucket}-none")).status == 404
        location = await ask(origin, "GET", bucket, query=[("location", None)])
        assert xml(location.body).tag == "LocationConstraint"

    run(scenario)


def test_tags(run: Callable[[Scenario], None]) -> None:
    """What is only forwarded arrives: tags come back as they were set. A directory and Azure have none, and say so."""

    async def scenario(origin: Origin, bucket: str) -> None:
        await ask(origin, "PUT", bucket, "key", body=b"x")
        document = b"<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>"
        put = await ask(origin, "PUT", bucket, "key", query=[("tagging", None)], body=document)
        if isinstance(origin, DirectoryOrigin | AzureOrigin):
            assert put.status == 501
            return
        assert put.status == 200
        answer = xml((await ask(origin, "GET", bucket, "key", query=[("tagging", None)])).body)
        assert answer.findtext("TagSet/Tag/Value") == "v"

    run(scenario)
