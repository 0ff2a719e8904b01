"""What an origin's answers show that it cannot do in a bucket, and that keeps objects out of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from gateway.core.model import ObjectVersion
from gateway.s3.headers import plain_etag

_SHARED_ETAGS_MAX = 64


class OriginHabits(NamedTuple):
    """Of a bucket. `shared_etags` are those that objects of different sizes have, without quotes; `*`: too many."""

    weak_etags: bool = False
    no_ranges: bool = False
    shared_etags: frozenset[str] = frozenset()

    def joined(self, other: OriginHabits) -> OriginHabits:
        """Both together."""
        shared = self.shared_etags | other.shared_etags
        shared = frozenset("*") if "*" in shared or len(shared) > _SHARED_ETAGS_MAX else shared
        return OriginHabits(self.weak_etags or other.weak_etags, self.no_ranges or other.no_ranges, shared)

    def is_distinct(self, version: ObjectVersion) -> bool:
        """Whether its ETag tells a version from others, as far as was found out."""
        shared = self.shared_etags
        return not shared or ("*" not in shared and plain_etag(version.etag) not in shared)

    def reasons(self, version: ObjectVersion | None = None) -> set[str]:
        """Why objects are not kept, in words; of one version, where it is given."""
        return set(self._reasons(version))

    def _reasons(self, version: ObjectVersion | None) -> Iterator[str]:
        if self.weak_etags if version is None else version.etag.startswith("W/"):
            yield "the origin makes weak ETags (W/), which no If-Match holds for: they are read in one stream"
        if self.no_ranges:
            yield "the origin answers a range with the whole object: those of several blocks are read in one stream"
        if self.shared_etags if version is None else not self.is_distinct(version):
            yield "the origin gives objects of different sizes the same ETag, which tells no version"


def shared_etags(listed: Iterable[tuple[str, int]], sizes: dict[str, int]) -> frozenset[str]:
    """Return the listed ETags that have several sizes, without quotes. Add the others to `sizes`, of pages before."""
    found = {etag for etag, size_bytes in listed if etag and sizes.setdefault(etag, size_bytes) != size_bytes}
    return frozenset(map(plain_etag, found))
