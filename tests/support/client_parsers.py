"""Everything that reads what clients send, each as a function of bytes: for the tests of growth, and for fuzzing.

A function returns None and raises nothing: refusals are answers, and are made into the document that clients get.
`words` are what the grammar of each consists of; generated inputs are put together from them.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gateway.core.errors import OriginBodyError, S3Error
from gateway.core.steps import at_once
from gateway.edge.access import Authenticator, ConfiguredKeyring, Key, authorise
from gateway.edge.request_parsing import ChunkedDecoder, HeadParser, IncompleteHead
from gateway.operations.read_wishes import head_must_bypass, judged_by_the_origin
from gateway.policy.slots import EVERYTHING, Grant, Prefix, Slots
from gateway.s3 import headers
from gateway.s3.aws_chunked import AwsChunkedDecoder
from gateway.s3.checksums import BodyVerifier
from gateway.s3.error_codes import error_document
from gateway.s3.events import MalformedEvents, parse_events
from gateway.s3.headers import (
    EncodedHeaders,
    filter_request_headers,
    filter_response_headers,
    is_md5_etag,
    parse_http_date,
    quote,
)
from gateway.s3.listings import UploadsQuery, decode_token, list_query, uploads_query
from gateway.s3.requests import S3Request, another_service, parse_copy_source, parse_request
from gateway.s3.signature_v4 import (
    STREAMING_SIGNED_TRAILER,
    STREAMING_UNSIGNED_TRAILER,
    UNSIGNED,
    SeedSignature,
    payload_mode,
)
from gateway.s3.xml import insert_delete_results, parse_complete_multipart_upload, parse_delete
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot

HEAD_BYTES_MAX = 64 * 1024
ACCESS_KEY_ID, SECRET = "AKID", "secret"
GRANT = Grant((Prefix.parse("s3://bucket/team-a/"),), False)
SLOTS = Slots([Slot("s", Prefix.parse("s3://bucket/"), "read-only")])
SEED = SeedSignature(b"key", "20260101T000000Z", "20260101/us-east-1/s3/aws4_request", "0" * 64)

_authenticator = Authenticator(
    ConfiguredKeyring([Key(ACCESS_KEY_ID, SECRET, None, EVERYTHING)]), ManualClock(), allow_unsigned=True
)


@dataclass(frozen=True)
class ClientParser:
    """One reader, and what its inputs are made of. `begin` and `end` lead it past its first look, where it has one."""

    name: str
    parse: Callable[[bytes], object]
    words: tuple[bytes, ...]
    begin: bytes = b""
    end: bytes = b""
    bytes_max: int = HEAD_BYTES_MAX


def _refusals_answered(parse: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def answered(data: bytes) -> None:
        try:
            parse(data)
        except S3Error as error:
            if error.status >= 500 and error.code not in ("NotImplemented", "SlowDown"):
                raise AssertionError("a client's bytes are no failure of the gateway") from error
            error_document(error, resource="/bucket/key", request_id="1", host_id="2")
            EncodedHeaders.of((name.lower(), value) for name, value in (error.headers or {}).items())

    return answered


def _request(
    query: bytes = b"", headers: Mapping[bytes, bytes] | None = None, path: bytes = b"/bucket/key", method: str = "GET"
) -> S3Request:
    fields = [(b"host", b"h"), *(headers or {}).items()]
    return parse_request(method, path, query, fields, ("s3.local",))


def _judged(request: S3Request) -> None:
    """All that looks at a request before an operation begins."""
    another_service(request)
    head_must_bypass(request)
    judged_by_the_origin(request)
    filter_request_headers(request.headers)
    for step in (_authenticator.authenticate, lambda one: authorise(one, GRANT, SLOTS)):
        try:
            step(request)
        except S3Error as error:
            error_document(error, resource="/bucket/key", request_id="1", host_id="2")


def _head(data: bytes) -> None:
    head = HeadParser(max_bytes=2**20, max_headers=2**16).parse(data + b"\r\n\r\n")
    _judged(
        parse_request(head.method, head.target.raw_path, head.target.raw_query, head.headers, ("s3.local", "local"))
    )


def _incomplete_head(data: bytes) -> None:
    IncompleteHead(2**20).find_end(data)


def _condition(data: bytes) -> None:
    text = data.decode("latin-1")
    for etag in ('"abc"', 'W/"abc"', "abc"):
        headers.etag_matches(text, etag)
    for name in ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since"):
        for prefix, check in (("", headers.evaluate_read), ("x-amz-copy-source-", headers.check_copy_source)):
            with suppress(S3Error):
                check({f"{prefix}{name}": text}, etag='"abc"', last_modified=1.0, now=2.0)
    headers.if_range_holds({"if-range": text}, etag='"abc"', last_modified=1.0)
    parse_http_date(text)
    is_md5_etag(text)
    quote(text)


def _range(data: bytes) -> None:
    text = data.decode("latin-1")
    headers.first_and_last(text)
    headers.is_one_range(text)
    with suppress(S3Error):
        headers.parse_range(text, 1000)
    with suppress(OriginBodyError):
        headers.parse_content_range(text)
    headers.parse_copy_source_range(text, 1000)


def _authorization(data: bytes) -> None:
    """The header as it comes, and as the list of signed headers of a request that has them all."""
    _judged(_request(headers={b"authorization": data, b"x-amz-date": b"20260101T000000Z"}))


def _signed_headers(data: bytes) -> None:
    credential = b"AWS4-HMAC-SHA256 Credential=AKID/20260101/us-east-1/s3/aws4_request, "
    header = credential + b"SignedHeaders=host;x-amz-content-sha256;x-amz-date;" + data + b", Signature=" + b"0" * 64
    names = {name: b"v" * 8 for name in data.split(b";")[:1000] if name and b"host" not in name}
    fields = {
        **names,
        b"a": b"long" * (len(data) // 4),
        b"x-amz-date": b"20260101T000000Z",
        b"x-amz-content-sha256": b"UNSIGNED-PAYLOAD",
        b"authorization": header,
    }
    _judged(_request(headers=fields))


def _unsigned_headers(data: bytes) -> None:
    """Many headers, none of which the signature covers, beside many names that it does."""
    names = [b"x-amz-meta-%d%s" % (number, part[:20]) for number, part in enumerate(data.split(b";"))]
    half = len(names) // 2
    signed = b";".join([b"host", b"x-amz-date", b"x-amz-content-sha256", *names[:half]])
    credential = b"AWS4-HMAC-SHA256 Credential=AKID/20260101/us-east-1/s3/aws4_request, "
    fields = {
        **dict.fromkeys(names[half:], b"v"),
        b"x-amz-date": b"20260101T000000Z",
        b"x-amz-content-sha256": b"UNSIGNED-PAYLOAD",
        b"authorization": credential + b"SignedHeaders=" + signed + b", Signature=" + b"0" * 64,
    }
    _judged(_request(headers=fields))


def _repeated_headers(data: bytes) -> None:
    fields = [(b"host", b"h"), *((b"x-amz-meta-a", value) for value in data.split(b","))]
    _judged(parse_request("PUT", b"/bucket/key", b"", fields, ()))


def _query(data: bytes) -> None:
    for method, path in (("GET", b"/bucket"), ("GET", b"/bucket/key"), ("PUT", b"/bucket/key"), ("POST", b"/bucket")):
        try:
            request = _request(data.replace(b"#", b""), path=path, method=method)
        except S3Error:
            continue
        _judged(request)
        for read in (list_query, uploads_query):
            with suppress(S3Error):
                read(request)


def _presigned(data: bytes) -> None:
    v4 = (
        b"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKID/20260101/us-east-1/s3/aws4_request"
        b"&X-Amz-Date=20260101T000000Z&X-Amz-Expires=60&X-Amz-Signature=00&X-Amz-SignedHeaders=host"
    )
    v2 = b"AWSAccessKeyId=AKID&Signature=00&Expires=9999999999"
    for query in (v4 + data, v4 + b"&" + data, v2 + data, v2 + b"&" + data, data):
        with suppress(S3Error):
            _judged(_request(query))


def _target(data: bytes) -> None:
    _judged(_request(path=b"/" + data))


def _absolute_target(data: bytes) -> None:
    _judged(_request(path=b"http://" + data))


def _host(data: bytes) -> None:
    _judged(parse_request("GET", b"/key", b"", [(b"host", data)], ("s3.local", "local")))


def _connection(data: bytes) -> None:
    names = {b"connection": data, b"content-encoding": data, b"expect": data, b"content-type": data}
    for method in ("GET", "POST"):
        _judged(_request(headers=names, method=method, query=b"delete" if method == "POST" else b""))


def _header_names(data: bytes) -> None:
    fields = {part[:4096].lower(): b"v" for part in data.split(b":") if part}
    request = _request(headers=fields, method="PUT")
    _judged(request)
    filter_response_headers(request.headers)


def _http_chunks(data: bytes) -> None:
    ChunkedDecoder().feed(data, lambda _: None)


def _http_chunks_in_pieces(data: bytes) -> None:
    decoder = ChunkedDecoder()
    for start in range(0, len(data), 7):
        decoder.feed(data[start : start + 7], lambda _: None)


def _aws_chunks(data: bytes) -> None:
    for mode in (STREAMING_UNSIGNED_TRAILER, STREAMING_SIGNED_TRAILER):
        for step in (len(data) or 1, 11):
            decoder = AwsChunkedDecoder(mode, 2**20, frozenset({"x-amz-checksum-crc32"}), SEED)
            with suppress(S3Error):
                for start in range(0, len(data), step):
                    decoder.feed(data[start : start + step])
                decoder.finish()


def _checksums(data: bytes) -> None:
    text = data.decode("latin-1")
    with suppress(S3Error):
        payload_mode(text)
    for name in ("content-md5", "x-amz-checksum-crc32", "x-amz-trailer", "x-amz-sdk-checksum-algorithm"):
        with suppress(S3Error):
            BodyVerifier({name: text}, UNSIGNED).verify()


def _events(data: bytes) -> None:
    with suppress(MalformedEvents):
        parse_events(data)


def _own_documents(data: bytes) -> None:
    """Those of origins, which may carry what clients have sent before."""
    with suppress(ValueError):
        insert_delete_results(data, [], ["key"])


def _delete(data: bytes) -> None:
    at_once(parse_delete(data))


def _complete(data: bytes) -> None:
    at_once(parse_complete_multipart_upload(data))


def _one_tag(data: bytes) -> None:
    """Attributes of one element, all of one namespace whose name is as long as they are together."""
    _delete(b"<Delete xmlns:a='" + b"u" * len(data) + b"'" + data + b"/>")


def _token(data: bytes) -> None:
    decode_token(data.decode("latin-1"))


def _inside_token(data: bytes) -> None:
    """What a token says, and not how it is encoded."""
    whole = zlib.crc32(data).to_bytes(4, "big") + data
    decode_token("1" + base64.urlsafe_b64encode(whole).decode().rstrip("="))


def _inside_upload_marker(data: bytes) -> None:
    marker = "fb1." + base64.urlsafe_b64encode(data).decode().rstrip("=")
    _ = UploadsQuery("", "", "k", marker, 7, is_url_encoded=True).place


_BLANKS = (b" ", b"\t", b",", b";", b'"')
_LINES = (b"\r\n", b"\n", b"\r", b":", b" ", b"\t", b"a: b\r\n", b"A:\r\n", b"x-amz-meta-a: b\r\n", b"host: h\r\n")
_QUERY = (b"&", b"=", b"%", b"%41", b"%ff", b"+", b"a", b"prefix=", b"a&", b"&a=b", b"X-Amz-Date=", b";", b"/", b"\n")
_XML = (b"<a/>", b"<a>", b"</a>", b"<b x='y'>", b"</b>", b" ", b"\n", b"&amp;", b"&#65;", b"a", b'<a xmlns="u">',
        b" a:b=''", b"<!---->", b"<?a?>", b"<![CDATA[a]]>", b"<Object><Key>k</Key></Object>", b"<Key>", b"u" * 64,
        b"<Part><PartNumber>1</PartNumber><ETag>e</ETag></Part>")  # fmt: skip


def _parsers() -> list[ClientParser]:
    found = [
        ClientParser("head", _head, (*_LINES, b"GET / HTTP/1.1\r\n"), b"GET /bucket/key HTTP/1.1\r\nHost: h\r\n"),
        ClientParser("incomplete head", _incomplete_head, _LINES, b"GET / HTTP/1.1\r\n"),
        ClientParser("conditions", _condition, (*_BLANKS, b'"a"', b"W/", b"*", b"a", b"x y", b",,", b'"x",'), b'"x",'),
        ClientParser("ranges", _range, (b"bytes=", b"0", b"9", b"-", b",", b" ", b"1-2,"), b"bytes="),
        ClientParser(
            "authorization",
            _authorization,
            (*_BLANKS, b"=", b"/", b"Credential=AKID/", b"SignedHeaders=", b"Signature=", b", ", b"a"),
            b"AWS4-HMAC-SHA256 ",
        ),
        ClientParser("signed headers", _signed_headers, (b";", b"a;", b"host;", b"a", b"x-amz-date;", b"b;")),
        ClientParser("unsigned headers", _unsigned_headers, (b";", b"a;", b"ab;")),
        ClientParser("repeated headers", _repeated_headers, (b",", b"a,", b"a", b" ")),
        ClientParser("query", _query, (*_QUERY, b"list-type=2&", b"continuation-token=", b"uploads&", b"key-marker=")),
        ClientParser("presigned", _presigned, (*_QUERY, b";host", b";a", b"&x-amz-meta-a=", b"&X-Amz-Date=")),
        ClientParser("target", _target, (b"/", b"%", b"%41", b"%ff", b"%2e", b"..", b"a", b"//", b"+", b"\xff")),
        ClientParser("absolute target", _absolute_target, (b"/", b":", b"@", b".", b"a", b"1", b"?", b"%41")),
        ClientParser("host", _host, (b":", b".", b"1", b"a", b"s3.local", b".local", b"-")),
        ClientParser(
            "connection header", _connection, (*_BLANKS, b"close", b"aws-chunked", b"x-amz-date,", b"a,", b"gzip,")
        ),
        ClientParser(
            "header names", _header_names, (b":", b"x-", b"copy-", b"source", b"x-amz-", b"move-", b"-", b"a")
        ),
        ClientParser("HTTP chunks", _http_chunks, (b"1\r\na\r\n", b"\r\n", b"0", b";a", b"a: b\r\n", b"f", b"0\r\n")),
        ClientParser(
            "HTTP chunks in pieces",
            _http_chunks_in_pieces,
            (b"1\r\na\r\n", b"\r\n", b"0", b";a", b"a: b\r\n", b"f", b"0\r\n"),
        ),
        ClientParser(
            "aws-chunked",
            _aws_chunks,
            (
                b"1\r\na\r\n",
                b"\r\n",
                b"0\r\n",
                b"\n",
                b";chunk-signature=",
                b"x-amz-checksum-crc32:",
                b"0;chunk-signature=" + b"0" * 64 + b"\r\n",
                b"a",
            ),
        ),
        ClientParser("DeleteObjects", _delete, _XML, b"<Delete>", b"</Delete>", 8 * 2**20),
        ClientParser("DeleteObjects, one tag", _one_tag, (b" a:b%d=''", b" x=''", b" ", b" a:a='b'")),
        ClientParser(
            "CompleteMultipartUpload",
            _complete,
            _XML,
            b"<CompleteMultipartUpload>",
            b"</CompleteMultipartUpload>",
            8 * 2**20,
        ),
        ClientParser("tokens", _token, (b"1", b"A", b"=", b"-", b"_", b"/", b"\xff"), b"1"),
        ClientParser("inside tokens", _inside_token, (b"\x00", b"a", b"\xff", b"/", b"\x01")),
        ClientParser(
            "inside upload markers", _inside_upload_marker, (b'["a",', b"[1.5,", b'"u"]]', b"{", b'"x":1}', b"]")
        ),
        ClientParser(
            "copy source",
            lambda data: parse_copy_source(data.decode("latin-1")),
            (b"/", b"%", b"%41", b"%ff", b"+", b"a", b"?versionId=", b"&", b"?", b"arn:"),
            b"bucket/",
        ),
        ClientParser("checksums", _checksums, (b"A", b"=", b"/", b",", b" ", b"crc32", b"x-amz-checksum-crc32,")),
        ClientParser(
            "events", _events, (b"[", b"]", b"{", b"}", b'"', b",", b":", b'{"Records":[', b'"Message":', b"1")
        ),
        ClientParser(
            "DeleteResult",
            _own_documents,
            (b"</DeleteResult>", b"<DeleteResult", b"/>", b" ", b"</a:", b"a", b"<", b"\n"),
            b"<DeleteResult>",
        ),
    ]
    return [
        ClientParser(one.name, _refusals_answered(one.parse), one.words, one.begin, one.end, one.bytes_max)
        for one in found
    ]


PARSERS = {one.name: one for one in _parsers()}


def fingerprint(data: bytes) -> str:
    """A name for an input in a corpus."""
    return hashlib.sha256(data).hexdigest()[:16]
