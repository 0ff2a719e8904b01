"""Turns exceptions into answers for clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from gateway.core.errors import (
    BufferUnavailable,
    CredentialsUnavailable,
    OriginAnswered,
    OriginBodyError,
    OriginBusy,
    OriginUnreachable,
    OutcomeUnknown,
    S3Error,
)
from gateway.operations.context import Response
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.headers import filter_response_headers
from gateway.s3.xml import error_code_of, text_of
from gateway.telemetry.logs import RateLimitedLog

_FORBIDDEN = 403

_log = structlog.get_logger("forebay.requests")
_refusals = RateLimitedLog(_log)

_LATER = {"Retry-After": "1"}


def reply_to(error: Exception, request_id: str, resource: str) -> Response:
    """Return the answer to a request that failed before the head of its answer was sent.

    The origin's own refusals reach the client as they are. An unexpected error is InternalError; the request id finds
    its log line.
    """
    if isinstance(error, OriginAnswered):
        headers = filter_response_headers(dict(error.headers))
        own = [pair for pair in headers if pair[0] != "content-length"]
        if not error.body and error.status >= 429:  # to a HEAD, which has no document: a GET gets one
            return _document(s3_error_of(error), request_id, resource, [p for p in own if p[0] != "content-type"])
        return Response(error.status, own, error.body, error_code=error_code_of(error.body))
    _log_failure(error, request_id)
    return _document(s3_error_of(error), request_id, resource)


def s3_error_of(error: Exception) -> S3Error:
    """Return the S3 error for a failure; InternalError for an unexpected one.

    For the origin's own refusal, return its code and message, for answers that need a document.
    """
    match error:
        case S3Error():
            return error
        case OriginAnswered():
            code = error_code_of(error.body) or _CODES_OF_HEADS.get(error.status, "ServiceUnavailable")
            return S3Error(code, text_of(error.body, "Message") or str(error), error.status)
        case OutcomeUnknown():
            return s3_error("OutcomeUnknown")
        case OriginBusy():
            return s3_error("SlowDown", headers=_LATER)
        case CredentialsUnavailable():
            return s3_error("ServiceUnavailable", "The gateway has no key to ask the origin with now.", headers=_LATER)
        case OriginUnreachable():
            return s3_error("ServiceUnavailable", "The origin does not answer. Try again later.", headers=_LATER)
        case BufferUnavailable():
            return s3_error("ServiceUnavailable", f"The write-back buffer cannot be used now: {error}")
        case OriginBodyError():
            return s3_error("ServiceUnavailable", "The origin's answer broke off or did not match. Please try again.")
    return s3_error("InternalError")


_CODES_OF_HEADS = {
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    412: "PreconditionFailed",
    429: "SlowDown",
    503: "SlowDown",
}
"""Codes for answers to HEAD, which have no document."""


def _log_failure(error: Exception, request_id: str) -> None:
    if isinstance(error, S3Error):
        if error.status == _FORBIDDEN:
            _refusals.warning("callers are refused", error.code, code=error.code, example=request_id, why=error.message)
        return
    for kind, event in _EXPECTED.items():
        if isinstance(error, kind):
            _log.warning(event, request_id=request_id, reason=str(error))
            return
    _log.error("internal error", request_id=request_id, exc_info=error)


_EXPECTED: Mapping[type[Exception], str] = {
    OutcomeUnknown: "outcome of a write unknown",
    OriginBusy: "origin busy",
    CredentialsUnavailable: "no key to ask the origin with",
    OriginUnreachable: "origin unreachable",
    BufferUnavailable: "write-back buffer unavailable",
    OriginBodyError: "origin body refused",
}
"""Log events for expected errors: the first class that fits counts."""


def _document(error: S3Error, request_id: str, resource: str, of_origin: Sequence[tuple[str, str]] = ()) -> Response:
    headers = [*of_origin, *((name.lower(), value) for name, value in error.headers.items())]
    if error.status == 304:
        return Response(304, headers, error_code=error.code)
    body = error_document(error, resource=resource, request_id=request_id, host_id=f"forebay/{request_id}")
    return Response(error.status, [("content-type", "application/xml"), *headers], body, error_code=error.code)
