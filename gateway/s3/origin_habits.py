"""An origin's inabilities in a bucket, as its answers show them, that keep objects out of the cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.core.errors import OriginAnswered, OriginBodyError, OriginError
from gateway.core.model import ByteRange, ObjectVersion
from gateway.s3.headers import plain_etag, unquote

_SHARED_ETAGS_MAX = 64
_WITHHELD_ETAGS_MAX = 8


class OriginHabits(NamedTuple):
    """The habits of one bucket.

    Objects of different sizes have the `shared_etags`. The origin names versions by the `withheld_etags`, and gives no
    ranges under them. Both are without quotes; `*` stands for too many.
    """

    weak_etags: bool = False
    no_ranges: bool = False
    shared_etags: frozenset[str] = frozenset()
    withheld_etags: frozenset[str] = frozenset()

    def joined(self, other: OriginHabits) -> OriginHabits:
        """Both together."""
        shared, withheld = self.shared_etags | other.shared_etags, self.withheld_etags | other.withheld_etags
        shared = frozenset("*") if "*" in shared or len(shared) > _SHARED_ETAGS_MAX else shared
        withheld = frozenset("*") if "*" in withheld or len(withheld) > _WITHHELD_ETAGS_MAX else withheld
        return OriginHabits(self.weak_etags or other.weak_etags, self.no_ranges or other.no_ranges, shared, withheld)

    def gives_ranges(self, version: ObjectVersion) -> bool:
        """Return whether the origin gives ranges of a version under its ETag, as far as Forebay knows."""
        return self.withheld_etags.isdisjoint(("*", unquote(version.etag)))

    def is_distinct(self, version: ObjectVersion) -> bool:
        """Tell whether its ETag tells a version from others, as far as answers have shown."""
        shared = self.shared_etags
        return not shared or ("*" not in shared and plain_etag(version.etag) not in shared)

    def concern(self, version: ObjectVersion) -> bool:
        """Return whether a version with a strong ETag must be read in an unusual way, or not be kept."""
        return self.no_ranges or not (self.gives_ranges(version) and self.is_distinct(version))

    def reasons(self, version: ObjectVersion | None = None) -> set[str]:
        """Why objects are not kept, in words; of one version, where it is given."""
        found = set[str]()
        if self.weak_etags if version is None else version.etag.startswith("W/"):
            found.add("the origin makes weak ETags (W/), which no If-Match holds for: they are read in one stream")
        if self.no_ranges:
            found.add(
                "the origin answers a range with the whole object: those of several blocks are read in one stream"
            )
        if self.withheld_etags if version is None else not self.gives_ranges(version):
            found.add("the origin gives no ranges under the ETag that it names an object by: it is read in one stream")
        if self.shared_etags if version is None else not self.is_distinct(version):
            found.add("the origin gives objects of different sizes the same ETag, which tells no version")
        return found


def makes_weak_etags(etag: str) -> bool:
    """Tell whether an ETag says that those of other objects are weak, too.

    That of a file in a directory is weak while the file is young (`W/"….f"`), which says nothing of others.
    """
    return etag.startswith("W/") and not etag.endswith('.f"')


NO_HABITS = OriginHabits()
"""Nearly all origins have these."""


class WrongAnswer(OriginBodyError):
    """The origin's answer does not match the question: to ask again would not help."""


class WrongBody(WrongAnswer):
    """The origin sent other bytes than its own answer says."""


class RangeIgnored(WrongAnswer):
    """The origin answered with the whole object instead of a range."""


def check_head(status: int, headers: Mapping[str, str], version: ObjectVersion, asked: ByteRange) -> None:
    """Raise WrongAnswer unless a 200 or 206 carries exactly the bytes asked for, of the version asked for.

    A 200 (an origin that knows no ranges) is as good where the range is the whole object. A Content-Encoding is the
    object's own where there is a length: a proxy that re-codes the bytes on the way cannot also keep the length.
    """
    if unquote(headers.get("etag", "")) != unquote(version.etag):  # some origins leave the quotes out
        raise WrongAnswer("the origin's ETag is not the one asked for")
    if status == 206:
        expected = f"bytes {asked.first}-{asked.last}/"
        if headers.get("content-range") not in (f"{expected}{version.size_bytes}", f"{expected}*"):
            raise WrongAnswer(f"Content-Range {headers.get('content-range')!r} instead of '{expected}…'")
    elif asked.length != version.size_bytes:
        raise RangeIgnored("the origin answered with the whole object instead of a range")
    length = headers.get("content-length", "" if "content-encoding" in headers else str(asked.length))
    if length != str(asked.length):
        kind = WrongAnswer if "content-encoding" in headers else WrongBody
        raise kind(f"Content-Length {length!r} instead of {asked.length}")


_NOT_OF_THE_QUESTION = frozenset({401, 403, 404, 408, 429})


def is_refusal(error: OriginError | None) -> bool:
    """Return whether the origin refuses the question or answers another one. The version may have changed."""
    if isinstance(error, OriginAnswered):
        return refuses(error.status)
    return isinstance(error, WrongAnswer) and not isinstance(error, WrongBody)


def refuses(status: int) -> bool:
    """Return whether the status refuses the question, and not the caller, the object or the time."""
    return status == 501 or (300 <= status < 500 and status not in _NOT_OF_THE_QUESTION)


def shared_etags(listed: Iterable[tuple[str, int]], sizes: dict[str, int]) -> frozenset[str]:
    """Return the listed ETags that have several sizes, without quotes. Add the others to `sizes`, of pages before."""
    found = {etag for etag, size_bytes in listed if etag and sizes.setdefault(etag, size_bytes) != size_bytes}
    return frozenset(map(plain_etag, found))
