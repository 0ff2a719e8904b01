"""Tries what writing needs under a prefix that the user names: put, multipart, conditions, delete.

It deletes everything that it made, versions included, and names what it could not delete.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import AsyncGenerator
from typing import Final

from gateway.core.errors import OriginError
from gateway.doctor.findings import Finding, error, note, ok, warning
from gateway.doctor.requests import Answered, OriginProbe
from gateway.policy.slots import Prefix

AREA = "write test"
_BODY: Final = b"forebay doctor\n" * 64
_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")
_ALLOW = "allow it to the key in the bucket's policy or in IAM"
_OTHER_ETAG = '"00000000000000000000000000000000"'


class _Made:
    """Objects (key, version) and uploads (key, upload id) to delete at the end."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str | None], None] = {}
        self.uploads: dict[tuple[str, str], None] = {}

    def take(self, key: str, answer: Answered) -> None:
        if answer.status == 200:
            self.objects[key, answer.headers.get("x-amz-version-id")] = None


async def write_test(probe: OriginProbe, where: Prefix) -> AsyncGenerator[Finding, None]:
    """Every finding; the last ones are about what was cleaned up."""
    made = _Made()
    key = f"{where.key_prefix}.forebay-doctor-{secrets.token_hex(8)}"
    try:
        async for finding in _written(probe, where.bucket, key, made):
            yield finding
    except OriginError as failure:
        yield error(AREA, f"{where}: {failure}", "check the network between here and the origin; then try again")
    async for finding in _cleaned(probe, where.bucket, made):
        yield finding


async def _written(probe: OriginProbe, bucket: str, key: str, made: _Made) -> AsyncGenerator[Finding, None]:
    put = await probe.ask("PUT", bucket, key, body=_BODY)
    if put.code == "NoSuchBucket":
        yield error(AREA, f"there is no bucket {bucket}", "name another with --write-test, or make it")
        return
    made.take(key, put)
    if put.status != 200:
        yield error(AREA, f"put: {put.described} (s3:PutObject)", _ALLOW)
    else:
        yield ok(AREA, f"put works, under {_shown(bucket, key)}")
        md5 = hashlib.md5(_BODY, usedforsecurity=False).hexdigest()
        if put.headers.get("etag", "").strip('"') != md5:
            yield note(
                AREA,
                "ETags are not MD5s (the bucket encrypts by KMS, say): Forebay writes nothing back there",
                'use write = "through" for slots of this bucket, or SSE-S3 as its encryption',
            )
        read = await probe.ask("GET", bucket, key)
        if read.document != _BODY:
            yield error(AREA, f"get after put: {read.described}, and not the bytes that were written", _ALLOW)
        async for finding in _conditions(probe, bucket, key, made):
            yield finding
    async for finding in _multipart(probe, bucket, f"{key}-multipart", made):
        yield finding


async def _conditions(probe: OriginProbe, bucket: str, key: str, made: _Made) -> AsyncGenerator[Finding, None]:
    """Yield whether the origin refuses a conditional write over an existing object."""
    again = await probe.ask("PUT", bucket, key, headers={"if-none-match": "*"}, body=_BODY)
    made.take(key, again)
    changed = await probe.ask("PUT", bucket, key, headers={"if-match": _OTHER_ETAG}, body=_BODY)
    made.take(key, changed)
    told = {"If-None-Match": again, "If-Match": changed}
    ignored = [name for name, answer in told.items() if answer.status == 200]
    refused = [f"{name} ({answer.described})" for name, answer in told.items() if answer.status not in (200, 412)]
    if not ignored and not refused:
        yield ok(AREA, "conditional writes are honoured: If-Match and If-None-Match on put")
    advice = "flushes look by HEAD before they write: let nobody else write under slots with write = back"
    if ignored:
        yield warning(AREA, f"conditions of put are ignored: {', '.join(ignored)}", advice)
    if refused:
        yield warning(AREA, f"conditions of put are refused: {', '.join(refused)}", advice)


async def _multipart(probe: OriginProbe, bucket: str, key: str, made: _Made) -> AsyncGenerator[Finding, None]:
    created = await probe.ask("POST", bucket, key, query=(("uploads", None),))
    found = _UPLOAD_ID.search(created.document)
    if created.status != 200 or found is None:
        yield error(AREA, f"multipart upload: create: {created.described} (s3:PutObject)", _ALLOW)
        return
    upload_id = found[1].decode(errors="replace")
    made.uploads[key, upload_id] = None
    of_upload = ("uploadId", upload_id)
    part = await probe.ask("PUT", bucket, key, query=(("partNumber", "1"), of_upload), body=_BODY)
    if part.status != 200:
        yield error(AREA, f"multipart upload: part: {part.described} (s3:PutObject)", _ALLOW)
        return
    listed = f"<Part><PartNumber>1</PartNumber><ETag>{part.headers.get('etag', '')}</ETag></Part>"
    document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
    completed = await probe.ask("POST", bucket, key, query=(of_upload,), body=document)
    if completed.status != 200 or b"<Error>" in completed.document:
        yield error(AREA, f"multipart upload: complete: {completed.described} (s3:PutObject)", _ALLOW)
        return
    made.take(key, completed)
    del made.uploads[key, upload_id]
    created = await probe.ask("POST", bucket, key, query=(("uploads", None),))
    found = _UPLOAD_ID.search(created.document)
    if found is not None:
        upload_id = found[1].decode(errors="replace")
        made.uploads[key, upload_id] = None
        aborted = await probe.ask("DELETE", bucket, key, query=(("uploadId", upload_id),))
        if aborted.status not in (200, 204):
            yield error(AREA, f"multipart upload: abort: {aborted.described} (s3:AbortMultipartUpload)", _ALLOW)
            return
        del made.uploads[key, upload_id]
    yield ok(AREA, "multipart uploads work: create, part, complete, abort")


async def _cleaned(probe: OriginProbe, bucket: str, made: _Made) -> AsyncGenerator[Finding, None]:
    left: list[str] = []
    for key, upload_id in made.uploads:
        if not await _is_deleted(probe, bucket, key, ("uploadId", upload_id)):
            left.append(f"the upload {upload_id} of {_shown(bucket, key)}")
    for key, version in made.objects:
        if not await _is_deleted(probe, bucket, key, ("versionId", version) if version else None):
            left.append(_shown(bucket, key))
    if left:
        yield error(
            AREA,
            f"delete is refused (s3:DeleteObject, s3:DeleteObjectVersion), and this is left: {', '.join(left)}",
            "delete it by hand, and allow deleting to the key",
        )
    elif made.objects:
        yield ok(AREA, "delete works; nothing of the test is left")


async def _is_deleted(probe: OriginProbe, bucket: str, key: str, query: tuple[str, str] | None) -> bool:
    try:
        answer = await probe.ask("DELETE", bucket, key, query=() if query is None else (query,))
    except OriginError:
        return False
    return answer.status in (200, 204, 404)


def _shown(bucket: str, key: str) -> str:
    return f"s3://{bucket}/{key}"
