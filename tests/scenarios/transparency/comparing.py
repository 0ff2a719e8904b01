"""What must be equal in two answers, and what cannot be: the moments, the marks and the names of each server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from tests.scenarios.transparency.wire import Answer

_NOT_COMPARED = frozenset(
    {
        "connection",  # of this connection only (RFC 9110, 7.6.1), as the next two
        "keep-alive",
        "transfer-encoding",
        "date",  # when it was answered
        "server",  # who answered
        "x-amz-request-id",  # the marks of one request at one server
        "x-amz-id-2",
        "x-amzn-requestid",
        "x-amz-content-sha256",  # moto stores and shows how the writer signed: gateways sign for themselves
    }
)
_OWN_PREFIX = "x-forebay-"

_WORDING = frozenset({"Message", "Resource", "RequestId", "HostId", "BucketName", "Key", "Condition"})
_WORDING_HEADERS = frozenset({"content-type", "content-length", "accept-ranges", "access-control-allow-origin"})
"""What a refusal may say in other words: `text/xml` for `application/xml`. moto lets every web page read its errors,
and names the last of two conditions that fail; RGW accepts ranges of errors."""

_ANY_VALUE = frozenset({"last-modified", "x-amz-version-id", "x-amz-copy-source-version-id"})
"""Headers that both must have; the origins differ in when they stored, and in what they call a version."""

_MOMENTS_AND_MARKS = re.compile(
    rb"<(RequestId|HostId|LastModified|CreationDate|Initiated|ServerTime|Expires|VersionId|DeleteMarkerVersionId|"
    rb"NextVersionIdMarker|VersionIdMarker|NextContinuationToken|ContinuationToken|NextUploadIdMarker)>[^<]+</"
)
_HOST = re.compile(rb"https?://[^/<]*")


def status_and_code(answer: Answer) -> str:
    """`404 NoSuchKey`; the status alone where there is no error document."""
    found = re.search(rb"<Error>.*?<Code>([^<]*)</Code>", answer.body, re.DOTALL)
    return f"{answer.status} {found[1].decode()}" if found else str(answer.status)


def differences(method: str, direct: Answer, through: Answer, names: tuple[Mapping[str, str], ...]) -> Iterator[str]:
    """How `through` differs from `direct`; `names` are each side's captured values, by which its answers may differ."""
    if status_and_code(direct) != status_and_code(through):
        yield f"status: {status_and_code(direct)} != {status_and_code(through)}"
    if _is_own_refusal(through):
        yield from _less_told(method, direct, through, names)
        return
    bodies = [_neutral(answer.body, own) for answer, own in zip((direct, through), names, strict=True)]
    if bodies[0] != bodies[1]:
        yield f"body: {bodies[0][:300]!r}\n   != {bodies[1][:300]!r}"
    headers = [_comparable(method, answer, own) for answer, own in zip((direct, through), names, strict=True)]
    if headers[0] != headers[1]:
        ours, theirs = (sorted(set(one) - set(other)) for one, other in ((headers[0], headers[1]), headers[::-1]))
        yield f"headers: {ours or sorted(headers[0])} != {theirs or sorted(headers[1])}"


def _is_own_refusal(answer: Answer) -> bool:
    """Whether the gateway has refused by itself; x-forebay-cache tells what the origin has answered, now or before."""
    told = answer.header("x-forebay-cache")
    return answer.status >= 300 and told not in ("forwarded", "bypass") and (answer.status < 400 or told is None)


def _less_told(method: str, direct: Answer, through: Answer, names: tuple[Mapping[str, str], ...]) -> Iterator[str]:
    """A refusal of the gateway's own may say more than the origin's, in other words, but nothing less."""
    headers = [_comparable(method, answer, own) for answer, own in zip((direct, through), names, strict=True)]
    missing = {pair for pair in set(headers[0]) - set(headers[1]) if pair[0] not in _WORDING_HEADERS}
    missing |= _elements(direct) - _elements(through)
    if missing:
        yield f"the gateway's own refusal leaves out {sorted(missing)}"


def _elements(answer: Answer) -> set[tuple[str, str]]:
    found = re.findall(r"<(\w+)>([^<]*)</", answer.body.decode("utf-8", "replace"))
    return {(name, text) for name, text in found if name not in _WORDING}


def warm_differences(cold: Answer, warm: Answer) -> Iterator[str]:
    """How the second answer of the gateway differs from its first; here moments and names are the same."""
    if cold.status != warm.status:
        yield f"status: {cold.status} != {warm.status} when asked again"
    if _without_request_ids(cold.body) != _without_request_ids(warm.body):
        yield f"body: {cold.body[:300]!r}\n   != {warm.body[:300]!r} when asked again"
    headers = [[pair for pair in _kept(answer) if not _is_length_of_document(pair, answer)] for answer in (cold, warm)]
    if headers[0] != headers[1]:
        yield f"headers: {headers[0]} != {headers[1]} when asked again"


def _kept(answer: Answer) -> list[tuple[str, str]]:
    return sorted(
        (name, value)
        for name, value in answer.headers
        if name not in _NOT_COMPARED and not name.startswith(_OWN_PREFIX)
    )


def _comparable(method: str, answer: Answer, names: Mapping[str, str]) -> list[tuple[str, str]]:
    fields = [(name, "*" if name in _ANY_VALUE else _neutral_text(value, names)) for name, value in _kept(answer)]
    return fields if method == "HEAD" else [pair for pair in fields if not _is_length_of_document(pair, answer)]


def _is_length_of_document(pair: tuple[str, str], answer: Answer) -> bool:
    """The neutralised document is compared; its length goes with request ids and host names."""
    return pair[0] == "content-length" and answer.body.lstrip().startswith(b"<")


def _neutral_text(text: str, names: Mapping[str, str]) -> str:
    return _neutral(text.encode("latin-1"), names).decode("latin-1")


def _neutral(body: bytes, names: Mapping[str, str]) -> bytes:
    for name, value in names.items():
        body = body.replace(value.encode(), f"{{{name}}}".encode())
    return (
        _HOST.sub(b"http://host", _MOMENTS_AND_MARKS.sub(rb"<\1>*</", body)) if b"<" in body or b"//" in body else body
    )


def _without_request_ids(body: bytes) -> bytes:
    return re.sub(rb"<(RequestId|HostId)>[^<]*</", rb"<\1>*</", body)
