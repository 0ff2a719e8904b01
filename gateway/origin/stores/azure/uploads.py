"""Keeps multipart uploads: a part is a block of the blob to be, and each upload has a record of its parts.

    .forebay-origin/uploads/ID    an append blob. Metadata: the key, the headers of the Create, its time. Each line is a
                                  part that is there: number, block, size, MD5, checksums. Of one number the last counts

A Complete is one Put Block List, with the condition in it; then the record goes. The blob keeps the upload's id, so
that a second Complete is told what the first was. What is aborted leaves blocks, which Azure removes after a week.
Azure also removes the blocks of all uploads of a key when the blob is written: a Complete of another upload then
answers InvalidPart.
"""

from __future__ import annotations

import base64
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
import structlog

from gateway.core.errors import OriginUnreachable, S3Error
from gateway.core.model import ObjectKey
from gateway.origin.stores.azure.blobs import META, OWN, packed, properties, unpacked
from gateway.origin.stores.azure.rest import Wire, outgoing
from gateway.origin.stores.store import (
    Condition,
    Found,
    FoundPart,
    FoundUpload,
    Headers,
    Incoming,
    checked,
    chosen,
)
from gateway.s3.checksums import PREFIX
from gateway.s3.error_codes import s3_error
from gateway.s3.headers import multipart_etag, parse_http_date
from gateway.s3.xml import CompletedPart, child_text, local_name
from gateway.s3.xml_writer import document, element

_RECORDS = f"{OWN}uploads/"
_ID = re.compile("[0-9a-f]{32}")
_PART_BYTES_MAX = 4000 * 1024 * 1024

log = structlog.get_logger(__name__)


class _Record:
    """Holds the headers of an upload's Create, and the line of each part."""

    def __init__(self, headers: Headers, lines: Mapping[int, Mapping[str, Any]]) -> None:
        self.headers = headers
        self.lines = lines
        self.parts = {
            number: FoundPart(number, line["size"], f'"{line["md5"]}"', line["modified"], line["checksums"])
            for number, line in sorted(lines.items())
        }

    def block(self, number: int) -> str:
        return str(self.lines[number]["block"])


class Uploads:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def begin(self, key: ObjectKey, headers: Headers) -> str:
        """`headers` are those to keep."""
        upload_id = uuid.uuid4().hex
        told = {"key": key.key, "headers": dict(headers), "initiated": time.time()}
        sent = {"x-ms-blob-type": "AppendBlob", f"{META}forebay_record": packed(told)}
        await self._wire.told("PUT", key.bucket, _RECORDS + upload_id, headers=sent)
        return upload_id

    async def began(self, key: ObjectKey, upload_id: str) -> Headers:
        return (await self._record(key, upload_id)).headers

    async def put_part(self, key: ObjectKey, upload_id: str, number: int, body: Incoming) -> FoundPart:
        _check_id(upload_id)
        content = await outgoing(body, _PART_BYTES_MAX)
        block = ""  # Azure has no empty blocks
        if content:
            block = base64.b64encode(bytes.fromhex(upload_id) + number.to_bytes(2) + os.urandom(6)).decode()
            await self._wire.told("PUT", key.bucket, key.key, [("comp", "block"), ("blockid", block)], body=content)
        checksums, md5, size_bytes = body.digests.verified(), body.digests.md5().hex(), body.length_bytes or 0
        part = FoundPart(number, size_bytes, f'"{md5}"', time.time(), checksums)
        line = {"number": number, "block": block, "size": size_bytes, "md5": md5, "checksums": checksums}
        line["modified"] = part.modified
        with _no_such_upload():
            await self._wire.told(
                "PUT", key.bucket, _RECORDS + upload_id, [("comp", "appendblock")], body=orjson.dumps(line) + b"\n"
            )
        return part

    async def parts(self, key: ObjectKey, upload_id: str) -> Sequence[FoundPart]:
        """Return those whose blocks are still there."""
        record = await self._record(key, upload_id)
        try:
            root = await self._wire.document(
                key.bucket, key.key, [("comp", "blocklist"), ("blocklisttype", "uncommitted")]
            )
            blocks = {child_text(node, "Name") or "" for node in root.iter() if local_name(node) == "Block"}
        except S3Error as error:
            if error.code != "NoSuchKey":
                raise
            blocks = set()
        return [part for number, part in record.parts.items() if record.block(number) in {"", *blocks}]

    async def complete(
        self, key: ObjectKey, upload_id: str, listed: Sequence[CompletedPart], headers: Headers, condition: Condition
    ) -> Found:
        try:
            record = await self._record(key, upload_id)
        except S3Error as error:
            if error.code == "NoSuchUpload" and (done := await self._done(key, upload_id)) is not None:
                return done
            raise
        parts = chosen(upload_id, record.parts, listed)
        checksums = checked(record.headers, parts, headers)
        sent = await self._wire.native(key, condition)
        etag, sizes = multipart_etag([part.etag for part in parts]) or "", [part.size_bytes for part in parts]
        kept = {name: value for name, value in record.headers.items() if not name.startswith(PREFIX)}
        sent |= properties(kept, checksums, etag.strip('"'), sizes)
        sent[f"{META}forebay_upload"] = upload_id
        blocks = [block for part in parts if (block := record.block(part.number))]
        body = document("BlockList", "".join(element("Latest", block) for block in blocks))
        try:
            told = await self._wire.told("PUT", key.bucket, key.key, [("comp", "blocklist")], sent, body)
        except S3Error as error:
            if error.code == "InvalidPart" and (done := await self._done(key, upload_id)) is not None:
                return done
            raise
        await self._forget(key, upload_id)
        modified = parse_http_date(told.get("last-modified", "")) or 0.0
        return Found(key.key, sum(sizes), etag, modified, kept, checksums, sizes)

    async def abort(self, key: ObjectKey, upload_id: str) -> None:
        await self._record(key, upload_id)
        with _no_such_upload():
            await self._wire.told("DELETE", key.bucket, _RECORDS + upload_id)

    async def open(self, bucket: str, prefix: str) -> Sequence[FoundUpload]:
        found, marker = list[FoundUpload](), ""
        while True:
            query = [("restype", "container"), ("comp", "list"), ("include", "metadata"), ("prefix", _RECORDS)]
            query += [("maxresults", "1000"), *([("marker", marker)] if marker else [])]
            root = await self._wire.document(bucket, None, query)
            for node in root.iter("Blob"):
                told = unpacked(next((one.text for one in node.iter("forebay_record")), None))
                upload_id = (child_text(node, "Name") or "").removeprefix(_RECORDS)
                if _ID.fullmatch(upload_id) and str(told.get("key", "")).startswith(prefix):
                    found.append(FoundUpload(told["key"], upload_id, told["initiated"]))
            marker = child_text(root, "NextMarker") or ""
            if not marker:
                return sorted(found, key=lambda one: (one.key.encode(), one.initiated))

    async def _record(self, key: ObjectKey, upload_id: str) -> _Record:
        _check_id(upload_id)
        with _no_such_upload():
            told = await self._wire.told("HEAD", key.bucket, _RECORDS + upload_id)
            meta = unpacked(told.get(f"{META}forebay_record"))
            if meta.get("key") != key.key:
                raise s3_error("NoSuchUpload", UploadId=upload_id)
            data = await self._wire.read(key.bucket, _RECORDS + upload_id, ())
        lines = [orjson.loads(line) for line in data.splitlines()]
        return _Record(meta["headers"], {line["number"]: line for line in lines})

    async def _done(self, key: ObjectKey, upload_id: str) -> Found | None:
        """Return what an earlier Complete of the upload has made, if it is there still."""
        blob = await self._wire.head(key)
        return blob.found if blob is not None and blob.upload_id == upload_id else None

    async def _forget(self, key: ObjectKey, upload_id: str) -> None:
        try:
            await self._wire.told("DELETE", key.bucket, _RECORDS + upload_id)
        except (S3Error, OriginUnreachable) as error:  # the object is there; the upload is listed as open
            log.warning("the record of a completed upload is left over", upload_id=upload_id, error=str(error))


def _check_id(upload_id: str) -> None:
    if not _ID.fullmatch(upload_id):
        raise s3_error("NoSuchUpload", UploadId=upload_id)


@contextmanager
def _no_such_upload() -> Iterator[None]:
    """Within, a record that is not there means: no such upload."""
    try:
        yield
    except S3Error as error:
        if error.code == "NoSuchKey":
            raise s3_error("NoSuchUpload") from error
        raise
