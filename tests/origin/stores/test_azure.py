"""Azure Blob as an origin, beyond what every origin does alike: against a strict fake of it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest

from gateway.core.errors import OriginBodyError, OriginUnreachable, OutcomeUnknown, S3Error
from gateway.core.model import ObjectKey
from gateway.core.steps import at_once
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.origin.stores.azure.blobs import blob_of, properties
from gateway.origin.stores.azure.store import AzureOrigin
from gateway.s3.xml import CompletedPart, complete_multipart_upload_document
from tests.origin.origins import Answer, ask, azure_origin, xml
from tests.support.azure_blob import AzureBlob, Blob, Container

BUCKET = "bucket"
MEBIBYTE = 1024 * 1024
PART = 5 * MEBIBYTE


def md5_etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


@pytest.fixture
def azure() -> Iterator[AzureBlob]:
    with AzureBlob() as one:
        one.containers[BUCKET] = Container()
        yield one


Run = Callable[..., None]


@pytest.fixture
def run(azure: AzureBlob) -> Run:
    def runner(scenario: Callable[[AzureOrigin], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            origin = azure_origin(azure.address, **options)
            try:
                await scenario(origin)
            finally:
                await origin.aclose()

        asyncio.run(main())

    return runner


def blobs(azure: AzureBlob) -> Mapping[str, Blob]:
    return azure.containers[BUCKET].blobs


def times(fault: str, number: int, method: str = "PUT") -> Callable[[str, str, Mapping[str, str]], str | None]:
    """The fault, for the first requests of this method."""
    left = [number]

    def choose(asked: str, _path: str, query: Mapping[str, str]) -> str | None:
        if asked != method or query.get("restype") == "account" or not left[0]:
            return None
        left[0] -= 1
        return fault

    return choose


async def begin(origin: AzureOrigin, key: str, **headers: str) -> str:
    made = await ask(origin, "POST", BUCKET, key, query=[("uploads", None)], headers=headers)
    return xml(made.body).findtext("UploadId") or ""


async def part(origin: AzureOrigin, key: str, upload_id: str, number: int, data: bytes) -> str:
    query = [("partNumber", str(number)), ("uploadId", upload_id)]
    return (await ask(origin, "PUT", BUCKET, key, query=query, body=data)).headers["etag"]


async def complete(origin: AzureOrigin, key: str, upload_id: str, etags: Mapping[int, str], **headers: str) -> Answer:
    listed = [CompletedPart(number, etag, {}) for number, etag in sorted(etags.items())]
    document = at_once(complete_multipart_upload_document(listed))
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await ask(origin, "POST", BUCKET, key, query=[("uploadId", upload_id)], headers=named, body=document)


async def listed(origin: AzureOrigin, **parameters: str) -> tuple[list[str], str | None]:
    """Keys and prefixes of a page in the order of S3, and the token of the next one."""
    query = [("list-type", "2"), *((name.replace("_", "-"), value) for name, value in parameters.items())]
    answer = await ask(origin, "GET", BUCKET, query=query)
    assert answer.status == 200, answer.body
    root = xml(answer.body)
    names = [node.text or "" for node in [*root.iterfind("Contents/Key"), *root.iterfind("CommonPrefixes/Prefix")]]
    return sorted(names, key=str.encode), root.findtext("NextContinuationToken")


def code(answer: Answer) -> str | None:
    return xml(answer.body).findtext("Code")


# ETags


def test_a_blob_of_somebody_else_has_the_etag_of_azure(azure: AzureBlob, run: Run) -> None:
    """It is no MD5, whatever Content-MD5 says; and another version of the same bytes has another."""
    azure.write(BUCKET, "key", b"data", owner="me")

    async def scenario(origin: AzureOrigin) -> None:
        found = await ask(origin, "HEAD", BUCKET, "key")
        assert found.headers["etag"] == blobs(azure)["key"].etag
        assert found.headers["x-amz-meta-owner"] == "me"
        first = found.headers["etag"]
        azure.write(BUCKET, "key", b"data")
        assert (await ask(origin, "GET", BUCKET, "key")).headers["etag"] != first
        assert (await ask(origin, "GET", BUCKET, "key", headers={"if-match": first})).status == 412

    run(scenario)


def test_a_tool_that_keeps_the_metadata_with_other_bytes_is_found_out(azure: AzureBlob, run: Run) -> None:
    """17.1 The ETag is not the one of the bytes that are gone: of a PUT, and of an upload with another size."""

    async def scenario(origin: AzureOrigin) -> None:
        put = await ask(origin, "PUT", BUCKET, "put", body=b"mine")
        upload_id = await begin(origin, "parts")
        await complete(origin, "parts", upload_id, {1: await part(origin, "parts", upload_id, 1, b"mine")})
        for key in ("put", "parts"):
            azure.write(BUCKET, key, b"theirs", **blobs(azure)[key].metadata)
        assert (await ask(origin, "HEAD", BUCKET, "put")).headers["etag"] == md5_etag(b"theirs") != put.headers["etag"]
        assert (await ask(origin, "HEAD", BUCKET, "parts")).headers["etag"] == blobs(azure)["parts"].etag

    run(scenario)


@pytest.mark.slow
def test_lists_and_reads_tell_one_etag(azure: AzureBlob, run: Run) -> None:
    azure.write(BUCKET, "theirs", b"data")

    async def scenario(origin: AzureOrigin) -> None:
        await ask(origin, "PUT", BUCKET, "mine", body=b"data")
        upload_id = await begin(origin, "parts")
        etags = {n: await part(origin, "parts", upload_id, n, bytes([n]) * PART) for n in (1, 2)}
        await complete(origin, "parts", upload_id, etags)
        root = xml((await ask(origin, "GET", BUCKET, query=[("list-type", "2")])).body)
        told = {node.findtext("Key"): node.findtext("ETag") for node in root.iterfind("Contents")}
        for key in ("theirs", "mine", "parts"):
            for method in ("GET", "HEAD"):
                assert (await ask(origin, method, BUCKET, key)).headers["etag"] == told[key]
        assert told["mine"] == md5_etag(b"data")
        assert str(told["parts"]).endswith('-2"')

    run(scenario)


@pytest.mark.parametrize("told", ["", "md5", "zz", "0" * 32 + "-1"])
@pytest.mark.parametrize("parts", ["", "x", "4x", "99x1", "1x99999", "4x1"])
def test_metadata_that_makes_no_sense_leaves_the_etag_of_azure(told: str, parts: str) -> None:
    meta = {"x-ms-meta-forebay_etag": told, "x-ms-meta-forebay_parts": parts, "x-ms-meta-forebay_more": "%%"}
    blob = blob_of("key", {"etag": '"0x1"', "content-length": "4", "content-md5": "no", **meta})
    assert (blob.found.etag, blob.found.part_sizes) == ('"0x1"', ())


def test_all_that_s3_keeps_comes_back() -> None:
    """Names and values that Azure would not take, and those that it takes, of which its tools see their own."""
    kept = {
        "content-type": "text/plain",
        "expires": "Thu, 01 Jan 2026 00:00:00 GMT",
        "x-amz-meta-plain": "value",
        "x-amz-meta-with-dash": "value",
        "x-amz-meta-forebay_etag": "md5",
        "x-amz-meta-utf8": "\u00e4",
        "x-amz-meta-empty": "",
        "cache-control": "",
    }
    sent = properties(kept, {"x-amz-checksum-crc32": "AAAAAA=="}, "md5", ())
    assert sent["x-ms-meta-plain"] == "value"
    told = {name.removeprefix("x-ms-blob-"): value for name, value in sent.items()}
    blob = blob_of("key", {**told, "content-md5": "1B2M2Y8AsgTpgAmY7PhCfg==", "etag": '"0x1"'})
    assert blob.found.headers == kept
    assert blob.found.etag == md5_etag(b"")
    assert blob.found.checksums == {"x-amz-checksum-crc32": "AAAAAA=="}


# Listings


NAMES = ["a", "a-b", "a/x", "a/y", "a0", "b/", "b/1", "b/2", "c", "\u00e9", "\ud7ff", "\uffee"]


@pytest.mark.parametrize("newest", ["2026-06-06", "2025-11-05"])
@pytest.mark.parametrize("delimiter", ["", "/"])
def test_pages_have_every_key_once_in_s3s_order(azure: AzureBlob, run: Run, newest: str, delimiter: str) -> None:
    """From any place, with a service that can begin there and with one that cannot."""
    azure.newest_version = newest
    for name in NAMES:
        azure.write(BUCKET, name, b"")
    azure.write(BUCKET, ".forebay-origin/uploads/0", b"")

    def row(name: str) -> str:
        return name.partition("/")[0] + "/" if delimiter and "/" in name else name

    async def scenario(origin: AzureOrigin) -> None:
        rows = sorted({row(name) for name in NAMES}, key=str.encode)
        for after in ["", "0", "a/", "a/x", "a/zz", "b/1", "zz", *rows]:
            expected = [one for one in rows if one.encode() > after.encode()]
            found, token = await listed(origin, start_after=after, max_keys="2", delimiter=delimiter)
            while token:
                page, token = await listed(origin, continuation_token=token, max_keys="2", delimiter=delimiter)
                found += page
            assert found == expected, after

    run(scenario)


def test_a_page_costs_one_request(azure: AzureBlob, run: Run) -> None:
    """A listing goes on where Azure said; only who begins in the midst makes it look for the place."""
    for number in range(20):
        azure.write(BUCKET, f"{number:02}", b"")

    async def scenario(origin: AzureOrigin) -> None:
        _, token = await listed(origin, max_keys="5")
        azure.asked.clear()
        page, _ = await listed(origin, max_keys="5", continuation_token=token or "")
        page_from_the_midst, _ = await listed(origin, max_keys="2", start_after="13")
        assert (page, page_from_the_midst) == (["05", "06", "07", "08", "09"], ["14", "15"])
        assert ["startfrom" in query for _, _, query in azure.asked][:2] == [False, True]

    run(scenario)


def test_a_page_with_characters_beyond_uffff_is_refused(azure: AzureBlob, run: Run) -> None:
    """17.4 Azure has them at another place than S3."""
    azure.write(BUCKET, "\U00010000", b"")

    async def scenario(origin: AzureOrigin) -> None:
        answer = await ask(origin, "GET", BUCKET, query=[("list-type", "2")])
        assert answer.status == 503
        assert b"U+FFFF" in answer.body

    run(scenario)


def test_names_that_xml_cannot_have_are_listed(azure: AzureBlob, run: Run) -> None:
    azure.write(BUCKET, "a\ufffe%41", b"")

    async def scenario(origin: AzureOrigin) -> None:
        query = [("list-type", "2"), ("encoding-type", "url")]
        root = xml((await ask(origin, "GET", BUCKET, query=query)).body)
        assert root.findtext("Contents/Key") == "a%EF%BF%BE%2541"

    run(scenario)


def test_an_account_with_a_hierarchical_namespace_is_refused(azure: AzureBlob, run: Run) -> None:
    azure.is_hierarchical = True

    async def scenario(origin: AzureOrigin) -> None:
        for method, key, query in (("GET", None, [("list-type", "2")]), ("PUT", "key", []), ("HEAD", None, [])):
            answer = await ask(origin, method, BUCKET, key, query=query)
            assert answer.status == 501
        assert not blobs(azure)

    run(scenario)


@pytest.mark.parametrize("key", ["a\\b", "a./b", "..", "a/.", "\x01", "a/" * 254 + "b", ".forebay-origin/x"])
def test_keys_that_azure_would_change_are_refused(azure: AzureBlob, run: Run, key: str) -> None:
    async def scenario(origin: AzureOrigin) -> None:
        assert (await ask(origin, "PUT", BUCKET, key, body=b"x")).status == 400
        upload = await ask(origin, "POST", BUCKET, key, query=[("uploads", None)])
        assert upload.status == 400
        assert (await ask(origin, "GET", BUCKET, key)).status == 404
        with pytest.raises(S3Error):
            await origin.store.check_place(ObjectKey(BUCKET, key))
        assert not blobs(azure)

    run(scenario)


# Uploads


def test_an_upload_is_listed_until_it_ends(azure: AzureBlob, run: Run) -> None:
    async def scenario(origin: AzureOrigin) -> None:
        ids = [await begin(origin, "dir/key"), await begin(origin, "dir/key"), await begin(origin, "other")]
        root = xml((await ask(origin, "GET", BUCKET, query=[("uploads", None), ("prefix", "dir/")])).body)
        assert [node.findtext("UploadId") for node in root.iterfind("Upload")] == ids[:2]
        assert (await listed(origin))[0] == []
        etag = await part(origin, "dir/key", ids[0], 1, b"x")
        assert (await complete(origin, "dir/key", ids[0], {1: etag})).status == 200
        for upload_id, key in zip(ids[1:], ("dir/key", "other"), strict=True):
            assert (await ask(origin, "DELETE", BUCKET, key, query=[("uploadId", upload_id)])).status == 204
        assert list(blobs(azure)) == ["dir/key"]

    run(scenario)


def test_the_last_of_several_attempts_at_a_part_counts(azure: AzureBlob, run: Run) -> None:
    async def scenario(origin: AzureOrigin) -> None:
        upload_id = await begin(origin, "key")
        await part(origin, "key", upload_id, 1, b"first")
        etag = await part(origin, "key", upload_id, 1, b"second")
        empty = await part(origin, "key", upload_id, 2, b"")
        root = xml((await ask(origin, "GET", BUCKET, "key", query=[("uploadId", upload_id)])).body)
        assert [node.findtext("ETag") for node in root.iterfind("Part")] == [etag, empty]
        assert code(await complete(origin, "key", upload_id, {1: md5_etag(b"first")})) == "InvalidPart"
        assert (await complete(origin, "key", upload_id, {1: etag})).status == 200
        assert (await ask(origin, "GET", BUCKET, "key")).body == b"second"

    run(scenario)


def test_a_complete_whose_answer_was_lost_is_told_what_it_made(azure: AzureBlob, run: Run) -> None:
    """Sent again by the gateway, and by its client, when the record is gone."""

    async def scenario(origin: AzureOrigin) -> None:
        upload_id = await begin(origin, "key", **{"content-type": "a/b"})
        etags = {1: await part(origin, "key", upload_id, 1, b"data")}
        azure.fault = times("lost", 1)
        first = await complete(origin, "key", upload_id, etags)
        again = await complete(origin, "key", upload_id, etags)
        assert (first.status, again.status) == (200, 200)
        assert first.body == again.body
        assert (await ask(origin, "HEAD", BUCKET, "key")).headers["content-type"] == "a/b"
        await ask(origin, "DELETE", BUCKET, "key")
        assert code(await complete(origin, "key", upload_id, etags)) == "NoSuchUpload"

    run(scenario)


def test_parts_that_a_write_of_the_key_has_removed_are_missed(azure: AzureBlob, run: Run) -> None:
    """17.5 Azure drops uncommitted blocks when the blob is written: nothing is made of what is left."""

    async def scenario(origin: AzureOrigin) -> None:
        upload_id = await begin(origin, "key")
        etag = await part(origin, "key", upload_id, 1, b"part")
        await ask(origin, "PUT", BUCKET, "key", body=b"put")
        root = xml((await ask(origin, "GET", BUCKET, "key", query=[("uploadId", upload_id)])).body)
        assert root.find("Part") is None
        assert code(await complete(origin, "key", upload_id, {1: etag})) == "InvalidPart"
        assert (await ask(origin, "GET", BUCKET, "key")).body == b"put"
        etag = await part(origin, "key", upload_id, 1, b"part")
        assert (await complete(origin, "key", upload_id, {1: etag})).status == 200

    run(scenario)


def test_conditions_hold_at_the_moment_of_the_write(azure: AzureBlob, run: Run) -> None:
    """17.2 Somebody else writes between the look at the blob and the write: it is refused, and so is one of none."""

    async def scenario(origin: AzureOrigin) -> None:
        mine = (await ask(origin, "PUT", BUCKET, "key", body=b"mine")).headers["etag"]
        upload_id = await begin(origin, "key")
        etags = {1: await part(origin, "key", upload_id, 1, b"part")}

        def meanwhile(method: str, _path: str, _query: Mapping[str, str]) -> None:
            if method != "HEAD":
                blobs(azure)["key"].etag = azure.new_etag()

        async def put() -> Answer:
            return await ask(origin, "PUT", BUCKET, "key", headers={"if-match": mine}, body=b"x")

        async def delete() -> Answer:
            return await ask(origin, "DELETE", BUCKET, "key", headers={"if-match": mine})

        async def finish() -> Answer:
            return await complete(origin, "key", upload_id, etags, if_match=mine)

        azure.fault = meanwhile
        for write in (put, delete, finish):
            assert (await write()).status == 412
        assert (await complete(origin, "key", upload_id, etags, if_none_match="*")).status == 412
        assert (await ask(origin, "PUT", BUCKET, "new", headers={"if-match": mine}, body=b"x")).status == 404
        assert (await ask(origin, "GET", BUCKET, "key")).body == b"mine"

    run(scenario)


# What goes wrong


def test_an_origin_that_is_busy_is_asked_again(azure: AzureBlob, run: Run) -> None:
    async def scenario(origin: AzureOrigin) -> None:
        azure.fault = times("503", 2)
        assert (await ask(origin, "PUT", BUCKET, "key", body=b"x")).status == 200
        azure.fault = lambda *_: "503"
        assert code(await ask(origin, "GET", BUCKET, "key")) == "SlowDown"

    run(scenario)


def test_the_fate_of_a_conditional_write_whose_answer_is_lost_is_unknown(azure: AzureBlob, run: Run) -> None:
    async def scenario(origin: AzureOrigin) -> None:
        azure.fault = times("lost", 1)
        with pytest.raises(OutcomeUnknown):
            await ask(origin, "PUT", BUCKET, "key", headers={"if-none-match": "*"}, body=b"x")
        azure.fault = times("lost", 1)
        assert (await ask(origin, "PUT", BUCKET, "key", body=b"y")).status == 200

    run(scenario)


@pytest.mark.slow
def test_a_body_that_fails_or_is_another_leaves_no_blob(azure: AzureBlob, run: Run) -> None:
    """Short ones, and those that are sent while they come."""

    async def chunks(size: int, fails: bool) -> AsyncIterator[bytes]:
        for _ in range(size // 1000):
            yield b"x" * 1000
        if fails:
            raise OriginUnreachable("the client left")

    async def scenario(origin: AzureOrigin) -> None:
        for size in (1000, MEBIBYTE // 1000 * 1000):
            for length, headers in ((size + 1, {}), (size, {"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="})):
                body = StreamedBody(chunks(size, fails=False), length)
                assert (await ask(origin, "PUT", BUCKET, "key", headers=headers, body=body)).status == 400
            with pytest.raises(OriginUnreachable):
                await ask(origin, "PUT", BUCKET, "key", body=StreamedBody(chunks(size, fails=True), size))
            no_length = await ask(origin, "PUT", BUCKET, "key", body=StreamedBody(chunks(size, fails=False), None))
            assert code(no_length) == "MissingContentLength"
        assert not blobs(azure)

    run(scenario)


def test_a_read_ends_when_the_blob_is_replaced(azure: AzureBlob, run: Run) -> None:
    """Bytes that have not come with the first answer are asked for by Azure's ETag."""
    azure.write(BUCKET, "key", b"0123456789")

    async def scenario(origin: AzureOrigin) -> None:
        async with await origin.send(OriginRequest("GET", BUCKET, "key", (), {"range": "bytes=-3"})) as response:
            azure.write(BUCKET, "key", b"9876543210")
            with pytest.raises(OriginBodyError):
                await response.read(100)

    run(scenario)


def test_a_clock_that_is_wrong_is_set_by_azures(azure: AzureBlob, run: Run) -> None:
    async def scenario(origin: AzureOrigin) -> None:
        assert (await ask(origin, "PUT", BUCKET, "key", body=b"x")).status == 200

    azure.skew_seconds = -7200.0
    run(scenario)


def test_a_wrong_key_is_told_as_such(run: Run) -> None:
    """Azure has one code for all that is wrong with a signature."""

    async def scenario(origin: AzureOrigin) -> None:
        answer = await ask(origin, "PUT", BUCKET, "key", body=b"x")
        assert code(answer) == "SignatureDoesNotMatch"

    run(scenario, key="d3Jvbmc=")
