"""A small S3 in this process: the fake that behaves, for tests, with faults on demand.

`MemoryOrigin` answers what S3 answers, headers and error documents included: the product's `StoreOrigin` over a store
in memory, judged by the tests' own rules. Beside the protocol it shows its state (`buckets`), what it was asked
(`calls`), and takes faults (`faults`, see faults.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from urllib.parse import unquote

from gateway.core.clock import Clock
from gateway.core.errors import OriginUnreachable, S3Error
from gateway.core.model import ByteRange
from gateway.origin.client import OriginRequest
from gateway.origin.stores.face import StoreOrigin
from gateway.origin.stores.listing import parameter
from gateway.origin.stores.response import StoreResponse, xml_answer
from gateway.origin.stores.store import OWNER, Found
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.headers import format_http_date
from gateway.s3.requests import Operation, classify
from gateway.s3.xml_writer import document
from tests.support.memory_origin.conditions import asked_range, check_copy_source, check_read, check_write
from tests.support.memory_origin.content import BytesContent, Content, GeneratedContent
from tests.support.memory_origin.dialect import Dialect
from tests.support.memory_origin.digests import BodyDigests
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
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.settings import bucket_setting, parse_xml, setting_of
from tests.support.memory_origin.store import Bucket, MemoryStore, StoredObject

_LEFT_OUT = frozenset({"content-length", "x-amz-request-id"})
"""Headers that an answer lacks where a fault makes them empty."""

Policy = Callable[[OriginRequest], S3Error | None]
"""Why a request is refused; None: it is not."""


class _Judge:
    """`Judge` by rules that are written apart from the gateway's own: a mistake in one is found by the other."""

    def may_read(self, headers: Mapping[str, str], found: Found) -> bool:
        return check_read(headers, found.etag, found.modified)

    def check_copy_source(self, headers: Mapping[str, str], found: Found) -> None:
        check_copy_source(headers, found.etag, found.modified)

    def check_write(self, headers: Mapping[str, str], etag: str | None) -> None:
        check_write(headers, etag)

    def asked_range(self, headers: Mapping[str, str], found: Found) -> ByteRange | None:
        return asked_range(headers, found)

    def digests(self, request: OriginRequest, *, of_body: bool) -> BodyDigests:
        return BodyDigests(request, of_body=of_body)


class _Face(StoreOrigin):
    """`StoreOrigin` with the few operations besides that a gateway forwards, enough to see that they arrive."""

    def __init__(self, store: MemoryStore, clock: Clock, region: str) -> None:
        super().__init__(store, clock, name="origin", judge=_Judge())
        self._memory = store
        self.region = region
        self._clock = clock

    async def answer(self, request: OriginRequest) -> StoreResponse:
        operation = classify(request.method, request.bucket, request.key, request.query, request.headers)
        if request.bucket is not None and operation is Operation.CREATE_BUCKET:
            return self._create_bucket(request.bucket)
        if request.bucket is not None:
            bucket = self._memory.bucket(request.bucket)
            if operation is Operation.HEAD_BUCKET:
                return StoreResponse(200, {"x-amz-bucket-region": self.region})
            if operation is Operation.GET_BUCKET_LOCATION:
                return xml_answer_of("LocationConstraint", "" if self.region == "us-east-1" else self.region)
            if (answer := await self._beyond(request, bucket)) is not None:
                return answer
        return await super().answer(replace(request, takes_rows=False))  # as every S3, it gives documents

    def check_kept(self, headers: Mapping[str, str], key: object) -> None:
        """Memory drops nothing that a test would miss."""

    def _create_bucket(self, name: str) -> StoreResponse:
        if name in self._memory.by_name:
            raise s3_error("BucketAlreadyOwnedByYou", BucketName=name)
        self._memory.by_name[name] = Bucket(name, self._clock.now())
        return StoreResponse(200, {"location": f"/{name}"})

    async def _beyond(self, request: OriginRequest, bucket: Bucket) -> StoreResponse | None:
        if request.method == "PUT" and "x-amz-rename-source" in request.headers:
            return _rename(request, bucket)
        if request.key is not None and parameter(request, "tagging") is not None:
            return _tagging(request, bucket, await self.document(request))
        if parameter(request, "acl") is not None:
            return _acl(request, bucket, await self.document(request))
        if request.key is None and parameter(request, "versioning") is not None and request.method == "GET":
            return xml_answer("VersioningConfiguration", "")
        setting = setting_of(request)
        if setting is not None:
            return bucket_setting(request, bucket, setting, await self.document(request))
        if request.key is None and request.method == "DELETE" and not request.query:
            if bucket.objects:
                raise s3_error("BucketNotEmpty", BucketName=bucket.name)
            del self._memory.by_name[bucket.name]
            return StoreResponse(204)
        return None


class MemoryOrigin:
    """`Origin` in memory. `keep_bodies` False hashes what is uploaded and throws it away: size and ETag stay."""

    def __init__(self, clock: Clock, *, region: str = "us-east-1", keep_bodies: bool = True) -> None:
        self.store = MemoryStore(clock, keep_bodies=keep_bodies)
        self.buckets = self.store.by_name
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.policies: dict[str, Policy] | None = None
        """What callers may do, by access key id, to requests in their own name; None: everything."""
        self.dialect = Dialect()
        self._face = _Face(self.store, clock, region)
        self._clock = clock
        self._numbers = count(1)

    @property
    def region(self) -> str:
        return self._face.region

    @region.setter
    def region(self, region: str) -> None:
        self._face.region = region

    def set_clock(self, clock: Clock) -> None:
        """Go by another clock from now on."""
        self._clock = self._face.clock = self.store._clock = clock

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
        if refusal := self.dialect.refusal(request):
            return self._error(refusal, request)
        return MemoryResponse.of(await self._face.send(request), request.method)

    def _error(self, error: S3Error, request: OriginRequest | None) -> MemoryResponse:
        resource = f"/{request.bucket or ''}/{request.key or ''}" if request else ""
        body = error_document(error, resource=resource, request_id=f"origin-{len(self.calls)}", host_id="origin")
        headers = {"content-type": "application/xml"} | {name.lower(): value for name, value in error.headers.items()}
        headers["content-length"] = str(len(body))
        headers["x-amz-request-id"] = f"ORIGIN-{len(self.calls)}"
        headers["date"] = format_http_date(self._clock.now())
        return MemoryResponse(error.status, headers, BytesContent(body), request is None or request.method != "HEAD")

    def _finish(self, request: OriginRequest, response: MemoryResponse) -> MemoryResponse:
        headers = dict(response.headers)
        if request.method == "HEAD":
            response.with_body = False
            if response.status >= 300:
                headers.pop("content-length", None)
        bucket = self.buckets.get(request.bucket or "")
        if bucket is not None and bucket.is_kms and request.key is not None and response.status == 200:
            headers.setdefault("x-amz-server-side-encryption", "aws:kms")
        response.headers = {name: value for name, value in headers.items() if value or name not in _LEFT_OUT}
        return response


def xml_answer_of(root: str, text: str) -> StoreResponse:
    return StoreResponse(200, {"content-type": "application/xml"}, document(root, text))


def _rename(request: OriginRequest, bucket: Bucket) -> StoreResponse:
    """RenameObject: nothing but the key changes. Sources are named `/bucket/key` or by the key alone."""
    named = unquote(request.headers["x-amz-rename-source"])
    source = bucket.object(named.removeprefix(f"/{bucket.name}/"))
    prefix = "x-amz-rename-source-"
    check_write(
        {name.removeprefix(prefix): value for name, value in request.headers.items() if name.startswith(prefix)},
        source.etag,
    )
    key = request.key or ""
    check_write(request.headers, bucket.etag_of(key))
    bucket.remove(source.key)
    bucket.put(replace(source, key=key))
    return StoreResponse(200)


def _tagging(request: OriginRequest, bucket: Bucket, data: bytes) -> StoreResponse:
    """GetObjectTagging, PutObjectTagging, DeleteObjectTagging."""
    stored = bucket.object(request.key or "")
    if request.method == "GET":
        empty = document("Tagging", "<TagSet></TagSet>")
        return StoreResponse(200, {"content-type": "application/xml"}, stored.tagging or empty)
    if request.method == "PUT":
        parse_xml(data)
    bucket.put(replace(stored, tagging=data if request.method == "PUT" else None))
    return StoreResponse(200 if request.method == "PUT" else 204)


def _acl(request: OriginRequest, bucket: Bucket, data: bytes) -> StoreResponse:
    if request.key is not None:
        bucket.object(request.key)
    if request.method == "PUT":
        if data:
            parse_xml(data)
        return StoreResponse(200)
    return xml_answer("AccessControlPolicy", f"{OWNER}<AccessControlList></AccessControlList>")


def _altered(headers: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    altered = {**headers, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in altered.items() if changes.get(name, "") is not None}
