"""PutObject: what is stored with an object, what is promised about its bytes, on what condition, in which framing."""

from __future__ import annotations

from collections.abc import Iterator

from tests.scenarios.transparency.steps import Case, Step, checksum, etag, get, head, md5_header, pattern, put

BODY = pattern(3000)
LARGE = pattern(700_000)
"""More than the gateway holds back for a check before the origin hears of it."""

_ALGORITHMS = (
    "crc32",
    "crc32c",
    "crc64nvme",
    "sha1",
    "sha256",
    "sha512",
    "md5",
    "xxhash64",
    "xxhash3",
    "xxhash128",
)
_AT_MOTO = ("crc32", "crc32c", "crc64nvme", "sha1", "sha256")
"""The algorithms whose answers moto knows; at the others it fails, or says something else for each form of the body."""

_CHECKED = ("x-amz-checksum-mode: ENABLED",)


def cases() -> Iterator[Case]:
    yield from _stored_headers()
    yield from _metadata()
    yield from _digests()
    yield from _checksums()
    yield from _refused_checksums()
    yield from _conditions()
    yield from _conditions_kept_by_strict_origins()
    yield from _framings()
    yield from _odd_bodies()


def _written(write: Step, *after: Step) -> tuple[Step, ...]:
    """A write and what is to be seen of it."""
    return (write, get("/{bucket}/k"), head("/{bucket}/k"), *after)


def _stored_headers() -> Iterator[Case]:
    lines = (
        "content-type: text/plain",
        "content-type: application/x-www-form-urlencoded",
        "content-type: text/plain; charset=utf-8",
        "content-type:",
        "cache-control: no-store",
        'content-disposition: attachment; filename="a b.txt"',
        "content-disposition: attachment; filename*=UTF-8''%e2%82%ac",
        "content-encoding: gzip",
        "content-encoding: gzip, br",
        "content-language: de",
        "expires: Thu, 01 Dec 2033 16:00:00 GMT",
        "expires: 0",
        "x-amz-storage-class: STANDARD",
        "x-amz-storage-class: STANDARD_IA",
        "x-amz-storage-class: NONSENSE",
        "x-amz-website-redirect-location: /elsewhere",
        "x-amz-acl: private",
        "x-amz-acl: public-read",
        "x-amz-tagging: a=b&c=d%20e",
        "x-amz-tagging: a",
        "x-amz-server-side-encryption: AES256",
        "x-amz-unknown-header: something",
        "x-custom: something",
        "accept-encoding: identity",
        'user-agent: odd "agent" (1;2)',
    )
    for line in lines:
        yield Case(f"put-{line}", _written(put("/{bucket}/k", BODY, line), get("/{bucket}/k?tagging")))
    every = tuple(line for line in lines[:1] + lines[4:8] + lines[9:11])
    yield Case("put-many-headers", _written(put("/{bucket}/k", BODY, *every)))


def _metadata() -> Iterator[Case]:
    lines = {
        "plain": ("x-amz-meta-a: b",),
        "case": ("X-Amz-Meta-MiXeD: CaSe",),
        "empty": ("x-amz-meta-a:",),
        "spaces-inside": ("x-amz-meta-a: b  c",),
        "commas": ("x-amz-meta-a: b, c,d",),
        "many": tuple(f"x-amz-meta-{number}: value-{number}" for number in range(40)),
        "long": (f"x-amz-meta-long: {'v' * 1900}",),
        "too-long": (f"x-amz-meta-long: {'v' * 2100}",),
        "odd-name": ("x-amz-meta-a.b_c-d!: e",),
        "odd-value": ('x-amz-meta-a: =?UTF-8?B?4oKs?=; "q" \\ {b}',),
        "twice": ("x-amz-meta-a: b", "x-amz-meta-a: c"),
        "unicode": ("x-amz-meta-a: €uro über 日本",),
    }
    for name, headers in lines.items():
        only = "strict" if name == "unicode" else None  # moto reads header values as latin-1 and answers with a 500
        yield Case(f"metadata-{name}", _written(put("/{bucket}/k", BODY, *headers)), only=only)
    replaced = put("/{bucket}/k", BODY, "x-amz-meta-new: 2")
    yield Case("metadata-replaced", _written(put("/{bucket}/k", BODY, "x-amz-meta-old: 1"), *_written(replaced)))


def _digests() -> Iterator[Case]:
    for size, body in (("small", BODY), ("large", LARGE), ("empty", b"")):
        yield Case(f"md5-right-{size}", _written(put("/{bucket}/k", body, md5_header(body))))
        for auth in ("header", "query"):
            wrong = put("/{bucket}/k", body, md5_header(b"?"), auth=auth, rule="400 BadDigest")
            yield Case(f"md5-wrong-{size}-{auth}", (wrong,))
        unsigned = put("/{bucket}/k", body, payload="unsigned")
        yield Case(f"unsigned-payload-{size}", _written(unsigned))
        yield Case(f"presigned-{size}", _written(put("/{bucket}/k", body, auth="query")))
        wrong = put("/{bucket}/k", body, f"x-amz-content-sha256: {'0' * 64}", rule="400 XAmzContentSHA256Mismatch")
        yield Case(f"sha256-wrong-{size}", (wrong,))
    for value in ("AWS4 HAHAHA", "short", "YWJj", "=====", ""):
        yield Case(
            f"md5-garbage-{value}", (put("/{bucket}/k", BODY, f"content-md5: {value}", rule="400 InvalidDigest"),)
        )


def _checksums() -> Iterator[Case]:
    for algorithm in _ALGORITHMS:
        header = f"x-amz-checksum-{algorithm}"
        reads = (
            get("/{bucket}/k", *_CHECKED),
            head("/{bucket}/k", *_CHECKED),
            get("/{bucket}/k", *_CHECKED, "range: bytes=0-9"),
        )
        only = None if algorithm in _AT_MOTO else "strict"
        for size, body in (("small", BODY), ("large", LARGE), ("empty", b"")):
            right = f"{header}: {checksum(algorithm, body)}"
            announced = f"x-amz-sdk-checksum-algorithm: {algorithm.upper()}"
            yield Case(f"{algorithm}-{size}", _written(put("/{bucket}/k", body, right), *reads), only=only)
            yield Case(f"{algorithm}-{size}-announced", _written(put("/{bucket}/k", body, announced, right)), only=only)
            wrong = f"{header}: {checksum(algorithm, b'?')}"
            steps = (put("/{bucket}/k", body, wrong, payload="unsigned", rule="400 BadDigest"),)
            yield Case(f"{algorithm}-{size}-wrong", steps)


def _refused_checksums() -> Iterator[Case]:
    right = {name: f"x-amz-checksum-{name}: {checksum(name, BODY)}" for name in ("crc32", "sha256")}
    headers = {
        "two": tuple(right.values()),
        "undecodable": ("x-amz-checksum-crc32: !!!!",),
        "too-short": ("x-amz-checksum-sha256: AAAA",),
        "empty": ("x-amz-checksum-crc32:",),
        "announced-absent": ("x-amz-sdk-checksum-algorithm: CRC32",),
        "announced-other": ("x-amz-sdk-checksum-algorithm: CRC32", right["sha256"]),
        "announced-unknown": ("x-amz-sdk-checksum-algorithm: CRC7", right["crc32"]),
    }
    for name, lines in headers.items():
        yield Case(f"checksum-{name}", (put("/{bucket}/k", BODY, *lines, rule="400 InvalidRequest"),))


def _conditions() -> Iterator[Case]:
    given = (put("/{bucket}/k", b"before"),)
    conditions = ("if-none-match: *", f"if-match: {etag(b'before')}", f"if-match: {etag(b'other')}", "if-match: *")
    for condition in conditions:
        write = put("/{bucket}/k", BODY, condition)
        yield Case(f"put-over-{condition}", _written(write), given)
        yield Case(f"put-large-over-{condition}", _written(put("/{bucket}/k", LARGE, condition)), given)
        yield Case(f"put-new-{condition}", _written(write))


def _conditions_kept_by_strict_origins() -> Iterator[Case]:
    given = (put("/{bucket}/k", b"before"),)
    for name, lines in {
        "none-match-etag": (f"if-none-match: {etag(b'before')}",),
        "both": ("if-none-match: *", "if-match: *"),
        "date": ("if-unmodified-since: Sat, 01 Jan 2000 00:00:00 GMT",),
    }.items():
        yield Case(f"put-condition-{name}", _written(put("/{bucket}/k", BODY, *lines)), given)


def _framings() -> Iterator[Case]:
    for size, body in (("empty", b""), ("small", BODY), ("large", LARGE), ("chunk", pattern(65_536))):
        trailer = f"x-amz-checksum-crc32c:{checksum('crc32c', body)}"
        wrong = f"x-amz-checksum-crc32c:{checksum('crc32c', b'?')}"
        for coding in ("", "aws-chunked", "aws-chunked,gzip"):
            lines = (f"content-encoding: {coding}",) if coding else ()
            for name, payload, sent in (
                ("signed", "signed-chunks", None),
                ("signed-trailer", "signed-chunks-trailer", trailer),
                ("unsigned-trailer", "unsigned-chunks-trailer", trailer),
            ):
                for chunked in (False, True):
                    write = put("/{bucket}/k", body, *lines, payload=payload, trailer=sent, http_chunks=chunked)
                    framing = "http-chunks" if chunked else "length"
                    case = f"{name}-{size}-{coding or 'unnamed'}-{framing}"
                    only = "strict" if chunked or coding == "aws-chunked,gzip" else None
                    yield Case(case, _written(write, get("/{bucket}/k", *_CHECKED)), only=only)
        for name, payload in (("signed", "signed-chunks-trailer"), ("unsigned", "unsigned-chunks-trailer")):
            write = put("/{bucket}/k", body, payload=payload, trailer=wrong, rule="400 BadDigest")
            yield Case(f"{name}-trailer-{size}-wrong", (write,))
    sizes = (8192, 9000, 8192)
    yield Case("signed-small-chunks", _written(put("/{bucket}/k", LARGE, payload="signed-chunks", chunk_sizes=sizes)))


def _odd_bodies() -> Iterator[Case]:
    yield Case("put-http-chunks", (put("/{bucket}/k", BODY, http_chunks=True, rule="411 MissingContentLength"),))
    yield Case(
        "put-over-again",
        _written(put("/{bucket}/k", b"1"), *_written(put("/{bucket}/k", LARGE), *_written(put("/{bucket}/k", b"")))),
    )
    for size, body in (("empty", b""), ("small", BODY), ("large", LARGE)):
        yield Case(f"put-expect-{size}", _written(put("/{bucket}/k", body, "expect: 100-continue")), only="strict")
    yield Case("put-absent-bucket", (put("/no-such-bucket-here/k", BODY),))
    refused = put("/no-such-bucket-here/k", pattern(2_000_000), rule="404 NoSuchBucket", only_gateway=True)
    yield Case("put-large-absent-bucket", (refused,))
