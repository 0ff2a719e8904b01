"""The origin refuses the gateway's own key: clients are told that it is not theirs, and operators are told too."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import structlog

from gateway.errors import OriginBodyError
from gateway.origin.client import Origin, OriginRequest, OriginResponse
from gateway.rate_limited_log import RateLimitedLog
from gateway.s3.error_codes import error_document, s3_error

_CODES = frozenset(
    {
        "AccountProblem",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidSecurity",
        "InvalidToken",
        "NotSignedUp",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnrecognizedClientException",
    }
)
"""They are about the key that a request is signed with, which is always the gateway's."""

_CODE = re.compile(rb"<Code>\s*+([A-Za-z]{1,64})\s*+</Code>")
_DOCUMENT_BYTES_MAX = 64 * 1024

_log = RateLimitedLog(structlog.get_logger("forebay.origin"))


def refusal_of_own_key(status: int, document: bytes) -> str | None:
    """The code by which the origin refuses the key that the request was signed with; None for every other answer."""
    if status not in (400, 401, 403):
        return None
    found = _CODE.search(document)
    code = found[1].decode() if found is not None else ""
    return code if code in _CODES else None


class OwnKeyOrigin:
    """An origin whose refusals of the gateway's key are told as such.

    A client that reads `InvalidAccessKeyId: check your key` looks for the mistake where it is not. HEAD has no error
    document: there only the status is told.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    async def send(self, request: OriginRequest) -> OriginResponse:
        """As `Origin.send`."""
        response = await self._origin.send(request)
        if response.status not in (400, 401, 403) or request.method == "HEAD":
            return response
        async with response:
            try:
                document = await response.read(_DOCUMENT_BYTES_MAX)
            except OriginBodyError:
                document = b""
        code = refusal_of_own_key(response.status, document)
        if code is None:
            headers = {**response.headers, "content-length": str(len(document))}
            return _WholeResponse(response.status, headers, document)
        _log.error("the origin refuses the gateway's own key", code, code=code, status=response.status)
        told = s3_error(
            "AccessDenied",
            f"The origin refuses the key of this gateway ({code}). Your own key and signature are good: tell whoever "
            "runs the gateway.",
        )
        body = error_document(told, resource="", request_id="", host_id="forebay")
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        headers |= {"content-type": "application/xml", "content-length": str(len(body))}
        return _WholeResponse(403, headers, body)

    async def aclose(self) -> None:
        await self._origin.aclose()


class _WholeResponse:
    """An `OriginResponse` whose body is here."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[bytes | memoryview]:
        body, self._body = self._body, b""
        if body:
            yield body

    def whole(self) -> memoryview | None:
        return None

    async def read(self, limit_bytes: int) -> bytes:
        body, self._body = self._body, b""
        if len(body) > limit_bytes:
            raise OriginBodyError(f"the origin's answer is longer than {limit_bytes} bytes")
        return body

    async def aclose(self) -> None:
        return

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
