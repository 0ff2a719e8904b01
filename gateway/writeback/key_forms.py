"""Forms of keys that a store may refuse. Pure.

S3 takes every key. Stores that keep objects as files do not: they refuse an empty part of a path, one that is too long,
an object where there is a directory. If a bucket has refused the key of an acknowledged write, the gateway asks it
before it acknowledges another key of that form, until the bucket takes one.
"""

from __future__ import annotations

import re

FORMS_MAX = 64
"""The most forms that the gateway keeps of a bucket."""

EVERY_KEY = "*"

_UNUSUAL = {
    "an empty part": re.compile(r"^/|//"),
    "a slash at the end": re.compile(r"/$"),
    "a part of dots": re.compile(r"(^|/)\.{1,2}(/|$)"),
    "a long part": re.compile(r"[^/]{256}"),
    "a long key": re.compile(r"(?s).{901}"),
    "control characters": re.compile(r"[\x00-\x1f\x7f]"),
    "not ASCII": re.compile(r"[^\x00-\x7f]"),
    "special characters": re.compile(r"""[\\:*?"'<>|`^{}\[\]#%~&$@=;+, ]"""),
}
"""Patterns over bytes, one a character. File systems take 255 of a part."""


def forms_of(key: str) -> frozenset[str]:
    """Return all forms that a key has; `refused_forms` of another key are among these."""
    return _unusual(key) | _directories(key) | {EVERY_KEY}


def refused_forms(key: str, code: str) -> frozenset[str]:
    """Return the forms to avoid after a key's final refusal: its unusual ones, or a usual key's directories'."""
    return frozenset({EVERY_KEY}) if code == "NoSuchBucket" else _unusual(key) or _directories(key)


def bounded(forms: frozenset[str]) -> frozenset[str]:
    """Keep what is unusual about keys, and the shortest directories: those that most keys have."""
    return frozenset(sorted(forms, key=lambda form: (form.startswith("in /"), len(form), form))[:FORMS_MAX])


def _unusual(key: str) -> frozenset[str]:
    text = key.encode("utf-8", "surrogatepass").decode("latin-1")
    return frozenset(name for name, pattern in _UNUSUAL.items() if pattern.search(text))


def _directories(key: str) -> frozenset[str]:
    """Return the prefixes that end with a slash, and the empty one: one of them may be an object, or no directory."""
    return frozenset({"in /", *(f"in /{key[: at + 1]}" for at, character in enumerate(key) if character == "/")})
