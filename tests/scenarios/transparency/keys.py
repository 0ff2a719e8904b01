"""Odd keys: what is written under a name is read, listed, copied and deleted under exactly that name, and no other."""

from __future__ import annotations

from collections.abc import Iterator

from tests.scenarios.transparency.steps import Case, delete, get, head, pattern, put

_LONGEST = "k" * 1024
_WIDE = "%E2%82%AC" * 341 + "x"
"""1,024 bytes in 342 characters."""

_KEYS = {
    "double-slash": "a//b",
    "triple-slash": "a///b",
    "leading-slash": "/a",
    "leading-slashes": "//a",
    "trailing-slash": "a/",
    "trailing-slashes": "a//",
    "only-slash": "/",
    "dot": ".",
    "dots": "..",
    "dot-segments": "a/./b/../c",
    "climbing": "../../etc/passwd",
    "encoded-climbing": "%2E%2E/%2E%2E/a",
    "encoded-dots": "%2e%2E",
    "plus": "a+b",
    "encoded-plus": "a%2Bb",
    "space": "a%20b",
    "leading-space": "%20a",
    "trailing-space": "a%20",
    "only-space": "%20",
    "encoded-slash": "a%2Fb",
    "encoded-slash-lower": "a%2fb",
    "percent": "a%25b",
    "percent-escape": "a%252Fb",
    "question-mark": "a%3Fb%3Dc",
    "hash": "a%23b",
    "ampersand": "a&b=c",
    "unescaped-marks": "a!'()*;:@=,$",
    "escaped-marks": "a%21%27%28%29%2A%3B%3A%40%3D%2C%24",
    "unreserved-escaped": "%61%2D%5F%2E%7E",
    "brackets": "a%5Bb%5D%7Bc%7D%7Cd%5C%5E%60%22",
    "markup": "%3Ca%3E%26amp%3B%22'",
    "tab": "a%09b",
    "newline": "a%0Ab",
    "return": "a%0D%0Ab",
    "bell": "a%07b",
    "unit-separator": "a%1Fb",
    "delete": "a%7Fb",
    "euro": "%E2%82%AC",
    "composed": "%C3%A9",
    "decomposed": "e%CC%81",
    "emoji": "%F0%9F%91%A8%E2%80%8D%F0%9F%91%A9",
    "right-to-left": "%D7%A9%D7%9C%D7%95%D7%9D%E2%80%8F",
    "byte-order-mark": "%EF%BB%BFa",
    "highest": "%F4%8F%BF%BF",
    "longest": _LONGEST,
    "longest-wide": _WIDE,
    "longest-segments": "/".join(["s" * 100] * 10),
    "query-like": "k%3Fuploads",
    "json": "%7B%22a%22%3A1%7D",
    "colon": "c%3A/windows",
    "soap": "soap/",
    "favicon": "favicon.ico",
    "health": "healthz",
    "many-slashes": "a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p",
}

_STRICT_ONLY = {
    "leading-slash",
    "leading-slashes",
    "only-slash",
    "dots",
    "climbing",
    "encoded-climbing",
    "encoded-dots",
}
_STRICT_ONLY |= {"dot", "dot-segments"}
"""The web server that moto runs in normalises these, so that they never reach it as they are."""

_NEVER_KEYS = {
    "too-long": ("k" * 1025, "400 KeyTooLongError"),
    "too-wide": ("%E2%82%AC" * 342, "400 KeyTooLongError"),
    "not-utf-8": ("a%FFb", "400 InvalidURI"),
    "half-a-character": ("a%E2%82", "400 InvalidURI"),
    "surrogate": ("%ED%A0%80", "400 InvalidURI"),
    "bad-escape": ("a%zz", "400 InvalidURI"),
    "half-escape": ("a%2", "400 InvalidURI"),
}


def cases() -> Iterator[Case]:
    body = pattern(100)
    for name, key in _KEYS.items():
        target = f"/{{bucket}}/{key}"
        copied = put("/{bucket}/copied", b"", f"x-amz-copy-source: /{{bucket}}/{key}")
        steps = (
            put(target, body),
            get(target),
            head(target),
            get(target, "range: bytes=1-2"),
            get("/{bucket}?list-type=2&encoding-type=url"),
            copied,
            get("/{bucket}/copied"),
            get(f"{target}?tagging"),
            delete(target),
            get(target),
            get("/{bucket}?encoding-type=url"),
        )
        yield Case(f"key-{name}", steps, only="strict" if name in _STRICT_ONLY else None)
    for name, (key, rule) in _NEVER_KEYS.items():
        target = f"/{{bucket}}/{key}"
        refused = get(target, rule=rule, only_gateway=True)
        yield Case(f"no-key-{name}", (put(target, b"1", rule=rule, only_gateway=True), refused))
    yield from _close_relatives()


def _close_relatives() -> Iterator[Case]:
    """Names that some normalisation would make one."""
    groups = {
        "plus-and-space": ("a+b", "a%20b"),
        "nfc-and-nfd": ("%C3%A9", "e%CC%81"),
        "case": ("Key", "key"),
        "slashes": ("a/b", "a//b", "a/b/"),
        "escapes": ("a%252Fb", "a/b"),
    }
    for name, keys in groups.items():
        written = tuple(put(f"/{{bucket}}/{key}", str(number).encode()) for number, key in enumerate(keys))
        reads = tuple(get(f"/{{bucket}}/{key}") for key in keys)
        yield Case(f"relatives-{name}", (*written, *reads, delete(f"/{{bucket}}/{keys[0]}"), *reads))
