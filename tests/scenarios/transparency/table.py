"""The whole table."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from tests.scenarios.transparency import (
    buckets,
    copying,
    keys,
    listing,
    multipart,
    reading,
    signatures,
    writing,
)
from tests.scenarios.transparency.steps import Case

_CHAPTERS = (reading, writing, multipart, copying, listing, buckets, keys, signatures)

TABLE: tuple[Case, ...] = tuple(chain.from_iterable(chapter.cases() for chapter in _CHAPTERS))

_names = Counter(case.name for case in TABLE)
assert max(_names.values()) == 1, f"names that stand twice: {[name for name, times in _names.items() if times > 1]}"
