"""ListObjects in both versions, ListBuckets, ListObjectVersions."""

from __future__ import annotations

from collections.abc import Iterator

from tests.scenarios.transparency.steps import Case, delete, get, head, put

_KEYS = (
    "a",
    "a/",
    "a/b",
    "a/c/d",
    "asdf",
    "b%20c",
    "b%2Bc",
    "foo%25bar",
    "x%26y%3Cz%3E",
    "zz/%E2%82%AC",
    "zz/%F0%9F%98%80",
    "%21",
    "a%C3%A9",
    "ae%CC%81",
)
_ORDINARY = tuple(put(f"/{{bucket}}/{key}", b"1") for key in _KEYS)
_CONTROL = tuple(put(f"/{{bucket}}/{key}", b"1") for key in ("a%01b", "a%0Ab", "a%0Db", "a%09b", "a%7Fb"))

_QUERIES = (
    "prefix=",
    "prefix=a",
    "prefix=a/",
    "prefix=a%2F",
    "prefix=nothing",
    "prefix=b%20",
    "prefix=b+c",
    "prefix=b%2Bc",
    "prefix=%E2%82%AC",
    "prefix=zz/%E2%82%AC",
    "delimiter=/",
    "delimiter=%2F",
    "delimiter=",
    "delimiter=a",
    "delimiter=%20",
    "delimiter=%25",
    "delimiter=c/",
    "delimiter=%E2%82%AC",
    "delimiter=nothing",
    "prefix=a&delimiter=/",
    "prefix=a/&delimiter=/",
    "prefix=a/b&delimiter=/",
    "prefix=zz/&delimiter=/",
    "max-keys=0",
    "max-keys=1",
    "max-keys=2&delimiter=/",
    "max-keys=1000",
    "max-keys=5000",
    "max-keys=",
    "encoding-type=url",
    "encoding-type=url&prefix=b",
    "encoding-type=url&delimiter=/",
    "encoding-type=url&prefix=zz/%E2%82%AC",
    "encoding-type=",
    "encoding-type=base64",
)
_REFUSED_BY_STRICT = ("max-keys=-1", "max-keys=text", "max-keys=1.5", "max-keys=99999999999999999999")
_V1: tuple[str, ...] = (
    "marker=a",
    "marker=a/b",
    "marker=zzzz",
    "marker=",
    "marker=a/&delimiter=/",
    "marker=b%20c&encoding-type=url",
)
_V1 += ("marker=a&max-keys=2", "delimiter=/&max-keys=1", "marker=%E2%82%AC", "marker=%01")
_V2: tuple[str, ...] = (
    "start-after=a",
    "start-after=a/b",
    "start-after=zzzz",
    "start-after=",
    "start-after=a/&delimiter=/",
)
_V2 += (
    "start-after=b%20c&encoding-type=url",
    "fetch-owner=true",
    "fetch-owner=false",
    "fetch-owner=",
    "start-after=%01",
)


def cases() -> Iterator[Case]:
    yield Case(
        "list-empty", (get("/{bucket}"), get("/{bucket}?list-type=2"), get("/{bucket}/"), get("/{bucket}/?list-type=2"))
    )
    yield from _all_queries()
    yield from _pages()
    yield from _after_changes()
    yield from _elsewhere()


def _all_queries() -> Iterator[Case]:
    for query in _QUERIES:
        strange = query in ("max-keys=", "encoding-type=base64")
        steps = (get(f"/{{bucket}}?{query}"), get(f"/{{bucket}}?list-type=2&{query}"))
        yield Case(f"list-{query}", steps, _ORDINARY, only="strict" if strange else None)
    for query in _REFUSED_BY_STRICT:
        steps = (get(f"/{{bucket}}?{query}"), get(f"/{{bucket}}?list-type=2&{query}"))
        yield Case(f"list-{query}", steps, _ORDINARY, only="strict")
    for query in _V1:
        yield Case(f"list-v1-{query}", (get(f"/{{bucket}}?{query}"), get(f"/{{bucket}}/?{query}")), _ORDINARY)
    for query in _V2:
        yield Case(
            f"list-v2-{query}",
            (get(f"/{{bucket}}?list-type=2&{query}"), get(f"/{{bucket}}?{query}&list-type=2")),
            _ORDINARY,
        )
    for query in ("list-type=1", "list-type=3", "list-type=", "list-type"):
        yield Case(f"list-{query}", (get(f"/{{bucket}}?{query}"),), _ORDINARY)
    controls = (get("/{bucket}?encoding-type=url"), get("/{bucket}?list-type=2&encoding-type=url&prefix=a"))
    yield Case("list-control-characters-url", controls, _CONTROL, only="strict")
    yield Case("list-control-characters", (get("/{bucket}"), get("/{bucket}?list-type=2")), _CONTROL, only="strict")
    strange_token = (get("/{bucket}?list-type=2&continuation-token=!!!"),)
    yield Case("list-token-strange", strange_token, _ORDINARY, only="strict")
    yield Case("list-token-empty", (get("/{bucket}?list-type=2&continuation-token="),), _ORDINARY, only="strict")


def _pages() -> Iterator[Case]:
    for query in ("max-keys=3", "max-keys=1&delimiter=/", "max-keys=4&encoding-type=url", "max-keys=2&prefix=a"):
        base = f"/{{bucket}}?list-type=2&{query}"
        first = get(base, capture={"token": "NextContinuationToken"})
        second = get(f"{base}&continuation-token={{token}}", capture={"token": "NextContinuationToken"})
        steps = (first, second, second, get(f"{base}&continuation-token={{token}}&start-after=a"))
        yield Case(f"list-pages-{query}", steps, _ORDINARY, only="strict")
    for marker in ("a", "a/c/d", "b%20c", "foo%25bar"):
        yield Case(f"list-page-behind-{marker}", (get(f"/{{bucket}}?max-keys=2&marker={marker}"),), _ORDINARY)


def _after_changes() -> Iterator[Case]:
    steps = (
        get("/{bucket}?list-type=2"),
        put("/{bucket}/new", b"1"),
        get("/{bucket}?list-type=2"),
        delete("/{bucket}/a"),
        get("/{bucket}?list-type=2"),
        put("/{bucket}/new", b"22"),
        get("/{bucket}"),
    )
    yield Case("list-after-changes", steps, _ORDINARY)


def _elsewhere() -> Iterator[Case]:
    absent = "/no-such-bucket-here"
    yield Case(
        "list-absent-bucket", (get(absent), get(f"{absent}?list-type=2"), head(absent), get(f"{absent}?uploads"))
    )
    versions = (
        get("/{bucket}?versions"),
        get("/{bucket}?versions&prefix=a&max-keys=2"),
        get("/{bucket}?versions&delimiter=/"),
    )
    yield Case("list-versions", versions, _ORDINARY)
    unknown = (get("/{bucket}?prefix=a&unknown=1"), get("/{bucket}?prefix=a&prefix=b"))
    yield Case("list-unknown-parameters", unknown, _ORDINARY)
    hints = (get("/{bucket}?x-id=ListObjects"), get("/{bucket}?list-type=2&x-id=ListObjectsV2"))
    yield Case("list-sdk-hints", hints, _ORDINARY)
    presigned = (get("/{bucket}?list-type=2&prefix=a", auth="query"), get("/{bucket}", auth="query-v2"))
    yield Case("list-presigned", presigned, _ORDINARY)
