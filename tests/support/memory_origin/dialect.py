"""What stores do in another way than S3, at `MemoryOrigin`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway.core.errors import S3Error
from gateway.origin.client import OriginRequest
from gateway.s3.error_codes import s3_error
from tests.support.memory_origin.response import MemoryResponse


@dataclass(slots=True)
class Dialect:
    """Attributes may be changed at any time."""

    encodes_keys: bool = True
    """Whether it knows `encoding-type=url`; else keys are listed as they are, and no `EncodingType` is named."""

    knows_ranges: bool = True
    """Whether it knows `Range`; else it answers 200 with the whole object."""

    has_weak_etags: bool = False
    """Whether ETags in headers are weak (`W/"..."`): If-Match never holds for them (RFC 9110, 13.1.1)."""

    def understood(self, request: OriginRequest) -> OriginRequest:
        """The request without what the origin does not know."""
        if not self.encodes_keys:
            request = replace(request, query=[pair for pair in request.query if pair[0] != "encoding-type"])
        if not self.knows_ranges and request.method in ("GET", "HEAD"):
            request = replace(request, headers={k: v for k, v in request.headers.items() if k != "range"})
        return request

    def refusal(self, request: OriginRequest) -> S3Error | None:
        """Why it is refused; None: it is not."""
        if self.has_weak_etags and request.headers.get("if-match", "").startswith("W/"):
            return s3_error("PreconditionFailed", Condition="If-Match")
        return None

    def spoken(self, request: OriginRequest, response: MemoryResponse) -> MemoryResponse:
        """The answer as this origin gives it."""
        headers: Mapping[str, str] = response.headers
        if request.key is not None and response.status < 400 and "etag" in headers:
            headers = {**headers, "etag": f"W/{headers['etag']}" if self.has_weak_etags else headers["etag"]}
        if not self.knows_ranges:
            headers = {name: value for name, value in headers.items() if name != "accept-ranges"}
        response.headers = dict(headers)
        return response
