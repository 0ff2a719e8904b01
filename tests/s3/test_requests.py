from __future__ import annotations

import pytest

from gateway.core.errors import S3Error
from gateway.s3.requests import FieldNames, another_service, parse_request
from tests.s3.wire import request


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
