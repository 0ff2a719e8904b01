"""Stores that are nearly S3, for the strict origin: each behaves as its own documents say, and as others saw it behave.

Written apart from the gateway's table on purpose. Sources are named there; none of this was compared with a real store.

    with StrictOrigin() as origin:
        origin.dialects = {"oss-cn-hangzhou.aliyuncs.com": OSS}
        # requests with this host, or a bucket before it, get that store
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gateway.core.errors import S3Error
from gateway.origin.client import OriginRequest
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import Operation, classify, split_path
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import StoredObject
from tests.support.strict_signatures import RawHeaders

_WRITES = frozenset(
    {
        Operation.PUT_OBJECT,
        Operation.COPY_OBJECT,
        Operation.COMPLETE_MULTIPART_UPLOAD,
        Operation.DELETE_OBJECT,
    }
)
_GENERATION = "x-goog-if-generation-match"


@dataclass(slots=True)
class StrictDialect:
    """A store. `path_refusal`: the code by which it refuses path style. `conditions`: what it makes of S3's on writes.

    `forbid`: its header that forbids to overwrite, with the code of its 409. `has_own_etags`: of objects of parts.
    """

    families: tuple[str, ...] = ("AWS4",)
    path_refusal: str | None = None
    takes_checksums: bool = True
    conditions: str = "honoured"
    forbid: tuple[str, str] | None = None
    copy_conditions: str = ""
    lists_uploads: bool = True
    unknown: frozenset[str] = frozenset()
    has_own_etags: bool = False
    is_google: bool = False
    request_id: str = "x-amz-request-id"
    _generations: dict[tuple[str, str], tuple[StoredObject, int]] = field(default_factory=dict)
    _count: int = 1000

    def at_front(self, headers: RawHeaders) -> RawHeaders:
        """What the signature is verified over: Google's front end says that it, too, takes gzip."""
        if not self.is_google:
            return headers
        return [(name, value + b",gzip(gfe)" if name == b"accept-encoding" else value) for name, value in headers]

    def place(self, host: str, own_host: str, raw_path: bytes) -> tuple[str | None, str | None]:
        """Bucket and key of a request to the store at `own_host`."""
        bucket = host.removesuffix(own_host).removesuffix(".") or None
        found = split_path(raw_path, bucket)
        if self.path_refusal is not None and bucket is None and found[0] is not None:
            raise S3Error(self.path_refusal, "virtual-hosted style, please", 403)
        return found

    def check_headers(self, headers: Mapping[str, str]) -> None:
        """What the store does not take, whoever signed it."""
        amz = any(name.startswith("x-amz-") for name in headers)
        if self.is_google and amz and any(name.startswith("x-goog-") for name in headers):
            raise S3Error("ExcessHeaderValues", "Requests cannot specify both x-amz and x-goog headers", 400)
        if self.takes_checksums:
            return
        if "x-amz-trailer" in headers or "aws-chunked" in headers.get("content-encoding", ""):
            raise s3_error("InvalidArgument", "aws-chunked encoding is not supported")
        found = [name for name in headers if name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum-"))]
        if found:
            raise s3_error("InvalidArgument", f"Unsupported header '{found[0]}' received for this API call.")

    def understood(self, request: OriginRequest, model: MemoryOrigin) -> OriginRequest:
        """The request as S3 would have it; S3Error for what the store refuses."""
        if unknown := {name for name, _ in request.query} & self.unknown:
            raise s3_error("InvalidArgument", f"{unknown} is not known")
        if (
            not self.lists_uploads
            and request.key is None
            and ("uploads", None) in [(n, None) for n, _ in request.query]
        ):
            raise s3_error("NotImplemented", "A header you provided implies functionality that is not implemented.")
        headers = {
            f"x-amz-{name.removeprefix('x-goog-')}" if self._is_renamed(name) else name: value
            for name, value in request.headers.items()
        }
        operation = classify(request.method, request.bucket, request.key, request.query, headers)
        generation = headers.pop(_GENERATION, None)
        if generation is not None and operation is Operation.CREATE_MULTIPART_UPLOAD:
            raise s3_error("NotImplemented")
        if operation in _WRITES:
            headers = self._with_conditions(request, headers, operation, generation, model)
        return replace(request, headers=headers)

    def _is_renamed(self, name: str) -> bool:
        return self.is_google and name.startswith("x-goog-") and name != _GENERATION

    def _with_conditions(
        self,
        request: OriginRequest,
        headers: dict[str, str],
        operation: Operation,
        generation: str | None,
        model: MemoryOrigin,
    ) -> dict[str, str]:
        names: list[str] = ["if-match", "if-none-match"]
        stated = {name: headers.pop(name) for name in names if name in headers}
        if stated and self.conditions == "refused":
            raise s3_error("NotImplemented", "conditional writes")
        if operation is Operation.COPY_OBJECT and self.copy_conditions:
            stated = {name: headers[own] for name in names if (own := f"{self.copy_conditions}{name}") in headers}
        elif self.conditions == "ignored":
            stated = {}
        if self.forbid is not None and headers.get(self.forbid[0]) == "true":
            stated["if-none-match"] = "*"
        if generation is not None and operation is not Operation.COMPLETE_MULTIPART_UPLOAD:
            stated = {"if-none-match": "*"} if generation == "0" else {"if-match": self._of(request, generation, model)}
        return headers | stated

    def _of(self, request: OriginRequest, generation: str, model: MemoryOrigin) -> str:
        """The ETag of that generation, which the store compares when the body is there."""
        stored = self._stored(request, model)
        if stored is None or str(self._generation(request, stored)) != generation:
            raise s3_error("PreconditionFailed", Condition=_GENERATION)
        return stored.etag

    def _stored(self, request: OriginRequest, model: MemoryOrigin) -> StoredObject | None:
        bucket = model.buckets.get(request.bucket or "")
        return bucket.objects.get(request.key or "") if bucket is not None else None

    def _generation(self, request: OriginRequest, stored: StoredObject) -> int:
        """The number of this object: another one has another, also where its bytes are the same."""
        at = (request.bucket or "", request.key or "")
        known = self._generations.get(at)
        if known is None or known[0] is not stored:
            self._count += 1
            known = self._generations[at] = (stored, self._count)
        return known[1]

    def answered(self, asked: OriginRequest, response: MemoryResponse, model: MemoryOrigin) -> MemoryResponse:
        """The answer as the store gives it; `asked` as it came."""
        headers = dict(response.headers)
        body = response.content.read(0, response.content.size_bytes) if response.status >= 300 else b""
        if self.forbid is not None and b"<Code>PreconditionFailed</Code>" in body and self.forbid[0] in asked.headers:
            response.status, body = 409, body.replace(b"PreconditionFailed", self.forbid[1].encode())
            response.content = BytesContent(body)
            headers["content-length"] = str(len(body))
        headers[self.request_id] = headers.pop("x-amz-request-id", "1")
        stored = self._stored(asked, model)
        if self.has_own_etags and asked.method == "POST" and response.status == 200 and stored is not None:
            self._name_anew(asked, response, stored, model)
            headers["content-length"] = str(response.content.size_bytes)
        if self.is_google and stored is not None and response.status < 300:
            headers["x-goog-generation"] = str(self._generation(asked, stored))
            if asked.method in ("GET", "HEAD"):
                self._transcode(asked, response, stored, headers)
        if self.is_google and any(name.startswith("x-goog-") for name in asked.headers):
            headers = {name.replace("x-amz-", "x-goog-", 1): value for name, value in headers.items()}
        response.headers = headers
        return response

    def _name_anew(
        self, asked: OriginRequest, response: MemoryResponse, stored: StoredObject, model: MemoryOrigin
    ) -> None:
        """An ETag of an object of parts is the store's own."""
        if not any(name == "uploadId" for name, _ in asked.query) or stored.etag.startswith('"own'):
            return
        etag = f'"own{hashlib.sha1(stored.etag.encode(), usedforsecurity=False).hexdigest()}"'
        model.buckets[asked.bucket or ""].put(replace(stored, etag=etag))
        body = response.content.read(0, response.content.size_bytes)
        plain = stored.etag.strip('"').encode()
        response.content = BytesContent(body.replace(plain, etag.strip('"').encode()))

    def _transcode(
        self, asked: OriginRequest, response: MemoryResponse, stored: StoredObject, headers: dict[str, str]
    ) -> None:
        """What is stored with gzip comes decompressed to whoever does not take it, and a HEAD tells no length of it."""
        headers["x-goog-stored-content-length"] = str(stored.size_bytes)
        if headers.get("content-encoding") != "gzip":
            return
        headers.pop("content-length", None)
        if asked.method == "GET" and "gzip" not in asked.headers.get("accept-encoding", ""):
            response.status = 200
            response.content = BytesContent(gzip.decompress(stored.content.read(0, stored.size_bytes)))
            for name in ("content-encoding", "content-range"):
                headers.pop(name, None)
        elif asked.method == "GET":
            headers["content-length"] = str(response.content.size_bytes)


S3 = StrictDialect()
_CHINESE: Mapping[str, object] = {"takes_checksums": False, "conditions": "ignored", "has_own_etags": True}


def strict_dialects() -> dict[str, StrictDialect]:
    """New stores, by host."""
    forbid = {
        "oss": ("x-oss-forbid-overwrite", "FileAlreadyExists"),
        "cos": ("x-cos-forbid-overwrite", "FileAlreadyExists"),
        "obs": ("x-obs-forbid-overwrite", "ObjectAlreadyExists"),
    }
    return {
        "storage.googleapis.com": StrictDialect(
            families=("AWS4", "GOOG4"),
            takes_checksums=False,
            conditions="ignored",
            has_own_etags=True,
            is_google=True,
            request_id="x-guploader-uploadid",
        ),
        "oss-cn-hangzhou.aliyuncs.com": StrictDialect(
            path_refusal="SecondLevelDomainForbidden",
            forbid=forbid["oss"],
            lists_uploads=False,
            request_id="x-oss-request-id",
            **_CHINESE,  # type: ignore[arg-type]
        ),
        "cos.ap-beijing.myqcloud.com": StrictDialect(
            path_refusal="PathStyleDomainForbidden",
            forbid=forbid["cos"],
            request_id="x-cos-request-id",
            **_CHINESE,  # type: ignore[arg-type]
        ),
        "obs.cn-north-4.myhuaweicloud.com": StrictDialect(
            path_refusal="NoSuchKey",
            forbid=forbid["obs"],
            request_id="x-obs-request-id",
            **_CHINESE,  # type: ignore[arg-type]
        ),
        "s3.bj.bcebos.com": StrictDialect(
            unknown=frozenset({"fetch-owner"}),
            request_id="x-bce-request-id",
            **_CHINESE,  # type: ignore[arg-type]
        ),
        "tos-s3-cn-beijing.volces.com": StrictDialect(
            path_refusal="InvalidPathAccess",
            request_id="x-tos-request-id",
            **_CHINESE,  # type: ignore[arg-type]
        ),
        "0123456789abcdef.r2.cloudflarestorage.com": StrictDialect(
            copy_conditions="cf-copy-destination-", has_own_etags=True
        ),
        "s3.eu-central-003.backblazeb2.com": StrictDialect(takes_checksums=False, conditions="refused"),
    }
