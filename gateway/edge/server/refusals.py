"""Answers that the server gives by itself, before or instead of the application: S3 error documents, then close."""

from __future__ import annotations

import os
from collections.abc import Iterable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.errors import S3Error
from gateway.s3.error_codes import error_document, s3_error

Header = tuple[bytes, bytes]


def refusal(error: S3Error) -> tuple[int, list[Header], bytes]:
    """Status, header fields and body of an error answer that ends its connection."""
    request_id = os.urandom(8).hex().upper()
    body = error_document(error, resource="", request_id=request_id, host_id=f"forebay/{request_id}")
    headers = [
        (b"content-type", b"application/xml"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-amz-request-id", request_id.encode()),
        *((name.encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()),
    ]
    return error.status, headers, body


def too_many_connections() -> S3Error:
    return s3_error("SlowDown", "Too many connections are open. Please reduce your request rate.")


def not_encrypted() -> S3Error:
    return s3_error("InvalidRequest", "The plain HTTP request was sent to HTTPS port. Please use https://.")


def refusal_bytes(error: S3Error, default_headers: Iterable[Header], *, without_body: bool) -> bytes:
    """The whole answer as it goes over the wire; `without_body` for HEAD."""
    status, headers, body = refusal(error)
    lines = [b"%s: %s\r\n" % field for field in (*default_headers, *headers)]
    return b"".join((STATUS_LINE[status], *lines, b"\r\n", b"" if without_body else body))
