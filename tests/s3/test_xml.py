"""XML documents, those of errors among them."""

from __future__ import annotations

from urllib.parse import unquote_plus
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.core.steps import at_once
from gateway.s3.error_codes import CODES, error_document, s3_error
from gateway.s3.requests import part_number
from gateway.s3.xml import (
    CompletedPart,
    DeleteEntry,
    DeleteError,
    DeleteRequest,
    complete_multipart_upload_result,
    delete_request_document,
    error_code_of,
    insert_delete_results,
    parse_bounded,
    parse_complete_multipart_upload,
    parse_delete,
    text_of,
)
from gateway.s3.xml_writer import element, encode_list_key, escape

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"

xml_text = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff") | st.sampled_from("\t\n\r"),
    min_size=1,
    max_size=40,
)
"""Text that XML 1.0 can carry (section 2.2)."""


@given(xml_text)
def test_text_makes_the_round_trip(text: str) -> None:
    """Escaped, any text that XML can carry comes back, carriage returns included."""
    assert ElementTree.fromstring(element("Key", text)).text == text


@given(st.text())
def test_escaped_text_is_always_well_formed(text: str) -> None:
    """Whatever it holds."""
    ElementTree.fromstring(f'<a b="{escape(text)}">{escape(text)}</a>'.encode())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_url_encoded_listing_keys_make_the_round_trip(key: str) -> None:
    """Every key, control characters included, decoded the way botocore does."""
    encoded = encode_list_key(key, url=True)
    assert unquote_plus(encoded) == key
    assert escape(encoded) == encoded


def test_listing_keys_without_url_encoding() -> None:
    """A slash stays literal, a plus must not (botocore decodes it as a space); control characters are references."""
    assert encode_list_key("a/b+c d", url=True) == "a/b%2Bc%20d"
    assert encode_list_key("a&b\r\x01", url=False) == "a&amp;b&#13;&#x1;"
    assert encode_list_key("plain", url=False) == "plain"


entries = st.builds(
    DeleteEntry,
    key=xml_text,
    version_id=st.none() | xml_text,
    etag=st.none() | xml_text,
    extras=st.just(()) | st.builds(lambda size: (("Size", size),), xml_text),
)


@given(st.builds(DeleteRequest, objects=st.lists(entries, min_size=1, max_size=5), quiet=st.booleans()))
def test_delete_requests_make_the_round_trip(asked: DeleteRequest) -> None:
    """What is written for the origin is read back the same: keys with markup, conditions, quiet."""
    assert at_once(parse_delete(delete_request_document(asked))) == asked


def delete_body(count: int) -> bytes:
    return b"<Delete>" + b"<Object><Key>k</Key></Object>" * count + b"</Delete>"


def test_a_thousand_objects_can_be_deleted_and_no_more() -> None:
    """S3's limits; the namespace may be missing, the order is free."""
    assert len(at_once(parse_delete(delete_body(1000))).objects) == 1000
    body = b"<Delete xmlns='x'><Quiet>true</Quiet><Object><VersionId>v</VersionId><Key>k</Key></Object></Delete>"
    assert at_once(parse_delete(body)) == DeleteRequest([DeleteEntry("k", "v", None)], quiet=True)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<Delete>",
        b"<Delete/>",
        b"not xml",
        b"\xff\xfe",
        b"<Other><Object><Key>k</Key></Object></Other>",
        b"<Delete><Object/></Delete>",
        b"<Delete><Object><Key/></Object></Delete>",
        b"<Delete><Object><Key>a</Key><Key>b</Key></Object></Delete>",
        b"<Delete><Object><Key>a</Key><key>b</key></Object></Delete>",
        b"<Delete xmlns:x='y'><Object><Key>a</Key><x:Key>b</x:Key></Object></Delete>",
        b"<Delete><Object><Key>a<b/>c</Key></Object></Delete>",
        b"<Delete><More><Object><Key>a</Key></Object></More><Object><Key>a</Key></Object></Delete>",
        b"<Delete><Object><Key>&#0;</Key></Object></Delete>",
        b"<?xml version='1.0' encoding='no-such'?><Delete><Object><Key>k</Key></Object></Delete>",
        b"<!DOCTYPE Delete><Delete><Object><Key>k</Key></Object></Delete>",
        b"<!DOCTYPE d [<!ENTITY e 'k'>]><Delete><Object><Key>&e;</Key></Object></Delete>",
        b"<!DOCTYPE d [<!ENTITY e SYSTEM 'file:///etc/passwd'>]><Delete><Object><Key>&e;</Key></Object></Delete>",
        delete_body(1001),
        b"<Delete>" + b"<a/>" * 100_000 + b"</Delete>",
        b"<Delete>" + b"<a>" * 50_000,
    ],
    ids=range(21),
)
def test_documents_that_could_be_read_in_two_ways_or_harm_are_malformed(body: bytes) -> None:
    """No DTDs, no entities, no trees beyond the schema, no key that another parser would see differently."""
    with pytest.raises(S3Error) as refusal:
        at_once(parse_delete(body))
    assert (refusal.value.code, refusal.value.status) == ("MalformedXML", 400)


def test_documents_beyond_the_callers_limit_are_not_even_parsed() -> None:
    """Size is checked first."""
    with pytest.raises(S3Error, match="MaxMessageLengthExceeded"):
        at_once(parse_delete(delete_body(2), size_bytes_max=10))
    with pytest.raises(S3Error, match="MaxMessageLengthExceeded"):
        at_once(parse_complete_multipart_upload(b"x" * 11, size_bytes_max=10))


@pytest.mark.parametrize(
    ("etag", "namespace", "prolog"),
    [("abc", "", ""), ('"abc"', f' xmlns="{NAMESPACE}"', '<?xml version="1.0" encoding="UTF-8"?>\n'),
     ("&#34;abc&#34;", "", ""), ("&quot;abc&quot;", ' xmlns="x"', "")],
)  # fmt: skip
def test_complete_bodies_of_every_client_are_read(etag: str, namespace: str, prolog: str) -> None:
    """Namespace, declaration, quotes and order of children vary between clients."""
    body = (
        f"{prolog}<CompleteMultipartUpload{namespace}>\n"
        f"<Part><ETag>{etag}</ETag><PartNumber>1</PartNumber></Part>"
        f"<Part><ChecksumCRC32>AAAAAA==</ChecksumCRC32><PartNumber> 7 </PartNumber>\n<ETag>{etag}</ETag></Part>"
        "</CompleteMultipartUpload>"
    )
    assert at_once(parse_complete_multipart_upload(body.encode())) == [
        CompletedPart(1, '"abc"', {}),
        CompletedPart(7, '"abc"', {"crc32": "AAAAAA=="}),
    ]


def test_ten_thousand_parts_with_checksums_fit() -> None:
    """The largest document that S3 allows."""
    fields = "<ETag>&quot;{0:032x}&quot;</ETag><ChecksumSHA256>{0:064x}</ChecksumSHA256>"
    parts = "".join(f"<Part><PartNumber>{n}</PartNumber>{fields.format(n)}</Part>" for n in range(1, 10_001))
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    assert len(at_once(parse_complete_multipart_upload(body))) == 10_000


@pytest.mark.parametrize(
    ("inner", "steps_max"),
    [
        (b"<Object %b/>" % b" ".join(b"a%d=''" % number for number in range(600_000)), 3),
        (b"<!--" + b"<a" * 4_000_000 + b"-->", 3),
        (b"<Object/>" * 800_000, 1),
        (b" " * 8_000_000, 500),
    ],
    ids=["attributes", "comment", "objects", "text"],
)
def test_documents_are_read_in_small_steps(inner: bytes, steps_max: int) -> None:
    """What would have to be taken at once, or is more than the schema has, is given up when it shows."""
    steps = parse_delete(b"<Delete>%b</Delete>" % inner)
    taken: list[None] = []
    with pytest.raises(S3Error, match="MalformedXML"):
        taken.extend(steps)
    assert steps_max // 2 <= len(taken) <= steps_max


def complete_body(*parts: tuple[str, str]) -> bytes:
    inner = "".join(f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>" for number, etag in parts)
    return f"<CompleteMultipartUpload>{inner}</CompleteMultipartUpload>".encode()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (complete_body(), "MalformedXML"),
        (complete_body(("x", "e")), "MalformedXML"),
        (complete_body(("1", "")), "MalformedXML"),
        (b"<CompleteMultipartUpload><Part><ETag>e</ETag></Part></CompleteMultipartUpload>", "MalformedXML"),
        (b"<!DOCTYPE x><CompleteMultipartUpload/>", "MalformedXML"),
        (complete_body(("2", "e"), ("1", "e")), "InvalidPartOrder"),
        (complete_body(("1", "e"), ("1", "e")), "InvalidPartOrder"),
        (complete_body(("0", "e")), "InvalidArgument"),
        (complete_body(("-1", "e")), "InvalidArgument"),
        (complete_body(("10001", "e")), "InvalidArgument"),
    ],
)
def test_bad_lists_of_parts_are_refused(body: bytes, code: str) -> None:
    """Checked before the origin hears of it (S3 API, "CompleteMultipartUpload", errors)."""
    with pytest.raises(S3Error) as refusal:
        at_once(parse_complete_multipart_upload(body))
    assert refusal.value.code == code


@pytest.mark.parametrize(
    "before", [b"", b"   \n ", b'<?xml version="1.0"?>\n', b'  <?xml version="1.0"?>', b"<?xml version='1.0'?>  "]
)
def test_an_error_behind_status_200_is_found(before: bytes) -> None:
    """Long operations send white space first, and an error may follow it."""
    assert error_code_of(before + b"<Error><Message/><Code>InternalError</Code></Error>") == "InternalError"
    assert error_code_of(before + b"<CopyObjectResult><Code>x</Code></CopyObjectResult>") is None


@pytest.mark.parametrize("body", [b"", b"   ", b"<Error>", b"\x00", b"<html><br></html>", b"<!DOCTYPE x><Error/>"])
def test_bodies_that_are_no_xml_are_no_errors(body: bytes) -> None:
    """An object's bytes or a proxy's page must not raise here."""
    assert error_code_of(body) is None
    assert text_of(body, "Code") is None


def test_an_error_without_a_code_is_still_an_error() -> None:
    """It must not pass for success."""
    assert error_code_of(b"<Error/>") == ""


def test_text_is_found_by_local_name() -> None:
    """With a namespace or without, at any depth; None when it is not there."""
    body = f'<A xmlns="{NAMESPACE}"><B><UploadId>u/1</UploadId></B><Empty/></A>'.encode()
    assert text_of(body, "UploadId") == "u/1"
    assert text_of(body, "Empty") == ""
    assert text_of(body, "Nothing") is None
    assert text_of(body, "UploadId", size_bytes_max=10) is None


def test_trees_are_bounded() -> None:
    """Elements and depth; attributes are not kept."""
    assert parse_bounded(b"<a><b/></a>", elements_max=2) is not None
    assert parse_bounded(b"<a><b/><c/></a>", elements_max=2) is None
    assert parse_bounded(b"<a>" * 9 + b"</a>" * 9, elements_max=100) is None


def test_the_result_of_complete_is_what_clients_parse() -> None:
    """Namespaced, ETag quoted, key escaped."""
    root = ElementTree.fromstring(complete_multipart_upload_result("b", "a&b", "abc-2"))
    assert root.tag == f"{{{NAMESPACE}}}CompleteMultipartUploadResult"
    fields = {child.tag.rpartition("}")[2]: child.text for child in root}
    assert fields == {"Location": "/b/a&b", "Bucket": "b", "Key": "a&b", "ETag": '"abc-2"'}


@pytest.mark.parametrize(
    "result",
    [
        b'<?xml version="1.0"?><DeleteResult xmlns="x"><Deleted><Key>a</Key></Deleted></DeleteResult>',
        b"<DeleteResult></DeleteResult>\n",
        b'<?xml version="1.0"?>\n<DeleteResult xmlns="x"/>',
        b"<DeleteResult />",
    ],
)
def test_errors_join_the_origins_answer(result: bytes) -> None:
    """The caller sees one document: what the origin did, and what was not let through."""
    joined = insert_delete_results(
        result, [DeleteError("k&1", None, "AccessDenied", "no"), DeleteError("k2", "v", "C", "m")], ["d&1"]
    )
    root = ElementTree.fromstring(joined)
    before = ElementTree.fromstring(result)
    assert len(root) == len(before) + 3
    texts = [[child.text for child in node] for node in root][-3:]
    assert texts == [["d&1"], ["k&1", "AccessDenied", "no"], ["k2", "v", "C", "m"]]
    with pytest.raises(ValueError, match="DeleteResult"):
        insert_delete_results(b"<Error><Code>X</Code></Error>", [])  # is passed on, not amended


@pytest.mark.parametrize(("text", "number"), [("1", 1), ("10000", 10_000), ("007", 7), ("0" * 100_000 + "42", 42)])
def test_part_numbers_are_read_whatever_zeros_they_begin_with(text: str, number: int) -> None:
    """As AWS reads them."""
    assert part_number("partNumber", text) == number


@pytest.mark.parametrize(
    "text", ["", "0", "10001", "-1", "+1", "1_0", " 1", "x", "٣", "00000000120000", "9" * 100_000, "0" * 100_000]
)
def test_a_part_number_that_is_none_is_an_invalid_argument(text: str) -> None:
    """However long it is: that is no error of ours."""
    with pytest.raises(S3Error, match="InvalidArgument"):
        part_number("partNumber", text)


def test_a_known_code_brings_its_status_and_message() -> None:
    """What the caller knows better wins over the table. A misspelt code is a mistake of the program, not an answer."""
    error = s3_error("NoSuchKey")
    assert (error.status, error.message) == (404, "The specified key does not exist.")
    error = s3_error("InvalidPart", "gone", status=416, headers={"Allow": "GET"}, UploadId="u")
    assert (error.status, error.message, error.elements) == (416, "gone", {"UploadId": "u"})
    assert error.headers == {"Allow": "GET"}
    with pytest.raises(ValueError, match="NoSuchKye"):
        s3_error("NoSuchKye")
    assert s3_error("Weird", "odd", status=418).status == 418
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
