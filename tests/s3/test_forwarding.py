import pytest

from gateway.s3.headers import EncodedHeaders, filter_request_headers, filter_response_headers


def test_headers_that_nobody_knows_go_along() -> None:
    """Only what belongs to the client's connection and signature stays behind."""
    sent = {
        "host": "gateway",
        "authorization": "AWS4-HMAC-SHA256 …",
        "x-amz-date": "20260101T000000Z",
        "x-amz-security-token": "token",
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "content-length": "3",
        "expect": "100-continue",
        "connection": "keep-alive, X-Private",
        "x-private": "hop",
        "x-amz-brand-new": "1",
        "x-unknown": "2",
        "content-type": "text/plain",
    }
    assert filter_request_headers(sent) == {"x-amz-brand-new": "1", "x-unknown": "2", "content-type": "text/plain"}


def test_the_framing_of_the_body_is_not_stored_with_the_object() -> None:
    """`aws-chunked` leaves Content-Encoding, other codings stay, an empty header goes."""
    assert filter_request_headers({"content-encoding": "aws-chunked"}) == {}
    assert filter_request_headers({"content-encoding": "gzip, aws-chunked"}) == {"content-encoding": "gzip"}
    assert filter_request_headers({"content-encoding": "aws-chunked,br"}) == {"content-encoding": "br"}
    for unframed in ("gzip", "gzip, br", "gzip,br", ""):
        assert filter_request_headers({"content-encoding": unframed}) == {"content-encoding": unframed}


def test_what_says_nothing_of_a_trace_stays_behind() -> None:
    """A `tracestate` that does not parse (W3C Trace Context, 3.3); `traceparent` goes along all the same."""
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    sent = {"traceparent": traceparent, "tracestate": "a=b, c = d"}
    assert filter_request_headers(sent) == {"traceparent": traceparent}
    sent = {"traceparent": traceparent, "tracestate": "a=b ,c=d"}
    assert filter_request_headers(sent) == {"traceparent": traceparent, "tracestate": "a=b,c=d"}


def test_the_origins_request_id_gets_a_name_of_its_own() -> None:
    """The gateway has request ids; the origin's stays findable."""
    headers = filter_response_headers({"x-amz-request-id": "R1", "date": "…", "server": "moto", "etag": '"e"'})
    assert headers == [("etag", '"e"'), ("x-forebay-origin-request-id", "R1")]


def test_connection_names_no_header_that_the_origin_goes_by() -> None:
    """`Connection` is unsigned: it must not take a condition, a range or an x-amz-* field out of a request."""
    kept = {
        "x-amz-meta-a": "1",
        "content-type": "text/plain",
        "content-md5": "…",
        "if-none-match": "*",
        "range": "bytes=0-1",
        "x-forebay-hop": "another",
    }
    assert filter_request_headers(kept | {"connection": ", ".join([*kept, "x-private"]), "x-private": "hop"}) == kept


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb", "a\0b"])
def test_encoded_headers_have_no_value_that_could_forge_an_answer(value: str) -> None:
    """They are written as they are, many times: each is one line."""
    with pytest.raises(ValueError, match="line break"):
        EncodedHeaders.of([("etag", '"e"'), ("x-amz-meta-a", value)])
    assert EncodedHeaders.of([("etag", '"e"')]).lines == b'etag: "e"\r\n'


def test_headers_that_were_encoded_come_back() -> None:
    """Names and values as they were, whatever is in a value; none of none."""
    headers = [("etag", '"e: 1"'), ("x-amz-meta-a", ""), ("x-amz-meta-b", " caf\xe9 : x "), ("vary", "a, b")]
    encoded = EncodedHeaders.of(headers)
    assert encoded.lines == b'etag: "e: 1"\r\nx-amz-meta-a: \r\nx-amz-meta-b:  caf\xe9 : x \r\nvary: a, b\r\n'
    assert encoded.pairs == headers
    assert EncodedHeaders.of([]).pairs == []
