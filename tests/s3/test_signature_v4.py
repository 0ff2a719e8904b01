"""AWS Signature Version 4 in the header, held against botocore."""

from __future__ import annotations

import time
from calendar import timegm
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.s3.requests import S3Request, encode_path, encode_query
from gateway.s3.signature_v4 import (
    Authorization,
    PayloadMode,
    canonical_query,
    format_timestamp,
    parse_authorization,
    parse_timestamp,
    payload_mode,
    sign_headers,
    signing_key,
    verify_header,
)
from tests.s3.wire import (
    ACCESS_KEY_ID,
    REGION,
    SECRET,
    aws_request,
    credentials,
    header_values,
    keys,
    now,
    on_the_wire,
    request,
)


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        (None, PayloadMode()),
        ("UNSIGNED-PAYLOAD", PayloadMode()),
        ("AB" * 32, PayloadMode(sha256_hex="ab" * 32)),
        ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", PayloadMode(streaming=True, signed=True)),
        ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", PayloadMode(streaming=True, signed=True, trailer=True)),
        ("STREAMING-UNSIGNED-PAYLOAD-TRAILER", PayloadMode(streaming=True, trailer=True)),
    ],
)
def test_every_mode_is_known(value: str | None, mode: PayloadMode) -> None:
    """The table of the S3 documentation."""
    assert payload_mode(value) == mode


@pytest.mark.parametrize(
    "value", ["", "ab" * 31, "zz" * 32, "unsigned-payload", "STREAMING-UNSIGNED-PAYLOAD", "ab" * 32 + "\n"]
)
def test_anything_else_is_refused(value: str) -> None:
    """A payload that is not what it says must not be taken for unsigned."""
    with pytest.raises(S3Error, match="InvalidArgument"):
        payload_mode(value)


@pytest.mark.parametrize("tail", ["", "-TRAILER"])
def test_sigv4a_streams_are_not_implemented(tail: str) -> None:
    """501, so that clients need not guess."""
    with pytest.raises(S3Error, match="NotImplemented"):
        payload_mode(f"STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD{tail}")


queries = st.dictionaries(
    keys.map("q{}".format), st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=4
)
metadata = st.dictionaries(
    st.sampled_from(["x-amz-meta-a", "X-Amz-Meta-B", "range", "Content-Type", "if-match"]), header_values, max_size=4
)


def signed_by_botocore(method: str, url: str, headers: dict[str, str], *, token: str | None = None) -> Any:
    signed = aws_request(method, url, headers)
    S3SigV4Auth(credentials(token), "s3", REGION).add_auth(signed)
    return signed


def verify(parsed: S3Request, secret: str = SECRET, at: float | None = None) -> None:
    verify_header(parsed, parse_authorization(parsed.headers["authorization"]), secret, now() if at is None else at)


def sign(
    method: str,
    path: str,
    query: Sequence[tuple[str, str | None]],
    headers: dict[str, str],
    *,
    at: float,
    payload_hash: str = "UNSIGNED-PAYLOAD",
    token: str | None = None,
) -> dict[str, str]:
    return sign_headers(
        method,
        path,
        query,
        headers,
        payload_hash=payload_hash,
        access_key_id=ACCESS_KEY_ID,
        secret=SECRET,
        session_token=token,
        region=REGION,
        now=at,
    )[0]


def plain(**headers: str) -> S3Request:
    return on_the_wire(signed_by_botocore("GET", "http://127.0.0.1:9000/b/k", headers))


@given(keys, queries, metadata)
def test_what_botocore_signs_verifies(key: str, query: dict[str, str], headers: dict[str, str]) -> None:
    """Any key, any query, any header whitespace: our canonical request is botocore's."""
    url = f"http://127.0.0.1:9000{encode_path('bucket', key)}"
    if query:
        url += f"?{encode_query(query.items())}"
    verify(on_the_wire(signed_by_botocore("OPTIONS", url, headers)))


@given(keys, st.sampled_from("!*'();:@&=+$,/?#[] €\t"))
def test_keys_signed_with_less_escaping_verify(key: str, special: str) -> None:
    """Clients that leave characters unescaped which S3 escapes sign the canonical form (SigV4, "Canonical URI")."""
    path = quote(f"/b/{special}{key}", safe="/-_.~!*'():@=$,;")
    signed = signed_by_botocore("GET", f"http://127.0.0.1{quote(f'/b/{special}{key}', safe='/-_.~')}", {})
    parsed = on_the_wire(signed)
    parsed.raw_path = path.encode()
    verify(parsed)


def test_virtual_hosted_requests_with_session_tokens_verify() -> None:
    """The host is signed as the client sent it, port included; so is the token."""
    url = "https://data.s3.local:9000/some/key"
    parsed = on_the_wire(signed_by_botocore("PUT", url, {}, token="session/token=="))
    assert parsed.headers["x-amz-security-token"] == "session/token=="
    verify(parsed)


@given(
    st.sampled_from(["method", "raw_path", "raw_query", "host", "header", "secret", "signature"]),
    st.integers(1, 10),
)
def test_any_change_breaks_the_signature(part: str, number: int) -> None:
    """Method, path, query, host, signed headers, key: all are covered."""
    parsed = on_the_wire(signed_by_botocore("GET", "http://h/b/k?list-type=2", {"x-amz-meta-a": "v"}))
    headers = dict(parsed.headers)
    if part == "method":
        parsed.method = "HEAD"
    elif part == "raw_path":
        parsed.raw_path += b"%2F" * number
    elif part == "raw_query":
        parsed.raw_query += b"&a=" + b"b" * number
    elif part == "host":
        parsed.host += "x" * number
    elif part == "header":
        headers["x-amz-meta-a"] += "v" * number
    elif part == "signature":
        headers["authorization"] = headers["authorization"][:-number] + "x" * number
    parsed.headers = headers
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verify(parsed, secret=SECRET + "x" if part == "secret" else SECRET)


def test_a_mismatch_shows_the_client_how_it_came_about() -> None:
    """String to sign and canonical request make wrong clients repairable; no secret is in them."""
    with pytest.raises(S3Error) as refusal:
        verify(plain(), secret="another secret")
    elements = refusal.value.elements
    assert refusal.value.status == 403
    assert elements["AWSAccessKeyId"] == ACCESS_KEY_ID
    assert elements["StringToSign"].startswith("AWS4-HMAC-SHA256\n")
    assert elements["CanonicalRequest"].startswith("GET\n/b/k\n\nhost:127.0.0.1:9000\n")
    assert len(elements["SignatureProvided"]) == 64
    assert "another secret" not in str(elements)


def test_the_host_must_be_signed() -> None:
    """Otherwise a request could be taken to another bucket."""
    parsed = plain()
    authorization = parsed.headers["authorization"].replace("SignedHeaders=host;", "SignedHeaders=")
    parsed.headers = {**parsed.headers, "authorization": authorization}
    with pytest.raises(S3Error, match="AccessDenied"):
        verify(parsed)


@pytest.mark.parametrize("offset", [-901, 901])
def test_clocks_may_differ_by_fifteen_minutes(offset: float) -> None:
    """Beyond that the error carries what SDKs correct their clock by."""
    parsed = plain()
    signed_at = parse_timestamp(parsed.headers["x-amz-date"])
    assert signed_at is not None
    verify(parsed, at=signed_at + 899)
    with pytest.raises(S3Error) as refusal:
        verify(parsed, at=signed_at + offset)
    error = refusal.value
    assert (error.code, error.status) == ("RequestTimeTooSkewed", 403)
    assert error.elements["RequestTime"] == parsed.headers["x-amz-date"]
    assert error.elements["MaxAllowedSkewMilliseconds"] == "900000"
    assert error.elements["ServerTime"].endswith("Z")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"x-amz-date": None}, "AccessDenied"),
        ({"x-amz-date": "yesterday"}, "AccessDenied"),
        ({"x-amz-date": "20269901T000000Z"}, "AccessDenied"),
        ({"x-amz-content-sha256": None}, "InvalidRequest"),
        ({"x-amz-content-sha256": "nonsense"}, "InvalidArgument"),
        ({"x-amz-content-sha256": "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD"}, "NotImplemented"),
    ],
)
def test_date_and_payload_hash_are_required(change: dict[str, str | None], code: str) -> None:
    """What the signature rests on must be there and make sense."""
    parsed = plain()
    headers = {**parsed.headers, **change}
    parsed.headers = {name: value for name, value in headers.items() if value is not None}
    with pytest.raises(S3Error) as refusal:
        verify(parsed)
    assert refusal.value.code == code


def test_the_date_header_stands_in_for_x_amz_date() -> None:
    """The signature then covers the Date header's time."""
    at = 1_700_000_000
    headers = {"date": "Tue, 14 Nov 2023 22:13:20 GMT", "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
    timestamp = format_timestamp(at)
    added = sign("GET", "/b/k", (), {"host": "h", "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}, at=at)
    assert added["x-amz-date"] == timestamp
    parsed = request(headers={**headers, "host": "h", "authorization": added["authorization"]})
    with pytest.raises(S3Error, match="SignatureDoesNotMatch") as refusal:
        verify(parsed, at=at)  # the signed x-amz-date is missing, so this cannot match, but the time was understood
    assert timestamp in refusal.value.elements["StringToSign"]


CHANGING = """
x-amz-acl x-amz-tagging x-goog-copy-source x-oss-copy-source x-cos-tagging x-obs-acl x-copy-from x-rename-to
x-move-source x-custom-server-side-encryption x-metadata-directive x-delete-version-id x-ms-copy-source
x-object-lock-mode x-archive-cascade-delete x-delete-after x-symlink-target x-container-read x-client-copy-source
x-never-heard-of ibm-sse-kms-encryption-algorithm retention-period
"""
HARMLESS = """
accept user-agent x-forwarded-for x-request-id x-real-ip x-amzn-trace-id x-b3-traceid x-datadog-tags x-client-version
x-forebay-hop x-envoy-attempt-count traceparent via cache-control content-encoding upgrade-insecure-requests
sec-fetch-site access-control-request-method
"""


@pytest.mark.parametrize("name", CHANGING.split())
def test_what_may_make_another_request_of_it_must_be_signed(name: str) -> None:
    """In whichever dialect, known or not: who has a presigned URL may send its request and no other."""
    parsed = plain()
    parsed.headers = {**parsed.headers, **dict.fromkeys(HARMLESS.split(), "value"), name: "value"}
    with pytest.raises(S3Error, match="AccessDenied") as refusal:
        verify(parsed)
    assert refusal.value.elements == {"HeadersNotSigned": name}


def test_what_proxies_and_tracing_add_need_not_be() -> None:
    """They change nothing of what is asked."""
    parsed = plain()
    parsed.headers = {**parsed.headers, **dict.fromkeys(HARMLESS.split(), "value")}
    verify(parsed)


def test_the_credentials_date_must_be_the_requests() -> None:
    """A signing key holds for one day."""
    parsed = plain()
    today = parsed.headers["x-amz-date"][:8]
    authorization = parsed.headers["authorization"].replace(f"/{today}/", "/20200101/")
    parsed.headers = {**parsed.headers, "authorization": authorization}
    with pytest.raises(S3Error, match="AuthorizationHeaderMalformed"):
        verify(parsed)


GOOD = "Credential=A/K/20260101/us-east-1/s3/aws4_request"


def test_commas_may_have_spaces_or_none_and_key_ids_slashes() -> None:
    """Clients differ; access key ids of other systems hold slashes."""
    for glue in (",", ", ", ",   ", ",\t"):
        parsed = parse_authorization(f"AWS4-HMAC-SHA256 {GOOD}{glue}SignedHeaders=a;b{glue}Signature=ff")
        assert parsed == Authorization("A/K", "20260101", "us-east-1", "s3", ("a", "b"), "ff")
        assert parsed.scope == "20260101/us-east-1/s3/aws4_request"


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("AWS AK:sig", "InvalidRequest"),
        ("AWS4-ECDSA-P256-SHA256 x", "NotImplemented"),
        ("Bearer x", "InvalidArgument"),
        ("", "InvalidArgument"),
        ("AWS4-HMAC-SHA256", "AuthorizationHeaderMalformed"),
        (f"AWS4-HMAC-SHA256 {GOOD}", "AuthorizationHeaderMalformed"),
        (f"AWS4-HMAC-SHA256 {GOOD}, SignedHeaders=host, Signature=", "AuthorizationHeaderMalformed"),
        (f"AWS4-HMAC-SHA256 {GOOD}, SignedHeaders=host, Signature=a, Extra=b", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256 Credential=AK, SignedHeaders=h, Signature=a", "AuthorizationHeaderMalformed"),
        (f"AWS4-HMAC-SHA256 {GOOD.replace('s3', 'sts')}, SignedHeaders=h, Signature=a", "AuthorizationHeaderMalformed"),
        (
            f"AWS4-HMAC-SHA256 {GOOD.replace('0101', '01')}, SignedHeaders=h, Signature=a",
            "AuthorizationHeaderMalformed",
        ),
        (f"AWS4-HMAC-SHA256 {GOOD}x, SignedHeaders=h, Signature=a", "AuthorizationHeaderMalformed"),
    ],
)
def test_headers_that_cannot_be_used_say_why(header: str, code: str) -> None:
    """Each wrong scheme has its own answer (S3 API, "Error responses")."""
    with pytest.raises(S3Error) as refusal:
        parse_authorization(header)
    assert refusal.value.code == code


@given(keys, queries, metadata, st.none() | st.just("token/=="))
def test_what_we_sign_is_what_botocore_signs(
    key: str, query: dict[str, str], headers: dict[str, str], token: str | None
) -> None:
    """Towards the origin, held against botocore: the same request has the same signature."""
    path = encode_path("bucket", key)
    url = f"https://origin:8000{path}" + (f"?{encode_query(query.items())}" if query else "")
    signed = {name.lower(): value for name, value in headers.items() if name.lower() != "if-match"}
    theirs = signed_by_botocore("PUT", url, signed, token=token)
    payload_hash = theirs.headers["X-Amz-Content-SHA256"]
    at = timegm(time.strptime(theirs.context["timestamp"], "%Y%m%dT%H%M%SZ"))
    sent = {"host": "origin:8000", **signed}
    ours = sign("PUT", path, list(query.items()), sent, at=at, payload_hash=payload_hash, token=token)
    assert ours["authorization"] == theirs.headers["Authorization"]
    assert ours.get("x-amz-security-token") == token
    assert ours["x-amz-content-sha256"] == payload_hash


def test_what_we_sign_verifies_with_a_valueless_parameter() -> None:
    """`?uploads` is signed as `uploads=`."""
    headers = {"host": "h", "if-match": '"e"', "expect": "100-continue"}
    added = sign("POST", "/b/k", [("uploads", None)], headers, at=now())
    verify(request("POST", "/b/k?uploads", {**headers, **added}))


@given(st.lists(st.tuples(keys, st.text(st.characters(exclude_categories=["Cs"]), max_size=9)), min_size=1))
def test_canonical_queries_sort_by_encoded_name_then_value(pairs: list[tuple[str, str]]) -> None:
    """Duplicates stay, and a literal plus is a plus."""
    raw = "&".join(f"{quote(n, safe='+-_.~')}={quote(v, safe='+/-_.~')}" for n, v in pairs).encode()
    encoded = sorted((quote(n, safe="-_.~"), quote(v, safe="-_.~")) for n, v in pairs)
    assert canonical_query(raw) == "&".join(f"{n}={v}" for n, v in encoded)


def test_seeds_and_keys_show_no_secret() -> None:
    """A seed lives as long as its body; whatever logs it must not give the signing key away."""
    parsed = plain()
    seed = verify_header(parsed, parse_authorization(parsed.headers["authorization"]), SECRET, now())
    assert seed.signing_key.hex() not in repr(seed)
    assert repr(seed.signing_key) not in repr(seed)
    assert SECRET not in repr(signing_key)


@given(st.integers(0, 253402300799))
def test_timestamps_make_the_round_trip(seconds: int) -> None:
    """ISO 8601 basic, from 1970 to 9999."""
    assert parse_timestamp(format_timestamp(seconds)) == seconds
