"""What an answer says of an object follows from what was said when it was stored."""

from __future__ import annotations

from gateway.s3.headers import stored_headers


def test_metadata_and_standard_headers_come_back() -> None:
    """As they were given; what was about the request alone does not."""
    given = {
        "content-type": "application/x-tar",
        "content-encoding": "gzip",
        "expires": "Thu, 01 Dec 2026 16:00:00 GMT",
        "x-amz-meta-step": "1200",
        "x-amz-acl": "private",
        "content-md5": "abc",
        "if-none-match": "*",
        "x-amz-checksum-algorithm": "CRC32",
    }
    assert stored_headers(given) == {
        "content-type": "application/x-tar",
        "content-encoding": "gzip",
        "expires": "Thu, 01 Dec 2026 16:00:00 GMT",
        "x-amz-meta-step": "1200",
    }


def test_an_object_has_a_type_always_and_a_class_where_it_is_not_the_usual_one() -> None:
    """S3's default type; STANDARD is not said."""
    assert stored_headers({"x-amz-storage-class": "STANDARD"}) == {"content-type": "binary/octet-stream"}
    assert stored_headers({"x-amz-storage-class": "STANDARD_IA"})["x-amz-storage-class"] == "STANDARD_IA"


def test_tags_are_counted() -> None:
    """Their values are nobody's business here."""
    assert stored_headers({"x-amz-tagging": "a=1&b=&c=%26"})["x-amz-tagging-count"] == "3"
    assert "x-amz-tagging-count" not in stored_headers({"x-amz-tagging": ""})
