"""Repeated reads of one object: what never changes between them is computed once.

A `PreparedRead` compares the conditions of an answer with the previous ones, and gives head and span of the answer. It
answers as `read_object` would, to the byte, where that can answer at once; it leaves all other requests to that.

In a `strict` slot the origin is asked about each GET, as `read_object` asks it (`StrictRead`). Its answer is compared
with the last one, and only ids of its answers may differ; else all is computed anew. If `read_object` must answer after
all, it gets the origin's answer, and does not ask again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from gateway.blocks.cache import BlockCache
from gateway.blocks.spans import HeldObject, UnreadSpan, WarmSpan
from gateway.core.model import ObjectKey
from gateway.metadata.catalog import CHECKSUM_MODE, HeldVersion, ObjectHead
from gateway.metadata.entries import of_part
from gateway.metadata.snapshots.registry import SnapshotRegistry
from gateway.operations.context import AppContext
from gateway.operations.read_object import (
    PLAIN_FIELDS,
    has_cacheable_bytes,
    judged_by_the_origin,
    of_not_modified,
)
from gateway.policy.slots import Slot
from gateway.s3.headers import EncodedHeaders, is_one_range
from gateway.s3.prepared_head import Conditions
from gateway.s3.requests import Operation, S3Request
from gateway.telemetry.request_counts import HitTally
from gateway.writeback.checkpoints.reads import counted_file
from gateway.writeback.order import is_marker

_RANGE = re.compile(rb"bytes=(\d{1,15})-(\d{1,15})?")
_STRONG_ETAG = re.compile(rb'"[!#-+\--~]*"')
"""One strong ETag; lists, weak ones and `*` are not handled here."""

TallyOf = Callable[[Operation, Slot, str], HitTally]
"""Returns the counter of answers of an operation in a slot with a status."""

_OF_ONE_ANSWER = frozenset({"date", "x-amz-id-2", "x-amz-request-id"})
"""Fields that differ in each of the origin's answers. Clients get one of them, under another name."""


class PreparedAnswer(NamedTuple):
    """An answer; its status is the tally's.

    `before` and `behind` are the lines of its head around those of the moment; no `span`: no body. `key` is the object
    read; `file` the checkpoint file that its bytes count for.
    """

    tally: HitTally
    before: bytes
    behind: bytes
    span: WarmSpan | None
    key: ObjectKey
    file: bytes | None = None

    def close(self) -> None:
        """Drop the answer unsent."""
        if self.span is not None:
            self.span.close()


class _Judged(NamedTuple):
    """An answer, and the bytes of the object for its body; `length` 0: it has none."""

    answer: PreparedAnswer
    first: int
    length: int


class PreparedVerification:
    """An answer whose bytes must be read and verified first: `ask`, or only `close`."""

    __slots__ = ("_answer", "_unread", "told")

    def __init__(self, answer: PreparedAnswer, unread: UnreadSpan) -> None:
        self._answer = answer
        self._unread = unread
        self.told: ObjectHead | Exception | None = None
        """Always None, unlike `PreparedQuestion`'s: the origin is not asked."""

    @property
    def slot(self) -> str:
        return self._answer.tally.slot

    @property
    def key(self) -> ObjectKey:
        return self._answer.key

    @property
    def is_known(self) -> bool:
        return self._answer.tally.is_known

    async def ask(self) -> PreparedAnswer | None:
        span = await self._unread.verified()
        if span is None:
            return None
        self._answer = self._answer._replace(span=span)
        return self._answer

    def close(self) -> None:
        """Drop the answer unsent. Idempotent."""
        self._answer.close()


class PreparedRead:
    """A GET or HEAD of one object. It refers to few objects: the garbage collector stops all else to visit them."""

    __slots__ = (
        "_blocks",
        "_buffer",
        "_etag",
        "_file",
        "_hold",
        "_is_head",
        "_key",
        "_length",
        "_part",
        "_size_bytes",
        "_slot",
        "_tally",
        "_whole",
    )

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
        version = held.head.version
        self._buffer = services.writeback
        self._file = counted_file(key, slot) if services.reads is not None else None
        self._key = key
        self._slot = slot
        self._hold = held.hold
        self._blocks = blocks
        self._is_head = operation is Operation.HEAD_OBJECT
        self._etag, self._size_bytes = version.etag.encode("latin-1"), version.size_bytes
        self._whole = held.head.of_whole.lines
        self._part: bytes | None = None
        self._length = b"content-length: %d\r\n\r\n" % version.size_bytes
        self._tally = tally

    def is_pending(self) -> bool:
        """Tell whether a write may be pending. Call it before `holds`: a flush enters the catalog before it ends."""
        return self._buffer is not None and self._buffer.may_be_pending(self._key)

    def holds(self) -> bool:
        return self._hold.holds()

    def _counted(self, status: str) -> HitTally:
        return self._tally(Operation.HEAD_OBJECT if self._is_head else Operation.GET_OBJECT, self._slot, status)

    def _of_all(self) -> _Judged:
        count = 0 if self._is_head else self._size_bytes
        return _Judged(PreparedAnswer(self._counted("200"), self._whole, self._length, None, self._key), 0, count)

    def _unchanged(self) -> _Judged:
        lines = EncodedHeaders.of(of_not_modified(EncodedHeaders(self._whole).pairs)).lines
        return _Judged(PreparedAnswer(self._counted("304"), b"", lines + b"\r\n", None, self._key), 0, 0)

    def answer(self, values: Conditions) -> PreparedAnswer | PreparedVerification | None:
        """Return the answer by the version; None: call `read_object`."""
        authorized_by_origin = self._judged(*values)
        if authorized_by_origin is None or not authorized_by_origin.length:
            return authorized_by_origin.answer if authorized_by_origin is not None else None
        span = self._blocks.span(authorized_by_origin.first, authorized_by_origin.length)
        if isinstance(span, WarmSpan):
            return authorized_by_origin.answer._replace(span=span, file=self._file)
        return (
            PreparedVerification(authorized_by_origin.answer._replace(file=self._file), span)
            if span is not None
            else None
        )

    def may_answer(self, values: Conditions) -> bool:
        authorized_by_origin = self._judged(*values)
        return authorized_by_origin is not None and (
            not authorized_by_origin.length or self._blocks.has(authorized_by_origin.first, authorized_by_origin.length)
        )

    def _judged(self, asked: bytes | None, match: bytes | None, other: bytes | None) -> _Judged | None:
        """Judge the request by Range, If-Match and If-None-Match."""
        if asked is None and match is None and other is None:
            return self._of_all()
        size_bytes = self._size_bytes
        first = last = 0
        if asked is not None:
            found = _RANGE.fullmatch(asked)
            if found is None or self._is_head:
                return None
            first = int(found[1])
            last = int(found[2]) if found[2] is not None else max(first, size_bytes - 1)
            if last < first:
                return None
        if match is not None and (match != self._etag or other is not None):
            return None
        if other is not None:
            if other == self._etag:
                return self._unchanged()
            if self._slot.is_buffered or not _STRONG_ETAG.fullmatch(other):
                return None  # in a buffered slot, it may be this node's ETag of the version
        if asked is None:
            return self._of_all()
        last = min(last, size_bytes - 1)
        count = last - first + 1
        if count <= 0:
            return None
        lengths = b"content-range: bytes %d-%d/%d\r\ncontent-length: %d\r\n\r\n" % (first, last, size_bytes, count)
        if self._part is None:  # most objects are requested whole, and once per epoch
            self._part = of_part(EncodedHeaders(self._whole)).lines
        return _Judged(PreparedAnswer(self._counted("206"), self._part, lengths, None, self._key), first, count)


class _Told(NamedTuple):
    """The origin's answer about an object: `fixed`, without fields that differ in each answer.

    `identity` ends an answer's head with fields that identify the origin's answer behind it. No `read`: the answer is
    for `read_object`.
    """

    fixed: str
    identity: bytes
    read: PreparedRead | None


class StrictRead:
    """A GET of one object of a `strict` slot, made by `prepare_read`. It refers to few objects, as `PreparedRead`."""

    __slots__ = ("_headers", "_services", "_tally", "key", "latest", "slot")

    def __init__(self, services: AppContext, request: S3Request, key: ObjectKey, slot: Slot, tally: TallyOf) -> None:
        self._services = services
        self.key = key
        self.slot = slot
        self._tally = tally
        self._headers = judged_by_the_origin(request)
        self.latest: _Told | None = None
        """The origin's last answer."""

    def is_pending(self) -> bool:
        buffer = self._services.writeback
        return buffer is not None and buffer.may_be_pending(self.key)

    def holds(self) -> bool:
        """Return True: the origin is asked."""
        return True

    def question(self, values: Conditions) -> PreparedQuestion | None:
        """Return the question that must precede the answer; None: call `read_object`, which asks."""
        if self.latest is None:
            asked = values[0]
            is_likely = asked is None or is_one_range(asked.decode("latin-1"))
        else:
            is_likely = self.latest.read is not None and self.latest.read.may_answer(values)
        return PreparedQuestion(self, values) if is_likely else None

    async def ask(self) -> ObjectHead:
        return await self._services.catalog.ask(self.key, self.slot, headers=self._headers)

    def told(self, head: ObjectHead) -> _Told:
        """Return the origin's answer, computed anew if it differs from the last one."""
        fixed, latest = _fixed(head), self.latest
        if latest is None or latest.fixed != fixed:
            held = HeldVersion(head, _TOLD_EACH_TIME)
            read = _read(self._services, Operation.GET_OBJECT, self.key, self.slot, held, self._tally)
            self.latest = latest = _Told(fixed, _identity(head), read)
        return latest


class PreparedQuestion:
    """One GET of a `strict` slot, whose answer waits for the origin: `ask`, or only `close`.

    It holds no file meanwhile: the origin may take its time, and evicted blocks must free their room.
    """

    __slots__ = ("_answer", "_read", "_values", "told")

    is_known = False
    """As of `PreparedVerification`."""

    def __init__(self, read: StrictRead, values: Conditions) -> None:
        self._read = read
        self._answer: PreparedAnswer | None = None
        self._values = values
        self.told: ObjectHead | Exception | None = None
        """The result of the question."""

    @property
    def slot(self) -> str:
        return self._read.slot.name

    @property
    def key(self) -> ObjectKey:
        return self._read.key

    async def ask(self) -> PreparedAnswer | None:
        """Return the answer by the origin's; None: call `read_object`, which goes on from `told`."""
        try:
            head = self.told = await self._read.ask()
        except Exception as error:  # noqa: BLE001 - whoever goes on is told, and says it
            self.told = error
            return None
        known = self._read.told(head)
        answer = known.read.answer(self._values) if known.read is not None else None
        if isinstance(answer, PreparedVerification):
            answer = await answer.ask()
        if answer is None:
            return None
        if answer.before:
            answer = answer._replace(before=answer.before.removesuffix(known.identity) + _identity(head))
        self._answer = answer
        return answer

    def close(self) -> None:
        """Drop the answer unsent. Idempotent."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()


class _ToldEachTime:
    """A version that holds because the origin is asked each time."""

    def holds(self) -> bool:
        return True


_TOLD_EACH_TIME = _ToldEachTime()


class _OfSnapshot:
    """A version in a frozen slot, as long as this snapshot freezes it."""

    __slots__ = ("_slot", "_snapshot", "_snapshots")

    def __init__(self, snapshots: SnapshotRegistry, slot: Slot, snapshot: object) -> None:
        self._snapshots = snapshots
        self._slot = slot
        self._snapshot = snapshot

    def holds(self) -> bool:
        return self._snapshots.of(self._slot) is self._snapshot


def _fixed(head: ObjectHead) -> str:
    """Join headers to a string: values have no line breaks, names no colons."""
    return "\n".join([name if name in _OF_ONE_ANSWER else f"{name}:{value}" for name, value in head.headers.items()])


def _identity(head: ObjectHead) -> bytes:
    """Return the end of `ObjectHead.of_whole` and `of_range`."""
    request_id = head.headers.get("x-amz-request-id")
    if request_id is None:
        return b""
    return b"x-forebay-origin-request-id: %b\r\naccept-ranges: bytes\r\n" % request_id.encode("latin-1")


def is_plain(request: S3Request) -> bool:
    """Return whether a request asks for bytes or metadata of an object's current version, and nothing else."""
    if request.method not in ("GET", "HEAD") or not PLAIN_FIELDS.issuperset(request.headers):
        return False
    return request.headers.get(CHECKSUM_MODE, "ENABLED").upper() == "ENABLED"


def prepare_read(services: AppContext, request: S3Request, tally: TallyOf) -> PreparedRead | StrictRead | None:
    """Return a GET or HEAD, without parameters, of a fresh object that the caller may read; None for others."""
    operation, bucket, name = request.operation, request.bucket, request.key
    if operation not in (Operation.GET_OBJECT, Operation.HEAD_OBJECT) or bucket is None or name is None:
        return None
    if not isinstance(services.blocks, BlockCache):
        return None
    key, slot = ObjectKey(bucket, name), services.slots.find(bucket, name)
    if services.writeback is not None and services.writeback.may_be_pending(key):
        return None
    if slot.write == "scratch" or (
        slot.write == "back" and is_marker(name, slot.markers)
    ):  # its answer has more (pending_versions.py)
        return None
    if slot.consistency == "strict":
        # A HEAD is forwarded as it is; a GET of an object that has no blocks asks for the bytes at once.
        is_asked_first = operation is Operation.GET_OBJECT and services.blocks.has_blocks_of(key)
        return StrictRead(services, request, key, slot, tally) if is_asked_first else None
    held = _held(services, key, slot, with_checksums=CHECKSUM_MODE in request.headers)
    return _read(services, operation, key, slot, held, tally) if held is not None else None


def _read(
    services: AppContext, operation: Operation, key: ObjectKey, slot: Slot, held: HeldVersion, tally: TallyOf
) -> PreparedRead | None:
    """Return prepared reads of a version; None for one that `read_object` must examine."""
    head = held.head
    if not isinstance(services.blocks, BlockCache) or not head.version.size_bytes or not has_cacheable_bytes(head):
        return None
    if not _STRONG_ETAG.fullmatch(head.version.etag.encode("latin-1")):
        return None
    if not services.catalog.habits(key.bucket).is_distinct(head.version):
        return None
    blocks = services.blocks.held_object(head.version, slot.name)
    return PreparedRead(services, key, operation, slot, held, blocks, tally)


def _held(services: AppContext, key: ObjectKey, slot: Slot, *, with_checksums: bool) -> HeldVersion | None:
    """Return the version that a slot answers with, and while it does; None: it must be looked up, or there is none."""
    if slot.consistency != "snapshot":
        return services.catalog.hold(key, slot, with_checksums=with_checksums)
    snapshots = services.snapshots
    snapshot = snapshots.of(slot)
    head = snapshot.head(key.key, with_checksums=with_checksums) if snapshot is not None else None
    return HeldVersion(head, _OfSnapshot(snapshots, slot, snapshot)) if head is not None else None
