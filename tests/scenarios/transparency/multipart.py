"""Multipart uploads from beginning to end, and everything that can be wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator

from tests.scenarios.transparency.steps import (
    PART_SIZE_BYTES,
    Case,
    Step,
    checksum,
    complete,
    complete_document,
    create_upload,
    delete,
    etag,
    get,
    head,
    md5_header,
    pattern,
    post,
    put,
    put_part,
)

FULL = pattern(PART_SIZE_BYTES)
SMALL = b"a small part"
K = "/{bucket}/k"

_BAD_DOCUMENTS = {
    "empty": b"",
    "text": b"no xml",
    "broken": b"<CompleteMultipartUpload><Part>",
    "no-parts": b"<CompleteMultipartUpload></CompleteMultipartUpload>",
    "other-root": b"<Delete></Delete>",
    "no-etag": b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber></Part></CompleteMultipartUpload>",
    "no-number": b"<CompleteMultipartUpload><Part><ETag>a</ETag></Part></CompleteMultipartUpload>",
    "entity": b'<!DOCTYPE a [<!ENTITY b "c">]><CompleteMultipartUpload>&b;</CompleteMultipartUpload>',
}


def cases() -> Iterator[Case]:
    yield from _whole_lives()
    yield from _checksums()
    yield from _refused_completions()
    yield from _refused_parts()
    yield from _aborts()
    yield from _list_parts()
    yield from _list_uploads()
    yield from _copied_parts()


def _one(*parts: Step, after: tuple[Step, ...] = ()) -> tuple[Step, ...]:
    return (create_upload(K), *parts, *after)


def _reads() -> tuple[Step, ...]:
    return (get(K), head(K), get(K, "range: bytes=-20"), get("/{bucket}?list-type=2"))


def _whole_lives() -> Iterator[Case]:
    one = (1, etag(SMALL))
    yield Case("multipart-one-part", _one(put_part(K, 1, SMALL), complete(K, one), *_reads()))
    yield Case("multipart-high-number", _one(put_part(K, 10_000, SMALL), complete(K, (10_000, etag(SMALL))), *_reads()))
    two = ((2, etag(FULL)), (7, etag(SMALL)))
    parts = (put_part(K, 7, SMALL), put_part(K, 2, FULL))
    yield Case("multipart-gap-and-disorder", _one(*parts, complete(K, *two), *_reads()))
    yield Case("multipart-again", _one(put_part(K, 1, b"x"), put_part(K, 1, SMALL), complete(K, one), *_reads()))
    yield Case("multipart-left-out", _one(put_part(K, 1, SMALL), put_part(K, 2, b"x"), complete(K, one), *_reads()))
    twice = (complete(K, one), complete(K, one), get(K))
    yield Case("multipart-complete-twice", _one(put_part(K, 1, SMALL), *twice))
    yield Case("multipart-empty-part", _one(put_part(K, 1, b""), complete(K, (1, etag(b""))), *_reads()))
    unquoted = complete(K, (1, etag(SMALL).strip('"')))
    yield Case("multipart-unquoted-etag", _one(put_part(K, 1, SMALL), unquoted, *_reads()))
    spaced = (
        b'<?xml version="1.0"?>\n<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">\n <Part>\n'
    )
    spaced += f"<ETag>{etag(SMALL)}</ETag>\n<PartNumber>1</PartNumber>\n</Part>\n</CompleteMultipartUpload>\n".encode()
    yield Case("multipart-namespace", _one(put_part(K, 1, SMALL), post(K + "?uploadId={upload}", spaced), *_reads()))
    headers = ("content-type: a/b", "x-amz-meta-a: b", "cache-control: no-cache", "content-encoding: gzip")
    stored = (create_upload(K, *headers), put_part(K, 1, SMALL), complete(K, one), *_reads())
    yield Case("multipart-headers", stored)
    over = (put(K, b"before"), get(K), *_one(put_part(K, 1, SMALL)), get(K), complete(K, one), *_reads())
    yield Case("multipart-over-object", over)
    for payload in ("unsigned", "signed-chunks"):
        part = put_part(K, 1, SMALL, payload=payload)
        yield Case(f"multipart-part-{payload}", _one(part, complete(K, one), *_reads()))
    for condition in ("if-none-match: *", f"if-match: {etag(b'before')}", 'if-match: "other"'):
        steps = _one(put_part(K, 1, SMALL), complete(K, one, headers=(condition,)), get(K))
        yield Case(f"complete-new-{condition}", steps, only="strict")
        yield Case(f"complete-over-{condition}", steps, (put(K, b"before"),), only="strict")
    size = complete(K, one, headers=(f"x-amz-mp-object-size: {len(SMALL)}",))
    yield Case("complete-object-size", _one(put_part(K, 1, SMALL), size, get(K)))
    size = complete(K, one, headers=("x-amz-mp-object-size: 1",))
    yield Case("complete-other-size", _one(put_part(K, 1, SMALL), size, get(K)))


def _checksums() -> Iterator[Case]:
    for algorithm, kind in (
        ("crc32", ""),
        ("crc32", "FULL_OBJECT"),
        ("crc32c", "COMPOSITE"),
        ("crc64nvme", ""),
        ("sha1", ""),
        ("sha256", "COMPOSITE"),
    ):
        created = [f"x-amz-checksum-algorithm: {algorithm.upper()}"]
        created += [f"x-amz-checksum-type: {kind}"] if kind else []
        name = f"Checksum{algorithm.upper()}"
        value = checksum(algorithm, SMALL)
        part = put_part(K, 1, SMALL, f"x-amz-checksum-{algorithm}: {value}")
        entry = f"<PartNumber>1</PartNumber><ETag>{etag(SMALL)}</ETag><{name}>{value}</{name}>"
        document = f"<CompleteMultipartUpload><Part>{entry}</Part></CompleteMultipartUpload>".encode()
        done = post(K + "?uploadId={upload}", document, *created[1:])
        reads = (get(K, "x-amz-checksum-mode: ENABLED"), head(K, "x-amz-checksum-mode: ENABLED"), *_reads())
        steps = (create_upload(K, *created), part, get(K + "?uploadId={upload}"), done, *reads)
        # Of such objects moto's HEAD says other checksums than its GET; the gateway's GET shows the head's.
        yield Case(f"multipart-{algorithm}-{kind}", steps, only="strict")
        yield Case(f"multipart-{algorithm}-{kind}-written", (*steps[:4], *_reads()[:2]))
        wrong = put_part(K, 1, SMALL, f"x-amz-checksum-{algorithm}: {checksum(algorithm, b'?')}", rule="400 BadDigest")
        yield Case(f"multipart-{algorithm}-{kind}-wrong", (create_upload(K, *created), wrong))


def _refused_completions() -> Iterator[Case]:
    a, b = put_part(K, 1, SMALL), put_part(K, 2, SMALL)
    one, two = (1, etag(SMALL)), (2, etag(SMALL))
    after = (get(K), get(K + "?uploadId={upload}"), complete(K, one), get(K))
    yield Case("complete-too-small", _one(a, b, complete(K, one, two), *after))
    disorder = post(K + "?uploadId={upload}", complete_document(two, one), rule="400 InvalidPartOrder")
    yield Case("complete-disorder", _one(a, b, disorder))
    double = post(K + "?uploadId={upload}", complete_document(one, one), rule="400 InvalidPartOrder")
    yield Case("complete-double", _one(a, double))
    yield Case("complete-unknown-part", _one(a, complete(K, one, (3, etag(SMALL))), *after))
    yield Case("complete-wrong-etag", _one(a, complete(K, (1, etag(b"?"))), *after))
    yield Case("complete-nothing-uploaded", _one(complete(K, one)))
    for name, document in _BAD_DOCUMENTS.items():
        refused = post(K + "?uploadId={upload}", document, rule="400 MalformedXML")
        yield Case(f"complete-document-{name}", _one(a, refused, get(K + "?uploadId={upload}")))
    for number in ("0", "10001", "-1"):
        document = complete_document((1, etag(SMALL))).replace(b"<PartNumber>1<", f"<PartNumber>{number}<".encode())
        refused = post(K + "?uploadId={upload}", document, rule="400 InvalidArgument")
        yield Case(f"complete-number-{number}", _one(a, refused))
    for upload in ("unknown", "", "a%2Fb%20c"):
        done = post(f"{K}?uploadId={upload}", complete_document(one))
        yield Case(f"complete-upload-{upload}", (done, get(K)), only=None if upload else "strict")
    other = post("/{bucket}/other?uploadId={upload}", complete_document(one))
    yield Case("complete-other-key", _one(a, other), only="strict")


def _refused_parts() -> Iterator[Case]:
    for number in ("0", "10001", "-1", "x", ""):
        step = put(f"{K}?partNumber={number}&uploadId={{upload}}", SMALL)
        yield Case(f"part-number-{number}", _one(step), only=None if number in ("0", "10001") else "strict")
    yield Case("part-unknown-upload", (put(f"{K}?partNumber=1&uploadId=unknown", SMALL),))
    lonely = {"number": "?partNumber=1", "upload": "?uploadId=unknown"}
    for name, query in lonely.items():
        yield Case(f"part-only-{name}", (put(K + query, SMALL, rule="400 InvalidArgument"),))
    wrong = put_part(K, 1, SMALL, md5_header(b"?"), rule="400 BadDigest")
    yield Case("part-wrong-md5", _one(wrong, get(K + "?uploadId={upload}")))
    yield Case("part-md5", _one(put_part(K, 1, SMALL, md5_header(SMALL)), get(K + "?uploadId={upload}")))
    unsized = put_part(K, 1, SMALL, http_chunks=True, rule="411 MissingContentLength")
    yield Case("part-without-length", _one(unsized))


def _aborts() -> Iterator[Case]:
    abort = delete(K + "?uploadId={upload}")
    gone = (
        put_part(K, 1, SMALL),
        get(K + "?uploadId={upload}"),
        complete(K, (1, etag(SMALL))),
        get("/{bucket}?uploads"),
    )
    yield Case("abort", _one(put_part(K, 1, SMALL), abort, *gone, get(K)))
    yield Case("abort-twice", _one(abort, abort))
    yield Case("abort-unknown", (delete(K + "?uploadId=unknown"),))
    yield Case("abort-completed", _one(put_part(K, 1, SMALL), complete(K, (1, etag(SMALL))), abort, get(K)))


def _list_parts() -> Iterator[Case]:
    parts = [put_part(K, number, bytes([number])) for number in (1, 2, 3, 5, 8)]
    queries: tuple[str, ...] = (
        "",
        "&max-parts=2",
        "&max-parts=2&part-number-marker=2",
        "&part-number-marker=8",
        "&max-parts=1000",
    )
    queries += ("&max-parts=5000", "&part-number-marker=4", "&encoding-type=url")
    lists = [get(f"{K}?uploadId={{upload}}{query}") for query in queries]
    yield Case("list-parts", _one(*parts, *lists, head(K + "?uploadId={upload}")))
    yield Case("list-parts-unknown", (get(K + "?uploadId=unknown"),))
    for query in ("&max-parts=x", "&max-parts=-1", "&part-number-marker=x", "&max-parts=0"):
        yield Case(f"list-parts-{query}", _one(*parts[:1], get(f"{K}?uploadId={{upload}}{query}")), only="moto")


def _list_uploads() -> Iterator[Case]:
    uploads = [create_upload(f"/{{bucket}}/{key}", name=f"u{n}") for n, key in enumerate(("a", "b/c", "b/d", "e", "e"))]
    queries: tuple[str, ...] = (
        "",
        "&prefix=b",
        "&max-uploads=2",
        "&key-marker=b/c",
        "&key-marker=a&upload-id-marker={u0}",
    )
    queries += ("&upload-id-marker={u0}", "&encoding-type=url", "&delimiter=/", "&max-uploads=1000", "&prefix=zzz")
    for query in queries:
        only = "moto" if "delimiter" in query or "max-uploads=2" in query else None
        yield Case(f"list-uploads-{query}", (*uploads, get(f"/{{bucket}}?uploads{query}")), only=only)
    for query in ("&max-uploads=x", "&max-uploads=-1", "&max-uploads=0"):
        yield Case(f"list-uploads-{query}", (*uploads[:1], get(f"/{{bucket}}?uploads{query}")), only="strict")


def _copied_parts() -> Iterator[Case]:
    source = pattern(1000)
    given = (put("/{bucket}/from", source), put("/{bucket}/odd%20%2B%E2%82%AC", source))
    for name, value, expected in (
        ("whole", "", source),
        ("range", "bytes=10-99", source[10:100]),
        ("first", "bytes=0-0", source[:1]),
        ("all", "bytes=0-999", source),
    ):
        source_range = (f"x-amz-copy-source-range: {value}",) if value else ()
        part = put_part(K, 1, b"", "x-amz-copy-source: /{bucket}/from", *source_range)
        steps = _one(part, complete(K, (1, etag(expected))), *_reads())
        yield Case(f"part-copy-{name}", steps, given)
    for value in (
        "bytes=0-1000",
        "bytes=1000-1001",
        "bytes=5-2",
        "bytes=0-",
        "bytes=-5",
        "0-5",
        "bytes=a-b",
        "chars=0-5",
    ):
        lines = ("x-amz-copy-source: {bucket}/from", f"x-amz-copy-source-range: {value}")
        yield Case(f"part-copy-range-{value}", _one(put_part(K, 1, b"", *lines)), given, only="strict")
    for value in (
        "{bucket}/odd%20%2B%E2%82%AC",
        "/{bucket}/odd%20%2b%e2%82%ac",
        "{bucket}/absent",
        "no-such-bucket-here/k",
    ):
        yield Case(f"part-copy-{value}", _one(put_part(K, 1, b"", f"x-amz-copy-source: {value}")), given)
    for name, condition in _source_conditions(source):
        lines = ("x-amz-copy-source: {bucket}/from", condition)
        yield Case(f"part-copy-{name}", _one(put_part(K, 1, b"", *lines)), given, only="strict")
    unknown = put(K + "?partNumber=1&uploadId=unknown", b"", "x-amz-copy-source: {bucket}/from")
    yield Case("part-copy-unknown-upload", (unknown,), given)


def _source_conditions(source: bytes) -> Iterator[tuple[str, str]]:
    for header, value in (
        ("if-match", etag(source)),
        ("if-match", '"other"'),
        ("if-none-match", etag(source)),
        ("if-none-match", '"other"'),
        ("if-modified-since", "Sat, 01 Jan 2000 00:00:00 GMT"),
        ("if-unmodified-since", "Sat, 01 Jan 2000 00:00:00 GMT"),
    ):
        yield f"{header}-{value[:6]}", f"x-amz-copy-source-{header}: {value}"
