"""Multipart uploads and copies: what every origin does alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from gateway.origin.client import Origin
from tests.origin.origins import Scenario, ask, xml

MEBIBYTE = 1024 * 1024


def md5_etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


async def create_upload(origin: Origin, bucket: str, key: str) -> str:
    created = await ask(origin, "POST", bucket, key, query=[("uploads", None)], headers={"x-amz-meta-a": "b"})
    return xml(created.body).findtext("UploadId") or ""


async def upload_part(origin: Origin, bucket: str, key: str, upload_id: str, number: int, data: bytes) -> str:
    query = [("partNumber", str(number)), ("uploadId", upload_id)]
    return (await ask(origin, "PUT", bucket, key, query=query, body=data)).headers["etag"]


def complete_document(etags: dict[int, str]) -> bytes:
    parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{etag}</ETag></Part>" for n, etag in etags.items())
    return f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()


def test_multipart_upload(run: Callable[[Scenario], None]) -> None:
    """Parts become one object with the ETag of parts; it is invisible before, and the upload is gone after."""

    async def scenario(origin: Origin, bucket: str) -> None:
        data = {1: b"a" * (5 * MEBIBYTE), 2: b"b" * 10}
        upload_id = await create_upload(origin, bucket, "big")
        etags = {number: await upload_part(origin, bucket, "big", upload_id, number, data[number]) for number in data}
        assert (await ask(origin, "HEAD", bucket, "big")).status == 404
        listed = xml((await ask(origin, "GET", bucket, "big", query=[("uploadId", upload_id)])).body)
        assert [node.text for node in listed.findall("Part/ETag")] == list(etags.values())
        uploads = xml((await ask(origin, "GET", bucket, query=[("uploads", None)])).body)
        assert [node.text for node in uploads.findall("Upload/UploadId")] == [upload_id]
        done = await ask(origin, "POST", bucket, "big", query=[("uploadId", upload_id)], body=complete_document(etags))
        raw = b"".join(bytes.fromhex(etag.strip('"')) for etag in etags.values())
        assert xml(done.body).findtext("ETag") == f'"{hashlib.md5(raw).hexdigest()}-2"'
        answer = await ask(origin, "GET", bucket, "big")
        assert answer.body == data[1] + data[2]
        assert answer.headers["x-amz-meta-a"] == "b"
        after = xml((await ask(origin, "GET", bucket, query=[("uploads", None)])).body)
        assert after.findall("Upload") == []

    run(scenario)


def test_multipart_refusals(run: Callable[[Scenario], None]) -> None:
    """Wrong parts, small parts, and unknown uploads are refused; an aborted upload is gone."""

    async def scenario(origin: Origin, bucket: str) -> None:
        upload_id = await create_upload(origin, bucket, "key")
        etags = {n: await upload_part(origin, bucket, "key", upload_id, n, b"small") for n in (1, 2)}
        complete = [("uploadId", upload_id)]

        async def refusal(document: bytes) -> str | None:
            return xml((await ask(origin, "POST", bucket, "key", query=complete, body=document)).body).findtext("Code")

        assert await refusal(complete_document(etags)) == "EntityTooSmall"
        assert await refusal(complete_document({1: '"0"'})) == "InvalidPart"
        # moto judges sizes before order
        assert await refusal(complete_document({2: etags[2], 1: etags[1]})) in ("InvalidPartOrder", "EntityTooSmall")
        assert (await ask(origin, "DELETE", bucket, "key", query=complete)).status == 204
        gone = await ask(origin, "GET", bucket, "key", query=complete)
        assert xml(gone.body).findtext("Code") == "NoSuchUpload"

    run(scenario)


def test_copies(run: Callable[[Scenario], None]) -> None:
    """CopyObject keeps or replaces the metadata; UploadPartCopy takes a range."""

    async def scenario(origin: Origin, bucket: str) -> None:
        data = b"0123456789" * (600 * 1024)
        await ask(origin, "PUT", bucket, "from me", headers={"x-amz-meta-a": "1"}, body=data)
        source = {"x-amz-copy-source": f"/{bucket}/from%20me"}
        copied = await ask(origin, "PUT", bucket, "to", headers=source)
        assert xml(copied.body).findtext("ETag") == md5_etag(data)
        assert (await ask(origin, "HEAD", bucket, "to")).headers["x-amz-meta-a"] == "1"
        upload_id = await create_upload(origin, bucket, "parts")
        query = [("partNumber", "1"), ("uploadId", upload_id)]
        part = await ask(
            origin, "PUT", bucket, "parts", query=query, headers={**source, "x-amz-copy-source-range": "bytes=10-29"}
        )
        document = complete_document({1: xml(part.body).findtext("ETag") or ""})
        await ask(origin, "POST", bucket, "parts", query=[("uploadId", upload_id)], body=document)
        assert (await ask(origin, "GET", bucket, "parts")).body == data[10:30]

    run(scenario)
