"""GetObject and HeadObject: ranges, conditions, parts, overrides, checksums, other ways of naming the bucket."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tests.scenarios.transparency.steps import (
    PART_SIZE_BYTES,
    Case,
    Step,
    complete,
    create_upload,
    etag,
    get,
    head,
    multipart_etag,
    pattern,
    put,
    put_part,
)

SMALL = pattern(1000)
BLOCKS = pattern(2_500_000)
"""Lies over three blocks of the gateway's cache."""

_OBJECTS = {"empty": b"", "one": b"x", "small": SMALL}
_PAST, _FUTURE = "Sat, 01 Jan 2000 00:00:00 GMT", "Fri, 01 Jan 2100 00:00:00 GMT"

_RANGES = (
    "bytes=0-0",
    "bytes=0-",
    "bytes=0-99",
    "bytes=5-9",
    "bytes=999-",
    "bytes=999-999",
    "bytes=1000-",
    "bytes=1000-1001",
    "bytes=990-5000",
    "bytes=0-99999999999999999999",
    "bytes=99999999999999999999-",
    "bytes=-1",
    "bytes=-10",
    "bytes=-1000",
    "bytes=-5000",
    "bytes=-0",
    "bytes=-",
    "bytes=10-5",
    "bytes=a-b",
    "bytes=0-0,5-9",
    "bytes=5",
    "bytes=",
    "bytes",
    "bits=0-5",
    "chars=0-5",
    "bytes=0x0-0x5",
    "bytes=--5",
    "bytes=+1-5",
)

_BLOCK_RANGES = (
    "bytes=0-0",
    "bytes=1048575-1048576",
    "bytes=1048576-1048576",
    "bytes=1048576-2097151",
    "bytes=1000000-2200000",
    "bytes=2499999-",
    "bytes=-1",
    "bytes=-1500000",
    "bytes=-2500000",
    "bytes=2500000-",
    "bytes=2000000-99999999",
)

_MATCHES = {
    "same": etag(SMALL),
    "unquoted": etag(SMALL).strip('"'),
    "other": '"0123456789abcdef0123456789abcdef"',
    "any": "*",
    "listed": f'"feedfacefeedfacefeedfacefeedface", {etag(SMALL)}',
}

_DATES = {"past": _PAST, "future": _FUTURE, "garbage": "yesterday"}


def cases() -> Iterator[Case]:
    yield from _plain()
    yield from _ranges()
    yield from _conditions()
    yield from _combined_conditions()
    yield from _if_range()
    yield from _overrides()
    yield from _parts()
    yield from _versions_and_modes()
    yield from _absent()


def _plain() -> Iterator[Case]:
    for name, data in (*_OBJECTS.items(), ("blocks", BLOCKS)):
        given = (put("/{bucket}/k", data),)
        yield Case(f"get-{name}", (get("/{bucket}/k"), head("/{bucket}/k"), get("/{bucket}/k?x-id=GetObject")), given)


def _ranges() -> Iterator[Case]:
    for name, data, ranges in (
        ("small", SMALL, _RANGES),
        ("empty", b"", _RANGES[:3] + _RANGES[11:17]),
        ("blocks", BLOCKS, _BLOCK_RANGES),
    ):
        for value in ranges:
            steps = (get("/{bucket}/k", f"range: {value}"), head("/{bucket}/k", f"range: {value}"), get("/{bucket}/k"))
            only = "strict" if value == "bytes" else None
            yield Case(f"range-{name}-{value}", steps, (put("/{bucket}/k", data),), only)


def _rule(*conditions: tuple[str, str], ranged: bool = False) -> str:
    """S3's answer to these (header, choice) pairs: its table of precedence, and nothing cleverer."""
    chosen = dict(conditions)
    if "if-match" in chosen:
        if chosen["if-match"] == "other":
            return "412 PreconditionFailed"
    elif chosen.get("if-unmodified-since") == "past":
        return "412 PreconditionFailed"
    if chosen.get("if-none-match", "other") != "other":
        return "304"
    # A date in the future says nothing, as does what is no date: If-Modified-Since never forbids in this table.
    return "206" if ranged else "200"


def _line(condition: tuple[str, str]) -> str:
    header, choice = condition
    return f"{header}: {(_MATCHES if 'match' in header else _DATES)[choice]}"


def _conditional(*conditions: tuple[str, str], ranged: bool = False) -> Step:
    extra = ("range: bytes=0-9",) if ranged else ()
    return get("/{bucket}/k", *map(_line, conditions), *extra, rule=_rule(*conditions, ranged=ranged))


def _conditions() -> Iterator[Case]:
    given = (put("/{bucket}/k", SMALL, "cache-control: max-age=60", "x-amz-meta-a: b"),)
    choices = dict.fromkeys(("if-match", "if-none-match"), tuple(_MATCHES))
    choices |= dict.fromkeys(("if-modified-since", "if-unmodified-since"), tuple(_DATES))
    for header, ours in choices.items():
        for choice in ours:
            condition, only = (header, choice), "strict" if choice == "garbage" else None
            steps = (
                _conditional(condition),
                head("/{bucket}/k", _line(condition)),
                _conditional(condition, ranged=True),
                get("/{bucket}/k"),
            )
            yield Case(f"read-{header}-{choice}", steps, given, only)


def _combined_conditions() -> Iterator[Case]:
    given = (put("/{bucket}/k", SMALL),)
    for match, none_match in product(("same", "other"), repeat=2):
        for modified, unmodified in product(("past", "future"), repeat=2):
            a, b = ("if-match", match), ("if-none-match", none_match)
            c, d = ("if-modified-since", modified), ("if-unmodified-since", unmodified)
            steps = [_conditional(*chosen) for chosen in ((a, b, c, d), (a, b), (c, d), (a, d), (b, c), (a, c), (b, d))]
            name = f"read-conditions-{match}-{none_match}-{modified}-{unmodified}"
            yield Case(name, tuple(steps), given, only="strict")


def _if_range() -> Iterator[Case]:
    given = (put("/{bucket}/k", SMALL),)
    for name, value, rule in (
        ("same", etag(SMALL), "206"),
        ("other", _MATCHES["other"], "200"),
        ("past", _PAST, "200"),
    ):
        steps = (
            get("/{bucket}/k", f"if-range: {value}", "range: bytes=5-9", rule=rule),
            get("/{bucket}/k", f"if-range: {value}"),
        )
        yield Case(f"if-range-{name}", steps, given)


def _overrides() -> Iterator[Case]:
    stored = (
        "content-type: text/plain",
        "cache-control: max-age=60",
        "content-disposition: attachment",
        "content-language: en",
        "expires: Thu, 01 Dec 2033 16:00:00 GMT",
    )
    given = (put("/{bucket}/k", SMALL, *stored),)
    wanted = {
        "content-type": "image/png",
        "content-language": "de-DE",
        "expires": "Thu%2C%2001%20Dec%202044%2016%3A00%3A00%20GMT",
        "cache-control": "no-cache",
        "content-disposition": "attachment%3B%20filename%3D%22a%20b.txt%22",
        "content-encoding": "gzip",
    }
    for name, value in wanted.items():
        query = f"response-{name}={value}"
        steps = (
            get(f"/{{bucket}}/k?{query}"),
            head(f"/{{bucket}}/k?{query}"),
            get(f"/{{bucket}}/k?{query}", "range: bytes=0-4"),
            get(f"/{{bucket}}/k?{query}", "if-none-match: *", rule="304"),
        )
        yield Case(f"override-{name}", steps, given)
    every = "&".join(f"response-{name}={value}" for name, value in wanted.items())
    yield Case("override-all", (get(f"/{{bucket}}/k?{every}"), head(f"/{{bucket}}/k?{every}")), given)
    yield Case("override-empty", (get("/{bucket}/k?response-content-type="),), given)
    yield Case("override-absent-object", (get(f"/{{bucket}}/absent?{every}"),), given)


def _parts() -> Iterator[Case]:
    first, second = pattern(PART_SIZE_BYTES), b"the last part"
    whole = multipart_etag(first, second)
    given = (
        put("/{bucket}/single", SMALL),
        put("/{bucket}/empty", b""),
        create_upload("/{bucket}/parts", "content-type: text/plain", "x-amz-meta-a: b"),
        put_part("/{bucket}/parts", 1, first),
        put_part("/{bucket}/parts", 2, second),
        complete("/{bucket}/parts", (1, etag(first)), (2, etag(second))),
    )
    targets = [f"/{{bucket}}/parts?partNumber={number}" for number in ("1", "2", "3", "0", "10000", "10001", "-1", "x")]
    targets += [f"/{{bucket}}/single?partNumber={number}" for number in ("1", "2")]
    targets += ["/{bucket}/empty?partNumber=1", "/{bucket}/parts?partNumber=", "/{bucket}/parts?partNumber=01"]
    for target in targets:
        only = None if target.rpartition("=")[2] in ("1", "2", "01") else "strict"
        yield Case(f"part-{target[10:]}", (get(target), head(target)), given if "parts" in target else given[:2], only)
    conditions = [
        (get("/{bucket}/parts?partNumber=2", f"if-match: {whole}")),
        (get("/{bucket}/parts?partNumber=2", f"if-none-match: {whole}")),
        (get("/{bucket}/parts?partNumber=2", 'if-match: "other"')),
        (get("/{bucket}/parts?partNumber=2", "range: bytes=0-4")),
        (head("/{bucket}/parts?partNumber=2", "range: bytes=0-4")),
        (get("/{bucket}/parts?partNumber=2&response-content-type=a/b")),
        (get("/{bucket}/parts", f"range: bytes={PART_SIZE_BYTES - 3}-{PART_SIZE_BYTES + 3}")),
        (get("/{bucket}/parts", f"if-range: {whole}", "range: bytes=-20")),
        get("/{bucket}/parts"),
        head("/{bucket}/parts"),
        get("/{bucket}/parts?attributes", "x-amz-object-attributes: ETag,ObjectSize,ObjectParts,StorageClass,Checksum"),
    ]
    yield Case("parts-conditions", tuple(conditions), given)


def _versions_and_modes() -> Iterator[Case]:
    plain = (put("/{bucket}/k", SMALL),)
    for value in ("null", "", "nonsense", "3sL4kqtJlcpXroDTDmJ.rmSpXd3dIbrHY%20MTRCxf3vjVBH40Nr8X8gdRQBpUMLUo"):
        target = f"/{{bucket}}/k?versionId={value}"
        yield Case(f"version-{value[:8]}", (get(target), head(target)), plain)
    for mode in ("ENABLED", "enabled", "DISABLED", ""):
        header = f"x-amz-checksum-mode: {mode}"
        steps = (
            get("/{bucket}/k", header),
            head("/{bucket}/k", header),
            get("/{bucket}/k", header, "range: bytes=1-2"),
        )
        yield Case(f"checksum-mode-{mode or 'empty'}", steps, plain)
    for header in ("x-amz-request-payer: requester", "accept-encoding: gzip, br", "accept: text/html", "x-custom: 1"):
        yield Case(f"read-with-{header}", (get("/{bucket}/k", header), head("/{bucket}/k", header)), plain)


def _absent() -> Iterator[Case]:
    for condition in ("range: bytes=0-9", "if-match: *", "if-none-match: *", f"if-modified-since: {_PAST}"):
        steps = (get("/{bucket}/absent", condition), head("/{bucket}/absent", condition))
        yield Case(f"absent-{condition}", steps)
    yield Case("absent-key", (get("/{bucket}/absent"), head("/{bucket}/absent"), get("/{bucket}/absent?partNumber=1")))
    yield Case(
        "absent-bucket", (get("/no-such-bucket-here/k"), head("/no-such-bucket-here/k"), get("/no-such-bucket-here"))
    )
