"""The steps by which a write comes to its end: events in, instructions out. Pure.

    OPEN        begin at the origin → send parts ahead → nothing to send: look now and then, until it expires
    COMMITTED   check → begin → parts → mark "publishing" → finish → done
    PUBLISHING  check: the origin has ours: done; it has the expected version: go on; anything else: a conflict
    ABORTING    abort the origin's upload; if only key and time are known, seek it first

Before it finishes a manifest, it looks for everything that the manifest names at the origin, and waits for it.

What fails is tried again later, from the beginning: the row says what the origin has. No failure makes it give a write
up. If the bucket honours conditions, `finish` carries one, and `check` is left out when the condition covers it;
otherwise a HEAD comes right before.

From the moment before `finish` is sent until its outcome is known a write is `publishing`: whatever becomes visible at
the origin then may be ours. A refusal means that the origin has not done it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal, TypeAlias

from gateway.core.clock import Moment
from gateway.s3.headers import is_of_parts, unquote
from gateway.telemetry.metrics import FailureKind
from gateway.writeback.journal.buckets import DATED_EARLIER_SECONDS_MAX, Conditions, Honoured
from gateway.writeback.journal.records import IDLE_SECONDS_MIN, UPLOAD_LOOK_SECONDS, Part, State, Write

PARTS_AT_ONCE = 4

CLOCKS_APART_SECONDS = 120.0
"""Seconds that the origin's clock may be behind ours, if its answers have no time."""

TOLD_APART_SECONDS = 5.0
"""The seconds if they have: dates are in whole seconds."""

ANSWER_GIVEN_UP_SECONDS = 3600.0
"""Seconds after which a Complete is given up: an origin may work on a large object for minutes, but not this long."""

ANSWER_LOOK_SECONDS_MAX = 600.0
"""The most seconds between two looks for a Complete's result."""

UNUSED_SECONDS = 12 * 3600.0
"""Seconds without parts after which an upload that may be ours is aborted."""

UNLISTED_GIVEN_UP_SECONDS = 3600.0
"""Seconds for which an upload is sought in a bucket that does not let its uploads be listed."""

GUESSED_BYTES_MAX = 8 * 1024**2
"""The largest object that is sent on the condition that the origin has what was seen there last, without a look: a
wrong guess sends the bytes twice."""

RESTARTS_MAX = 3
"""Times that an upload is begun anew soon; a bucket that has no use for it after that has refused it for good."""

Kind = Literal["put", "complete", "delete"]

# Events


@dataclass(frozen=True, slots=True)
class Headed:
    """The origin's version of the key: ETag and length; None: no object.

    `age_seconds` is the time since it was written, by the origin's own clock if `is_age_told`, by ours otherwise; at
    `moment` it was that old, or older.
    """

    etag: str | None
    age_seconds: float = 0.0
    is_age_told: bool = True
    size_bytes: int = -1
    moment: Moment = field(default_factory=lambda: Moment(0.0))


@dataclass(frozen=True, slots=True)
class Begun:
    """The origin has opened an upload, and the journal has it; `write` is the row as it is now."""

    write: Write


@dataclass(frozen=True, slots=True)
class PartSent:
    """The origin has taken a part of this upload, and gave it this ETag; `state` is the write's present one."""

    origin_upload_id: str
    number: int
    etag: str
    state: State = State.COMMITTED


@dataclass(frozen=True, slots=True)
class PartFailed:
    """The origin has refused a part, or its answer was lost."""

    origin_upload_id: str
    number: int
    failure: WriteRefused | Lost


@dataclass(frozen=True, slots=True)
class Finished:
    """The object is visible, or a tombstone's key gone, by the origin's answer. `etag` is from the answer, if given."""

    etag: str | None


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison: the origin's object has our bytes, or not; None: it has changed again."""

    is_same: bool | None


@dataclass(frozen=True, slots=True)
class FoundObject:
    """The result of a look for the origin's upload: it is open there, and has parts."""

    is_open: bool
    has_parts: bool = False


@dataclass(frozen=True, slots=True)
class LookedFor:
    """The result for a manifest: of `named` objects `missing` are not at the origin, such as `example`.

    For a marker that waits for other nodes, `reason` says so.
    """

    missing: int = 0
    named: int = 0
    example: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The origin does not have the upload any more."""


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """The origin has not carried out the request; S3's `code`, its own `words`. `is_final`: nor will it next time."""

    code: str
    kind: FailureKind = field(default="other", compare=False)
    words: str = field(default="", compare=False)
    is_final: bool = field(default=False, compare=False)

    @property
    def reason(self) -> str:
        return self.code


@dataclass(frozen=True, slots=True)
class Lost:
    """The outcome is unknown: no answer, or a 5xx."""

    reason: str
    kind: FailureKind = field(default="other", compare=False)


Event: TypeAlias = (
    Headed
    | Begun
    | PartSent
    | PartFailed
    | Finished
    | Compared
    | FoundObject
    | LookedFor
    | Aborted
    | WriteRefused
    | Lost
)

# Instructions: requests to the origin, each with one event


class Ask(Enum):
    """Requests about the write's own key or upload."""

    HEAD = auto()
    """Ask what the origin has under the key → Headed."""
    BEGIN = auto()
    """Open an upload at the origin, and record its id → Begun."""
    COMPLETE = auto()
    """Complete the upload under the conditions of its client, which waits → Finished."""
    FIND = auto()
    """Ask whether the origin's upload is open → FoundObject."""
    LOOK_FOR_FILES = auto()
    """Look at the origin for everything that this manifest names → LookedFor."""
    SEEK = auto()
    """Look for uploads of the key that were begun when this one was asked for, and abort ours → Aborted."""
    ABORT = auto()
    """Abort the origin's upload → Aborted."""


@dataclass(frozen=True, slots=True)
class SendPart:
    """Send a part of an upload → PartSent or PartFailed. Several may be under way, beside anything else."""

    origin_upload_id: str
    part: Part


@dataclass(frozen=True, slots=True)
class Finish:
    """Record that the object is publishing, then make it visible → Finished.

    `expected` is the ETag that the key must have then; None: it must not exist. Without `is_conditional` the request
    has no condition.
    """

    expected: str | None
    is_conditional: bool = True


@dataclass(frozen=True, slots=True)
class Delete:
    """Record that the tombstone is publishing, then delete the key, if it has this version → Finished."""

    expected: str
    is_conditional: bool = True


@dataclass(frozen=True, slots=True)
class Compare:
    """Read the origin's version back, and compare it with ours, byte for byte → Compared."""

    etag: str


class JournalNote(Enum):
    """Instructions without an event."""

    LEARN = auto()
    """The bucket answers 501 to conditions on requests of this kind (`kind_of`), and takes them without."""
    PROBE_AGAIN = auto()
    """The bucket refuses a request under a condition that holds: probe it again."""
    UNMARK = auto()
    """The origin certainly has nothing of it that could become visible."""
    START_OVER = auto()
    """The origin's upload is gone, or useless: begin it anew."""


# The last instruction: then the write rests, or has ended


@dataclass(frozen=True, slots=True)
class Settle:
    """The origin has the write, as this version (None: the key is deleted): it is no longer pending.

    `upload_may_be_open`: perhaps it did not come from our Complete: others may have written the same bytes.
    """

    etag: str | None
    upload_may_be_open: bool = False


@dataclass(frozen=True, slots=True)
class MarkConflict:
    """A conflict: the write stays as it is until a person decides. `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Completed:
    """The origin has completed an upload for its client, as this version."""

    etag: str


@dataclass(frozen=True, slots=True)
class OriginReply:
    """The answer for the client that waits for a Complete; `is_over`: the origin has certainly not carried it out."""

    code: str
    is_over: bool


@dataclass(frozen=True, slots=True)
class Expire:
    """An open upload ends: its client has left it, or the bucket has ended it. `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The origin's upload is gone; or, with a `reason`, that cannot be known, and it is given up."""

    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Rest:
    """The write rests for this time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A failure: try again after a while. `is_away`: the origin is not working.

    `refused_with`: the code with which it has refused an acknowledged write for good.
    """

    reason: str
    is_away: bool
    kind: FailureKind = field(default="other", compare=False)
    refused_with: str | None = field(default=None, compare=False)

    @property
    def waits_for_bucket(self) -> bool:
        """Return whether it ends without a person: when the bucket answers again, or is less busy."""
        return self.kind in _PASSING or (self.is_away and self.kind in ("origin-error", "other"))


@dataclass(frozen=True, slots=True)
class AwaitFiles:
    """A manifest waits for files that are not at the origin yet: look again soon. That is no failure."""

    reason: str


Request: TypeAlias = Ask | SendPart | Finish | Delete | Compare
End: TypeAlias = Settle | MarkConflict | Completed | OriginReply | Expire | Forget | Rest | Wait | AwaitFiles
Instruction: TypeAlias = Request | JournalNote | End


def kind_of(write: Write) -> Kind:
    """Return the kind of request that makes a write visible."""
    if write.deleted:
        return "delete"
    return "complete" if write.multipart else "put"


class _Awaited(Enum):
    """The answer that a write waits for."""

    CHECK = auto()
    BEGIN = auto()
    PARTS = auto()
    FILES = auto()
    LAST_LOOK = auto()
    FINISH = auto()
    VERIFY = auto()
    COMPARE = auto()
    FIND = auto()
    ABORT = auto()
    END = auto()


_PASSING = frozenset[FailureKind]({"unreachable", "slow-down", "changed"})

_OF_THE_GATEWAY: Mapping[FailureKind, str] = {
    "credentials": "the origin refuses the gateway's own key",
    "clock": "the origin has another time than this machine, and refuses what the gateway signs",
}
"""Faults that lie neither in the write nor in the bucket."""

_UPLOAD_OF_NO_USE = frozenset({"NoSuchUpload", "InvalidPart", "InvalidPartOrder", "EntityTooSmall"})
"""Codes of a Complete whose upload has lost something: begin it anew."""

_DOES_NOT_HOLD = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"})
"""S3's codes for a condition that does not hold."""

_NOT_IMPLEMENTED = frozenset({"NotImplemented", "MethodNotAllowed"})

OTHERS = "others have changed the object at the origin"
UNTOLD = "the origin has answered without an ETag, and has what it had before"
DIFFERENT = "what the origin has is not what was sent"


@dataclass(slots=True)
class Progress:
    """The progress of one write. `begin` gives the first instructions, `after` those that follow an event.

    `conditions` are those that the bucket honours; `expiry_seconds` is for open uploads; `names_files`: it may be a
    manifest, and waits for everything that it names; `awaits_others`: it comes behind earlier writes of other nodes;
    `is_scratch`: no parts of open uploads are sent ahead;
    `is_room_wanted`: look soon for open uploads that the bucket has ended, to free their room. After an `End` only
    events of parts may follow.
    """

    write: Write
    conditions: Conditions = field(default_factory=Conditions)
    now: Moment = field(default_factory=lambda: Moment(0.0))
    expiry_seconds: float = 86_400.0
    names_files: bool = False
    awaits_others: bool = False
    is_scratch: bool = False
    is_room_wanted: bool = False
    _step: _Awaited = _Awaited.CHECK
    _parts: list[Part] = field(default_factory=list)
    """The parts of `write`, changed in place while they are sent: there may be 10,000."""
    _unsent: list[int] = field(default_factory=list)
    """Indexes into `_parts` of those neither sent nor under way, the next one last."""
    _under_way: dict[int, int] = field(default_factory=dict)
    """The numbers of the parts under way, and their indexes into `_parts`."""
    _expected: str | None = None
    _found: str | None = None
    _made: str | None = None
    _refused_with: str | None = None
    """The origin's code for a condition that does not hold."""
    _has_resent: bool = False
    _has_left_out: bool = False
    _are_files_there: bool = False
    _in_doubt: bool = False
    _is_lost: bool = False

    def begin(self) -> Sequence[Instruction]:
        """Return the first instructions; after a restart they find out the outcome of what was under way."""
        write = self.write
        self._in_doubt = write.state is State.PUBLISHING
        match write.state:
            case State.ABORTING:
                self._step = _Awaited.ABORT
                if write.origin_upload_id is None:
                    return [Ask.SEEK]
                return self._perhaps_ours() if write.asked is not None else [Ask.ABORT]
            case State.OPEN:
                return self._idle() if self.is_scratch else self._begin_or_send()
            case State.PUBLISHING if not write.is_acknowledged:
                return self._ask(_Awaited.FIND, Ask.FIND) if self.write.answer is not None else self._begin_or_send()
        if self._may_skip_check():
            return self._finish(write.expected.etags[0] if write.expected.etags else None)
        if write.multipart and write.state is State.COMMITTED and any(part.origin_etag for part in write.parts):
            return self._begin_or_send()
        return self._ask(_Awaited.CHECK, Ask.HEAD)

    def after(self, event: Event) -> Sequence[Instruction]:
        match event:
            case PartSent():
                return self._part_sent(event)
            case PartFailed():
                return self._part_failed(event)
            case Headed() if self._step in (_Awaited.CHECK, _Awaited.LAST_LOOK):
                return self._checked(event)
            case Headed() if self._step is _Awaited.VERIFY:
                return self._verified(event)
            case Begun() if self._step is _Awaited.BEGIN:
                return self._begun(event.write)
            case Finished() if self._step is _Awaited.FINISH:
                return self._finished(event)
            case Compared() if self._step is _Awaited.COMPARE:
                return self._compared(event)
            case FoundObject() if self._step is _Awaited.FIND:
                return self._upload_found(event)
            case LookedFor() if self._step is _Awaited.FILES:
                return self._looked_for(event)
            case Aborted() if self._step is _Awaited.ABORT:
                return self._end(Forget())
            case WriteRefused() if self._step is not _Awaited.END:
                return self._refused(event)
            case Lost() if self._step is not _Awaited.END:
                return self._lost(event)
        raise ValueError(f"{event} does not follow from {self._step.name}")

    # What the origin has

    def _may_skip_check(self) -> bool:
        write = self.write
        if write.state is not State.COMMITTED or write.multipart or not write.expected.is_exact:
            return False
        if not write.expected.is_told and write.size_bytes > GUESSED_BYTES_MAX:
            return False
        expected = next(iter(write.expected.etags), None)
        return self._honours(expected) is Honoured.YES and (not write.deleted or expected is not None)

    def _honours(self, expected: str | None) -> Honoured:
        """Return the bucket's treatment of the condition that this version, or none, is there."""
        known: Honoured = getattr(self.conditions, kind_of(self.write))
        if known is Honoured.CREATES:
            return Honoured.YES if expected is None else Honoured.REFUSED
        return known

    def _checked(self, found: Headed) -> Sequence[Instruction]:
        write = self.write
        expected = self._is_expected(found)  # even for our own bytes, if the same were there before
        if write.deleted and found.etag is None:
            return self._end(Settle(None))
        if not expected and self._in_doubt and not write.deleted:
            return self._found_unexpected(found)
        if not expected:
            return self._end(MarkConflict(OTHERS))
        self._expected = found.etag
        if self._step is _Awaited.LAST_LOOK or not write.multipart:
            return self._finish(found.etag)
        return self._begin_or_send()

    def _found_unexpected(self, found: Headed) -> Sequence[Instruction]:
        """Decide about an unexpected version, which may be ours."""
        if self._is_ours(found.etag):
            return self._end(Settle(found.etag, upload_may_be_open=self.write.origin_upload_id is not None))
        if found.etag is not None and found.size_bytes == self.write.size_bytes:
            self._found = found.etag
            return self._ask(_Awaited.COMPARE, Compare(found.etag))
        return self._end(MarkConflict(OTHERS))

    def _is_ours(self, etag: str | None) -> bool:
        return etag is not None and unquote(etag) == unquote(self.write.etag)

    def _is_expected(self, found: Headed) -> bool:
        expected = self.write.expected
        if expected.known or expected.allows(found.etag):
            return expected.allows(found.etag)
        if found.etag is None:
            return True
        since_seconds, is_certain = found.moment.since(expected.asked_then)
        apart_seconds = TOLD_APART_SECONDS if is_certain and found.is_age_told else CLOCKS_APART_SECONDS
        open_seconds = DATED_EARLIER_SECONDS_MAX if is_of_parts(found.etag) else 0.0
        return since_seconds >= 0 and found.age_seconds > since_seconds + apart_seconds + open_seconds

    # Parts

    def _begin_or_send(self) -> Sequence[Instruction]:
        if self.write.multipart and self.write.origin_upload_id is None:
            return self._ask(_Awaited.BEGIN, Ask.BEGIN)
        return self._begin_parts()

    def _begun(self, write: Write) -> Sequence[Instruction]:
        if write.state is not self.write.state:
            return self._end(Rest(0.0))
        self.write = replace(write, parts=self.write.parts)
        return self._begin_parts()

    def _begin_parts(self) -> Sequence[Instruction]:
        self._step = _Awaited.PARTS
        self._parts = list(self.write.parts)
        self.write = replace(self.write, parts=self._parts)
        unsent = [at for at, part in enumerate(self._parts) if part.origin_etag is None] if self.write.multipart else []
        self._unsent = unsent[::-1]
        return self._send_parts()

    def _send_parts(self) -> Sequence[Instruction]:
        if not self._unsent and not self._under_way:
            return self._when_all_sent()
        chosen = [self._unsent.pop() for _ in range(min(len(self._unsent), PARTS_AT_ONCE - len(self._under_way)))]
        self._under_way |= {self._parts[at].number: at for at in chosen}
        return [SendPart(self.write.origin_upload_id or "", self._parts[at]) for at in chosen]

    def _when_all_sent(self) -> Sequence[Instruction]:
        if self.write.state is State.OPEN:
            return self._idle()
        if self._is_to_look_for_files():
            return self._ask(_Awaited.FILES, Ask.LOOK_FOR_FILES)
        if self.write.is_completed_at_origin:
            return self._ask(_Awaited.FINISH, Ask.COMPLETE)
        expected = self._expected or next(iter(self.write.expected.etags), None)
        if self._honours(expected) is Honoured.YES and (self._expected is not None or self.write.expected.is_exact):
            return self._finish(expected)
        return self._ask(_Awaited.LAST_LOOK, Ask.HEAD)

    def _part_sent(self, event: PartSent) -> Sequence[Instruction]:
        if event.origin_upload_id != self.write.origin_upload_id or self._step is not _Awaited.PARTS:
            return []
        at = self._under_way.pop(event.number)
        self._parts[at] = replace(self._parts[at], origin_etag=event.etag)
        if event.state is not self.write.state:  # its client has completed or ended it
            return [] if self._under_way else self._end(Rest(0.0))
        return self._send_parts()

    def _part_failed(self, event: PartFailed) -> Sequence[Instruction]:
        if event.origin_upload_id != self.write.origin_upload_id or self._step is not _Awaited.PARTS:
            return []  # another part has failed before
        del self._under_way[event.number]
        return self._failed(event.failure)

    # Open uploads

    def _idle(self) -> Sequence[Instruction]:
        idle_seconds = self._idle_seconds()
        if idle_seconds >= self.expiry_seconds:
            return self._end(Expire(f"no part of it has come for {idle_seconds:.0f} seconds"))
        if self._is_left_alone() and self.write.origin_upload_id is not None:
            return self._ask(_Awaited.FIND, Ask.FIND)
        return self._rest(idle_seconds)

    def _is_left_alone(self) -> bool:
        return self._idle_seconds() >= (IDLE_SECONDS_MIN if self.is_room_wanted else UPLOAD_LOOK_SECONDS)

    def _idle_seconds(self) -> float:
        return self.now.passed_since(self.write.touched_then)

    def _rest(self, idle_seconds: float) -> Sequence[Instruction]:
        looked_at = self.is_room_wanted or not 0 <= idle_seconds < UPLOAD_LOOK_SECONDS
        look_seconds = UPLOAD_LOOK_SECONDS - (0.0 if looked_at else idle_seconds)
        return self._end(Rest(max(1.0, min(look_seconds, self.expiry_seconds - idle_seconds))))

    def _upload_found(self, found: FoundObject) -> Sequence[Instruction]:
        write = self.write
        if write.state is State.ABORTING:
            if found.has_parts:
                return self._end(Forget("it has parts, and so is another writer's"))
            return self._ask(_Awaited.ABORT, Ask.ABORT) if found.is_open else self._end(Forget())
        if write.state is State.OPEN:
            return self._rest(self._idle_seconds()) if found.is_open else self._end(Expire("the bucket has ended it"))
        if not found.is_open:
            return self._ask(_Awaited.VERIFY, Ask.HEAD)
        asked_seconds = abs(self._idle_seconds())  # the clock may have been set back
        if self._refused_with is not None or asked_seconds > ANSWER_GIVEN_UP_SECONDS:
            return self._end(OriginReply(self._refused_with or write.answer or "PreconditionFailed", is_over=True))
        return self._end(Rest(min(ANSWER_LOOK_SECONDS_MAX, max(5.0, asked_seconds))))

    # Becoming visible

    def _is_to_look_for_files(self) -> bool:
        return (self.names_files or self.awaits_others) and not self._are_files_there and not self.write.deleted

    def _looked_for(self, event: LookedFor) -> Sequence[Instruction]:
        if event.missing:
            files = "file" if event.missing == 1 else "files"
            reason = f"waits for {event.missing} {files} of {event.named} that it names, such as {event.example}"
            return self._end(AwaitFiles(event.reason or reason))
        self._are_files_there = True
        if self.write.multipart:
            return self._when_all_sent()
        if self._honours(self._expected) is Honoured.YES:
            return self._finish(self._expected)
        return self._ask(_Awaited.LAST_LOOK, Ask.HEAD)  # the look for files may have taken long

    def _finish(self, expected: str | None) -> Sequence[Instruction]:
        self._expected = expected
        if self._is_to_look_for_files():
            return self._ask(_Awaited.FILES, Ask.LOOK_FOR_FILES)
        self.write = replace(self.write, state=State.PUBLISHING)
        is_conditional = self._honours(expected) is not Honoured.REFUSED
        if self.write.deleted:
            return self._ask(_Awaited.FINISH, Delete(expected or "", is_conditional))
        return self._ask(_Awaited.FINISH, Finish(expected, is_conditional))

    def _finished(self, event: Finished) -> Sequence[Instruction]:
        # Learned only now: without this success, the refusal may have had another cause.
        learned = [JournalNote.LEARN] if self._has_left_out else []
        return [*learned, *self._made_visible(event)]

    def _made_visible(self, event: Finished) -> Sequence[Instruction]:
        write = self.write
        if write.is_completed_at_origin:
            return self._end(Completed(event.etag or write.etag))
        if write.deleted:
            return self._end(Settle(None))
        self._in_doubt = True
        if event.etag is None:
            return self._ask(_Awaited.VERIFY, Ask.HEAD)
        if write.is_etag_local:  # no ETag to compare: Content-MD5 has vouched for the bytes
            return self._end(Settle(event.etag))
        if self._is_ours(event.etag):
            return self._end(Settle(event.etag))
        self._made = self._found = event.etag
        return self._ask(_Awaited.COMPARE, Compare(event.etag))

    def _verified(self, found: Headed) -> Sequence[Instruction]:
        write = self.write
        if write.is_completed_at_origin:
            if self._is_ours(found.etag):
                return self._end(Completed(found.etag or ""))
            if write.is_etag_local and found.etag is not None and found.size_bytes == write.size_bytes:
                self._found = found.etag
                return self._ask(_Awaited.COMPARE, Compare(found.etag))
            return self._not_completed()
        if self._is_expected(found):
            return self._end(Wait(UNTOLD, is_away=True, kind="origin-error"))
        return self._found_unexpected(found)

    def _not_completed(self) -> Sequence[Instruction]:
        if self._is_lost:
            return self._end(OriginReply("ServiceUnavailable", is_over=False))
        return [JournalNote.START_OVER, *self._end(OriginReply("NoSuchUpload", is_over=True))]

    def _compared(self, event: Compared) -> Sequence[Instruction]:
        if self.write.is_completed_at_origin:
            return self._end(Completed(self._found or "")) if event.is_same else self._not_completed()
        if event.is_same:
            is_left = self._made is None and self.write.origin_upload_id is not None
            return self._end(Settle(self._found, upload_may_be_open=is_left))
        if self._made is None:
            return self._end(MarkConflict(OTHERS))
        return self._end(
            MarkConflict(DIFFERENT) if event.is_same is False else Settle(self._made)
        )  # others came after it

    # Failures

    def _refused(self, refusal: WriteRefused) -> Sequence[Instruction]:
        step, write, code = self._step, self.write, refusal.code
        if write.state is State.ABORTING:
            return self._not_aborted(refusal)
        if write.is_completed_at_origin and step is _Awaited.FINISH:
            return self._completion_refused(code)
        if step is _Awaited.FIND and (code in _NOT_IMPLEMENTED or self._refused_with or write.state is State.OPEN):
            return self._upload_found(FoundObject(True))  # the result decides nothing that is not known otherwise
        if (
            step is _Awaited.FINISH
            and code in _NOT_IMPLEMENTED
            and self._honours(self._expected) is not Honoured.REFUSED
        ):
            self.conditions = replace(self.conditions, **{kind_of(self.write): Honoured.REFUSED})
            self._has_left_out = True
            return self._ask(_Awaited.LAST_LOOK, Ask.HEAD)
        if step is _Awaited.FINISH and code in _DOES_NOT_HOLD and self._refused_with is None:
            self._refused_with = code
            return self._ask(_Awaited.LAST_LOOK, Ask.HEAD)
        return self._failed(refusal)

    def _completion_refused(self, code: str) -> Sequence[Instruction]:
        here = [part for part in self.write.parts if part.file.is_here]
        if code == "InvalidPart" and here and not self._has_resent:  # two versions of a part have crossed on their way
            self._has_resent = True
            parts = [replace(part, origin_etag=None) if part.file.is_here else part for part in self.write.parts]
            self.write = replace(self.write, parts=parts)
            return self._begin_parts()
        if code == "NoSuchUpload":
            return self._ask(_Awaited.VERIFY, Ask.HEAD)
        if code in _DOES_NOT_HOLD:
            self._refused_with = code
            return self._ask(_Awaited.FIND, Ask.FIND)  # if it is still open, it was not completed before
        return self._end(OriginReply(code, is_over=True))

    def _perhaps_ours(self) -> Sequence[Instruction]:
        """Decide about an upload from a request whose answer was lost: if it is ours, no part was ever sent to it."""
        asked = self.write.asked
        waited_seconds = self.now.passed_since(asked.begun) if asked is not None else UNUSED_SECONDS
        if waited_seconds < UNUSED_SECONDS:
            return self._end(Rest(max(1.0, min(UPLOAD_LOOK_SECONDS, UNUSED_SECONDS - waited_seconds))))
        return self._ask(_Awaited.FIND, Ask.FIND)

    def _not_aborted(self, refusal: WriteRefused) -> Sequence[Instruction]:
        code = refusal.code
        if self._step is _Awaited.FIND:
            return self._end(Forget(f"it may be another writer's, and the bucket does not list its parts: {code}"))
        if self.write.origin_upload_id is None:
            begun = self.write.asked.begun if self.write.asked is not None else Moment(self.write.began_at)
            waited_seconds = self.now.passed_since(begun)
            if code in _NOT_IMPLEMENTED or waited_seconds > UNLISTED_GIVEN_UP_SECONDS:
                return self._end(Forget(f"the bucket does not list its uploads: {code}"))
        return self._end(Wait(code, is_away=False, kind=refusal.kind))

    def _lost(self, lost: Lost) -> Sequence[Instruction]:
        if self._step is _Awaited.FINISH:
            self._in_doubt = True
            if self.write.is_completed_at_origin:
                self._is_lost = True
                return self._ask(_Awaited.VERIFY, Ask.HEAD)
        if self._step is _Awaited.VERIFY and self.write.is_completed_at_origin and self.write.answer is None:
            return self._end(OriginReply("ServiceUnavailable", is_over=False))
        return self._failed(lost)

    def _failed(self, failure: WriteRefused | Lost) -> Sequence[Instruction]:
        step, write, reason, kind = self._step, self.write, failure.reason, failure.kind
        code = failure.code if isinstance(failure, WriteRefused) else None
        if write.is_completed_at_origin and write.answer is None and step in (_Awaited.BEGIN, _Awaited.PARTS):
            if code == "NoSuchUpload":
                return self._ask(_Awaited.VERIFY, Ask.HEAD)
            return self._end(OriginReply(code or "ServiceUnavailable", is_over=True))
        notes: list[Instruction] = []
        is_final = isinstance(failure, WriteRefused) and failure.is_final and code not in _UPLOAD_OF_NO_USE
        if step is _Awaited.FINISH and code == "PreconditionFailed":  # for the second time, and the key is as expected
            notes.append(JournalNote.PROBE_AGAIN)
        if code in _UPLOAD_OF_NO_USE and step in (_Awaited.PARTS, _Awaited.FINISH):
            if write.state is State.OPEN and self._is_left_alone():
                return self._end(Expire("the bucket has ended it"))
            notes.append(JournalNote.START_OVER)
            is_final = write.restarts >= RESTARTS_MAX
            kind = kind if is_final else "changed"
        elif step is _Awaited.FINISH and code is not None and not self._in_doubt:
            notes.append(JournalNote.UNMARK)
        if code is not None and kind in _OF_THE_GATEWAY:
            reason = f"{code}: {_OF_THE_GATEWAY[kind]}"
        if not is_final or not write.is_acknowledged:
            return [*notes, *self._end(Wait(reason, is_away=code is None, kind=kind))]
        if isinstance(failure, WriteRefused) and failure.words:
            reason = f"{code}: {failure.words}"
        return [*notes, *self._end(Wait(reason, is_away=False, kind=kind, refused_with=code))]

    def _ask(self, step: _Awaited, request: Request) -> Sequence[Instruction]:
        self._step = step
        return [request]

    def _end(self, instruction: End) -> Sequence[Instruction]:
        self._step = _Awaited.END
        return [instruction]
