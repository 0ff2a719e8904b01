from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.s3.error_codes import CODES, error_document, s3_error


def test_a_known_code_brings_its_status_and_message() -> None:
    """Whoever raises an error names its code only."""
    error = s3_error("NoSuchKey")
    assert (error.status, error.message) == (404, "The specified key does not exist.")
    assert s3_error("SlowDown").status == 503
    assert s3_error("LoopDetected").status == 508


def test_status_message_elements_and_headers_can_be_given() -> None:
    """What the caller knows better wins over the table."""
    error = s3_error("InvalidPart", "gone", status=416, headers={"Allow": "GET"}, UploadId="u")
    assert (error.status, error.message, error.elements, error.headers) == (
        416,
        "gone",
        {"UploadId": "u"},
        {"Allow": "GET"},
    )


def test_an_unknown_code_is_refused_unless_it_is_described() -> None:
    """A misspelt code is a programming error, not an answer."""
    with pytest.raises(ValueError, match="NoSuchKye"):
        s3_error("NoSuchKye")
    assert s3_error("Weird", "odd", status=418).status == 418


def test_every_code_is_an_error_status() -> None:
    """The table holds no success."""
    assert all(300 <= status < 600 and message for status, message in CODES.values())


def test_the_document_has_its_fields_in_the_order_that_clients_know() -> None:
    """Code, Message, Resource, RequestId, HostId, then the code's own elements; no namespace."""
    error = s3_error("InvalidArgument", "a < b & c", ArgumentName="n", ArgumentValue='"v"')
    root = ElementTree.fromstring(error_document(error, resource="/b/k", request_id="R", host_id="H"))
    assert root.tag == "Error"
    assert [(child.tag, child.text) for child in root] == [
        ("Code", "InvalidArgument"),
        ("Message", "a < b & c"),
        ("Resource", "/b/k"),
        ("RequestId", "R"),
        ("HostId", "H"),
        ("ArgumentName", "n"),
        ("ArgumentValue", '"v"'),
    ]


@given(st.text())
def test_whatever_a_client_sent_the_document_stays_well_formed(text: str) -> None:
    """Keys and headers are echoed; none of them can break the document, lone surrogates and NUL included."""
    document = error_document(s3_error("NoSuchKey", Key=text), resource=text, request_id="R", host_id="H")
    assert ElementTree.fromstring(document).findtext("Code") == "NoSuchKey"


@pytest.mark.parametrize("filler", ["a", "&", "\x00", "é"])
def test_what_is_repeated_is_cut(filler: str) -> None:
    """And says so. What was signed stays whole where it is of ordinary length."""
    longest = {"AWSAccessKeyId": 1024, "StringToSign": 8192, "CanonicalRequest": 8192, "HeadersNotSigned": 1024}
    for extra in (0, 1):
        fields = {name: filler * (size + extra) for name, size in longest.items()}
        error = S3Error("SignatureDoesNotMatch", "no", 403, elements=fields)
        shown = ElementTree.fromstring(error_document(error, resource="/" * 1025, request_id="1", host_id="2"))
        assert shown.findtext("Resource", "").endswith("[cut here: 1024 of 1025 characters]")
        for name, size in longest.items():
            note = f" [cut here: {size} of {size + 1} characters]" if extra else ""
            assert shown.findtext(name) == filler.replace("\x00", "\ufffd") * size + note
