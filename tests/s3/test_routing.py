from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.s3.requests import Operation, encode_query, strip_signature_parameters
from tests.s3.wire import request

SIGNED_V4 = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=c&X-Amz-Date=d&X-Amz-Expires=1&X-Amz-SignedHeaders=host"
    "&X-Amz-Security-Token=t&X-Amz-Signature=s"
)
SIGNED_V2 = "AWSAccessKeyId=a&Signature=s&Expires=1&x-amz-security-token=t"

HANDLED = [
    ("GET", "/", "ListBuckets"),
    ("GET", "/?x-id=ListBuckets&max-buckets=2", "ListBuckets"),
    ("HEAD", "/b", "HeadBucket"),
    ("GET", "/b?location", "GetBucketLocation"),
    ("GET", "/b?location=", "GetBucketLocation"),
    ("GET", "/b?versioning", "GetBucketVersioning"),
    ("GET", "/b/?encryption=&x-id=GetBucketEncryption", "GetBucketEncryption"),
    ("GET", "/b?tagging", "GetBucketTagging"),
    ("GET", "/b?object-lock", "GetObjectLockConfiguration"),
    ("GET", "/b", "ListObjects"),
    ("GET", "/b/?prefix=a%2F&delimiter=&marker=&max-keys=5&encoding-type=url", "ListObjects"),
    ("GET", "/b?list-type=2&prefix=&start-after=&fetch-owner=true&continuation-token=", "ListObjectsV2"),
    ("GET", "/b?uploads&prefix=p", "ListMultipartUploads"),
    ("PUT", "/b", "CreateBucket"),
    ("PUT", "/b/?x-id=CreateBucket", "CreateBucket"),
    ("POST", "/b?delete", "DeleteObjects"),
    ("POST", "/b/?delete=", "DeleteObjects"),
    ("GET", "/b/k", "GetObject"),
    ("GET", "/b/k?x-id=GetObject", "GetObject"),
    ("GET", "/b/k?versionId=v&partNumber=1&response-content-type=text%2Fplain", "GetObject"),
    ("GET", "/b/k?x-amz-checksum-mode=ENABLED&x-id=GetObject", "GetObject"),
    ("HEAD", "/b/k?partNumber=1", "HeadObject"),
    ("PUT", "/b/k?x-id=PutObject", "PutObject"),
    ("DELETE", "/b/k?versionId=v", "DeleteObject"),
    ("POST", "/b/k?uploads", "CreateMultipartUpload"),
    ("POST", "/b/k?uploads=&x-id=CreateMultipartUpload", "CreateMultipartUpload"),
    ("PUT", "/b/k?partNumber=1&uploadId=u", "UploadPart"),
    ("POST", "/b/k?uploadId=u", "CompleteMultipartUpload"),
    ("DELETE", "/b/k?uploadId=u", "AbortMultipartUpload"),
    ("GET", "/b/k?uploadId=u&max-parts=5&part-number-marker=1", "ListParts"),
]

FORWARDED = [
    ("POST", "/"),
    ("GET", "/?session"),
    ("PUT", "/b?unknown"),
    ("DELETE", "/b"),
    ("OPTIONS", "/b/k"),
    ("GET", "/b?versions"),
    ("GET", "/b?policy"),
    ("GET", "/b?location&versioning"),
    ("GET", "/b?versioning&prefix=x"),
    ("HEAD", "/b?versioning"),
    ("PUT", "/b?versioning"),
    ("DELETE", "/b?encryption"),
    ("GET", "/b?list-type=3"),
    ("GET", "/b?allow-unordered=true"),
    ("GET", "/b?location&prefix=x"),
    ("HEAD", "/b?anything"),
    ("POST", "/b"),
    ("POST", "/b?delete&versioning"),
    ("GET", "/b/k?acl"),
    ("GET", "/b/k?tagging="),
    ("GET", "/b/k?attributes"),
    ("GET", "/b/k?torrent"),
    ("GET", "/b/k?VersionId=v"),
    ("GET", "/b/k?versionId=a&versionId=b"),
    ("PUT", "/b/k?tagging"),
    ("PUT", "/b/k?renameObject"),
    ("PUT", "/b/k?x-amz-acl=public-read"),
    ("PUT", "/b/k?versionId=v"),
    ("DELETE", "/b/k?tagging"),
    ("POST", "/b/k?select&select-type=2"),
    ("POST", "/b/k?restore"),
]


@pytest.mark.parametrize(("method", "target", "operation"), HANDLED)
@pytest.mark.parametrize("signature", ["", SIGNED_V4, SIGNED_V2])
def test_operations_are_recognised(method: str, target: str, operation: str, signature: str) -> None:
    """Valueless or empty sub-resources, SDK hints and presigned parameters lead to the same operation."""
    glue = "&" if "?" in target else "?"
    assert request(method, f"{target}{glue}{signature}").operation is Operation(operation)


@pytest.mark.parametrize(("method", "target", "operation"), HANDLED)
def test_operations_are_the_same_in_virtual_hosted_style(method: str, target: str, operation: str) -> None:
    """The host names the bucket; the rest means what it means in path style."""
    if target.startswith("/b"):
        path = "/" + target[2:].lstrip("/")
        parsed = request(method, path, headers={"host": "b.s3.local"})
        assert (parsed.operation, parsed.bucket) == (Operation(operation), "b")


@pytest.mark.parametrize(("method", "target"), FORWARDED)
def test_everything_else_is_forwarded(method: str, target: str) -> None:
    """A sub-resource that is not handled here is never answered as the plain operation."""
    assert request(method, target).operation is Operation.FORWARD


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), st.sampled_from(["", "=", "=1"]))
def test_an_unknown_parameter_always_forwards(name: str, value: str) -> None:
    """What was invented after this was written reaches the origin."""
    name = f"new-{name}"
    query = encode_query([(name, None)]) + value
    for method, target, _ in HANDLED:
        glue = "&" if "?" in target else "?"
        if (method, target) != ("POST", "/"):
            assert request(method, f"{target}{glue}{query}").operation is Operation.FORWARD


def test_a_copy_source_turns_a_put_into_a_copy() -> None:
    """CopyObject and UploadPartCopy differ from their siblings by one header."""
    headers = {"x-amz-copy-source": "b/k"}
    assert request("PUT", "/b/k2", headers).operation is Operation.COPY_OBJECT
    assert request("PUT", "/b/k2?partNumber=2&uploadId=u", headers).operation is Operation.UPLOAD_PART_COPY


@pytest.mark.parametrize("name", ["x-amz-copy-source", "X-Amz-Copy-Source", "x-amz-rename-source"])
def test_a_second_object_in_the_query_is_refused(name: str) -> None:
    """Authorisation looks at headers; a source hidden in the query must not slip past it to the origin."""
    with pytest.raises(S3Error, match="InvalidRequest"):
        request("PUT", f"/b/k?{name}=%2Fsecret%2Fk")


@pytest.mark.parametrize("query", ["partNumber=1", "uploadId=u"])
def test_half_a_part_address_is_refused(query: str) -> None:
    """A part has a number and an upload; a PUT with one of them is not a PutObject."""
    with pytest.raises(S3Error, match="InvalidArgument"):
        request("PUT", f"/b/k?{query}")


@pytest.mark.parametrize(
    ("method", "target", "resource"),
    [
        ("PATCH", "/b/k", "OBJECT"),
        ("POST", "/b/k", "OBJECT"),
        ("TRACE", "/b", "BUCKET"),
        ("DELETE", "/", "SERVICE"),
    ],
)
def test_methods_that_no_operation_uses_are_405(method: str, target: str, resource: str) -> None:
    """The answer says what is allowed."""
    with pytest.raises(S3Error) as refusal:
        request(method, target)
    error = refusal.value
    assert (error.code, error.status) == ("MethodNotAllowed", 405)
    assert error.elements == {"Method": method, "ResourceType": resource}
    assert "GET" in error.headers["Allow"]


def test_signature_parameters_are_stripped_and_nothing_else() -> None:
    """What goes on to the origin is signed anew there."""
    parsed = request(target=f"/b/k?acl&{SIGNED_V4}&response-expires=1&{SIGNED_V2}")
    assert strip_signature_parameters(parsed.query) == [("acl", None), ("response-expires", "1")]
