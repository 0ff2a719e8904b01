"""Heads of GETs and HEADs as real clients write them, to be signed freshly.

Recorded on 2026-11-23 between each client, as it is pinned in pyproject.toml, and a gateway: the fields in their order
and case, and the names that the client signs. What differs from one request to the next is filled in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.s3.signature_v4 import format_timestamp, sign, signing_key, string_to_sign

REGION = "us-east-1"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()

_BOTO3 = (
    "Boto3/1.43.117 md/Botocore#1.43.117 md/awscrt#0.38.1 ua/2.1 os/linux#6.18.44-fc-v595 md/arch#x86_64 "
    "lang/python#3.11.7 md/pyimpl#CPython m/D,b,e,N,Z cfg/retry-mode#legacy Botocore/1.43.117"
)
_ARROW = (
    "aws-sdk-cpp/1.11.900 ua/2.1 api/S3 os/Linux#6.18.44-fc-v595 lang/c++#C++11 md/aws-crt#0.44.1 md/arch#x86_64 "
    "md/GCC#14.2.1 md/http#curl m/Z,b,P"
)
_GO = "aws-sdk-go/1.44.298 (go1.22.10; linux; amd64) S3Manager"
_ID = "aff13b3c-35c5-40f6-9010-8d4f1ff63058"


@dataclass(frozen=True, slots=True)
class Signing:
    """Who signs, and for which host."""

    access_key_id: str
    secret: str
    host: str


@dataclass(frozen=True, slots=True)
class ClientHead:
    """One kind of head. `lines` are `Name: value`; a name alone is of a field that signing fills in.

    `signed` are the names in the order of `SignedHeaders`; `method` is GET or HEAD.
    """

    method: str
    signed: str
    lines: Sequence[str]

    def head(
        self, by: Signing, raw_path: str, now: float, *, raw_query: str = "", values: Mapping[str, str] | None = None
    ) -> bytes:
        """The whole head, signed at `now`; path and query must be canonical. `values` (by names in lower case) take the
        place of those recorded."""
        fields = [_field(line) for line in self.lines]
        timestamp = format_timestamp(now)
        given = {"host": by.host, "x-amz-date": timestamp, **(values or {})}
        fields = [(name, given.get(name.lower(), value)) for name, value in fields]
        said = {name.lower(): value for name, value in fields}
        payload_hash = said["x-amz-content-sha256"]
        canonical = "\n".join(f"{name}:{said[name]}" for name in self.signed.split(";"))
        request = f"{self.method}\n{raw_path}\n{raw_query}\n{canonical}\n\n{self.signed}\n{payload_hash}"
        day = timestamp[:8]
        scope = f"{day}/{REGION}/s3/aws4_request"
        text = string_to_sign(timestamp, scope, hashlib.sha256(request.encode("latin-1")).hexdigest())
        signature = sign(signing_key(by.secret, day, REGION), text)
        said["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={by.access_key_id}/{scope}, "
            f"SignedHeaders={self.signed}, Signature={signature}"
        )
        target = f"{raw_path}?{raw_query}" if raw_query else raw_path
        lines = [f"{self.method} {target} HTTP/1.1", *(f"{name}: {said[name.lower()]}" for name, _ in fields)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(": ")
    return name, value


_SHA = f"x-amz-content-sha256: {EMPTY_SHA256}"
_PLAIN = "host;x-amz-content-sha256;x-amz-date"
_RANGED = "host;range;x-amz-content-sha256;x-amz-date"
_CHECKED = "host;x-amz-checksum-mode;x-amz-content-sha256;x-amz-date"
_CHECKED_RANGED = "host;range;x-amz-checksum-mode;x-amz-content-sha256;x-amz-date"
_SDK = "amz-sdk-invocation-id;amz-sdk-request"

_BOTO3_END = (f"User-Agent: {_BOTO3}", "host", "X-Amz-Date", _SHA, "Authorization")
_BOTO3_IDS = (f"amz-sdk-invocation-id: {_ID}", "amz-sdk-request: attempt=1")
_AIO_IDS = (*_BOTO3_IDS, "Accept-Encoding: identity", "Accept: */*")
_AIO_AGENT = f"User-Agent: {_BOTO3.replace('Boto3/1.43.117', 'aiobotocore/3.10.0')}"
_S5CMD = ("Host", f"User-Agent: {_GO}", "Authorization", f"X-Amz-Content-Sha256: {EMPTY_SHA256}", "X-Amz-Date")
_OBSTORE = ("x-amz-date", _SHA, "authorization", "accept: */*", "user-agent: object_store/0.14.2", "host")
_MINIO_AGENT = "User-Agent: MinIO (Linux; x86_64) minio-py/7.2.20"
_MINIO = ("Accept-Encoding: identity", "Host", _MINIO_AGENT, _SHA, "x-amz-date", "Authorization")
_RCLONE = (
    *("Host", "User-Agent: rclone/v1.75.2", "Accept-Encoding: identity", f"Amz-Sdk-Invocation-Id: {_ID}"),
    *("Amz-Sdk-Request: attempt=1; max=10", "Authorization", f"X-Amz-Content-Sha256: {EMPTY_SHA256}", "X-Amz-Date"),
)
_ARROW_BEGIN = ("Host", "Accept: */*", f"amz-sdk-invocation-id: {_ID.upper()}", "amz-sdk-request: attempt=1")
_ARROW_TYPE = ("authorization", "content-type: application/xml")
_ARROW_VERSION = (f"user-agent: {_ARROW}", "x-amz-api-version: 2006-03-01")
_ARROW_SIGNED = f"{_SDK};content-type;host;x-amz-api-version;x-amz-content-sha256;x-amz-date"

CRT_RANGED = ClientHead(
    "GET",
    _RANGED,
    (
        *("Host", "Range: bytes=0-5242879", "User-Agent: CRTS3NativeClient/1.5.1 platform/unknown m/AX,Al"),
        *("X-Amz-Date", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "Authorization"),
    ),
)
S5CMD_RANGED = ClientHead("GET", _RANGED, (*_S5CMD[:3], "Range: bytes=0-52428799", *_S5CMD[3:]))

CLIENT_HEADS: Mapping[str, ClientHead] = {
    "boto3": ClientHead(
        "GET", _CHECKED, ("Accept-Encoding: identity", "x-amz-checksum-mode: ENABLED", *_BOTO3_END, *_BOTO3_IDS)
    ),
    "boto3, range": ClientHead(
        "GET",
        _CHECKED_RANGED,
        (
            *("Accept-Encoding: identity", "Range: bytes=100-999", "x-amz-checksum-mode: ENABLED"),
            *(*_BOTO3_END, *_BOTO3_IDS),
        ),
    ),
    "boto3, HEAD": ClientHead("HEAD", _PLAIN, ("Accept-Encoding: identity", *_BOTO3_END, *_BOTO3_IDS)),
    "AWS CRT": CRT_RANGED,
    "s5cmd": S5CMD_RANGED,
    "s3fs, range": ClientHead(
        "GET",
        "host;if-match;range;x-amz-checksum-mode;x-amz-content-sha256;x-amz-date",
        (
            *("host", "Range: bytes=0-99999", 'If-Match: "38101b2de01f7722d6c09c47803e8cb9"'),
            *("x-amz-checksum-mode: ENABLED", _AIO_AGENT, "X-Amz-Date", _SHA, "Authorization", *_AIO_IDS),
        ),
    ),
    "s3fs, HEAD": ClientHead("HEAD", _PLAIN, ("host", _AIO_AGENT, "X-Amz-Date", _SHA, "Authorization", *_AIO_IDS)),
    "rclone": ClientHead("GET", f"accept-encoding;{_SDK};{_PLAIN}", _RCLONE),
    "rclone, HEAD": ClientHead("HEAD", f"accept-encoding;{_SDK};{_PLAIN}", _RCLONE),
    "obstore": ClientHead("GET", _PLAIN, _OBSTORE),
    "obstore, range": ClientHead("GET", _RANGED, ("range: bytes=5-499", *_OBSTORE)),
    "obstore, HEAD": ClientHead("HEAD", _PLAIN, _OBSTORE),
    "pyarrow": ClientHead(
        "GET",
        f"{_SDK};content-type;host;range;x-amz-api-version;x-amz-checksum-mode;x-amz-content-sha256;x-amz-date",
        (
            *(*_ARROW_BEGIN, *_ARROW_TYPE, "range: bytes=0-99999", *_ARROW_VERSION),
            *("x-amz-checksum-mode: enabled", _SHA, "x-amz-date"),
        ),
    ),
    "pyarrow, HEAD": ClientHead(
        "HEAD", _ARROW_SIGNED, (*_ARROW_BEGIN, *_ARROW_TYPE, *_ARROW_VERSION, _SHA, "x-amz-date")
    ),
    "minio": ClientHead("GET", _PLAIN, _MINIO),
    "minio, HEAD": ClientHead("HEAD", _PLAIN, _MINIO),
}
