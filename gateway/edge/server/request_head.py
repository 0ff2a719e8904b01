"""What a request head must look like beyond what the parser checks (RFC 9112, 3 and 6). Pure.

Everything here decides where a message ends or whom it is for, so it is strict: what two implementations could read
differently is refused, and the connection closed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import S3Error
from gateway.s3.error_codes import s3_error

FRAMING_HEADERS = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect"))
"""The fields that `body_length`, `check_host` and `expects_continue` look at."""

HEAD_END = b"\r\n\r\n"

_VERSIONS = {b" HTTP/1.1\r\n": "1.1", b" HTTP/1.0\r\n": "1.0"}

_FRAGMENT = ord("#")
"""A number is found in bytes at a tenth of what looking for bytes costs."""

MAX_BODY_BYTES = 2**63 - 1

_ABSOLUTE = re.compile(rb"https?://([^/?]*+)([^?]*+)(?:\?(.*+))?", re.IGNORECASE | re.DOTALL)
_REQUEST_LINE = re.compile(rb"[A-Z-]+ [^ ]+ HTTP/1\.[01]\Z")
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class Target:
    """The request target as bytes of the wire, undecoded. `authority` is None unless the form was absolute."""

    raw_path: bytes
    raw_query: bytes
    authority: bytes | None = None


def bad_request(message: str = "An error occurred when parsing the HTTP request.") -> S3Error:
    """S3's answer to what is no HTTP request."""
    return s3_error("BadRequest", message, status=400)


def header_section_too_large(max_bytes: int) -> S3Error:
    return s3_error("RequestHeaderSectionTooLarge", MaxSizeAllowed=str(max_bytes))


def parse_target(method: str, target: bytes) -> Target:
    """Split a request target (RFC 9112, 3.2); InvalidURI for the authority form, a fragment or user information."""
    if _FRAGMENT in target:
        raise s3_error("InvalidURI", "The request target must not have a fragment; encode '#' as %23.")
    if target[:1] == b"/":
        raw_path, _, raw_query = target.partition(b"?")
        return Target(raw_path, raw_query)
    if target == b"*" and method == "OPTIONS":
        return Target(b"*", b"")
    return _absolute_form(target)


def _absolute_form(target: bytes) -> Target:
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise s3_error("InvalidURI")
    authority, raw_path, raw_query = match.groups(b"")
    if not authority or b"@" in authority:
        raise s3_error("InvalidURI", "The authority of the request target is not valid.")
    return Target(raw_path or b"/", raw_query, authority)


def http_version(head: bytes, method: str, target: bytes) -> str:
    """`1.0` or `1.1`; S3Error when the request line is anything but `METHOD SP TARGET SP VERSION CRLF`."""
    line = b"%b %b" % (method.encode(), target)
    version_at = len(line)
    version = _VERSIONS.get(head[version_at : version_at + 11])
    if version is None or head[:version_at] != line:
        raise bad_request()
    return version


def check_host(framing: Headers, http_version: str) -> None:
    """HTTP/1.1 has exactly one Host field, HTTP/1.0 at most one (RFC 9112, 3.2)."""
    count = sum(name == b"host" for name, _ in framing)
    if count > 1 or (count == 0 and http_version == "1.1"):
        raise bad_request("The request must have exactly one Host header.")


def body_length(framing: Headers, http_version: str) -> int | None:
    """Bytes of the request body; None when it comes in chunks (RFC 9112, 6.3)."""
    lengths = [value for name, value in framing if name == b"content-length"]
    codings = [value for name, value in framing if name == b"transfer-encoding"]
    if codings:
        _check_chunked(codings, lengths, http_version)
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 19 or int(lengths[0]) > MAX_BODY_BYTES:
        raise bad_request("The Content-Length header is not valid.")
    return int(lengths[0])


def _check_chunked(codings: list[bytes], lengths: list[bytes], http_version: str) -> None:
    if lengths:
        raise bad_request("A request must not have both Content-Length and Transfer-Encoding.")
    if len(codings) > 1 or codings[0].lower() != b"chunked" or http_version != "1.1":
        raise bad_request("The only transfer coding understood is 'chunked'.")


def expects_continue(framing: Headers, http_version: str) -> bool:
    """Does the client hold the body back until it has seen `100 Continue` (RFC 9110, 10.1.1)?"""
    return http_version == "1.1" and any(
        name == b"expect" and value.lower() == b"100-continue" for name, value in framing
    )


def check_incomplete_head(received: bytes, max_bytes: int) -> None:
    """Refuse at once what can never become a request, rather than wait for the rest until the timeout."""
    if len(received) > max_bytes:
        raise header_section_too_large(max_bytes)
    if received and not received[:1].isalpha() and received != b"\r":
        raise bad_request()
    if _BARE_LINE_FEED.search(received):
        raise bad_request("Lines must end with CRLF.")
    request_line, line_end, _ = received.partition(b"\r\n")
    if line_end and not _REQUEST_LINE.match(request_line):
        raise bad_request()
