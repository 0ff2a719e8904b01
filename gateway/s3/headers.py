"""Which headers travel on, from the client to the origin and back, and which are stored with an object.

HeadObject says of an object what PutObject or CreateMultipartUpload has said of it (S3 API, pages of those names).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.errors import S3Error


class EncodedHeaders(NamedTuple):
    """Headers as they go onto the wire, made once for many answers: as pairs, and as the lines of a response head."""

    pairs: tuple[tuple[bytes, bytes], ...]
    lines: bytes

    @classmethod
    def of(cls, headers: Iterable[tuple[str, str]]) -> EncodedHeaders:
        """Of lower-case names and latin-1 values, none of them about the body's length or the connection.

        ValueError when a value has a line break or NUL in it: it could forge an answer.
        """
        pairs = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers)
        lines = b"".join(b"%b: %b\r\n" % pair for pair in pairs)
        if lines.count(b"\r") != len(pairs) or lines.count(b"\n") != len(pairs) or b"\0" in lines:
            raise ValueError("a header field has a line break or NUL in it")
        return cls(pairs, lines)


NO_HEADERS = EncodedHeaders((), b"")

HOP_BY_HOP = frozenset(
    {
        "connection",
        "expect",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, 7.6.1: they are about one connection. `expect` is answered by whoever receives it."""

_END_TO_END = ("x-amz-", "x-forebay-", "content-", "if-", "range", "cache-control", "expires")
"""Beginnings of field names that S3, or a gateway behind this one, goes by."""

_SET_ANEW_FOR_THE_ORIGIN = HOP_BY_HOP | {
    "authorization",
    "content-length",
    "date",
    "host",
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-decoded-content-length",
    "x-amz-security-token",
    "x-amz-trailer",
}
"""What belongs to the client's own signature and framing; the origin gets ours."""

_SET_ANEW_FOR_THE_CLIENT = HOP_BY_HOP | {"date", "server", "x-amz-id-2", "x-amz-request-id"}


def filter_request_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Every header of the client's request that goes along, unknown ones too.

    `aws-chunked` leaves Content-Encoding: it described the body on the wire, and must not be stored with the object.
    """
    dropped = _SET_ANEW_FOR_THE_ORIGIN | _named_in_connection(headers)
    onward = {name: value for name, value in headers.items() if name not in dropped}
    if "aws-chunked" in onward.get("content-encoding", "").lower():
        codings = [coding.strip() for coding in onward.pop("content-encoding").split(",")]
        kept = ",".join(coding for coding in codings if coding.lower() != "aws-chunked" and coding)
        if kept:
            onward["content-encoding"] = kept
    return onward


def filter_response_headers(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Every header of the origin's answer that goes along; its request id under a name of its own."""
    onward = [(name, value) for name, value in headers.items() if name not in _SET_ANEW_FOR_THE_CLIENT]
    if "x-amz-request-id" in headers:
        onward.append(("x-forebay-origin-request-id", headers["x-amz-request-id"]))
    return onward


_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def sendable(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Latin-1 text to text whose UTF-8 has the same bytes; S3Error InvalidArgument where there is none.

    S3 itself takes header values in UTF-8 only.
    """
    if (text := "".join(headers.values())).isascii() and text.isprintable():
        return headers
    return {
        name: value if value.isascii() and value.isprintable() else _as_utf8(name, value)
        for name, value in headers.items()
    }


def _as_utf8(name: str, value: str) -> str:
    try:
        text = value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise _unsendable(name, "Header values must be valid UTF-8.") from None
    if _CONTROL.search(text):
        raise _unsendable(name, "Header values must not hold control characters.")
    return text


def _unsendable(name: str, message: str) -> S3Error:
    return S3Error("InvalidArgument", message, 400, elements={"ArgumentName": name})


def without(headers: Iterable[tuple[str, str]], *names: str) -> list[tuple[str, str]]:
    """The headers less those named."""
    return [(name, value) for name, value in headers if name not in names]


def _named_in_connection(headers: Mapping[str, str]) -> set[str]:
    """Fields for this connection only. Those that mean something to S3 never are (RFC 9110, 7.6.1): `Connection` is
    not signed, so that it must not take from a request what was signed, authorised and verified.
    """
    names = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return {name for name in names if not name.startswith(_END_TO_END)}


DEFAULT_CONTENT_TYPE = "binary/octet-stream"

_KEPT = frozenset(
    {
        "cache-control",
        "content-disposition",
        "content-encoding",
        "content-language",
        "content-type",
        "expires",
        "x-amz-object-lock-legal-hold",
        "x-amz-object-lock-mode",
        "x-amz-object-lock-retain-until-date",
        "x-amz-server-side-encryption",
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-server-side-encryption-bucket-key-enabled",
        "x-amz-website-redirect-location",
    }
)

_METADATA = "x-amz-meta-"


def stored_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of the answer that follow from the request's, lower-case names; all but those about the bytes."""
    stored = {"content-type": DEFAULT_CONTENT_TYPE}
    stored |= {name: value for name, value in headers.items() if name in _KEPT or name.startswith(_METADATA)}
    storage_class = headers.get("x-amz-storage-class", "STANDARD")
    if storage_class != "STANDARD":
        stored["x-amz-storage-class"] = storage_class
    tags = [tag for tag in headers.get("x-amz-tagging", "").split("&") if tag]
    if tags:
        stored["x-amz-tagging-count"] = str(len(tags))
    return stored
