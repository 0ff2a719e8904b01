"""CopyObject, DeleteObject and DeleteObjects."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from tests.scenarios.transparency.steps import (
    Case,
    Step,
    checksum,
    delete,
    etag,
    get,
    head,
    md5_header,
    pattern,
    post,
    put,
)

SOURCE = pattern(2000)
FROM = "x-amz-copy-source: /{bucket}/from"
TO = "/{bucket}/to"

_GIVEN = (put("/{bucket}/from", SOURCE, "content-type: text/plain", "x-amz-meta-a: b", "cache-control: no-cache"),)

_SOURCES = {
    "no-slash": "{bucket}/from",
    "absent-key": "/{bucket}/absent",
    "absent-bucket": "/no-such-bucket-here/k",
    "version-null": "/{bucket}/from?versionId=null",
    "version-unknown": "/{bucket}/from?versionId=unknown",
}

_ODD_KEYS = (
    "a%20b",
    "a%2Bb",
    "a%25b",
    "a%2520b",
    "%E2%82%AC%F0%9F%98%80",
    "a%3Fb",
    "a%26b%3Dc",
    "a/b//c",
    "%2Fa",
    "a%27b%28c%29",
    "~a_b-c.d",
    "a%3Cb%3E",
    "../up",
)


def cases() -> Iterator[Case]:
    yield from _copies()
    yield from _refused_copies()
    yield from _odd_sources()
    yield from _deletes()
    yield from _multi_deletes()
    yield from _refused_multi_deletes()


def _copied(copy: Step) -> tuple[Step, ...]:
    return (copy, get(TO), head(TO), get("/{bucket}?list-type=2"))


def _copies() -> Iterator[Case]:
    lines = {
        "plain": (),
        "copy-metadata": ("x-amz-metadata-directive: COPY", "x-amz-meta-new: 1"),
        "replace-metadata": ("x-amz-metadata-directive: REPLACE", "x-amz-meta-new: 1", "content-type: a/b"),
        "replace-with-nothing": ("x-amz-metadata-directive: REPLACE",),
        "directive-unknown": ("x-amz-metadata-directive: NONSENSE",),
        "storage-class": ("x-amz-storage-class: STANDARD_IA",),
        "if-match": (f"x-amz-copy-source-if-match: {etag(SOURCE)}",),
        "if-match-other": ('x-amz-copy-source-if-match: "other"',),
        "if-none-match": (f"x-amz-copy-source-if-none-match: {etag(SOURCE)}",),
        "if-none-match-other": ('x-amz-copy-source-if-none-match: "other"',),
        "if-modified": ("x-amz-copy-source-if-modified-since: Sat, 01 Jan 2000 00:00:00 GMT",),
        "if-unmodified": ("x-amz-copy-source-if-unmodified-since: Sat, 01 Jan 2000 00:00:00 GMT",),
        "destination-if-none-match": ("if-none-match: *",),
        "destination-if-match": (f"if-match: {etag(SOURCE)}",),
        "acl": ("x-amz-acl: private",),
    }
    for name, extra in lines.items():
        yield Case(f"copy-{name}", _copied(put(TO, b"", FROM, *extra)), _GIVEN)
        again = (put(TO, b"before"), get(TO), *_copied(put(TO, b"", FROM, *extra)))
        yield Case(f"copy-over-{name}", again, _GIVEN)
    tagged = put("/{bucket}/from", SOURCE, "x-amz-tagging: a=b")
    for directive in ("", "COPY", "REPLACE"):
        extra = (f"x-amz-tagging-directive: {directive}", "x-amz-tagging: c=d") if directive else ()
        steps = (put(TO, b"", FROM, *extra), get(TO + "?tagging"), get(TO))
        yield Case(f"copy-tags-{directive}", steps, (tagged,))
    chain = (
        put(TO, b"", FROM),
        put("/{bucket}/third", b"", "x-amz-copy-source: {bucket}/to"),
        delete(TO),
        get("/{bucket}/third"),
    )
    yield Case("copy-chain", chain, _GIVEN)


def _refused_copies() -> Iterator[Case]:
    for name, value in _SOURCES.items():
        yield Case(f"copy-source-{name}", _copied(put(TO, b"", f"x-amz-copy-source: {value}")), _GIVEN)
    for name, value in (("empty", ""), ("no-key", "{bucket}"), ("only-slash", "/"), ("bucket-slash", "/{bucket}/")):
        step = put(TO, b"", f"x-amz-copy-source: {value}")
        yield Case(f"copy-source-{name}", (step, get(TO)), _GIVEN, only="strict")
    itself = put("/{bucket}/from", b"", FROM)
    yield Case("copy-itself", (itself, get("/{bucket}/from")), _GIVEN)
    changed = put("/{bucket}/from", b"", FROM, "x-amz-metadata-directive: REPLACE", "x-amz-meta-new: 1")
    yield Case(
        "copy-itself-changed", (get("/{bucket}/from"), changed, get("/{bucket}/from"), head("/{bucket}/from")), _GIVEN
    )
    yield Case("copy-to-absent-bucket", (put("/no-such-bucket-here/k", b"", FROM),), _GIVEN)


def _odd_sources() -> Iterator[Case]:
    for key in _ODD_KEYS:
        given = (put(f"/{{bucket}}/{key}", SOURCE),)
        steps = (
            put(TO, b"", f"x-amz-copy-source: /{{bucket}}/{key}"),
            get(TO),
            put(f"/{{bucket}}/new-{key}", b"", FROM),
        )
        yield Case(f"copy-from-{key}", (*steps, get(f"/{{bucket}}/new-{key}")), given + _GIVEN)
    unescaped = put(TO, b"", "x-amz-copy-source: {bucket}/a b")
    yield Case("copy-from-unescaped-space", (unescaped, get(TO)), (put("/{bucket}/a%20b", SOURCE),))
    plus = put(TO, b"", "x-amz-copy-source: {bucket}/a+b")
    for key in ("a%20b", "a%2Bb"):
        yield Case(f"copy-from-unescaped-plus-{key}", (plus, get(TO)), (put(f"/{{bucket}}/{key}", SOURCE),))


def _deletes() -> Iterator[Case]:
    after = (get("/{bucket}/from"), head("/{bucket}/from"), delete("/{bucket}/from"), get("/{bucket}?list-type=2"))
    yield Case("delete", (get("/{bucket}/from"), delete("/{bucket}/from"), *after), _GIVEN)
    yield Case("delete-absent", (delete("/{bucket}/absent"), delete("/no-such-bucket-here/k")))
    for condition in (f"if-match: {etag(SOURCE)}", 'if-match: "other"', "if-match: *"):
        steps = (delete("/{bucket}/from", condition), get("/{bucket}/from"), delete("/{bucket}/absent", condition))
        yield Case(f"delete-{condition}", steps, _GIVEN)
    for version in ("null", "unknown"):
        gone = (delete(f"/{{bucket}}/from?versionId={version}"), get("/{bucket}/from"))
        yield Case(f"delete-version-{version}", gone, _GIVEN)
    yield Case("delete-presigned", (delete("/{bucket}/from", auth="query"), get("/{bucket}/from")), _GIVEN)
    written = (delete("/{bucket}/from"), put("/{bucket}/from", b"again"), get("/{bucket}/from"))
    yield Case("delete-and-write", (get("/{bucket}/from"), *written), _GIVEN)


def _document(*keys: str, quiet: bool | None = None, extra: str = "") -> bytes:
    objects = "".join(f"<Object><Key>{escape(key)}</Key>{extra}</Object>" for key in keys)
    ending = "" if quiet is None else f"<Quiet>{str(quiet).lower()}</Quiet>"
    return f"<Delete>{objects}{ending}</Delete>".encode()


def _multi_delete(document: bytes, *headers: str, rule: str | None = None) -> Step:
    return post("/{bucket}?delete", document, md5_header(document), *headers, rule=rule)


def _multi_deletes() -> Iterator[Case]:
    given = tuple(put(f"/{{bucket}}/{key}", b"1") for key in ("a", "b", "c/d", "e%20f", "%E2%82%AC", "a%26b"))
    after = (get("/{bucket}/a"), get("/{bucket}?list-type=2"))
    documents = {
        "one": _document("a"),
        "many": _document("a", "b", "c/d", "absent", "e f", "€", "a&b"),
        "quiet": _document("a", "absent", quiet=True),
        "loud": _document("a", "absent", quiet=False),
        "absent-only": _document("absent"),
        "thousand": _document(*(f"key-{number}" for number in range(1000))),
        "version-null": _document("a", extra="<VersionId>null</VersionId>"),
        "prolog": b'<?xml version="1.0" encoding="UTF-8"?>\n' + _document("a"),
        "namespace": _document("a", "b").replace(
            b"<Delete>", b'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        ),
    }
    for name, document in documents.items():
        yield Case(f"multi-delete-{name}", (get("/{bucket}/a"), _multi_delete(document), *after), given)
    document = documents["one"]
    crc32 = f"x-amz-checksum-crc32: {checksum('crc32', document)}"
    yield Case("multi-delete-crc32", (post("/{bucket}?delete", document, crc32), *after), given)
    yield Case("multi-delete-equals", (post("/{bucket}?delete=", document, md5_header(document)), *after), given)
    yield Case("multi-delete-absent-bucket", (post("/no-such-bucket-here?delete", document, md5_header(document)),))


def _refused_multi_deletes() -> Iterator[Case]:
    given = (put("/{bucket}/a", b"1"),)
    documents = {
        "text": b"no xml",
        "broken": b"<Delete><Object>",
        "nothing": b"<Delete></Delete>",
        "other-root": b"<Remove><Object><Key>a</Key></Object></Remove>",
        "no-key": b"<Delete><Object><VersionId>null</VersionId></Object></Delete>",
        "empty-key": b"<Delete><Object><Key></Key></Object></Delete>",
        "empty": b"",
        "too-many": _document(*(f"key-{number}" for number in range(1001))),
        "entity": b'<!DOCTYPE a [<!ENTITY b "a">]><Delete><Object><Key>&b;</Key></Object></Delete>',
    }
    for name, document in documents.items():
        refused = _multi_delete(document, rule="400 MalformedXML")
        yield Case(f"multi-delete-document-{name}", (refused, get("/{bucket}/a")), given)
    document = _document("a")
    wrong = post("/{bucket}?delete", document, md5_header(b"?"), rule="400 BadDigest")
    yield Case("multi-delete-wrong-md5", (wrong, get("/{bucket}/a")), given)
    yield Case("multi-delete-no-digest", (post("/{bucket}?delete", document), get("/{bucket}/a")), given)
