"""From an exception to what the client is told."""

from __future__ import annotations

import structlog

from gateway.errors import (
    BufferUnavailable,
    OriginAnswered,
    OriginBodyError,
    OriginBusy,
    OriginUnreachable,
    OutcomeUnknown,
    S3Error,
)
from gateway.operations.context import Response
from gateway.rate_limited_log import RateLimitedLog
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.headers import filter_response_headers

_FORBIDDEN = 403

_log = structlog.get_logger("forebay.requests")
_refusals = RateLimitedLog(_log)

_LATER = {"Retry-After": "1"}


def reply_to(error: Exception, request_id: str, resource: str) -> Response:
    """The answer to a request that failed before the head of its answer was sent.

    The origin's own refusals reach the client as they are. What nobody expected is InternalError; the request id finds
    its log line.
    """
    if isinstance(error, OriginAnswered):
        headers = filter_response_headers(dict(error.headers))
        return Response(error.status, [pair for pair in headers if pair[0] != "content-length"], error.body)
    return _document(_as_s3_error(error, request_id), request_id, resource)


def _as_s3_error(error: Exception, request_id: str) -> S3Error:
    if isinstance(error, S3Error):
        if error.status == _FORBIDDEN:
            _refusals.warning("callers are refused", error.code, code=error.code, example=request_id, why=error.message)
        return error
    if isinstance(error, OutcomeUnknown):
        _log.warning("outcome of a write unknown", request_id=request_id, reason=str(error))
        return s3_error("OutcomeUnknown")
    if isinstance(error, OriginBusy):
        _log.warning("origin busy", request_id=request_id, reason=str(error))
        return s3_error("SlowDown", headers=_LATER)
    if isinstance(error, OriginUnreachable):
        _log.warning("origin unreachable", request_id=request_id, reason=str(error))
        return s3_error("ServiceUnavailable", "The origin does not answer. Try again later.", headers=_LATER)
    if isinstance(error, BufferUnavailable):
        _log.warning("write-back buffer unavailable", request_id=request_id, reason=str(error))
        return s3_error("ServiceUnavailable", f"The write-back buffer cannot be used now: {error}")
    if isinstance(error, OriginBodyError):
        _log.warning("origin body refused", request_id=request_id, reason=str(error))
        return s3_error("ServiceUnavailable", "The origin's answer broke off or did not match. Please try again.")
    _log.error("internal error", request_id=request_id, exc_info=error)
    return s3_error("InternalError", f"We encountered an internal error. Its request id is {request_id}.")


def _document(error: S3Error, request_id: str, resource: str) -> Response:
    headers = [(name.lower(), value) for name, value in error.headers.items()]
    if error.status == 304:
        return Response(304, headers)
    body = error_document(error, resource=resource, request_id=request_id, host_id=f"forebay/{request_id}")
    return Response(error.status, [("content-type", "application/xml"), *headers], body)
