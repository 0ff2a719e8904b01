from __future__ import annotations

from typing import Any

import pytest
from botocore.auth import S3SigV4QueryAuth
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.s3.presigned import PresignedV4, parse_presigned_v4, verify_presigned_v4
from gateway.s3.requests import Operation, S3Request, encode_path, encode_query
from gateway.s3.signature_v4 import SeedSignature, parse_timestamp
from tests.s3.wire import ACCESS_KEY_ID, REGION, SECRET, aws_request, credentials, keys, on_the_wire, request


def presigned(
    url: str, *, method: str = "GET", headers: dict[str, str] | None = None, expires: int = 60, token: str | None = None
) -> Any:
    signed = aws_request(method, url, headers)
    S3SigV4QueryAuth(credentials(token), "s3", REGION, expires=expires).add_auth(signed)
    return signed


def parsed_of(arrived: S3Request) -> PresignedV4:
    parsed = parse_presigned_v4(arrived)
    assert parsed is not None
    return parsed


def verify(arrived: S3Request, *, later: float = 0, secret: str = SECRET) -> SeedSignature:
    parsed = parsed_of(arrived)
    signed_at = parse_timestamp(parsed.timestamp)
    assert signed_at is not None
    return verify_presigned_v4(arrived, parsed, secret, signed_at + later)


@given(keys, st.none() | st.just("to/ken=="), st.sampled_from(["GET", "HEAD", "PUT"]))
def test_what_botocore_presigns_verifies(key: str, token: str | None, method: str) -> None:
    """Any key; the session token, when there is one, is found in the query."""
    url = f"https://data.s3.local:9000{encode_path(None, None)}{encode_path('x', key)[3:]}"
    arrived = on_the_wire(presigned(url, method=method, token=token))
    assert (arrived.bucket, arrived.key) == ("data", key)
    assert parsed_of(arrived).access_key_id == ACCESS_KEY_ID
    assert parsed_of(arrived).session_token == token
    verify(arrived)


def test_the_rest_of_the_query_is_signed_too() -> None:
    """Overrides and versions cannot be changed by whoever holds the URL."""
    query = encode_query([("versionId", "v/1"), ("response-content-type", "text/plain; x=é")])
    arrived = on_the_wire(presigned(f"http://h/b/k?{query}"))
    assert arrived.operation is Operation.GET_OBJECT
    verify(arrived)
    arrived.raw_query = arrived.raw_query.replace(b"v%2F1", b"v%2F2")
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verify(arrived)


def test_signed_headers_must_come_along_and_no_others() -> None:
    """A presigned PUT with metadata needs exactly that metadata."""
    arrived = on_the_wire(presigned("http://h/b/k", method="PUT", headers={"x-amz-meta-a": "1"}))
    verify(arrived)
    headers = dict(arrived.headers)
    arrived.headers = {**headers, "x-amz-meta-a": "2"}
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verify(arrived)
    arrived.headers = {**headers, "x-amz-meta-b": "1"}
    with pytest.raises(S3Error, match="AccessDenied"):
        verify(arrived)


def test_a_url_lives_from_its_date_to_its_expiry() -> None:
    """Not before (beyond the clocks' difference), not after; the refusal says when it expired."""
    arrived = on_the_wire(presigned("http://h/b/k", expires=60))
    verify(arrived, later=60)
    verify(arrived, later=-900)
    with pytest.raises(S3Error, match="Request has expired") as refusal:
        verify(arrived, later=61)
    assert (refusal.value.code, refusal.value.status) == ("AccessDenied", 403)
    assert set(refusal.value.elements) == {"Expires", "ServerTime"}
    with pytest.raises(S3Error, match="not valid yet"):
        verify(arrived, later=-901)


def test_a_wrong_secret_does_not_verify() -> None:
    """The signature is what counts."""
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verify(on_the_wire(presigned("http://h/b/k")), secret="wrong")


def test_a_query_without_signing_parameters_is_not_presigned() -> None:
    """Ordinary parameters say nothing about who is calling."""
    assert parse_presigned_v4(request(target="/b?list-type=2&x-id=ListObjectsV2")) is None


GOOD = {
    "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
    "X-Amz-Credential": "AK/20260101/us-east-1/s3/aws4_request",
    "X-Amz-Date": "20260101T000000Z",
    "X-Amz-Expires": "60",
    "X-Amz-SignedHeaders": "host",
    "X-Amz-Signature": "00",
}


@pytest.mark.parametrize("name", list(GOOD))
def test_a_missing_or_double_parameter_is_named(name: str) -> None:
    """AuthorizationQueryParametersError lists what is needed."""
    rest = [(other, value) for other, value in GOOD.items() if other != name]
    with pytest.raises(S3Error, match=f"AuthorizationQueryParametersError.*{name}"):
        parse_presigned_v4(request(target=f"/b/k?{encode_query(rest)}"))
    with pytest.raises(S3Error, match=f"AuthorizationQueryParametersError.*{name}"):
        parse_presigned_v4(request(target=f"/b/k?{encode_query([*GOOD.items(), (name, GOOD[name])])}"))


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("X-Amz-Algorithm", "AWS4-ECDSA-P256-SHA256", "NotImplemented"),
        ("X-Amz-Algorithm", "MD5", "AuthorizationQueryParametersError"),
        ("X-Amz-Credential", "AK/20260101/us-east-1/sts/aws4_request", "AuthorizationQueryParametersError"),
        ("X-Amz-Credential", "AK", "AuthorizationQueryParametersError"),
        ("X-Amz-Date", "2026-01-01", "AuthorizationQueryParametersError"),
        ("X-Amz-Expires", "soon", "AuthorizationQueryParametersError"),
        ("X-Amz-Expires", "-1", "AuthorizationQueryParametersError"),
        ("X-Amz-Expires", "604801", "AuthorizationQueryParametersError"),
        ("X-Amz-SignedHeaders", "host;€", "AuthorizationQueryParametersError"),
    ],
)
def test_bad_parameters_are_refused(name: str, value: str, code: str) -> None:
    """Each with its reason (S3 API, "AuthorizationQueryParametersError")."""
    with pytest.raises(S3Error) as refusal:
        parse_presigned_v4(request(target=f"/b/k?{encode_query({**GOOD, name: value}.items())}"))
    assert refusal.value.code == code


def test_the_credentials_date_must_be_the_urls() -> None:
    """A signing key holds for one day."""
    arrived = request(target=f"/b/k?{encode_query({**GOOD, 'X-Amz-Date': '20260102T000000Z'}.items())}")
    with pytest.raises(S3Error, match="AuthorizationQueryParametersError"):
        verify(arrived)


def test_signatures_and_tokens_stay_out_of_the_repr() -> None:
    """A presigned URL's signature is a credential."""
    arrived = request(
        target=f"/b/k?{encode_query({**GOOD, 'X-Amz-Security-Token': 't0ken', 'X-Amz-Signature': 's1gned'}.items())}"
    )
    assert "t0ken" not in repr(parsed_of(arrived))
    assert "s1gned" not in repr(parsed_of(arrived))
