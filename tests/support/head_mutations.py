"""Heads of requests, changed in one place: by chance, and as somebody would who looks for a gap between two parsers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

HEAD_END = b"\r\n\r\n"

_TELLING = [bytes([byte]) for byte in b"\r\n\t \0\x0b\x0c\x7f\x80\xff:,;%/?#&=+\"'.\\"]
"""What somewhere ends or separates something, or is taken for it."""

_LINE_ENDS = (b"\n", b"\r", b"\n\r", b"\r\r\n", b"\r\n ", b"\r\n\t", b" \r\n", b"\t\r\n", b"\r\n\r\n", b"\0\r\n")
_BETWEEN = (b":", b":  ", b":\t", b" : ", b"\t: ", b": \t", b"=", b": \x0b", b":\xa0")

_MORE_LINES = (
    *(b"Content-Length: 0", b"Content-Length: 5", b"content-length:0", b"Transfer-Encoding: chunked"),
    *(b"Expect: 100-continue", b"Connection: close", b"Connection: keep-alive", b"Connection: upgrade", b"Trailer: x"),
    *(b"Upgrade: h2c", b"Host: elsewhere", b"Host:", b"Keep-Alive: x", b"Via: 1.1 a", b"X-Forwarded-For: ::1"),
    *(b'If-Match:"a", "b": x', b"If-Match: *", b'If-None-Match: "a"', b"If-Modified-Since: x", b"If-Range: x"),
    *(b"Range: bytes=0-0", b"Range : bytes=1-2", b" Range: bytes=1-2", b"Range:bytes=1-2", b"range: ", b"Range:"),
    *(b"X-Amz-Date: 20260101T120000Z", b"Date: Thu, 01 Jan 2026 12:00:00 GMT", b"X-Amz-Security-Token: t"),
    *(b"Authorization: AWS a:b", b"X-HTTP-Method-Override: DELETE", b"X-Amz-Meta-A: b", b"x-amz-copy-source: /b/k"),
    *(b"X-Amz-Content-SHA256: UNSIGNED-PAYLOAD", b"X-Amz-Checksum-Mode: ENABLED", b"x-amz-checksum-mode: x"),
    *(b": x", b"x", b"\xc3\xa9: x", b"User-Agent: \xc3\xa9", b"Accept: a, b", b"accept:  c  d ", b"Accept-Encoding: "),
    *(b"amz-sdk-request: ttl=1", b"Amz-Sdk-Request:  a  b", b"amz-sdk-invocation-id: ", b"Content-Type: a/b;c=d"),
)
_VALUES = (
    *(
        b"",
        b" ",
        b"  ",
        b"a  b",
        b"a\tb",
        b"a, b",
        b"\xc3\xa9",
        b"bytes=0-",
        b"bytes=-1",
        b"bytes=0-1,3-4",
        b"bytes=9-1",
    ),
    *(b"bytes = 0-1", b"BYTES=0-1", b"bytes=00-01", b"bytes=0-99999999999999999999", b'""', b'W/"a"', b'"a","b"', b"*"),
    *(b"20260101T000000Z", b"20260101T240000Z", b"20260101T235960Z", b"20261301T120000Z", b"20260101 120000Z"),
    *(b"2026\xb201T120000ZZ", b"0" * 16, b"0" * 64, b"A" * 64, b"%s", b"%b%%", b"enabled", b"UNSIGNED-PAYLOAD"),
)
_TARGETS = (
    *(b"/", b"//", b"/.", b"/..", b"/%2e%2e/", b"/%2F", b"/%00", b"/%", b"/%zz", b"/%C3%A9", b"/%c3%a9", b"/\xc3\xa9"),
    *(b"/+", b"/%20", b"/%2B", b"/a;b", b"/a%3Fb", b"/a%23b", b"/~", b"/%7E", b"/%41", b"/a%25b", b"/a%2525b", b"/[]"),
)
_QUERIES = (
    *(b"?", b"?x-id=GetObject", b"?x-id=HeadObject", b"?x-id=", b"?acl", b"?acl=", b"?versionId=1", b"?a=b&c=d"),
    *(
        b"?c=d&a=b",
        b"?%61=b",
        b"?a=%2B",
        b"?a=+",
        b"?&",
        b"?=",
        b"?a=b?c",
        b"?partNumber=1",
        b"#x",
        b"?#",
        b"?X-Amz-Date=1",
    ),
    *(b"?response-content-type=a%2fb", b"?response-content-type=a/b", b"?a=1&a=0", b"?list-type=2", b"?torrent"),
)
_VERSIONS = (b" HTTP/1.0", b" HTTP/1.2", b" HTTP/2.0", b" http/1.1", b"  HTTP/1.1", b" HTTP/1.1 ", b"", b"\tHTTP/1.1")
_METHODS = (b"GET", b"HEAD", b"get", b"PUT", b"POST", b"DELETE", b"OPTIONS", b" GET", b"GET ", b"\r\nGET", b"G\0ET")

_VARYING = (b"range", b"if-", b"amz-sdk-", b"x-amz-date", b"authorization")
_HEX_SIGNATURE = re.compile(rb"[0-9a-f]{64}(?=\r\n)")
_UNRESERVED = re.compile(rb"[A-Za-z0-9\-._~]")
_ENCODED = re.compile(rb"%([0-9A-Fa-f]{2})")

_LEAST_BYTES = 16

Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def mutated(rng: random.Random, head: bytes, others: Sequence[bytes] = ()) -> bytes:
    """A whole head, changed once, twice or three times; `others` are heads that parts may be taken from."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if len(head) < _LEAST_BYTES:
            break
        head = rng.choice(_CHANGES)(rng, head, others or (head,))
    return head


def first_head(received: bytes) -> bytes:
    """What a connection takes for one head of what it receives; an empty line before it is tolerated. Where no head
    ends, it is ended."""
    received = received.removeprefix(b"\r\n")
    end = received.find(HEAD_END)
    return received[: end + len(HEAD_END)] if end >= 0 else received + HEAD_END


def _flip(rng: random.Random, head: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(head))
    byte = rng.choice([rng.randrange(256), head[at] ^ (1 << rng.randrange(8))])
    return head[:at] + bytes([byte]) + head[at + 1 :]


def _telling(rng: random.Random, head: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(head))
    return head[:at] + rng.choice(_TELLING) + head[at + rng.randrange(2) :]


def _in_request_line(rng: random.Random, head: bytes, _: Sequence[bytes]) -> bytes:
    """A byte of the target, mostly one that may stand there."""
    at = rng.randrange(max(1, head.find(b" HTTP/")))
    byte = rng.choice(_TELLING) if rng.random() < 0.4 else bytes([rng.randrange(33, 127)])
    return head[:at] + byte + head[at + rng.randrange(2) :]


def _delete(rng: random.Random, head: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(head))
    return head[:at] + head[at + rng.choice([1, 1, 2, 16]) :]


def _truncate(rng: random.Random, head: bytes, _: Sequence[bytes]) -> bytes:
    return head[: rng.randrange(1, len(head))]


def _join(rng: random.Random, head: bytes, others: Sequence[bytes]) -> bytes:
    """The beginning of one and the end of another, at a byte or between lines; or one behind the other."""
    other = rng.choice(others)
    if rng.random() < 0.3:
        return head[: rng.randrange(len(head))] + other
    if rng.random() < 0.3:
        at = rng.randrange(len(head))
        return head[:at] + other[min(at, len(other)) :]
    ours, theirs = head.split(b"\r\n"), other.split(b"\r\n")
    return b"\r\n".join(ours[: rng.randrange(len(ours)) + 1] + theirs[rng.randrange(len(theirs)) :])


def _case(rng: random.Random, head: bytes, _: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(head))
    return head[:at] + head[at : at + 1].swapcase() + head[at + 1 :]


def _of_line(change: Callable[[random.Random, list[bytes], int, Sequence[bytes]], None]) -> Change:
    """A change of the fields, one of which is chosen."""

    def changed(rng: random.Random, head: bytes, others: Sequence[bytes]) -> bytes:
        line, *fields = head.removesuffix(HEAD_END).split(b"\r\n")
        if fields:
            change(rng, fields, rng.randrange(len(fields)), others)
        return b"\r\n".join([line, *fields]) + HEAD_END

    return changed


def _move(rng: random.Random, fields: list[bytes], at: int, _: Sequence[bytes]) -> None:
    moved = fields.pop(at)
    fields.insert(rng.randrange(len(fields) + 1), moved)


def _double(rng: random.Random, fields: list[bytes], at: int, _: Sequence[bytes]) -> None:
    fields.insert(rng.choice([at, rng.randrange(len(fields))]), fields[at])


def _drop(_: random.Random, fields: list[bytes], at: int, __: Sequence[bytes]) -> None:
    del fields[at]


def _name_case(rng: random.Random, fields: list[bytes], at: int, _: Sequence[bytes]) -> None:
    name, colon, value = fields[at].partition(b":")
    fields[at] = rng.choice([name.lower, name.upper, name.title])() + colon + value


def _space(rng: random.Random, fields: list[bytes], at: int, _: Sequence[bytes]) -> None:
    kind = rng.randrange(3)
    if kind == 0:
        fields[at] = fields[at].replace(b": ", rng.choice(_BETWEEN), 1)
    elif kind == 1:
        fields[at] += rng.choice([b" ", b"\t", b"  "])
    else:
        fields[at] = fields[at].replace(b" ", b"  ")


def _line_end(rng: random.Random, fields: list[bytes], at: int, _: Sequence[bytes]) -> None:
    if at + 1 < len(fields):
        fields[at : at + 2] = [fields[at] + rng.choice(_LINE_ENDS) + fields[at + 1]]


def _add(rng: random.Random, fields: list[bytes], at: int, _: Sequence[bytes]) -> None:
    fields.insert(rng.choice([at, len(fields)]), rng.choice(_MORE_LINES))


def _value(rng: random.Random, fields: list[bytes], at: int, others: Sequence[bytes]) -> None:
    """Another value, or that of another head's field."""
    varying = [number for number, line in enumerate(fields) if line.lower().startswith(_VARYING)]
    at = rng.choice([at, *varying, *varying])
    name, colon, said = fields[at].partition(b":")
    value = rng.choice([*_VALUES, said.strip() + rng.choice(_TELLING), rng.choice(_TELLING) + said.strip()])
    if rng.random() < 0.5:
        theirs = [line for line in rng.choice(others).split(b"\r\n")[1:] if line.lower().startswith(name.lower())]
        value = theirs[0].partition(b":")[2].strip() if theirs else value
    fields[at] = name + colon + b" " + value


def _signature(rng: random.Random, head: bytes, others: Sequence[bytes]) -> bytes:
    """That of another head, or the same written otherwise."""
    theirs = _HEX_SIGNATURE.search(rng.choice(others))
    signature = theirs[0] if theirs is not None else b"0" * 64
    return _HEX_SIGNATURE.sub(lambda ours: rng.choice([signature, ours[0].upper(), ours[0][:63], ours[0] + b"0"]), head)


def _signed_names(rng: random.Random, head: bytes, _: Sequence[bytes]) -> bytes:
    found = re.search(rb"SignedHeaders=([^,\r]*)", head)
    if found is None:
        return head
    names = found[1].split(b";")
    kind = rng.randrange(4)
    if kind == 0:
        names.pop(rng.randrange(len(names)))
    elif kind == 1:
        rng.shuffle(names)
    elif kind == 2:
        names.append(rng.choice([b"range", b"user-agent", b"accept", b"authorization", b"none", b"HOST", b"host", b""]))
    else:
        names = sorted([*names, rng.choice([b"range", b"if-match", b"if-none-match", b"accept-encoding"])])
    return head[: found.start(1)] + b";".join(names) + head[found.end(1) :]


def _path(rng: random.Random, head: bytes, _: Sequence[bytes]) -> bytes:
    """The same path or another one, encoded otherwise."""
    method, blank, rest = head.partition(b" ")
    path, blank_too, rest = rest.partition(b" ")
    kind, at = rng.randrange(6), rng.randrange(len(path) + 1)
    if kind == 0 and _UNRESERVED.fullmatch(path[at : at + 1]):
        path = path[:at] + rng.choice([b"%%%02X", b"%%%02x"]) % path[at] + path[at + 1 :]
    elif kind == 1:
        path = _ENCODED.sub(lambda found: rng.choice([found[0].lower(), found[0].upper(), b"%25" + found[1]]), path)
    elif kind == 2:
        path = path[:at] + rng.choice(_TARGETS) + path[at:]
    elif kind == 3:
        path = path.partition(b"?")[0] + rng.choice(_QUERIES)
    elif kind == 4:
        path = rng.choice([b"http://127.0.0.1:9000", b"https://b.s3.example", b"", b"*", b"x"]) + path
    else:
        path += rng.choice([b"/", b"%2F", b"&", b"=", b"?", b"\t", b" ", b"%20"])
    return method + blank + path + blank_too + rest


def _request_line(rng: random.Random, head: bytes, _: Sequence[bytes]) -> bytes:
    if rng.random() < 0.5:
        return head.replace(b" HTTP/1.1", rng.choice(_VERSIONS), 1)
    return rng.choice(_METHODS) + head[max(0, head.find(b" ")) :]


_CHANGES: Sequence[Change] = (
    *(_flip, _flip, _telling, _telling, _in_request_line, _in_request_line, _delete, _truncate, _join, _case),
    *(_of_line(_move), _of_line(_double), _of_line(_drop), _of_line(_name_case), _of_line(_space), _of_line(_line_end)),
    *(
        _of_line(_add),
        _of_line(_value),
        _of_line(_value),
        _of_line(_value),
        _signature,
        _signed_names,
        _path,
        _path,
        _request_line,
    ),
)
