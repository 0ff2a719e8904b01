"""Prefixes of keys, and what belongs to the longest of several that cover a key."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_SCHEME = "s3://"


@dataclass(frozen=True, slots=True)
class Prefix:
    """All keys of `bucket` that begin with `key_prefix`; an empty bucket stands for every bucket.

    >>> str(Prefix.parse("s3://train/imagenet/"))
    's3://train/imagenet/'
    """

    bucket: str
    key_prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> Prefix:
        """Parse `s3://` (everything), `s3://b` or `s3://b/` (the whole bucket), or a prefix. Raises ValueError."""
        if not text.startswith(_SCHEME):
            raise ValueError(f"{text!r} does not begin with s3://")
        bucket, _, key_prefix = text[len(_SCHEME) :].partition("/")
        if not bucket and key_prefix:
            raise ValueError(f"{text!r} names a key but no bucket")
        return cls(bucket, key_prefix)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.bucket}/{self.key_prefix}" if self.bucket else _SCHEME

    def covers(self, bucket: str, key_prefix: str) -> bool:
        """Return whether every key of `bucket` that begins with `key_prefix` lies within."""
        return not self.bucket or (bucket == self.bucket and key_prefix.startswith(self.key_prefix))


class PrefixMap(Generic[T]):
    """Values (none of them None) by prefix; of several with the same prefix the first counts. It never changes.

    A look-up is one binary search in the sorted prefixes of the bucket, then a walk outwards through the prefixes that
    enclose each other. So its cost grows with the depth of their nesting, and with their number only by the search.
    """

    def __init__(self, entries: Iterable[tuple[Prefix, T]]) -> None:
        by_bucket: dict[str, dict[str, T]] = {}
        for prefix, value in entries:
            # A prefix without a bucket covers every bucket, whatever else it says.
            key_prefix = prefix.key_prefix if prefix.bucket else ""
            by_bucket.setdefault(prefix.bucket, {}).setdefault(key_prefix, value)
        self._everywhere = by_bucket.pop("", {}).get("")
        self._buckets = {bucket: _PrefixesOfBucket(values) for bucket, values in by_bucket.items()}

    def longest(self, bucket: str, key: str) -> T | None:
        """Return the value of the longest prefix that covers `key`, or all keys that begin with it; None: none does."""
        prefixes = self._buckets.get(bucket)
        found = prefixes.longest(key) if prefixes is not None else None
        return self._everywhere if found is None else found

    def within(self, bucket: str, key_prefix: str) -> Iterator[T]:
        """Yield the values of all longer prefixes of `bucket` that begin with `key_prefix`, in order."""
        prefixes = self._buckets.get(bucket)
        if prefixes is not None:
            yield from prefixes.within(key_prefix)


class _PrefixesOfBucket(Generic[T]):
    """The prefixes of one bucket in order, each with the number of the next shorter one that encloses it (-1: none).

    All strings between a prefix and a key that begins with it begin with that prefix too. So the greatest prefix that
    is not greater than the key is either a prefix of the key, or lies within all those that are.
    """

    def __init__(self, values: dict[str, T]) -> None:
        self._prefixes = sorted(values)
        self._values = [values[prefix] for prefix in self._prefixes]
        self._enclosing: list[int] = []
        open_ones: list[int] = []
        for number, prefix in enumerate(self._prefixes):
            while open_ones and not prefix.startswith(self._prefixes[open_ones[-1]]):
                open_ones.pop()
            self._enclosing.append(open_ones[-1] if open_ones else -1)
            open_ones.append(number)

    def longest(self, key: str) -> T | None:
        number = bisect_right(self._prefixes, key) - 1
        while number >= 0:
            if key.startswith(self._prefixes[number]):
                return self._values[number]
            number = self._enclosing[number]
        return None

    def within(self, key_prefix: str) -> Iterator[T]:
        first = bisect_right(self._prefixes, key_prefix)
        end = bisect_left(self._prefixes, True, key=lambda prefix: not prefix.startswith(key_prefix), lo=first)
        return iter(self._values[first:end])
