"""Reads of one object that are asked for again and again: what never changes between them is worked out once.

A `PreparedRead` compares what an answer hangs on with what it was, and gives head and span of the answer. It answers
what `read_object` answers at once, to the byte; whatever else is asked of it, it leaves to that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from gateway.blocks.cache import BlockCache
from gateway.blocks.reading.sources import HeldObject, WarmSpan
from gateway.counting import HitTally
from gateway.metadata.catalog import CHECKSUM_MODE, HeldVersion
from gateway.objects import ObjectKey
from gateway.operations.context import AppContext
from gateway.operations.read_object import PLAIN_FIELDS, is_cacheable, not_modified_headers
from gateway.policy.slots import Slot
from gateway.s3.headers import EncodedHeaders
from gateway.s3.requests import Operation, S3Request

_RANGE = re.compile(rb"bytes=(\d{1,15})-(\d{1,15})?")
_STRONG_ETAG = re.compile(rb'"[!#-+\--~]*"')
"""One strong ETag; lists, weak ones and `*` are not looked at here."""

TallyOf = Callable[[Operation, str, str], HitTally]
"""Who counts answers of an operation in a slot with a status."""


class PreparedAnswer(NamedTuple):
    """Its status is the tally's. `before` and `behind` are the lines of its head before and behind those of the
    moment; no `span`: no body."""

    tally: HitTally
    before: bytes
    behind: bytes
    span: WarmSpan | None


class PreparedRead:
    """GET or HEAD of one object. Made by `prepare_read`."""

    def __init__(
        self,
        services: AppContext,
        key: ObjectKey,
        operation: Operation,
        slot: Slot,
        held: HeldVersion,
        blocks: HeldObject,
        tally: TallyOf,
    ) -> None:
        head, version = held.head, held.head.version
        self._buffer = services.writeback
        self._key = key
        self._held = held
        self._blocks = blocks
        self._is_head = operation is Operation.HEAD_OBJECT
        self._etag, self._size_bytes = version.etag.encode("latin-1"), version.size_bytes
        self._whole, self._part = head.of_whole.lines, head.of_range.lines
        self._not_modified = EncodedHeaders.of(not_modified_headers(head)).lines + b"\r\n"
        self._of_whole, self._of_part, self._of_unchanged = (
            tally(operation, slot.name, status) for status in ("200", "206", "304")
        )

    def is_pending(self) -> bool:
        """Whether something may be pending under the key. To be asked before `holds`: what is flushed meanwhile is in
        the catalog before nothing is pending any more."""
        return self._buffer is not None and self._buffer.may_be_pending(self._key)

    def holds(self) -> bool:
        """Whether the version is still the one to answer by."""
        return self._held.holds()

    def answer(self, asked: bytes | None, match: bytes | None, other: bytes | None) -> PreparedAnswer | None:
        """The answer by the version, to these values of Range, If-Match and If-None-Match; None: `read_object` is to
        be asked."""
        size_bytes = self._size_bytes
        first, last = 0, size_bytes - 1
        if asked is not None:
            found = _RANGE.fullmatch(asked)
            if found is None or self._is_head:
                return None
            first = int(found[1])
            last = int(found[2]) if found[2] is not None else max(first, last)
            if last < first:
                return None
        if match is not None and (match != self._etag or other is not None):
            return None
        if other is not None:
            if other == self._etag:
                return PreparedAnswer(self._of_unchanged, b"", self._not_modified, None)
            if not _STRONG_ETAG.fullmatch(other):
                return None
        if self._is_head:
            return PreparedAnswer(self._of_whole, self._whole, b"content-length: %d\r\n\r\n" % size_bytes, None)
        last = min(last, size_bytes - 1)
        count = last - first + 1
        span = self._blocks.span(first, count) if count > 0 else None
        if span is None:
            return None
        if asked is None:
            return PreparedAnswer(self._of_whole, self._whole, b"content-length: %d\r\n\r\n" % count, span)
        lengths = b"content-range: bytes %d-%d/%d\r\ncontent-length: %d\r\n\r\n" % (first, last, size_bytes, count)
        return PreparedAnswer(self._of_part, self._part, lengths, span)


def is_plain(request: S3Request) -> bool:
    """Whether a request asks for bytes or metadata of an object's current version, and nothing else."""
    if request.method not in ("GET", "HEAD") or not PLAIN_FIELDS.issuperset(request.headers):
        return False
    return request.headers.get(CHECKSUM_MODE, "ENABLED").upper() == "ENABLED"


def wants_checksums(request: S3Request) -> bool:
    """Whether checksums of the object are to be told, where a request is plain."""
    return CHECKSUM_MODE in request.headers


def prepare_read(services: AppContext, request: S3Request, tally: TallyOf) -> PreparedRead | None:
    """GET or HEAD of an object, whose caller may read it; None: of something else, or not known and fresh."""
    operation, bucket, name = request.operation, request.bucket, request.key
    if operation not in (Operation.GET_OBJECT, Operation.HEAD_OBJECT) or bucket is None or name is None:
        return None
    if not isinstance(services.blocks, BlockCache):
        return None
    key, slot = ObjectKey(bucket, name), services.slots.find(bucket, name)
    if services.writeback is not None and services.writeback.may_be_pending(key):
        return None
    held = _held(services, key, slot, with_checksums=wants_checksums(request))
    if held is None or not held.head.version.size_bytes or not is_cacheable(request, held.head):
        return None
    if not _STRONG_ETAG.fullmatch(held.head.version.etag.encode("latin-1")):
        return None
    blocks = services.blocks.held_object(held.head.version, slot.name)
    return PreparedRead(services, key, operation, slot, held, blocks, tally)


def _held(services: AppContext, key: ObjectKey, slot: Slot, *, with_checksums: bool) -> HeldVersion | None:
    """The version that answers in a slot, as long as it does; None: it is to be found, or there is none."""
    if slot.consistency != "snapshot":
        return services.catalog.hold(key, slot, with_checksums=with_checksums)
    snapshots = services.snapshots
    snapshot = snapshots.of(slot)
    head = snapshot.head(key.key, with_checksums=with_checksums) if snapshot is not None else None
    return HeldVersion(head, lambda: snapshots.of(slot) is snapshot) if head is not None else None
