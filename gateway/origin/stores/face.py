"""A store of objects as an S3: `Origin` over a `Store`.

Protocol is here: operations, conditions, ranges, digests, documents. State, and whatever lasts, is the store's. What no
store has (versions, ACLs, tags, settings of buckets) is answered 501.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from itertools import count

from gateway.core.clock import Clock
from gateway.core.errors import OriginUnreachable, OutcomeUnknown, S3Error
from gateway.core.model import ByteRange, ObjectKey
from gateway.core.steps import in_steps
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.origin.receive_buffer import ReceiveBuffer
from gateway.origin.retry import Repetition, repetition
from gateway.origin.stores.judge import S3Judge, WithChecksum
from gateway.origin.stores.listing import (
    list_buckets,
    list_parts,
    list_uploads,
    list_v1,
    list_v2,
    parameter,
)
from gateway.origin.stores.response import PIECE_BYTES, StoreResponse, xml_answer
from gateway.origin.stores.store import (
    Condition,
    Found,
    Headers,
    Incoming,
    Judge,
    Reading,
    Store,
    kept_headers,
    timestamp,
)
from gateway.origin.traffic_meter import Attempt, answer_kind
from gateway.s3.checksums import PREFIX, upload_checksum_type
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.headers import (
    DEFAULT_CONTENT_TYPE,
    etag_matches,
    first_and_last,
    format_http_date,
    parse_copy_source_range,
)
from gateway.s3.requests import Operation, classify, parse_copy_source, part_number
from gateway.s3.xml import DeleteEntry, parse_complete_multipart_upload, parse_delete
from gateway.s3.xml_writer import element

_DOCUMENT_BYTES_MAX = 8 * 1024 * 1024
"""The longest document of a DeleteObjects or CompleteMultipartUpload: 10,000 parts, each with a checksum."""

_OVERRIDES = (
    "content-type",
    "content-language",
    "expires",
    "cache-control",
    "content-disposition",
    "content-encoding",
)

_NOT_KEPT = (
    "x-amz-tagging",
    "x-amz-object-lock-",
    "x-amz-server-side-encryption",
    "x-amz-grant-",
    "x-amz-write-offset",
)
"""Headers of writes that no store keeps: they are refused, not dropped."""

_SETTLING_SECONDS_MAX = 5.0
"""Seconds for which a read may wait for a version to settle; it takes longer where clocks differ."""

_OWN_ACLS = frozenset({"private", "bucket-owner-full-control"})
"""ACLs that give nobody rights."""


class StoreOrigin:
    """`Origin` over a store. `name` is the origin's in metrics."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        name: str,
        judge: Judge | None = None,
        on_attempt: Callable[[Attempt], None] | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self._name = name
        self._judge = judge or S3Judge(clock)
        self._on_attempt = on_attempt
        self._numbers = count(1)

    async def send(self, request: OriginRequest) -> StoreResponse:
        """As `Origin.send`."""
        started = self.clock.monotonic()
        request_id = self._request_id()
        try:
            try:
                response = await self.answer(request)
            except S3Error as error:
                response = self._error(error, request, request_id)
        except OriginUnreachable as error:
            self.report(request, None, started)
            if error.may_be_done and repetition(request) is Repetition.WRONG_ANSWER:
                raise OutcomeUnknown(f"a write may have been carried out: {error}") from error
            raise
        self.complete(request, response, request_id)
        self.report(request, response.status, started)
        return response

    def complete(self, request: OriginRequest, response: StoreResponse, request_id: str | None = None) -> None:
        """Put into an answer what each has."""
        headers = dict(response.headers)
        if response.status not in (204, 304):
            headers.setdefault("content-length", str(response.size_bytes))
        if request.method == "HEAD":
            response.body = b""
            if response.status >= 300:
                headers.pop("content-length", None)
        headers.setdefault("date", format_http_date(self.clock.now()))
        headers.setdefault("x-amz-request-id", request_id or self._request_id())
        response.headers = headers

    def _request_id(self) -> str:
        return f"ORIGIN{next(self._numbers):010d}"

    async def aclose(self) -> None:
        await self.store.aclose()

    async def answer(self, request: OriginRequest) -> StoreResponse:
        """Answer without what each answer has. S3Error is the answer, too."""
        operation = classify(request.method, request.bucket, request.key, request.query, request.headers)
        if request.bucket is None:
            if operation is Operation.LIST_BUCKETS:
                return await list_buckets(self.store)
            raise self.unknown()
        if request.key is None:
            return await self._of_bucket(operation, request, request.bucket)
        return await self._of_object(operation, request, ObjectKey(request.bucket, request.key))

    def unknown(self) -> S3Error:
        """Return the answer to what no store has."""
        return s3_error("NotImplemented", "The origin is no S3, and has nothing of the kind.")

    async def _of_bucket(self, operation: Operation, request: OriginRequest, bucket: str) -> StoreResponse:
        match operation:
            case Operation.LIST_OBJECTS_V2:
                return await list_v2(request, bucket, self.store)
            case Operation.LIST_OBJECTS:
                return await list_v1(request, bucket, self.store)
            case Operation.LIST_MULTIPART_UPLOADS:
                return await list_uploads(request, bucket, self.store)
            case Operation.HEAD_BUCKET:
                await self.store.check_bucket(bucket)
                return StoreResponse(200, {"x-amz-bucket-region": "us-east-1"})
            case Operation.GET_BUCKET_LOCATION:
                await self.store.check_bucket(bucket)
                return xml_answer("LocationConstraint", "")
            case Operation.DELETE_OBJECTS:
                return await self._delete_objects(request, bucket)
        raise self.unknown()

    async def _of_object(self, operation: Operation, request: OriginRequest, key: ObjectKey) -> StoreResponse:
        match operation:
            case Operation.GET_OBJECT | Operation.HEAD_OBJECT:
                return await self._read(operation, request, key)
            case Operation.DELETE_OBJECT:
                self._check_version(request)
                await self.store.delete(key, self._delete_condition(request.headers.get("if-match")))
                return StoreResponse(204)
            case Operation.LIST_PARTS:
                return await list_parts(request, key, self.store)
            case Operation.ABORT_MULTIPART_UPLOAD:
                await self.store.abort(key, parameter(request, "uploadId") or "")
                return StoreResponse(204)
            case Operation.PUT_OBJECT:
                self.check_kept(request.headers, key)
                found = await self.store.put(key, self._incoming(request), request.headers, self._condition(request))
                return StoreResponse(200, {"etag": found.etag, **found.checksums})
            case Operation.COPY_OBJECT:
                return await self._copy(request, key)
            case Operation.CREATE_MULTIPART_UPLOAD:
                return await self._begin(request, key)
            case Operation.UPLOAD_PART:
                part = await self.store.put_part(key, *_place(request), self._incoming(request))
                return StoreResponse(200, {"etag": part.etag, **part.checksums})
            case Operation.UPLOAD_PART_COPY:
                return await self._copy_part(request, key)
            case Operation.COMPLETE_MULTIPART_UPLOAD:
                return await self._complete(request, key)
        raise self.unknown()

    # Reads

    async def _read(self, operation: Operation, request: OriginRequest, key: ObjectKey) -> StoreResponse:
        self._check_version(request)
        if operation is Operation.HEAD_OBJECT:
            found = await self.store.head(key)
            if await self._settles(request, found):
                found = await self.store.head(key)
            return self.read_answer(request, found, None)
        reading = await self.store.open(key, likely_bytes(request))
        if await self._settles(request, reading.found):
            await reading.aclose()
            reading = await self.store.open(key, likely_bytes(request))
        try:
            response = self.read_answer(request, reading.found, reading)
        except BaseException:
            await reading.aclose()
            raise
        if response.status == 304:
            await reading.aclose()
        return response

    async def _settles(self, request: OriginRequest, found: Found) -> bool:
        """Wait until a version that has just come into being can be named, if the request names it."""
        if found.settles_at is None or not names_version(request, found):
            return False
        seconds = found.settles_at - self.clock.now()
        if seconds <= _SETTLING_SECONDS_MAX:
            await self.clock.sleep(max(seconds, 0.0))
        return seconds <= _SETTLING_SECONDS_MAX

    def read_answer(self, request: OriginRequest, found: Found, reading: Reading | None) -> StoreResponse:
        date = format_http_date(found.modified)
        etag = found.etag if found.settles_at is None else f"W/{found.etag}"
        if found.settles_at is not None and request.headers.get("if-match", "*").strip() != "*":
            raise s3_error("PreconditionFailed", Condition="If-Match")  # a weak ETag names no bytes
        if not self._judge.may_read(request.headers, found):
            return StoreResponse(304, {"etag": etag, "last-modified": date})
        number = parameter(request, "partNumber")
        if number is not None:
            asked = _part_of(request, found, number)
        else:
            asked = self._judge.asked_range(request.headers, found)
        headers = {"content-type": DEFAULT_CONTENT_TYPE, **found.headers}
        headers |= {"etag": etag, "last-modified": date, "accept-ranges": "bytes"}
        if asked is None and number is None and found.size_bytes:
            sent: ByteRange | None = ByteRange(0, found.size_bytes - 1)
        else:
            sent = asked  # None: an object, or a part, of no bytes
        headers["content-length"] = str(sent.length if sent is not None else 0)
        if asked is None and request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED":
            headers |= found.checksums
        for name in _OVERRIDES:
            if (override := parameter(request, f"response-{name}")) is not None:
                headers[name] = override
        if number is not None and found.part_sizes:
            headers["x-amz-mp-parts-count"] = str(len(found.part_sizes))
        status = 200 if asked is None and number is None else 206
        if asked is not None:
            headers["content-range"] = f"bytes {asked.first}-{asked.last}/{found.size_bytes}"
        return StoreResponse(status, headers, b"", reading, sent if reading is not None else None)

    def _check_version(self, request: OriginRequest) -> None:
        if parameter(request, "versionId") not in (None, "null"):
            raise s3_error("NoSuchVersion")

    # Writes

    def check_kept(self, headers: Headers, key: ObjectKey) -> None:
        """Raise S3Error for a key that no object can have, and for what the store would silently drop."""
        refusal = self.store.refusal(key)
        if refusal is not None:
            raise refusal
        for name, value in headers.items():
            if name.startswith(_NOT_KEPT) or (name == "x-amz-acl" and value not in _OWN_ACLS):
                raise s3_error("NotImplemented", "The origin is no S3, and cannot keep this.", Header=name)

    def _condition(self, request: OriginRequest) -> Condition:
        return partial(self._judge.check_write, request.headers)

    def _delete_condition(self, if_match: str | None) -> Condition:
        return partial(self._judge.check_write, {"if-match": if_match} if if_match is not None else {})

    def _incoming(self, request: OriginRequest) -> Incoming:
        body = request.body
        digests = self._judge.digests(request, of_body=True)
        if isinstance(body, StreamedBody):
            return Incoming(body.chunks, digests, body.length_bytes)
        return Incoming(_once(body), digests, len(body))

    async def document(self, request: OriginRequest) -> bytes:
        """Return the body that is a document; S3Error if it is too long, or not what was vouched for."""
        is_of_object = parameter(request, "uploadId") is not None  # its checksums are those of the object
        digests = self._judge.digests(request, of_body=not is_of_object)
        chunks = request.body.chunks if isinstance(request.body, StreamedBody) else _once(request.body)
        content = bytearray()
        async for chunk in chunks:
            content += chunk
            digests.update(chunk)
            if len(content) > _DOCUMENT_BYTES_MAX:
                raise s3_error("MaxMessageLengthExceeded", MaxMessageLengthBytes=str(_DOCUMENT_BYTES_MAX))
        digests.verified()
        return bytes(content)

    async def _source(self, request: OriginRequest) -> Reading:
        source = parse_copy_source(request.headers["x-amz-copy-source"])
        if source.version_id not in (None, "null"):
            raise s3_error("NoSuchVersion")
        reading = await self.store.open(source.key, (0, None))
        try:
            self._judge.check_copy_source(request.headers, reading.found)
        except BaseException:
            await reading.aclose()
            raise
        return reading

    async def _copy(self, request: OriginRequest, key: ObjectKey) -> StoreResponse:
        replaced = request.headers.get("x-amz-metadata-directive", "COPY").upper() == "REPLACE"
        self.check_kept(request.headers, key)
        reading = await self._source(request)
        try:
            is_itself = parse_copy_source(request.headers["x-amz-copy-source"]).key == key
            if is_itself and not replaced and "x-amz-storage-class" not in request.headers:
                raise s3_error(
                    "InvalidRequest",
                    "This copy request is illegal because it is trying to copy an object to itself without changing "
                    "anything.",
                )
            headers = request.headers if replaced else reading.found.headers
            found = await self.store.put(key, self._copied(request, reading, None), headers, self._condition(request))
        finally:
            await reading.aclose()
        fields = element("LastModified", timestamp(int(found.modified))) + element("ETag", found.etag)
        return xml_answer("CopyObjectResult", fields)

    def _copied(self, request: OriginRequest, reading: Reading, wanted: ByteRange | None) -> Incoming:
        size_bytes = reading.found.size_bytes
        asked = wanted or (ByteRange(0, size_bytes - 1) if size_bytes else None)
        chunks = reading.pieces(asked, ReceiveBuffer(PIECE_BYTES, PIECE_BYTES)) if asked is not None else _once(b"")
        digests = self._judge.digests(OriginRequest("PUT", request.bucket, request.key), of_body=True)
        return Incoming(chunks, digests, asked.length if asked is not None else 0, (reading, wanted))

    async def _copy_part(self, request: OriginRequest, key: ObjectKey) -> StoreResponse:
        upload_id, number = _place(request)
        algorithm = (await self.store.began(key, upload_id)).get(f"{PREFIX}algorithm")
        reading = await self._source(request)
        try:
            named = request.headers.get("x-amz-copy-source-range")
            wanted = parse_copy_source_range(named, reading.found.size_bytes) if named is not None else None
            body = self._copied(request, reading, wanted)
            if algorithm is not None:
                body.digests = WithChecksum(body.digests, algorithm.lower())
            part = await self.store.put_part(key, upload_id, number, body)
        finally:
            await reading.aclose()
        fields = element("LastModified", timestamp(int(part.modified))) + element("ETag", part.etag)
        for name, value in part.checksums.items():
            fields += element(f"Checksum{name.removeprefix(PREFIX).upper()}", value)
        return xml_answer("CopyPartResult", fields)

    async def _delete_objects(self, request: OriginRequest, bucket: str) -> StoreResponse:
        data = await self.document(request)
        has_trailer = isinstance(request.body, StreamedBody) and request.body.trailer_name is not None
        if not has_trailer and not any(name == "content-md5" or name.startswith(PREFIX) for name in request.headers):
            raise s3_error("InvalidRequest", "Missing required header for this request: Content-MD5")
        asked = await in_steps(parse_delete(data))
        await self.store.check_bucket(bucket)
        deleted = [await self._delete_one(ObjectKey(bucket, entry.key), entry, asked.quiet) for entry in asked.objects]
        return xml_answer("DeleteResult", "".join(deleted))

    async def _delete_one(self, key: ObjectKey, entry: DeleteEntry, quiet: bool) -> str:
        try:
            if entry.version_id not in (None, "null"):
                raise s3_error("NoSuchVersion")
            await self.store.delete(key, self._delete_condition(entry.etag))
        except S3Error as error:
            fields = element("Key", key.key) + element("Code", error.code) + element("Message", error.message)
            return f"<Error>{fields}</Error>"
        return "" if quiet else f"<Deleted>{element('Key', key.key)}</Deleted>"

    async def _begin(self, request: OriginRequest, key: ObjectKey) -> StoreResponse:
        self.check_kept(request.headers, key)
        algorithm = request.headers.get("x-amz-checksum-algorithm")
        told: dict[str, str] = {}
        if algorithm is not None:
            name, kind = upload_checksum_type(algorithm, request.headers.get("x-amz-checksum-type"))
            told = {"x-amz-checksum-algorithm": name.upper(), "x-amz-checksum-type": kind}
        upload_id = await self.store.begin(key, {**kept_headers(request.headers), **told})
        fields = element("Bucket", key.bucket) + element("Key", key.key) + element("UploadId", upload_id)
        return xml_answer("InitiateMultipartUploadResult", fields, told)

    async def _complete(self, request: OriginRequest, key: ObjectKey) -> StoreResponse:
        listed = await in_steps(parse_complete_multipart_upload(await self.document(request)))
        upload_id = parameter(request, "uploadId") or ""
        found = await self.store.complete(key, upload_id, listed, request.headers, self._condition(request))
        fields = element("Location", f"/{key.bucket}/{key.key}") + element("Bucket", key.bucket)
        fields += element("Key", key.key) + element("ETag", found.etag)
        for name, value in found.checksums.items():
            tag = name.removeprefix(PREFIX)
            fields += element("ChecksumType" if tag == "type" else f"Checksum{tag.upper()}", value)
        return xml_answer("CompleteMultipartUploadResult", fields)

    def _error(self, error: S3Error, request: OriginRequest, request_id: str) -> StoreResponse:
        resource = f"/{request.bucket or ''}/{request.key or ''}"
        body = error_document(error, resource=resource, request_id=request_id, host_id="origin")
        headers: Mapping[str, str] = {name.lower(): value for name, value in error.headers.items()}
        return StoreResponse(error.status, {"content-type": "application/xml", **headers}, body)

    def report(self, request: OriginRequest, status: int | None, started: float) -> None:
        if self._on_attempt is None:
            return
        seconds = self.clock.monotonic() - started
        kind = answer_kind(request) if status is not None and status < 400 else None
        of_request = request.slot, request.purpose, request.method, status, seconds
        self._on_attempt(Attempt(*of_request, 0, kind, seconds, self._name, request.bucket, request.key))


def likely_bytes(request: OriginRequest) -> tuple[int, int | None]:
    """Return the first and the last byte that a GET will probably read; None: to the end."""
    return first_and_last(request.headers.get("range")) or (0, None)


def names_version(request: OriginRequest, found: Found) -> bool:
    """Return whether a request is for this version, and for no other."""
    named = request.headers.get("if-match", "*").strip()
    return named != "*" and etag_matches(named, found.etag)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


def _place(request: OriginRequest) -> tuple[str, int]:
    """Return the upload and the part number that a part's request names."""
    number = part_number("partNumber", parameter(request, "partNumber") or "")
    return parameter(request, "uploadId") or "", number


def _part_of(request: OriginRequest, found: Found, text: str) -> ByteRange | None:
    if "range" in request.headers:
        raise s3_error("InvalidRequest", "Cannot specify both Range header and partNumber query parameter")
    number, sizes = part_number("partNumber", text), found.part_sizes or (found.size_bytes,)
    if number > len(sizes):
        raise s3_error("InvalidPartNumber")
    first = sum(sizes[: number - 1])
    return ByteRange(first, first + sizes[number - 1] - 1) if sizes[number - 1] else None
