"""Presigned requests, of version 4 and of version 2, held against botocore."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.auth import HmacV1QueryAuth, S3SigV4QueryAuth
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.s3.presigned import (
    PresignedV2,
    PresignedV4,
    parse_presigned_v2,
    parse_presigned_v4,
    verify_presigned_v2,
    verify_presigned_v4,
)
from gateway.s3.requests import Operation, S3Request, encode_key, encode_path, encode_query
from gateway.s3.signature_v4 import SeedSignature, parse_timestamp
from tests.s3.wire import ACCESS_KEY_ID, REGION, SECRET, aws_request, credentials, keys, now, on_the_wire, request


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
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verify(arrived, secret="wrong")
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


def test_a_query_without_signing_parameters_is_not_presigned() -> None:
    """Ordinary parameters say nothing about who is calling."""
    asked = request(target="/b?list-type=2&x-id=ListObjectsV2")
    assert parse_presigned_v4(asked) is None
    assert parse_presigned_v2(asked) is None


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
    assert "s3cr" not in repr(parsed_v2(request(target="/b/k?AWSAccessKeyId=a&Signature=s3cr&Expires=1")))


def presigned_v2(
    url: str, *, method: str = "GET", auth_path: str | None = None, token: str | None = None, expires: int = 60
) -> Any:
    signed = aws_request(method, url)
    signed.auth_path = auth_path
    HmacV1QueryAuth(credentials(token), expires=expires).add_auth(signed)
    return signed


def arrive(signed: Any) -> S3Request:
    """As it comes over the wire: what the signer moved into the query is in the query only."""
    sent = aws_request(signed.method, signed.url)
    return on_the_wire(sent)


def parsed_v2(arrived: S3Request) -> PresignedV2:
    parsed = parse_presigned_v2(arrived)
    assert parsed is not None
    return parsed


def verify_v2(arrived: S3Request, *, secret: str = SECRET, at: float | None = None) -> None:
    verify_presigned_v2(arrived, parsed_v2(arrived), secret, now() if at is None else at)


@given(keys, st.sampled_from(["GET", "HEAD"]), st.none() | st.just("to/ken=="))
def test_what_botocore_presigns_by_default_verifies(key: str, method: str, token: str | None) -> None:
    """`generate_presigned_url` of boto3 and `aws s3 presign`, path style."""
    arrived = arrive(presigned_v2(f"http://127.0.0.1:9000{encode_path('b', key)}", method=method, token=token))
    assert parsed_v2(arrived).access_key_id == ACCESS_KEY_ID
    assert parsed_v2(arrived).session_token == token
    assert arrived.operation in (Operation.GET_OBJECT, Operation.HEAD_OBJECT)
    verify_v2(arrived)


@given(keys)
def test_virtual_hosted_urls_verify(key: str) -> None:
    """The bucket of the host belongs in the resource that was signed."""
    path = "/" + encode_key(key)
    verify_v2(arrive(presigned_v2(f"http://data.s3.local{path}", auth_path=f"/data{path}")))


def test_a_path_style_url_does_not_open_another_key_in_virtual_hosted_style() -> None:
    """Version 2 signs no host: `/b/k` on host `b.s3.local` is the key `b/k`, and needs a signature of its own."""
    url = presigned_v2("http://127.0.0.1/b/k").url.replace("127.0.0.1", "b.s3.local")
    arrived = on_the_wire(aws_request("GET", url))
    assert (arrived.bucket, arrived.key) == ("b", "b/k")
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verify_v2(arrived)


@pytest.mark.parametrize("target", ["/b", "/b/", "/b?list-type=2&prefix=a%2F", "/b/k?versionId=v%2F1&partNumber=2",
                                    "/b/k?response-content-type=text%2Fplain&response-content-disposition=a%20b%22",
                                    "/b/k?acl", "/b?uploads&prefix=x"])  # fmt: skip
def test_subresources_and_overrides_are_part_of_the_resource(target: str) -> None:
    """The list of version 2, `response-*` included; other parameters are not signed."""
    verify_v2(arrive(presigned_v2(f"http://127.0.0.1{target}")))


@pytest.mark.parametrize(
    ("old", "new"),
    [("versionId=1", "versionId=2"), ("/b/k", "/b/l"), ("x-id=a", "x-id=a&acl"), ("x-id=a", "x-id=a&x-amz-b=1")],
)
def test_what_version_2_signs_cannot_be_changed(old: str, new: str) -> None:
    """Resource, version, further sub-resources, further x-amz-* parameters."""
    url = presigned_v2("http://127.0.0.1/b/k?versionId=1&x-id=a").url
    assert old in url
    verify_v2(on_the_wire(aws_request("GET", url)))
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verify_v2(on_the_wire(aws_request("GET", url.replace(old, new))))


def test_an_unsigned_parameter_cannot_change_the_operation() -> None:
    """Sub-resources younger than version 2 are not covered by it; added to a URL they are refused."""
    for signed, added in (("http://127.0.0.1/b/k", "&attributes"), ("http://127.0.0.1/b", "&encryption")):
        url = presigned_v2(signed).url + added
        with pytest.raises(S3Error, match="AccessDenied"):
            verify_v2(on_the_wire(aws_request("GET", url)))


def test_headers_with_amz_names_are_signed() -> None:
    """A caller may not add any to a URL that was signed without."""
    signed = presigned_v2("http://127.0.0.1/b/k")
    sent = aws_request("GET", signed.url, {"x-amz-server-side-encryption-customer-algorithm": "AES256"})
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verify_v2(on_the_wire(sent))


def test_no_parameter_may_break_its_line() -> None:
    """Names and values are signed decoded, line by line: a line break in either could move a border."""
    signed = presigned_v2("http://127.0.0.1/b/k")
    for added in ("x-amz-a%0Ab=1", "x-amz-a=1%0A", "versionId=a%0Ab"):
        with pytest.raises(S3Error, match="line break"):
            verify_v2(on_the_wire(aws_request("GET", f"{signed.url}&{added}", {})))


def test_a_url_dies_at_its_expiry() -> None:
    """Expires is an absolute time."""
    arrived = arrive(presigned_v2("http://127.0.0.1/b/k"))
    verify_v2(arrived, at=parsed_v2(arrived).expires)
    with pytest.raises(S3Error, match="Request has expired") as refusal:
        verify_v2(arrived, at=parsed_v2(arrived).expires + 1)
    assert refusal.value.status == 403


@pytest.mark.parametrize(
    ("operation", "method", "more"),
    [
        ("put_object", "PUT", {}),
        ("put_object", "PUT", {"ContentType": "text/plain", "ContentMD5": "AAAAAAAAAAAAAAAAAAAAAA=="}),
        ("upload_part", "PUT", {"UploadId": "u", "PartNumber": 1}),
        ("create_multipart_upload", "POST", {}),
        ("complete_multipart_upload", "POST", {"UploadId": "u", "MultipartUpload": {"Parts": []}}),
        ("abort_multipart_upload", "DELETE", {"UploadId": "u"}),
        ("delete_object", "DELETE", {"VersionId": "v"}),
        ("put_object_tagging", "PUT", {"Tagging": {"TagSet": []}}),
        ("put_object_acl", "PUT", {}),
        ("list_parts", "GET", {"UploadId": "u"}),
        ("get_object", "GET", {"ResponseContentType": "a/b"}),
        ("head_object", "HEAD", {}),
    ],
)
def test_what_boto3_presigns_as_it_comes_verifies(operation: str, method: str, more: dict[str, Any]) -> None:
    """`generate_presigned_url` without a configuration makes version 2, for every operation."""
    client = boto3.client(
        "s3",
        endpoint_url="http://127.0.0.1:9000",
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET,
    )
    url = client.generate_presigned_url(operation, Params={"Bucket": "bucket", "Key": "k", **more})
    headers = {"content-type": more.get("ContentType"), "content-md5": more.get("ContentMD5")}
    sent = aws_request(method, url, {name: value for name, value in headers.items() if value})
    arrived = on_the_wire(sent)
    verify_v2(arrived)
    assert parsed_v2(arrived).access_key_id == ACCESS_KEY_ID
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        verify_v2(on_the_wire(aws_request("GET" if method == "DELETE" else "DELETE", url)))


@pytest.mark.parametrize("added", ["x-goog-copy-source", "x-oss-object-acl", "x-copy-from", "x-obs-meta-a"])
def test_a_header_of_another_dialect_cannot_make_another_write_of_it(added: str) -> None:
    """Version 2 signs `x-amz-*` and no other header of this kind."""
    signed = presigned_v2("http://127.0.0.1/b/k", method="PUT")
    with pytest.raises(S3Error, match="does not cover the header"):
        verify_v2(on_the_wire(aws_request("PUT", signed.url, {added: "b/other"})))


@pytest.mark.parametrize("added", ["renameObject", "attributes", "legal-hold", "retention", "append"])
def test_a_parameter_cannot_make_another_write_of_it(added: str) -> None:
    """Those that version 2 signs do not match; the others are refused."""
    signed = presigned_v2("http://127.0.0.1/b/k", method="PUT")
    with pytest.raises(S3Error, match="does not cover the query parameter"):
        verify_v2(on_the_wire(aws_request("PUT", f"{signed.url}&{added}")))


def test_a_wrong_secret_does_not_verify_and_the_reason_is_shown() -> None:
    """The string to sign helps; no secret is in it."""
    with pytest.raises(S3Error, match="SignatureDoesNotMatch") as refusal:
        verify_v2(arrive(presigned_v2("http://127.0.0.1/b/k")), secret="another")
    assert refusal.value.elements["StringToSign"].endswith("\n/b/k")
    assert "another" not in str(refusal.value.elements)


def test_the_developer_guides_example() -> None:
    """The query string example of "Signing and Authenticating REST Requests"."""
    query = [("AWSAccessKeyId", "AKIAIOSFODNN7EXAMPLE"), ("Signature", "NpgCjnDzrM+WFzoENXmpNDUsSn8="),
             ("Expires", "1175139620")]  # fmt: skip
    arrived = request(
        target=f"/photos/puppy.jpg?{encode_query(query)}",
        headers={"host": "johnsmith.s3.amazonaws.com"},
        base_domains=("s3.amazonaws.com",),
    )
    verify_presigned_v2(arrived, parsed_v2(arrived), SECRET, 1175139619)


@pytest.mark.parametrize(
    "query",
    ["AWSAccessKeyId=a&Expires=1", "Signature=s&Expires=1", "AWSAccessKeyId=a&Signature=s",
     "AWSAccessKeyId=a&Signature=s&Expires=soon", "AWSAccessKeyId=a&Signature=s&Expires=1&Expires=2",
     "AWSAccessKeyId=&Signature=s&Expires=1"],
)  # fmt: skip
def test_incomplete_signatures_are_refused(query: str) -> None:
    """Half a signature is no anonymous request."""
    with pytest.raises(S3Error, match="AccessDenied"):
        parse_presigned_v2(request(target=f"/b/k?{query}"))
