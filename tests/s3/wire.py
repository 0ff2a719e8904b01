"""From a botocore request, signed by botocore's own signers, to what the gateway parses."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import strategies as st

from gateway.s3.requests import S3Request, parse_request

ACCESS_KEY_ID = "AKIAEXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
REGION = "eu-central-1"
BASE_DOMAINS = ("s3.local",)


def credentials(token: str | None = None) -> Any:
    return Credentials(ACCESS_KEY_ID, SECRET, token)


def on_the_wire(signed: Any, base_domains: Sequence[str] = BASE_DOMAINS) -> S3Request:
    """The S3Request that arrives when `signed`, a botocore AWSRequest, is sent."""
    parts = urlsplit(signed.url)
    headers = [(name.lower().encode(), value_bytes(value)) for name, value in signed.headers.items()]
    headers.append((b"host", parts.netloc.encode()))
    return parse_request(signed.method, parts.path.encode(), parts.query.encode(), headers, base_domains)


def value_bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("latin-1")


def aws_request(method: str, url: str, headers: Mapping[str, str] | None = None) -> Any:
    return AWSRequest(method, url, headers=dict(headers or {}))


def request(
    method: str = "GET",
    target: str = "/bucket/key",
    headers: Mapping[str, str] | None = None,
    base_domains: Sequence[str] = BASE_DOMAINS,
) -> S3Request:
    """A request written by hand; Host is an address unless given."""
    fields = {"host": "127.0.0.1:9000", **(headers or {})}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
    path, _, query = target.partition("?")
    return parse_request(method, path.encode(), query.encode(), raw, base_domains)


def now() -> float:
    return time.time()


keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)
"""Keys of any characters that UTF-8 has; 60 characters are 240 bytes at most."""

header_values = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20).flatmap(
    lambda word: st.sampled_from([word, f"{word}  {word}", f"{word}\t {word}", f"{word} {word}"])
)
