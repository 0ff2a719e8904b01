"""A client's aws-chunked encoder, written from the specification alone."""

from __future__ import annotations

import hashlib
import hmac

from gateway.s3.signature_v4 import SeedSignature, payload_mode, signing_key

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TIMESTAMP = "20130524T000000Z"
SCOPE = "20130524/us-east-1/s3/aws4_request"
KEY = signing_key(SECRET, "20130524", "us-east-1")

SIGNED = payload_mode("STREAMING-AWS4-HMAC-SHA256-PAYLOAD")
SIGNED_TRAILER = payload_mode("STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER")
UNSIGNED_TRAILER = payload_mode("STREAMING-UNSIGNED-PAYLOAD-TRAILER")

CRC32C = "x-amz-checksum-crc32c"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def seed_of(signature: str = "5" * 64) -> SeedSignature:
    return SeedSignature(KEY, TIMESTAMP, SCOPE, signature)


def signed_body(chunks: list[bytes], seed: SeedSignature, trailers: list[tuple[str, str]] | None = None) -> bytes:
    """A client's encoder, written from the specification alone."""
    previous, body = seed.signature, b""
    for chunk in [*chunks, b""]:
        digests = f"{EMPTY_SHA256}\n{hashlib.sha256(chunk).hexdigest()}"
        text = f"AWS4-HMAC-SHA256-PAYLOAD\n{TIMESTAMP}\n{SCOPE}\n{previous}\n{digests}"
        previous = hmac.new(KEY, text.encode(), hashlib.sha256).hexdigest()
        body += f"{len(chunk):x};chunk-signature={previous}\r\n".encode() + chunk + (b"\r\n" if chunk else b"")
    if trailers is None:
        return body + b"\r\n"
    block = "".join(f"{name}:{value}\n" for name, value in sorted(trailers))
    text = f"AWS4-HMAC-SHA256-TRAILER\n{TIMESTAMP}\n{SCOPE}\n{previous}\n{hashlib.sha256(block.encode()).hexdigest()}"
    signature = hmac.new(KEY, text.encode(), hashlib.sha256).hexdigest()
    lines = "".join(f"{name}:{value}\r\n" for name, value in trailers)
    return body + f"{lines}x-amz-trailer-signature:{signature}\r\n\r\n".encode()


def unsigned_body(chunks: list[bytes], trailer: str = f"{CRC32C}:AAAAAA==") -> bytes:
    body = b"".join(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" for chunk in chunks)
    return body + f"0\r\n{trailer}\r\n\r\n".encode()
