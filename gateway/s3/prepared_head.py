"""Prepared heads: a client repeats the same head, apart from target, date, signature and a few values.

As databases prepare statements, so this prepares heads. One that has gone the whole way, parsed and authenticated, is
cut where its variable values stand, and its canonical request (S3 API, "Create a canonical request") at the same
places. The next head is compared with the pieces and never parsed; whatever does not fit to the byte goes the whole
way. Its signature is verified each time: only that it is put together from pieces is new. Pure.

    GET [/bucket/key] HTTP/1.1 | Host: h | X-Amz-Date: [16] | Range: [...] | Authorization: AWS4-... Signature=[64]
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from gateway.s3.requests import S3Request
from gateway.s3.signature_v4 import (
    CLOCK_SKEW_SECONDS_MAX,
    Authorization,
    canonical_path,
    canonical_query,
    canonical_value,
    hmac_states,
    parse_timestamp,
    signing_key,
    string_to_sign,
)

_DATE, _AUTHORIZATION, _CHECKSUM_MODE = "x-amz-date", "authorization", "x-amz-checksum-mode"

_TO_LINE_END = 0
_VARIABLE: Mapping[str, int] = {
    _DATE: 16,
    _AUTHORIZATION: 64,
    "range": _TO_LINE_END,
    "amz-sdk-invocation-id": _TO_LINE_END,
    "amz-sdk-request": _TO_LINE_END,
    "if-match": _TO_LINE_END,
    "if-none-match": _TO_LINE_END,
    "traceparent": _TO_LINE_END,
    "tracestate": _TO_LINE_END,
    "x-amzn-trace-id": _TO_LINE_END,
}
"""The fields whose values differ from one request of a client to the next, and how long these are."""

_WITH_A_BODY = frozenset({"content-length", "transfer-encoding", "expect", "upgrade", "trailer"})

_SIGNATURE = re.compile(rb"(.*, ?Signature=)([0-9a-f]{64})", re.DOTALL)
_VALUE = re.compile(rb"[!-~]+(?: [!-~]+)*")
"""A value that no parser trims or refuses, and that a canonical request leaves unchanged."""

_TARGET = re.compile(rb"(/[A-Za-z0-9\-._~/%!$&'()*+,;=:@]*)(?:\?([A-Za-z0-9\-._~/%!$&'()*+,;=:@?]*))?")
_VERSION = b" HTTP/1.1"


class HeadValues(NamedTuple):
    """The values of a head that matches a prepared one: raw path and query, and its variable fields in order."""

    raw_path: bytes
    raw_query: bytes
    fields: Sequence[bytes]


Conditions: TypeAlias = Mapping[str, str]
"""Range, If-Match and If-None-Match of a head, by their lower-case names."""

_CONDITIONS = ("range", "if-match", "if-none-match")
_NO_CONDITIONS: Conditions = MappingProxyType({})


class _Moment(NamedTuple):
    """The parts that all signatures with one secret in one second share."""

    signed_at: float
    begin: bytes
    inner: hashlib._Hash
    outer: hashlib._Hash


@lru_cache(maxsize=1024)
def _moment(secret: str, authorization_date: str, region: str, scope: str, raw_timestamp: bytes) -> _Moment | None:
    """Return the shared parts, or None for a malformed timestamp. Nothing can read the secrets in the cache."""
    timestamp = raw_timestamp.decode("latin-1")
    signed_at = parse_timestamp(timestamp)
    if signed_at is None or authorization_date != timestamp[:8]:
        return None
    states = hmac_states(signing_key(secret, authorization_date, region))
    return _Moment(signed_at, string_to_sign(timestamp, scope, "").encode(), *states)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedHead:
    """The pieces of a head whose signature has been verified.

    `pieces` are bytes that stay the same, and how long the value behind them is (0: to the end of its line); `places`
    says the numbers of the values by the names of their fields, in order. `canonical` is the canonical request with a
    place for path, query and each signed value (`signed`: their numbers). No `authorization`: of presigned requests,
    whose target says all of it.
    """

    authorization: Authorization | None
    request: S3Request
    prefix: bytes
    pieces: Sequence[tuple[bytes, int]]
    tail: bytes
    places: Mapping[str, int]
    asker: tuple[str | None, str, str, str | None]
    """The access key, the host, the method, and how checksums are asked for: what an answer hangs on beside the
    values."""
    canonical: bytes = b""
    signed: Sequence[int] = ()
    date_at: int = 0
    signature_at: int = 0
    conditions_at: Sequence[tuple[str, int]] = ()

    def match(self, head: bytes) -> HeadValues | None:
        """Return the values of a whole head of this kind; None: it is of another."""
        if not head.startswith(self.prefix):
            return None
        at = head.find(b"\r\n")
        if head[at - len(_VERSION) : at] != _VERSION:
            return None
        target = _TARGET.fullmatch(head, len(self.prefix), at - len(_VERSION))
        if target is None:
            return None
        fields = []
        for fixed, size_bytes in self.pieces:
            start = at + len(fixed)
            if head[at:start] != fixed:
                return None
            if size_bytes:
                at = start + size_bytes
                fields.append(head[start:at])
            else:
                at = head.find(b"\r\n", start)
                value = head[start:at]
                if not _VALUE.fullmatch(value):
                    return None
                fields.append(value)
        if head[at:] != self.tail:
            return None
        raw_path, raw_query = target.groups(b"")
        return HeadValues(raw_path, raw_query, fields)

    def verified(self, values: HeadValues, secret: str, now: float) -> bool:
        """Return whether the signature matches these values. If not, the full path finds the error to answer."""
        fields, authorization = values.fields, self.authorization
        if authorization is None:
            return False
        moment = _moment(secret, authorization.date, authorization.region, authorization.scope, fields[self.date_at])
        if moment is None or abs(now - moment.signed_at) > CLOCK_SKEW_SECONDS_MAX:
            return False
        path, query = canonical_path(values.raw_path).encode(), canonical_query(values.raw_query).encode()
        canonical = self.canonical % (path, query, *[fields[number] for number in self.signed])
        inner, outer = moment.inner.copy(), moment.outer.copy()
        inner.update(moment.begin + hashlib.sha256(canonical).hexdigest().encode())
        outer.update(inner.digest())
        return hmac.compare_digest(outer.hexdigest().encode(), fields[self.signature_at])

    def conditions(self, values: HeadValues) -> Conditions:
        if not self.conditions_at:
            return _NO_CONDITIONS
        return {name: values.fields[number].decode("latin-1") for name, number in self.conditions_at}

    def headers(self, values: HeadValues) -> dict[str, str]:
        """All fields, as `S3Request.headers` has them."""
        found = dict(self.request.headers)
        for name, value in zip(self.places, values.fields, strict=True):
            text = value.decode("latin-1")
            found[name] = found[name][: -len(text)] + text if name == _AUTHORIZATION else text
        return found


def prepare(head: bytes, request: S3Request, authorization: Authorization | None) -> PreparedHead | None:
    """Prepare a head whose signature was verified. Return None for a kind of head that does not repeat.

    `request` is the parsed `head`; `authorization` is its parsed header, or None for a presigned URL.
    """
    line, _, rest = head.partition(b"\r\n")
    method = request.method.encode()
    if not line.startswith(method + b" /") or not line.endswith(_VERSION):
        return None
    cut = _cut(rest[:-4])
    if cut is None or not _WITH_A_BODY.isdisjoint(request.headers) or cut.of_lines != request.headers.keys():
        return None
    places = {name: number for number, name in enumerate(cut.names)}
    who = authorization.access_key_id if authorization is not None else None
    asker = who, request.host, request.method, request.headers.get(_CHECKSUM_MODE)
    conditions_at = tuple((name, places[name]) for name in _CONDITIONS if name in places)
    if authorization is None:
        if _DATE in places or _AUTHORIZATION in places:
            return None
        prepared = PreparedHead(
            None, request, method + b" ", cut.pieces, cut.tail, places, asker, conditions_at=conditions_at
        )
    else:
        if _DATE not in places or _AUTHORIZATION not in places:
            return None
        format_, signed = _canonical_format(request, authorization, cut.names)
        at = places[_DATE], places[_AUTHORIZATION]
        prepared = PreparedHead(
            authorization,
            request,
            method + b" ",
            cut.pieces,
            cut.tail,
            places,
            asker,
            format_,
            signed,
            *at,
            conditions_at,
        )
    return prepared if prepared.match(head) is not None else None


class _Cut(NamedTuple):
    pieces: Sequence[tuple[bytes, int]]
    tail: bytes
    names: Sequence[str]
    of_lines: Set[str]


def _cut(fields: bytes) -> _Cut | None:
    """Header lines, cut at their variable values; None where one is written in a way that is not looked at here."""
    pieces: list[tuple[bytes, int]] = []
    names: list[str] = []
    fixed, seen = b"\r\n", set[str]()
    for number, line in enumerate(fields.split(b"\r\n")):
        raw_name, colon, value = line.partition(b": ")
        name = raw_name.decode("latin-1").lower()
        if not colon or name in seen:
            return None
        seen.add(name)
        fixed += (b"\r\n" if number else b"") + raw_name + colon
        size_bytes = _VARIABLE.get(name)
        if size_bytes is None:
            fixed += value
            continue
        if name == _AUTHORIZATION:
            signature = _SIGNATURE.fullmatch(value)
            if signature is None:
                return None
            fixed += signature[1]
        elif size_bytes and len(value) != size_bytes:
            return None
        pieces.append((fixed, size_bytes))
        names.append(name)
        fixed = b""
    return _Cut(tuple(pieces), fixed + b"\r\n\r\n", tuple(names), seen)


def _canonical_format(
    request: S3Request, authorization: Authorization, names: Sequence[str]
) -> tuple[bytes, Sequence[int]]:
    """Return the canonical request with gaps, and the numbers of signed fields that vary among all that do.

    The gaps stand for path, query and each of these fields.
    """
    lines, signed = [], list[int]()
    for name in authorization.signed_headers:
        if name in names and name != _AUTHORIZATION:
            lines.append(f"{name}:".encode() + b"%b")
            signed.append(names.index(name))
        else:
            value = request.host if name == "host" else request.headers.get(name, "")
            lines.append(_escaped(f"{name}:{canonical_value(value)}"))
    listed = ";".join(authorization.signed_headers)
    payload_hash = request.headers.get("x-amz-content-sha256", "")
    end = _escaped(f"\n\n{listed}\n{payload_hash}")
    return request.method.encode() + b"\n%b\n%b\n" + b"\n".join(lines) + end, tuple(signed)


def _escaped(text: str) -> bytes:
    return text.encode("latin-1").replace(b"%", b"%%")
