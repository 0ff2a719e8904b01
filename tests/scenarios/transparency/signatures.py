"""The ways to say who is calling: presigned requests are answered as signed ones, and bad signatures as S3 answers."""

from __future__ import annotations

from collections.abc import Iterator

from tests.scenarios.transparency.steps import Case, delete, get, head, pattern, put

BODY = pattern(800)
K = "/{bucket}/k"
_GIVEN = (put(K, BODY),)

_OVERRIDES = "response-content-type=text/plain&response-content-disposition=attachment%3B%20filename%3D%22a%2Bb.txt%22"

_REFUSED_HEADERS = {
    "empty": ("", "400 InvalidArgument"),
    "garbage": ("AWS4-HMAC-SHA256 garbage", "400 AuthorizationHeaderMalformed"),
    "version-2": ("AWS key:c2lnbmF0dXJl", "400 InvalidRequest"),
    "other-scheme": ("Bearer token", "400 InvalidArgument"),
    "unknown-key": (
        "AWS4-HMAC-SHA256 Credential=AKIAUNKNOWN/20300101/us-east-1/s3/aws4_request, SignedHeaders=host, "
        f"Signature={'0' * 64}",
        "403 InvalidAccessKeyId",
    ),
}


def cases() -> Iterator[Case]:
    yield from _presigned()
    yield from _version_2()
    yield from _refused()


def _presigned() -> Iterator[Case]:
    for target in (K, f"{K}?{_OVERRIDES}", f"{K}?versionId=null", f"{K}?partNumber=1", "/{bucket}/absent"):
        steps = (get(target, auth="query"), head(target, auth="query"))
        yield Case(f"presigned-read-{target[10:40]}", steps, _GIVEN)
    for header in ("range: bytes=10-19", 'if-match: "other"', "if-none-match: *"):
        rule = "304" if header == "if-none-match: *" else None
        yield Case(f"presigned-read-{header}", (get(K, header, auth="query", rule=rule),), _GIVEN)
    lines = ("content-type: text/plain", "x-amz-meta-a: b", "cache-control: no-cache")
    writes = (put(K, b"presigned", *lines, auth="query"), get(K), delete(K, auth="query"), get(K, auth="query"))
    yield Case("presigned-writes", writes, _GIVEN)
    odd = "/{bucket}/a%20b+c%2Bd%25e/%E2%82%AC//x"
    yield Case("presigned-odd-key", (put(odd, BODY, auth="query"), get(odd, auth="query"), get(odd, auth="query-v2")))


def _version_2() -> Iterator[Case]:
    for target in (K, f"{K}?{_OVERRIDES}", "/{bucket}/absent", f"{K}?versionId=null"):
        yield Case(f"version-2-{target[10:40]}", (get(target, auth="query-v2"), head(target, auth="query-v2")), _GIVEN)
    ranged = get(K, "range: bytes=1-3", auth="query-v2")
    yield Case("version-2-range", (ranged,), _GIVEN)
    yield Case("version-2-write", (put(K, b"1", auth="query-v2"), get(K), delete(K, auth="query-v2"), get(K)), _GIVEN)


def _refused() -> Iterator[Case]:
    unsigned = get(K, auth="none", rule="403 AccessDenied", only_gateway=True)
    yield Case("unsigned", (unsigned, head(K, auth="none", rule="403", only_gateway=True)), _GIVEN)
    late = get(K, auth="query-v2", expires_seconds=-10, rule="403 AccessDenied", only_gateway=True)
    yield Case("version-2-expired", (late,), _GIVEN)
    for name, (value, rule) in _REFUSED_HEADERS.items():
        step = get(K, f"authorization: {value}", auth="none", rule=rule, only_gateway=True)
        write = put(K, BODY, f"authorization: {value}", auth="none", rule=rule, only_gateway=True)
        yield Case(f"authorization-{name}", (step, write), _GIVEN)
    spoilt = f"{K}?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature=abc"
    broken = get(spoilt, auth="none", rule="400 AuthorizationQueryParametersError", only_gateway=True)
    yield Case("presigned-incomplete", (broken,), _GIVEN)
    both = get(f"{K}?X-Amz-Algorithm=AWS4-HMAC-SHA256", rule="400 AuthorizationQueryParametersError", only_gateway=True)
    yield Case("signed-twice", (both,), _GIVEN)
    negative = get(K, auth="query", expires_seconds=-1, rule="400 AuthorizationQueryParametersError", only_gateway=True)
    week = get(K, auth="query", expires_seconds=604801, rule="400 AuthorizationQueryParametersError", only_gateway=True)
    yield Case("presigned-lifetimes", (negative, week), _GIVEN)
