"""From a step to the bytes on the wire, signed with botocore's own signers and nothing of the gateway's.

Only the canonical request is written out here, because botocore's would encode paths and queries again. Source: S3 API,
"Authenticating Requests (AWS Signature Version 4)" and "Signature Calculations for the Authorization Header:
Transferring Payload in Multiple Chunks".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.scenarios.transparency.steps import Payload, Step

REGION = "us-east-1"

_HASHES: Mapping[Payload, str] = {
    "unsigned": "UNSIGNED-PAYLOAD",
    "signed-chunks": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
    "signed-chunks-trailer": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
    "unsigned-chunks-trailer": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
}

Fields = list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Who signs."""

    access_key_id: str
    secret_access_key: str


def wire_bytes(step: Step, variables: Mapping[str, str], host: str, keys: KeyPair) -> bytes:
    """The request that `step` means."""
    path, mark, query = _filled(step.target, variables).partition("?")
    fields = [_field(_filled(header, variables)) for header in step.headers]
    body = step.body
    for name, value in variables.items():
        body = body.replace(f"{{{name}}}".encode(), value.encode())
    host = host if step.host is None else _filled(step.host, variables)
    signer = _Signer(step, keys)
    fields = [("host", host.encode()), *_framing(step, body), *fields]
    if step.auth == "header":
        fields, body = signer.by_header(path, query, fields, body)
    elif step.auth == "query":
        query = signer.by_query(path, query, fields)
    elif step.auth == "query-v2":
        query = signer.by_old_query(path, query)
    target = f"{path}{mark or ('?' if query else '')}{query}".encode("latin-1")
    lines = [step.method.encode() + b" " + target + b" HTTP/1.1"]
    lines += [name.encode() + b": " + value for name, value in _length(step, fields, body)]
    return b"\r\n".join([*lines, b"", b""]) + (_http_chunks(body) if step.http_chunks else body)


def _filled(text: str, variables: Mapping[str, str]) -> str:
    for name, value in variables.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _field(header: str) -> tuple[str, bytes]:
    name, _, value = header.partition(":")
    return name, value.strip(" ").encode("utf-8", "surrogateescape")


def _framing(step: Step, body: bytes) -> Fields:
    """What a client adds by itself to an aws-chunked body."""
    if step.payload not in _HASHES or step.payload == "unsigned":
        return []
    fields = [("x-amz-decoded-content-length", str(len(body)).encode())]
    if step.trailer is not None:
        fields.append(("x-amz-trailer", step.trailer.partition(":")[0].encode()))
    return fields


def _length(step: Step, fields: Fields, body: bytes) -> Fields:
    named = {name.lower() for name, _ in fields}
    if step.http_chunks:
        return [*fields, ("Transfer-Encoding", b"chunked")]
    if (body or step.method in ("PUT", "POST")) and "content-length" not in named:
        return [*fields, ("Content-Length", str(len(body)).encode())]
    return fields


def _http_chunks(body: bytes) -> bytes:
    chunks = (body[start : start + 60_000] for start in range(0, len(body), 60_000))
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


class _Signer:
    """The signatures of one request."""

    def __init__(self, step: Step, keys: KeyPair) -> None:
        self._step = step
        self._keys = keys
        self._auth = S3SigV4Auth(Credentials(keys.access_key_id, keys.secret_access_key), "s3", REGION)
        self._timestamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._scope = f"{self._timestamp[:8]}/{REGION}/s3/aws4_request"

    def by_header(self, path: str, query: str, fields: Fields, body: bytes) -> tuple[Fields, bytes]:
        own = {name.lower(): value.decode("latin-1") for name, value in fields}
        payload_hash = own.get("x-amz-content-sha256") or _HASHES.get(self._step.payload) or _sha256(body)
        added = [("x-amz-date", self._timestamp.encode()), ("x-amz-content-sha256", payload_hash.encode())]
        fields = [*fields, *(field for field in added if field[0] not in own)]
        names, signature = self._signature(path, query, fields, payload_hash)
        credential = f"{self._keys.access_key_id}/{self._scope}"
        value = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
        return [*fields, ("Authorization", value.encode())], self._framed(body, signature)

    def by_query(self, path: str, query: str, fields: Fields) -> str:
        signed = sorted({name.lower() for name, _ in fields})
        parameters = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{self._keys.access_key_id}/{self._scope}",
            "X-Amz-Date": self._timestamp,
            "X-Amz-Expires": str(self._step.expires_seconds),
            "X-Amz-SignedHeaders": ";".join(signed),
        }
        added = "&".join(f"{name}={quote(value, safe='')}" for name, value in parameters.items())
        query = f"{query}&{added}" if query else added
        return f"{query}&X-Amz-Signature={self._signature(path, query, fields, 'UNSIGNED-PAYLOAD')[1]}"

    def by_old_query(self, path: str, query: str) -> str:
        """Signature version 2 of a GET or HEAD without headers of its own (S3 user guide, "Signing REST requests")."""
        expires = int(time.time()) + self._step.expires_seconds
        covered = [part for part in sorted(query.split("&")) if part.startswith(("response-", "versionId=", "acl"))]
        resource = path + ("?" + "&".join(_unquoted_value(part) for part in covered) if covered else "")
        text = f"{self._step.method}\n\n\n{expires}\n{resource}"
        digest = hmac.new(self._keys.secret_access_key.encode(), text.encode(), hashlib.sha1).digest()
        signature = quote(base64.b64encode(digest).decode(), safe="")
        added = f"AWSAccessKeyId={self._keys.access_key_id}&Expires={expires}&Signature={signature}"
        return f"{query}&{added}" if query else added

    def _signature(self, path: str, query: str, fields: Fields, payload_hash: str) -> tuple[str, str]:
        covered: dict[str, list[bytes]] = {}
        for name, value in fields:
            covered.setdefault(name.lower(), []).append(b" ".join(value.split()))
        names = ";".join(sorted(covered))
        headers = b"".join(name.encode() + b":" + b",".join(covered[name]) + b"\n" for name in sorted(covered))
        uri = quote_from_bytes(unquote_to_bytes(path.encode("latin-1")), safe="/-_.~").encode()
        parts = [self._step.method.encode(), uri, _canonical_query(query), headers, names.encode()]
        canonical = b"\n".join([*parts, payload_hash.encode()])
        digest = _sha256(canonical)
        return names, self._sign(f"AWS4-HMAC-SHA256\n{self._timestamp}\n{self._scope}\n{digest}")

    def _sign(self, text: str) -> str:
        request = AWSRequest(self._step.method, "http://unused/")
        request.context["timestamp"] = self._timestamp
        signature: Any = self._auth.signature(text, request)
        return str(signature)

    def _framed(self, body: bytes, seed: str) -> bytes:
        if self._step.payload in ("signed-chunks", "signed-chunks-trailer"):
            return self._signed_chunks(body, seed)
        if self._step.payload == "unsigned-chunks-trailer":
            chunks = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in self._pieces(body))
            return chunks + b"0\r\n" + _line(self._step.trailer) + b"\r\n"
        return body

    def _signed_chunks(self, body: bytes, previous: str) -> bytes:
        framed = b""
        for chunk in [*self._pieces(body), b""]:
            digests = f"{_sha256(b'')}\n{_sha256(chunk)}"
            text = f"AWS4-HMAC-SHA256-PAYLOAD\n{self._timestamp}\n{self._scope}\n{previous}\n{digests}"
            previous = self._sign(text)
            framed += b"%x;chunk-signature=%s\r\n%s" % (
                len(chunk),
                previous.encode(),
                chunk + b"\r\n" if chunk else b"",
            )
        if self._step.payload == "signed-chunks" or self._step.trailer is None:
            return framed + b"\r\n"
        digest = _sha256(self._step.trailer.encode() + b"\n")
        text = f"AWS4-HMAC-SHA256-TRAILER\n{self._timestamp}\n{self._scope}\n{previous}\n{digest}"
        return framed + _line(self._step.trailer) + f"x-amz-trailer-signature:{self._sign(text)}\r\n\r\n".encode()

    def _pieces(self, body: bytes) -> Iterator[bytes]:
        for size in self._step.chunk_sizes:
            if body:
                yield body[:size]
            body = body[size:]
        while body:
            yield body[:65_536]
            body = body[65_536:]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _line(trailer: str | None) -> bytes:
    return b"" if trailer is None else trailer.encode() + b"\r\n"


def _canonical_query(query: str) -> bytes:
    pairs = (part.partition("=") for part in query.split("&") if part)
    return "&".join(
        f"{n}={v}" for n, v in sorted((_requoted(name), _requoted(value)) for name, _, value in pairs)
    ).encode()


def _requoted(text: str) -> str:
    return quote_from_bytes(unquote_to_bytes(text.encode("latin-1")), safe="-_.~")


def _unquoted_value(part: str) -> str:
    name, mark, value = part.partition("=")
    return f"{name}{mark}{unquote_to_bytes(value).decode('latin-1')}"
