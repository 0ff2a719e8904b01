"""A small S3 in this process: the fake that behaves, for tests, with faults on demand.

`MemoryOrigin` answers what S3 answers, headers and error documents included. Beside the protocol it shows its state
(`buckets`), what it was asked (`calls`), and takes faults (`faults`, see faults.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from itertools import count

from gateway.core.clock import Clock
from gateway.core.errors import OriginUnreachable, S3Error
from gateway.origin.client import OriginRequest
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.headers import format_http_date
from gateway.s3.requests import Operation, classify
from gateway.s3.xml_writer import document
from tests.support.memory_origin import listing, multipart, objects
from tests.support.memory_origin.content import BytesContent, Content, GeneratedContent
from tests.support.memory_origin.dialect import Dialect
from tests.support.memory_origin.digests import ReceivedBody, receive
from tests.support.memory_origin.faults import (
    AlterBody,
    AlterHeaders,
    Answer,
    Call,
    CutBody,
    Delay,
    Effect,
    Fault,
    Hold,
    Unreachable,
)
from tests.support.memory_origin.objects import parameter, parse_xml, xml_answer
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.settings import bucket_setting, setting_of
from tests.support.memory_origin.store import Bucket, StoredObject

_TAKES_BODY = frozenset({"PUT", "POST"})

_LEFT_OUT = frozenset({"content-length", "x-amz-request-id"})
"""Headers that an answer lacks where a fault makes them empty."""
Policy = Callable[[OriginRequest], S3Error | None]
"""Why a request is refused; None: it is not."""

_BodyHandler = Callable[[OriginRequest, Bucket, ReceivedBody], MemoryResponse]


class MemoryOrigin:
    """`Origin` in memory. `keep_bodies` False hashes what is uploaded and throws it away: size and ETag stay."""

    def __init__(self, clock: Clock, *, region: str = "us-east-1", keep_bodies: bool = True) -> None:
        self.region = region
        self.keep_bodies = keep_bodies
        self.buckets: dict[str, Bucket] = {}
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.policies: dict[str, Policy] | None = None
        """What callers may do, by access key id, to requests in their own name; None: everything."""
        self.dialect = Dialect()
        self._clock = clock
        self._numbers = count(1)
        self._upload_orders = count(1)
        self._request_ids = count(1)

    def create_bucket(self, name: str) -> Bucket:
        """A new bucket, or the one there is."""
        return self.buckets.setdefault(name, Bucket(name, self._clock.now()))

    def put(self, bucket: str, key: str, data: bytes | Content, headers: Mapping[str, str] | None = None) -> str:
        """Store an object past the protocol, bucket included; its ETag, made up for contents too large to hash."""
        content = BytesContent(data) if isinstance(data, bytes) else data
        text = data if isinstance(data, bytes) else f"{bucket}/{key}/{content.size_bytes}".encode()
        etag = f'"{hashlib.md5(text, usedforsecurity=False).hexdigest()}"'
        self.create_bucket(bucket).put(StoredObject(key, content, etag, self._clock.now(), dict(headers or {})))
        return etag

    def put_generated(self, bucket: str, key: str, size_bytes: int, seed: int = 0) -> str:
        """Store an object of any size that takes no memory; its ETag."""
        return self.put(bucket, key, GeneratedContent(size_bytes, seed))

    def data(self, bucket: str, key: str) -> bytes:
        """The bytes of an object; KeyError when it is not there."""
        content = self.buckets[bucket].objects[key].content
        return content.read(0, content.size_bytes)

    def count(self, operation: Operation | None = None, *, key: str | None = None) -> int:
        """How many requests arrived, of this operation, for this key."""
        return sum(1 for call in self.calls if operation in (None, call.operation) and (key is None or call.key == key))

    def inject(self, when: Callable[[Call], bool], effect: Effect, *, times: int | None = 1) -> Fault:
        """Add a fault. Faults are tried in the order in which they were added; several may hit one call."""
        fault = Fault(when, effect, times)
        self.faults.append(fault)
        return fault

    async def send(self, request: OriginRequest) -> MemoryResponse:
        call = self._record(request)
        request = self.dialect.understood(request)
        effects = [fault.effect for fault in self.faults if fault.takes(call)]
        response = await self._before(effects) or self._denied(request) or await self._answer(request)
        response = self._after(effects, response)
        response = self.dialect.spoken(request, self._finish(request, response))
        call.status = response.status
        return response

    async def aclose(self) -> None:
        return

    def _record(self, request: OriginRequest) -> Call:
        try:
            operation = classify(request.method, request.bucket, request.key, request.query, request.headers)
        except S3Error:
            operation = Operation.FORWARD
        call = Call(
            next(self._numbers),
            operation,
            request.method,
            request.bucket,
            request.key,
            request.query,
            dict(request.headers),
            request.purpose,
            signed_by=request.signed_by.access_key_id if request.signed_by is not None else None,
        )
        self.calls.append(call)
        return call

    def _denied(self, request: OriginRequest) -> MemoryResponse | None:
        """What the policies say of who has signed it."""
        if request.signed_by is None or self.policies is None:
            return None
        policy = self.policies.get(request.signed_by.access_key_id)
        refusal = s3_error("InvalidAccessKeyId") if policy is None else policy(request)
        return self._error(refusal, request) if refusal is not None else None

    async def _before(self, effects: list[Effect]) -> MemoryResponse | None:
        for effect in effects:
            match effect:
                case Hold():
                    if effect.reached is not None:
                        effect.reached.set()
                    await effect.until.wait()
                case Delay():
                    await self._clock.sleep(effect.seconds)
                case Answer(late=False):
                    return self.refusal(effect)
                case Unreachable(late=False):
                    raise OriginUnreachable("no answer from the origin: injected")
        return None

    def _after(self, effects: list[Effect], response: MemoryResponse) -> MemoryResponse:
        for effect in effects:
            match effect:
                case Answer(late=True):
                    response = self.refusal(effect)
                case Unreachable(late=True):
                    raise OriginUnreachable("the answer of the origin was lost: injected")
                case CutBody():
                    response.cut = effect
                case AlterHeaders():
                    response.headers = _altered(response.headers, effect.headers)
                case AlterBody():
                    body = effect.change(response.content.read(0, response.content.size_bytes))
                    response.content = BytesContent(body)
                    response.headers = {**response.headers, "content-length": str(len(body))}
        return response

    def refusal(self, effect: Answer) -> MemoryResponse:
        """The answer that an injected one is."""
        if effect.body is not None:
            headers = {"x-amz-request-id": "", **effect.headers}  # a proxy's: it has none
            return MemoryResponse(effect.status, headers, BytesContent(effect.body))
        error = s3_error(effect.code, "injected", status=effect.status, headers=effect.headers)
        return self._error(error, None)

    async def _answer(self, request: OriginRequest) -> MemoryResponse:
        try:
            if refusal := self.dialect.refusal(request):
                raise refusal
            return await self._dispatch(request)
        except S3Error as error:
            return self._error(error, request)

    def _error(self, error: S3Error, request: OriginRequest | None) -> MemoryResponse:
        resource = f"/{request.bucket or ''}/{request.key or ''}" if request else ""
        body = error_document(error, resource=resource, request_id=f"origin-{len(self.calls)}", host_id="origin")
        headers = {"content-type": "application/xml"} | {name.lower(): value for name, value in error.headers.items()}
        return MemoryResponse(error.status, headers, BytesContent(body))

    def _finish(self, request: OriginRequest, response: MemoryResponse) -> MemoryResponse:
        headers = dict(response.headers)
        if response.status not in (204, 304):
            headers.setdefault("content-length", str(response.content.size_bytes))
        if request.method == "HEAD":
            response.with_body = False
            if response.status >= 300:
                headers.pop("content-length", None)
        bucket = self.buckets.get(request.bucket or "")
        if bucket is not None and bucket.is_kms and request.key is not None and response.status == 200:
            headers.setdefault("x-amz-server-side-encryption", "aws:kms")
        headers.setdefault("date", format_http_date(self._clock.now()))
        headers.setdefault("x-amz-request-id", f"ORIGIN{next(self._request_ids):010d}")
        headers = {name: value for name, value in headers.items() if value or name not in _LEFT_OUT}
        response.headers = headers
        return response

    async def _dispatch(self, request: OriginRequest) -> MemoryResponse:
        operation = classify(request.method, request.bucket, request.key, request.query, request.headers)
        if request.bucket is None:
            return listing.list_buckets(self.buckets.values())
        if operation is Operation.CREATE_BUCKET:
            return self._create_bucket(request.bucket)
        bucket = self.buckets.get(request.bucket)
        if bucket is None:
            raise s3_error("NoSuchBucket", BucketName=request.bucket)
        if request.method in _TAKES_BODY:
            return await self._write(operation, request, bucket)
        return self._read(operation, request, bucket)

    def _create_bucket(self, name: str) -> MemoryResponse:
        if name in self.buckets:
            raise s3_error("BucketAlreadyOwnedByYou", BucketName=name)
        self.create_bucket(name)
        return MemoryResponse(200, {"location": f"/{name}"})

    def _read(self, operation: Operation, request: OriginRequest, bucket: Bucket) -> MemoryResponse:
        match operation:
            case Operation.GET_OBJECT | Operation.HEAD_OBJECT:
                return objects.read_object(request, bucket)
            case Operation.HEAD_BUCKET:
                return MemoryResponse(200, {"x-amz-bucket-region": self.region})
            case Operation.GET_BUCKET_LOCATION:
                return self._location()
            case Operation.LIST_OBJECTS_V2:
                return listing.list_v2(request, bucket)
            case Operation.LIST_OBJECTS:
                return listing.list_v1(request, bucket)
            case Operation.LIST_MULTIPART_UPLOADS:
                return listing.list_uploads(request, bucket)
            case Operation.LIST_PARTS:
                return multipart.list_parts(request, bucket)
            case Operation.DELETE_OBJECT:
                return objects.delete_object(request, bucket)
            case Operation.ABORT_MULTIPART_UPLOAD:
                return multipart.abort(request, bucket)
        return self._other(request, bucket, b"")

    async def _write(self, operation: Operation, request: OriginRequest, bucket: Bucket) -> MemoryResponse:
        """Conditions are judged when the body is complete, so the last writer loses where two began alike."""
        keeps_body = self.keep_bodies or operation not in (Operation.PUT_OBJECT, Operation.UPLOAD_PART)
        headers = request.headers
        if operation is Operation.COMPLETE_MULTIPART_UPLOAD:  # its checksums are those of the object
            headers = {name: value for name, value in headers.items() if not name.startswith("x-amz-checksum-")}
        body = await receive(request.body, headers, keep=keeps_body)
        now = self._clock.now()
        data = body.content.read(0, body.content.size_bytes) if request.method == "POST" else b""
        match operation:
            case Operation.PUT_OBJECT:
                return objects.put_object(request, bucket, body, now)
            case Operation.COPY_OBJECT:
                source = objects.copy_source(request, self.buckets)
                return objects.copy_object(request, self.buckets, bucket, _md5(source.content), now)
            case Operation.DELETE_OBJECTS:
                return objects.delete_objects(request, bucket, body, data)
            case Operation.CREATE_MULTIPART_UPLOAD:
                return multipart.create(request, bucket, next(self._upload_orders), now)
            case Operation.UPLOAD_PART:
                return multipart.upload_part(request, bucket, body, now)
            case Operation.UPLOAD_PART_COPY:
                content = multipart.copied_range(request, objects.copy_source(request, self.buckets))
                return multipart.store_copied_part(request, bucket, content, _md5(content), now)
            case Operation.COMPLETE_MULTIPART_UPLOAD:
                return multipart.complete(request, bucket, data)
        return self._other(request, bucket, body.content.read(0, body.content.size_bytes))

    def _other(self, request: OriginRequest, bucket: Bucket, data: bytes) -> MemoryResponse:
        """The few operations that a gateway forwards, enough to see that they arrive."""
        if request.method == "PUT" and "x-amz-rename-source" in request.headers:
            return objects.rename_object(request, bucket)
        if request.key is not None and parameter(request, "tagging") is not None:
            return objects.tagging(request, bucket, data)
        if parameter(request, "acl") is not None:
            return self._acl(request, bucket, data)
        if request.key is None and parameter(request, "versioning") is not None and request.method == "GET":
            return xml_answer("VersioningConfiguration", "")
        setting = setting_of(request)
        if setting is not None:
            return bucket_setting(request, bucket, setting, data)
        if request.key is None and request.method == "DELETE" and not request.query:
            return self._delete_bucket(bucket)
        raise s3_error("NotImplemented")

    def _acl(self, request: OriginRequest, bucket: Bucket, data: bytes) -> MemoryResponse:
        if request.key is not None:
            bucket.object(request.key)
        if request.method == "PUT":
            if data:
                parse_xml(data)
            return MemoryResponse(200)
        return xml_answer("AccessControlPolicy", f"{listing.OWNER}<AccessControlList></AccessControlList>")

    def _delete_bucket(self, bucket: Bucket) -> MemoryResponse:
        if bucket.objects:
            raise s3_error("BucketNotEmpty", BucketName=bucket.name)
        del self.buckets[bucket.name]
        return MemoryResponse(204)

    def _location(self) -> MemoryResponse:
        name = "" if self.region == "us-east-1" else self.region
        body = document("LocationConstraint", name)
        return MemoryResponse(200, {"content-type": "application/xml"}, BytesContent(body))


def _md5(content: Content) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for piece in multipart.pieces_of(content):
        digest.update(piece)
    return digest.hexdigest()


def _altered(headers: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    altered = {**headers, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in altered.items() if changes.get(name, "") is not None}
