"""The answers by one fixed version to GETs and HEADs: which status, head and bytes, by conditions and range."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from gateway.core.clock import Clock
from gateway.core.model import ByteRange
from gateway.metadata.entries import ObjectHead, of_part
from gateway.operations.context import RequestContext
from gateway.s3.headers import READ_CONDITIONS, EncodedHeaders, evaluate_read, if_range_holds, parse_range
from gateway.s3.origin_habits import NO_HABITS

_ARCHIVED = frozenset({"GLACIER", "DEEP_ARCHIVE"})

_OF_NOT_MODIFIED = frozenset({"etag", "last-modified", "cache-control", "expires", "vary", "x-amz-version-id"})

_NO_OVERRIDES: Mapping[str, str] = MappingProxyType({})


class AnswerHead(NamedTuple):
    """The head of an answer by a version, and the bytes of the object that a GET's has for its body."""

    status: int
    lines: bytes
    """Its fields, encoded, without Content-Length."""

    length_bytes: int | None
    """Content-Length; None: it has none."""

    first: int
    body_bytes: int

    @property
    def sent(self) -> ByteRange:
        """Return the bytes of the object that a GET's answer has; there must be any."""
        return ByteRange(self.first, self.first + self.body_bytes - 1)


class VersionAnswers:
    """The heads of answers by one version to GETs and HEADs, encoded once."""

    __slots__ = ("_lines", "_of_range", "_part", "_whole", "etag", "last_modified", "size_bytes")

    def __init__(self, head: ObjectHead, overrides: Mapping[str, str] = _NO_OVERRIDES) -> None:
        self.etag, self.size_bytes, self.last_modified = head.version.etag, head.version.size_bytes, head.last_modified
        self._part = head.part
        self._lines = self._whole = head.of_whole.lines
        if overrides:
            kept = [(name, value) for name, value in head.of_whole.pairs if name not in overrides]
            self._whole = EncodedHeaders.of([*kept, *overrides.items()]).lines
        self._of_range: bytes | None = None
        """Encoded when it is asked for, as most objects are read as a whole."""

    def judge(self, headers: Mapping[str, str], clock: Clock) -> AnswerHead:
        """Return the answer to a request's conditions and range. S3Error PreconditionFailed (412), InvalidRange."""
        etag, last_modified, size_bytes, asked = self.etag, self.last_modified, self.size_bytes, self._part
        if not READ_CONDITIONS.isdisjoint(headers):
            judged = evaluate_read(headers, etag=etag, last_modified=last_modified, now=clock.now())
            if judged == "not-modified":
                kept = [pair for pair in EncodedHeaders(self._lines).pairs if pair[0] in _OF_NOT_MODIFIED]
                return AnswerHead(304, EncodedHeaders.of(kept).lines, None, 0, 0)
        counts = "if-range" not in headers or if_range_holds(headers, etag=etag, last_modified=last_modified)
        if asked is None and counts and "range" in headers:
            asked = parse_range(headers["range"], size_bytes)
        if asked is None:
            return self.whole()
        if self._of_range is None:  # a part has its own checksums
            self._of_range = of_part(EncodedHeaders(self._whole)).lines if self._part is None else self._whole
        first, last = asked.first, asked.last
        lines = b"%bcontent-range: bytes %d-%d/%d\r\n" % (self._of_range, first, last, size_bytes)
        return AnswerHead(206, lines, last - first + 1, first, last - first + 1)

    def whole(self) -> AnswerHead:
        """Return the answer with the whole object."""
        return AnswerHead(200, self._whole, self.size_bytes, 0, self.size_bytes)


def has_cacheable_bytes(head: ObjectHead) -> bool:
    if (
        not head.version.etag
        or head.version.etag.startswith("W/")
        or "x-amz-server-side-encryption-customer-algorithm" in head.headers
    ):
        return False
    return head.headers.get("x-amz-storage-class") not in _ARCHIVED or "x-amz-restore" in head.headers


def is_cacheable(context: RequestContext, head: ObjectHead) -> bool:
    """Return whether blocks may hold the bytes that a request asks of a version."""
    request, habits = context.request, context.services.catalog.habits(head.version.key.bucket)
    if not has_cacheable_bytes(head) or (habits != NO_HABITS and not habits.is_distinct(head.version)):
        return False
    if head.version.size_bytes == 0 and "range" in request.headers:
        return False  # servers differ about ranges of nothing, and asking costs nothing
    return request.parameter("partNumber") is None or head.part is not None
