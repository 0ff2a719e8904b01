"""Repeated reads of one object: what never changes between them is computed once.

A `PreparedRead` is what `read_object` answers by: a version and its blocks. It gives the answer again as long as the
version holds, where that can be given at once; it leaves all other requests to `read_object`.

In a `strict` slot the origin is asked about each GET, as `read_object` asks it (`StrictRead`). Its answer is compared
with the last one, and only ids of its answers may differ; else all is computed anew. If `read_object` must answer after
all, it gets the origin's answer, and does not ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from gateway.blocks.cache import BlockCache
from gateway.blocks.handed_out import HandedOut
from gateway.blocks.spans import HeldObject, UnreadSpan, WarmSpan
from gateway.core.errors import S3Error
from gateway.core.model import ObjectKey
from gateway.metadata.catalog import CHECKSUM_MODE, BegunHead, HeldVersion, ObjectHead
from gateway.metadata.snapshots.registry import OpenSnapshot, SnapshotRegistry
from gateway.operations.cluster_writes import ClusterWrites
from gateway.operations.context import AppContext
from gateway.operations.read_wishes import judged_by_the_origin
from gateway.operations.version_answers import AnswerHead, VersionAnswers, has_cacheable_bytes
from gateway.origin.client import OriginRequest, StillSo
from gateway.policy.slots import Grant, Slot
from gateway.s3.headers import is_one_range
from gateway.s3.origin_habits import NO_HABITS
from gateway.s3.prepared_head import Conditions
from gateway.s3.requests import Operation, S3Request
from gateway.telemetry.request_counts import AnswerTally
from gateway.writeback.checkpoints.reads import counted_file
from gateway.writeback.order import is_marker

TallyOf = Callable[[Operation, Slot, int], AnswerTally]
"""Returns the counter of answers of an operation in a slot with a status."""

_OF_ONE_ANSWER = frozenset({"date", "x-amz-id-2", "x-amz-request-id"})
"""Fields that differ in each of the origin's answers. Clients get one of them, under another name."""


class PreparedAnswer(NamedTuple):
    """An answer; no `span`: no body. `key` is the object read; `file` the checkpoint file that its bytes count for."""

    head: AnswerHead
    tally: AnswerTally
    span: WarmSpan | None
    key: ObjectKey
    file: bytes | None = None

    def close(self) -> None:
        """Drop the answer unsent."""
        if self.span is not None:
            self.span.close()


class PendingAnswer:
    """An answer to wait for: `ask`, or only `close`. The origin is asked, or bytes are read and verified.

    It holds no file meanwhile: the origin may take its time, and evicted blocks must free their room.
    """

    __slots__ = ("_answer", "is_known", "key", "slot", "told")

    def __init__(self, slot: str, key: ObjectKey, *, is_known: bool) -> None:
        """`is_known`: the catalog has named the version."""
        self.slot = slot
        self.key = key
        self.is_known = is_known
        self._answer: PreparedAnswer | None = None
        self.told: ObjectHead | Exception | None = None
        """The answer of the origin, if it was asked."""

    def begin(self, on_end: Callable[[PreparedAnswer | None], None]) -> bool:
        """Ask without a wait, and call `on_end` with the answer. With None, or if this returns False, call `ask`.

        `on_end` may not be called after `close`.
        """
        return False

    async def ask(self) -> PreparedAnswer | None:
        """Return the answer; None: call `read_object`, which goes on from `told`."""
        self._answer = await self._awaited()
        return self._answer

    async def _awaited(self) -> PreparedAnswer | None:
        raise NotImplementedError

    def close(self) -> None:
        """Drop the answer unsent. Idempotent."""
        if self._answer is not None:
            self._answer.close()


class _UnverifiedAnswer(PendingAnswer):
    __slots__ = ("_unread", "_without_span")

    def __init__(self, answer: PreparedAnswer, unread: UnreadSpan) -> None:
        super().__init__(answer.tally.slot, answer.key, is_known=answer.tally.is_known)
        self._without_span = answer
        self._unread = unread

    async def _awaited(self) -> PreparedAnswer | None:
        span = await self._unread.verified()
        return self._without_span._replace(span=span) if span is not None else None


class PreparedRead(VersionAnswers):
    """A GET or HEAD of one object. It refers to few objects: the garbage collector stops all else to visit them."""

    __slots__ = ("_blocks", "_file", "_hold", "_is_head", "_key", "_of_whole", "_services", "_slot", "_tally")

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
        super().__init__(held.head)
        self._services = services
        self._file = counted_file(key, slot) if services.reads is not None else None
        self._key = key
        self._slot = slot
        self._hold = held.hold
        self._blocks = blocks
        self._is_head = operation is Operation.HEAD_OBJECT
        self._tally = tally
        self._of_whole: AnswerTally | None = None
        """The counter of whole objects that clients read themselves."""

    def is_pending(self) -> bool:
        """Tell whether a write may be pending. Call it before `holds`: a flush enters the catalog before it ends."""
        buffer = self._services.writeback
        return buffer is not None and buffer.may_be_pending(self._key)

    def is_current(self) -> bool:
        """Tell whether the version is that of the object, unless another node has changed it."""
        return self._hold.holds()

    def holds(self) -> bool:
        return self._hold.holds() and not _is_shared(self._services, self._slot)

    def answer(self, conditions: Conditions) -> PreparedAnswer | PendingAnswer | None:
        """Return the answer by the version; None: call `read_object`."""
        head = self._judged(conditions)
        if head is None:
            return None
        if self._is_head or not head.body_bytes:
            operation = Operation.HEAD_OBJECT if self._is_head else Operation.GET_OBJECT
            return PreparedAnswer(head, self._tally(operation, self._slot, head.status), None, self._key)
        span = self._blocks.span(head.first, head.body_bytes)
        if span is None:
            return None
        tally = self._tally(Operation.GET_OBJECT, self._slot, head.status)
        if isinstance(span, WarmSpan):
            return PreparedAnswer(head, tally, span, self._key, self._file)
        return _UnverifiedAnswer(PreparedAnswer(head, tally, None, self._key, self._file), span)

    @property
    def key(self) -> ObjectKey:
        return self._key

    @property
    def slot(self) -> Slot:
        return self._slot

    def hand_out(self, first: int, count: int) -> HandedOut | None:
        """Return bytes for a client that reads files itself, if they are here; `count` 0: to the end. None: by HTTP."""
        left = self.size_bytes - first
        if left <= 0 or self._is_doubtful():
            return None
        return self._blocks.hand_out(first, count if 0 < count < left else left)

    def handed_out(self, size_bytes: int) -> AnswerTally:
        """Return the counter of answers with such bytes, and count them as read, of a checkpoint's file."""
        if self._file is not None and self._services.reads is not None:
            self._services.reads.begin(self._file)
            self._services.reads.end(self._file, size_bytes)
        if size_bytes != self.size_bytes:
            return self._tally(Operation.GET_OBJECT, self._slot, 206)
        if self._of_whole is None:
            self._of_whole = self._tally(Operation.GET_OBJECT, self._slot, 200)
        return self._of_whole

    def may_be_shown(self, grant: Grant) -> bool:
        """Return whether a caller may have files of the slot that hold other objects, too, if it may read those."""
        return grant.covers(self._slot.prefix.bucket, self._slot.prefix.key_prefix)

    def _is_doubtful(self) -> bool:
        """Return whether perhaps only the origin can answer, though some blocks are here."""
        habits = self._services.catalog.habits(self._key.bucket)
        return habits is not NO_HABITS and habits != NO_HABITS and habits.concern(self._blocks.version)

    def _judged(self, conditions: Conditions) -> AnswerHead | None:
        if self._is_doubtful():
            return None
        if not conditions:
            return self.whole()
        if self._is_head and "range" in conditions:
            return None
        try:
            head = self.judge(conditions, self._services.clock)
        except S3Error:
            return None
        if head.status != 206 and "range" in conditions:
            return None  # perhaps only the origin can judge it
        if head.status != 304 and "if-none-match" in conditions and self._slot.is_buffered:
            return None  # it may be this node's ETag of the version
        return head


class SharedRead:
    """A GET or HEAD of one object that other nodes write, too. It refers to few objects, as `PreparedRead`."""

    __slots__ = ("_writes", "read")

    def __init__(self, read: PreparedRead, writes: ClusterWrites) -> None:
        self.read = read
        self._writes = writes

    def is_pending(self) -> bool:
        return self.read.is_pending()

    def holds(self) -> bool:
        return self.read.is_current()

    def answer(self, conditions: Conditions) -> PendingAnswer:
        """Return an answer to ask the registry for."""
        return _LookedUpAnswer(self, conditions)

    async def asked(self) -> PreparedRead | None:
        """Ask the registry; None: `read_object` answers, and asks again. Raises S3Error as it does."""
        [known] = await self._writes.look([self.read.key])
        is_known = known.store is None and known.stamp is not None
        return self.read if is_known and not self.read.is_pending() and self.read.is_current() else None


class _LookedUpAnswer(PendingAnswer):
    """An answer if no other node has changed the object."""

    __slots__ = ("_conditions", "_read")

    def __init__(self, read: SharedRead, conditions: Conditions) -> None:
        super().__init__(read.read.slot.name, read.read.key, is_known=True)
        self._read = read
        self._conditions = conditions

    async def _awaited(self) -> PreparedAnswer | None:
        try:
            read = await self._read.asked()
        except S3Error:  # `read_object` asks again, and tells the client
            return None
        answer = read.answer(self._conditions) if read is not None else None
        return await answer.ask() if isinstance(answer, PendingAnswer) else answer


class _Told(NamedTuple):
    """The origin's answer about an object: `fixed`, without fields that differ in each answer.

    `identity` are lines of an answer's head that identify the origin's answer behind it. No `read`: the answer is
    for `read_object`. `still`: as in `ObjectHead`.
    """

    fixed: Mapping[str, str]
    identity: bytes
    read: PreparedRead | None
    etag: str
    still: StillSo | None


class StrictRead:
    """A GET of one object of a `strict` slot, made by `prepare_read`. It refers to few objects, as `PreparedRead`."""

    __slots__ = ("_tally", "headers", "key", "latest", "services", "slot")

    def __init__(self, services: AppContext, request: S3Request, key: ObjectKey, slot: Slot, tally: TallyOf) -> None:
        self.services = services
        self.key = key
        self.slot = slot
        self._tally = tally
        self.headers = judged_by_the_origin(request)
        self.latest: _Told | None = None
        """The origin's last answer."""

    def is_pending(self) -> bool:
        buffer = self.services.writeback
        return buffer is not None and buffer.may_be_pending(self.key)

    def holds(self) -> bool:
        """Tell whether the origin alone is asked: until another node begins to write there, too."""
        return not _is_shared(self.services, self.slot)

    def answer(self, conditions: Conditions) -> PreparedAnswer | PendingAnswer | None:
        """Return an answer, or one to ask the origin for; None: call `read_object`, which asks."""
        asked, latest = conditions.get("range"), self.latest
        if (latest is not None and latest.read is None) or (asked is not None and not is_one_range(asked)):
            return None
        answer = self._still(latest, conditions) if latest is not None and latest.still is not None else None
        return answer or _AskedAnswer(self, conditions)

    def _still(self, latest: _Told, conditions: Conditions) -> PreparedAnswer | PendingAnswer | None:
        """Return the answer if the origin's last one holds, which the origin says at once."""
        answer = latest.read.answer(conditions) if latest.read is not None else None
        if answer is None or latest.still is None:
            return None
        if not latest.still():
            answer.close()
            return None
        self.services.catalog.shown(self.key, latest.etag)
        return answer

    async def asked(self) -> PreparedRead | None:
        """Ask the origin; return reads of the version that it names. None: `read_object` answers. Raises as `ask`."""
        return self.known(await self.services.catalog.ask(self.key, self.slot, headers=self.headers)).read

    def known(self, head: ObjectHead) -> _Told:
        """Return the origin's answer, computed anew if it differs from the last one."""
        fixed, latest = _fixed(head), self.latest
        if latest is None or latest.fixed != fixed:
            held = HeldVersion(head, _TOLD_EACH_TIME)
            read = _read(self.services, Operation.GET_OBJECT, self.key, self.slot, held, self._tally)
            self.latest = latest = _Told(fixed, _identity(head), read, head.version.etag, head.still)
        elif latest.still is not head.still:
            self.latest = latest = latest._replace(still=head.still)
        return latest


class _AskedAnswer(PendingAnswer):
    """An answer by what the origin says about the object now."""

    __slots__ = ("_begun", "_conditions", "_on_end", "_onward", "_read")

    def __init__(self, read: StrictRead, conditions: Conditions) -> None:
        super().__init__(read.slot.name, read.key, is_known=False)
        self._read = read
        self._conditions = conditions
        self._begun: BegunHead | None = None
        self._on_end: Callable[[PreparedAnswer | None], None] | None = None
        self._onward: OriginRequest | None = None
        """The question to the origin that was begun, to go on with."""

    def begin(self, on_end: Callable[[PreparedAnswer | None], None]) -> bool:
        read = self._read
        self._on_end = on_end
        self._begun = read.services.catalog.begin_ask(
            read.key, read.slot, read.headers, read.services.begin_read, self._ended
        )
        return self._begun is not None

    def _ended(self, _: object) -> None:
        begun, on_end, answer = self._begun, self._on_end, None
        self._on_end = None  # no circle of references keeps the answer
        if begun is None or on_end is None:
            return  # it was closed
        try:
            told = begun.answer()
            if isinstance(told, ObjectHead):
                self.told = told
                answer = self._by(self._read.known(told), told)
            else:
                self._onward = told
        except Exception as error:  # noqa: BLE001 - the way that takes over gets it, and reports it
            self.told = error
        on_end(answer if isinstance(answer, PreparedAnswer) else None)

    async def _awaited(self) -> PreparedAnswer | None:
        read, head = self._read, self.told
        try:
            if head is None:
                ask = read.services.catalog.ask
                head = await ask(read.key, read.slot, headers=read.headers, onward=self._onward)
        except Exception as error:  # noqa: BLE001 - the way that takes over gets it, and reports it
            head = error
        self.told = head
        if isinstance(head, Exception):
            return None
        known = read.known(head)
        answer = self._by(known, head)
        if not isinstance(answer, PendingAnswer):
            return answer
        verified = await answer.ask()
        return _with_identity(verified, known, head) if verified is not None else None

    def _by(self, known: _Told, head: ObjectHead) -> PreparedAnswer | PendingAnswer | None:
        answer = known.read.answer(self._conditions) if known.read is not None else None
        return _with_identity(answer, known, head) if isinstance(answer, PreparedAnswer) else answer

    def close(self) -> None:
        self._on_end = None
        if self._begun is not None:
            self._begun.close()
        super().close()


def _with_identity(answer: PreparedAnswer, known: _Told, head: ObjectHead) -> PreparedAnswer:
    """Name the origin's own answer in the answer."""
    if not known.identity:
        return answer
    lines = answer.head.lines.replace(known.identity, _identity(head))
    return answer._replace(head=answer.head._replace(lines=lines))


class _ToldEachTime:
    """A version that holds because the origin is asked each time."""

    def holds(self) -> bool:
        return True


_TOLD_EACH_TIME = _ToldEachTime()


class _OfSnapshot:
    """A version in a frozen slot, as long as this snapshot freezes it, and keeps this head of it."""

    __slots__ = ("_head", "_slot", "_snapshot", "_snapshots", "_with_checksums")

    def __init__(
        self,
        snapshots: SnapshotRegistry,
        slot: Slot,
        snapshot: OpenSnapshot,
        head: ObjectHead,
        *,
        with_checksums: bool,
    ) -> None:
        self._snapshots = snapshots
        self._slot = slot
        self._snapshot = snapshot
        self._head = head
        self._with_checksums = with_checksums

    def holds(self) -> bool:
        head = self._head
        if self._snapshots.of(self._slot) is not self._snapshot:
            return False
        kept = self._snapshot.head(head.version.key.key, with_checksums=self._with_checksums)
        return kept is None or kept is head


def _fixed(head: ObjectHead) -> Mapping[str, str]:
    fixed = dict(head.headers)
    for name in _OF_ONE_ANSWER & fixed.keys():
        fixed[name] = ""
    return fixed


def _identity(head: ObjectHead) -> bytes:
    """Return lines of `ObjectHead.of_whole` that nothing else in it has; empty: there are none."""
    request_id = head.headers.get("x-amz-request-id")
    if request_id is None:
        return b""
    return b"\r\nx-forebay-origin-request-id: %b\r\naccept-ranges: bytes\r\n" % request_id.encode("latin-1")


Reads = PreparedRead | SharedRead | StrictRead


def prepare_read(services: AppContext, request: S3Request, tally: TallyOf) -> Reads | None:
    """Return a GET or HEAD, without parameters, of a fresh object that the caller may read; None for others."""
    operation, bucket, name = request.operation, request.bucket, request.key
    if operation not in (Operation.GET_OBJECT, Operation.HEAD_OBJECT) or bucket is None or name is None:
        return None
    if not isinstance(services.blocks, BlockCache):
        return None
    key, slot = ObjectKey(bucket, name), services.slots.find(bucket, name)
    if services.writeback is not None and services.writeback.may_be_pending(key):
        return None
    is_shared = _is_shared(services, slot)
    if slot.write == "scratch" or (
        slot.write == "back" and is_marker(name, slot.markers)
    ):  # its answer has more (pending_versions.py)
        return None
    if slot.consistency == "strict":
        # A HEAD is forwarded as it is; a GET of an object that has no blocks asks for the bytes at once.
        is_asked_first = operation is Operation.GET_OBJECT and services.blocks.has_blocks_of(key) and not is_shared
        return StrictRead(services, request, key, slot, tally) if is_asked_first else None
    held = _held(services, key, slot, with_checksums=CHECKSUM_MODE in request.headers)
    read = _read(services, operation, key, slot, held, tally) if held is not None else None
    if read is None or not is_shared or services.cluster_writes is None:
        return read
    return SharedRead(read, services.cluster_writes)


def _is_shared(services: AppContext, slot: Slot) -> bool:
    """Return whether other nodes' writes must be known."""
    return services.cluster_writes is not None and services.cluster_writes.asks(slot)


def _read(
    services: AppContext, operation: Operation, key: ObjectKey, slot: Slot, held: HeldVersion, tally: TallyOf
) -> PreparedRead | None:
    """Return prepared reads of a version; None for one that `read_object` must examine."""
    head = held.head
    if not isinstance(services.blocks, BlockCache) or not head.version.size_bytes or not has_cacheable_bytes(head):
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
    if snapshot is None or head is None:
        return None
    return HeldVersion(head, _OfSnapshot(snapshots, slot, snapshot, head, with_checksums=with_checksums))
