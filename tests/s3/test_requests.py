"""From a request line and headers to an S3 request and its operation."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.core.model import ObjectKey
from gateway.s3.requests import (
    FieldNames,
    Operation,
    another_service,
    encode_key,
    encode_path,
    encode_query,
    parse_copy_source,
    parse_query,
    parse_request,
    strip_signature_parameters,
)
from tests.s3.wire import keys, request


@given(keys)
def test_keys_make_the_round_trip_in_both_addressing_styles(key: str) -> None:
    """Any UTF-8 key comes back exactly as it went out, path style and virtual-hosted."""
    parsed = request(target=encode_path("bucket", key))
    assert (parsed.bucket, parsed.key) == ("bucket", key)
    parsed = request(target="/" + encode_key(key), headers={"host": "bucket.s3.local:9000"})
    assert (parsed.bucket, parsed.key) == ("bucket", key)


@given(keys)
def test_only_unreserved_characters_and_slashes_stay_literal(key: str) -> None:
    """The encoding is the canonical one of S3's signatures."""
    assert encode_key(key) == quote(key.encode(), safe="/-_.~")


@pytest.mark.parametrize(
    ("target", "key"),
    [
        ("/b/x//y", "x//y"),
        ("/b//lead", "/lead"),
        ("/b/odd/../z.bin", "odd/../z.bin"),
        ("/b/.", "."),
        ("/b/a+b", "a+b"),
        ("/b/a%2Bb%20c", "a+b c"),
        ("/b/a%2Fb", "a/b"),
        ("/b/per%2525cent", "per%25cent"),
        ("/b/%E2%82%AC", "€"),
        ("/b/%00", "\0"),
        ("/b/dir/", "dir/"),
        ("/b//", "/"),
    ],
)
def test_paths_are_decoded_once_and_never_normalised(target: str, key: str) -> None:
    """A key is what the client wrote, whatever a file system would make of it."""
    assert request(target=target).key == key


@pytest.mark.parametrize(
    ("host", "target", "bucket", "key"),
    [
        ("data.s3.local", "/k", "data", "k"),
        ("data.s3.local:9000", "/", "data", None),
        ("DATA.S3.local", "//k", "data", "/k"),
        ("a.b.s3.local", "/k", "a.b", "k"),
        ("data.deep.s3.local", "/k", "data", "k"),
        ("s3.local", "/b/k", "b", "k"),
        ("deep.s3.local:80", "/b/", "b", None),
        ("10.0.0.1:9000", "/b/k", "b", "k"),
        ("[::1]:9000", "/b/k", "b", "k"),
        ("localhost", "/b/k", "b", "k"),
        ("elsewhere.example", "/b/k", "b", "k"),
        ("nots3.local", "/b/k", "b", "k"),
        ("127.0.0.1", "/", None, None),
        ("127.0.0.1", "/b", "b", None),
    ],
)
def test_the_host_names_the_bucket_below_a_base_domain(host: str, target: str, bucket: str, key: str) -> None:
    """The longest base domain that fits wins; every other host means path style."""
    parsed = request(target=target, headers={"host": host}, base_domains=("s3.local", "deep.s3.local"))
    assert (parsed.bucket, parsed.key) == (bucket, key)


def test_an_absolute_form_target_brings_its_own_host() -> None:
    """Some clients send `GET http://host/b/k`; the authority counts, not the Host header (RFC 9112, 3.2.2)."""
    parsed = request(target="http://data.s3.local:9000/k", headers={"host": "other"})
    assert (parsed.bucket, parsed.key, parsed.host, parsed.raw_path) == ("data", "k", "data.s3.local:9000", b"/k")
    assert request(target="HTTP://127.0.0.1").raw_path == b"/"


@pytest.mark.parametrize(
    "target", ["*", "b/k", "ftp://h/b", "/b/%zz", "/b/%", "/b/%ff", "/b/k?a=%f", "/b/k?%ff=", "http://"]
)
def test_targets_that_are_no_utf8_or_no_uri_are_refused(target: str) -> None:
    """Bytes that cannot be a key are InvalidURI, in path and query alike."""
    with pytest.raises(S3Error) as refusal:
        request(target=target)
    assert (refusal.value.code, refusal.value.status) == ("InvalidURI", 400)


@pytest.mark.parametrize("bucket", ["", "..", ".", "a%00b", "a%0Ab", "a%2Fb", "a b", "%C3%A9", "x" * 256])
def test_what_cannot_be_a_bucket_is_refused(bucket: str) -> None:
    """Control characters, slashes and dot segments never reach the origin as a bucket; `//k` lists no buckets."""
    with pytest.raises(S3Error, match="InvalidBucketName"):
        request(target=f"/{bucket}/k")


def test_odd_but_real_bucket_names_pass() -> None:
    """Old buckets have capitals and underscores, RGW's have tenants."""
    for bucket in ("Old_Bucket", "tenant:bucket", "x", "a.b.c", "x" * 255):
        assert request(target=f"/{bucket}/k").bucket == bucket


@pytest.mark.parametrize(
    ("key", "fits"), [("a" * 1024, True), ("a" * 1025, False), ("€" * 341, True), ("€" * 342, False)]
)
def test_keys_end_at_1024_bytes_of_utf8(key: str, fits: bool) -> None:
    """The limit counts bytes, not characters."""
    if fits:
        assert request(target=encode_path("b", key)).key == key
        return
    with pytest.raises(S3Error, match="KeyTooLongError"):
        request(target=encode_path("b", key))


@given(st.lists(st.tuples(keys, st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20))))
def test_queries_make_the_round_trip(pairs: list[tuple[str, str | None]]) -> None:
    """Names without `=` stay so; `+`, `&`, `=` and unicode survive. As origins read it, a literal plus is a space."""
    assert parse_query(encode_query(pairs).encode()) == pairs
    assert parse_query(b"prefix=a+b%2Bc&x+y") == [("prefix", "a b+c"), ("x y", None)]


@given(keys)
def test_copy_sources_make_the_round_trip(key: str) -> None:
    """Percent-encoded with or without a leading slash, with or without a version, and encoded altogether."""
    source = ObjectKey("bucket", key)
    encoded = encode_path("bucket", key)
    assert parse_copy_source(encoded) == (source, None)
    assert parse_copy_source(encoded[1:]) == (source, None)
    assert parse_copy_source(encoded + "?versionId=v%2F1") == (source, "v/1")
    assert parse_copy_source(quote(encoded[1:], safe="%").replace("/", "%2F")) == (source, None)


def test_raw_utf8_and_plus_in_a_copy_source() -> None:
    """Raw UTF-8 arrives as latin-1 text; a plus is a space in this header, as at AWS."""
    assert parse_copy_source("/b/€".encode().decode("latin-1")).key == ObjectKey("b", "€")
    assert parse_copy_source("b/a+b%2Bc").key == ObjectKey("b", "a b+c")


@pytest.mark.parametrize(
    "value",
    ["", "/", "bucket", "bucket/", "/bucket/", "//k", "b/k?versionId=", "b/k?versionId=a&x=y", "b/%ff", "b/%z", "../k",
     "arn:aws:s3:us-east-1:1:accesspoint/a/object/k"],
)  # fmt: skip
def test_bad_copy_sources_are_refused(value: str) -> None:
    """InvalidArgument names the header."""
    with pytest.raises(S3Error) as refusal:
        parse_copy_source(value)
    assert refusal.value.code == "InvalidArgument"
    assert refusal.value.elements["ArgumentName"] == "x-amz-copy-source"


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

FORWARDED = (
    "POST /, GET /?session, PUT /b?unknown, DELETE /b, OPTIONS /b/k, GET /b?versions, GET /b?policy, GET "
    "/b?location&versioning, GET /b?versioning&prefix=x, HEAD /b?versioning, PUT /b?versioning, DELETE "
    "/b?encryption, GET /b?list-type=3, GET /b?allow-unordered=true, GET /b?location&prefix=x, HEAD /b?anything, "
    "POST /b, POST /b?delete&versioning, GET /b/k?acl, GET /b/k?tagging=, GET /b/k?attributes, GET /b/k?torrent, "
    "GET /b/k?VersionId=v, GET /b/k?versionId=a&versionId=b, PUT /b/k?tagging, PUT /b/k?renameObject, PUT "
    "/b/k?x-amz-acl=public-read, PUT /b/k?versionId=v, DELETE /b/k?tagging, POST /b/k?select&select-type=2, POST "
    "/b/k?restore"
)


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


@pytest.mark.parametrize("line", FORWARDED.split(", "))
def test_everything_else_is_forwarded(line: str) -> None:
    """A sub-resource that is not handled here is never answered as the plain operation."""
    method, target = line.split()
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


def test_headers_are_lower_case_trimmed_and_joined() -> None:
    """Repeated fields become one, in order of arrival (RFC 9110, 5.3)."""
    raw = [(b"Host", b"h"), (b"X-Amz-Meta-A", b" 1 "), (b"x-amz-meta-a", b"\t2"), (b"x-latin", b"\xe9")]
    parsed = parse_request("GET", b"/b/k", b"", raw, ())
    assert parsed.headers == {"host": "h", "x-amz-meta-a": "1,2", "x-latin": "é"}
    assert parsed.host == "h"


@pytest.mark.parametrize("name", ["host", "authorization", "x-amz-date", "x-amz-content-sha256"])
def test_headers_that_decide_cannot_come_twice(name: str) -> None:
    """Two servers must not pick different ones."""
    with pytest.raises(S3Error, match="InvalidRequest"):
        parse_request("GET", b"/b/k", b"", [(name.encode(), b"a"), (name.encode(), b"b")], ())


def test_names_that_clients_make_up_are_not_kept() -> None:
    """What is remembered of field names is bounded in number and length, whatever is sent."""
    names = FieldNames()
    assert [names[b"X-%d" % number] for number in range(5000)] == [f"x-{number}" for number in range(5000)]
    assert names[b"X" * 65] == "x" * 65
    assert len(names) <= 1024
    assert max(map(len, names)) <= 64


def test_parameters_are_found_by_name() -> None:
    """Absent is None, valueless is empty, the first of several counts."""
    parsed = request(target="/b?prefix=a&uploads&prefix=b")
    assert (parsed.parameter("prefix"), parsed.parameter("uploads"), parsed.parameter("nix")) == ("a", "", None)


def test_signatures_and_tokens_stay_out_of_the_repr() -> None:
    """A request may be logged; what it is signed with may not."""
    parsed = request(
        target="/b/k?X-Amz-Signature=abc123",
        headers={"authorization": "secret-signature", "x-amz-security-token": "secret-token"},
    )
    assert "abc123" not in repr(parsed)
    assert "secret" not in repr(parsed)


AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=AK/20260101/us-east-1/{}/aws4_request, SignedHeaders=host, Signature=00"
FORM = {"content-type": "application/x-www-form-urlencoded; charset=utf-8"}


@pytest.mark.parametrize(
    ("method", "target", "headers", "service"),
    [
        ("POST", "/", {"authorization": AUTHORIZATION.format("sts"), **FORM}, "sts"),
        ("POST", "/", {"authorization": AUTHORIZATION.format("sqs"), **FORM}, "sqs"),
        ("POST", "/", FORM, "sts"),
        ("GET", "/?Action=GetCallerIdentity&Version=2011-06-15", {}, "sts"),
        ("POST", "/", {"x-amz-target": "DynamoDB_20120810.ListTables"}, "dynamodb"),
        ("GET", "/2015-03-31/functions", {"authorization": AUTHORIZATION.format("lambda")}, "lambda"),
        ("GET", "/?X-Amz-Credential=AK%2F20260101%2Fr%2Fsts%2Faws4_request", {}, "sts"),
        ("GET", "/b/k", {"authorization": AUTHORIZATION.format("s3")}, None),
        ("POST", "/b?delete", {"authorization": AUTHORIZATION.format("s3"), **FORM}, None),
        ("GET", "/b/k", {"authorization": "AWS AK:signature"}, None),
        ("GET", "/b/k?X-Amz-Credential=AK%2F20260101%2Fr%2Fs3%2Faws4_request", {}, None),
        ("GET", "/", {}, None),
        ("PUT", "/b/k", FORM, None),
    ],
)
def test_requests_for_other_services_are_recognised(
    method: str, target: str, headers: dict[str, str], service: str | None
) -> None:
    """AWS_ENDPOINT_URL moves every service; those other than S3 must get an answer that says so."""
    assert another_service(request(method, target, headers)) == service
