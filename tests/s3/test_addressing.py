from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.core.model import ObjectKey
from gateway.s3.requests import encode_key, encode_path, encode_query, parse_copy_source, parse_query
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


@pytest.mark.parametrize("bucket", ["..", ".", "a%00b", "a%0Ab", "a%2Fb", "a b", "%C3%A9", "x" * 256])
def test_what_cannot_be_a_bucket_is_refused(bucket: str) -> None:
    """Control characters, slashes and dot segments never reach the origin as a bucket."""
    with pytest.raises(S3Error, match="InvalidBucketName"):
        request(target=f"/{bucket}/k")


def test_odd_but_real_bucket_names_pass() -> None:
    """Old buckets have capitals and underscores, RGW's have tenants."""
    for bucket in ("Old_Bucket", "tenant:bucket", "x", "a.b.c", "x" * 255):
        assert request(target=f"/{bucket}/k").bucket == bucket


def test_an_empty_bucket_name_is_no_list_of_buckets() -> None:
    """`//k` in path style addresses nothing."""
    with pytest.raises(S3Error, match="InvalidBucketName"):
        request(target="//k")


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
    """Names without `=` stay so; `+`, `&`, `=` and unicode survive."""
    assert parse_query(encode_query(pairs).encode()) == pairs


def test_a_plus_in_a_query_is_a_space() -> None:
    """As origins read it: the prefix that is checked and sent on is the one that was meant."""
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
