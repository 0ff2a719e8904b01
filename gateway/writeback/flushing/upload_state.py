"""How a pending object gets to the origin: events in, instructions out. Pure.

    check ──▶ begin ──▶ parts ──▶ mark "sending" ──▶ finish ──▶ verify ──▶ settled
      ▲                                                 │
      └────────── wait, after anything that failed ◀────┘

Every way back leads through `check`, a HEAD of the key: what the origin has there decides. Ours: done. What is expected
under it: go on, with what the origin already has of it. Anything else is somebody else's write, a conflict: it is kept
and never overwritten. Nothing is ever given up because it failed.

From the moment before `finish` is sent until its outcome is known the object is `sending`: whatever becomes visible at
the origin then may be ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TypeAlias

from gateway.s3.headers import unquote
from gateway.writeback.journal.records import Part, PendingObject, State

PARTS_AT_ONCE = 4

CLOCKS_APART_SECONDS = 120.0
"""How far the origin's clock may be behind ours, for what was written while it could not be asked."""

# Events


@dataclass(frozen=True, slots=True)
class Headed:
    """What the origin has under the key: an ETag and when it was written (seconds since 1970); None is no object."""

    etag: str | None
    last_modified: float = 0.0


@dataclass(frozen=True, slots=True)
class Begun:
    """The origin has opened an upload."""

    origin_upload_id: str


@dataclass(frozen=True, slots=True)
class PartSent:
    """The origin has taken a part of this upload, and calls it so."""

    origin_upload_id: str
    number: int
    etag: str


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A part did not get there, or nobody knows. `code` is S3's, where the origin has answered."""

    origin_upload_id: str
    number: int
    reason: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The origin says that the object is visible, or, of a tombstone, gone. `etag` as it says it, if it does."""

    etag: str | None


@dataclass(frozen=True, slots=True)
class Refused:
    """The origin answered that it has not done what it was asked; `code` is S3's."""

    code: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Whether the origin has done it nobody knows: no answer, or a 5xx."""

    reason: str


@dataclass(frozen=True, slots=True)
class Again:
    """The time to wait is over."""


Event: TypeAlias = Headed | Begun | PartSent | PartFailed | Finished | Refused | Lost | Again

# Instructions


@dataclass(frozen=True, slots=True)
class Head:
    """Ask what the origin has under the key → Headed."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Open an upload at the origin, and write down its id → Begun."""


@dataclass(frozen=True, slots=True)
class SendPart:
    """Send a part of an upload → PartSent or PartFailed. Several may be under way, whatever else happens."""

    origin_upload_id: str
    part: Part


@dataclass(frozen=True, slots=True)
class Finish:
    """Write down that the object is `sending`, then make it visible, if the key is as expected → Finished.

    `expected` is the ETag that the key must have then; None: it must not exist.
    """

    expected: str | None


@dataclass(frozen=True, slots=True)
class Delete:
    """Write down that the tombstone is `sending`, then delete the key → Finished."""


@dataclass(frozen=True, slots=True)
class StartOver:
    """Write down that the origin has nothing of it: its upload there is gone, or of no use."""


@dataclass(frozen=True, slots=True)
class Settle:
    """The origin has it, as this version (None: the key is deleted): nothing is pending any more. The end.

    `upload_may_be_open`: it was found there, and perhaps not by our Complete: somebody may have written the same bytes.
    """

    etag: str | None
    upload_may_be_open: bool = False


@dataclass(frozen=True, slots=True)
class Keep:
    """Somebody else has changed the key: write down a conflict, and leave everything as it is. The end, for now."""

    found: str | None


@dataclass(frozen=True, slots=True)
class Wait:
    """It failed for the `failures`th time in a row: go on after a while → Again. `reason` is for people."""

    failures: int
    reason: str


Instruction: TypeAlias = Head | Begin | SendPart | Finish | Delete | StartOver | Settle | Keep | Wait


class _Step(Enum):
    """What is being waited for."""

    CHECK = auto()
    BEGIN = auto()
    PARTS = auto()
    FINISH = auto()
    VERIFY = auto()
    PAUSE = auto()
    END = auto()


_UPLOAD_OF_NO_USE = frozenset({"NoSuchUpload", "InvalidPart", "InvalidPartOrder", "EntityTooSmall"})
"""What Complete says of an upload that has lost something: it is begun anew."""


@dataclass(slots=True)
class Flush:
    """One pending object on its way. `begin` gives the first instructions, `after` those that follow from an event."""

    object: PendingObject
    _step: _Step = _Step.CHECK
    _under_way: set[int] = field(default_factory=set)
    _failures: int = 0
    _found: Headed = Headed(None)
    _finished_as: str | None = None

    @property
    def ended(self) -> bool:
        return self._step is _Step.END

    def begin(self) -> Sequence[Instruction]:
        """Also after a restart: what was under way then is found out."""
        if self.object.deleted:
            return self._send_deletion()
        return self._check()

    def after(self, event: Event) -> Sequence[Instruction]:
        """What is to be done now. Events of parts may still come when one of them has failed already.

        Every instruction but Wait, Settle, Keep and StartOver has one event; of those but SendPart there is one at a
        time.
        """
        match event:
            case PartSent():
                return self._part_sent(event)
            case PartFailed():
                return self._part_failed(event)
            case Headed() if self._step is _Step.CHECK:
                return self._checked(event)
            case Headed() if self._step is _Step.VERIFY:
                return self._verified(event)
            case Begun() if self._step is _Step.BEGIN:
                self.object = replace(self.object, origin_upload_id=event.origin_upload_id)
                return self._send_parts()
            case Finished() if self._step is _Step.FINISH:
                return self._finished(event)
            case Refused() | Lost():
                return self._failed(event)
            case Again() if self._step is _Step.PAUSE:
                return self.begin()
        raise ValueError(f"{event} does not follow from {self._step.name}")

    # What the origin has

    def _check(self) -> Sequence[Instruction]:
        self._step = _Step.CHECK
        return [Head()]

    def _checked(self, found: Headed) -> Sequence[Instruction]:
        self._found = found
        expected = self._is_expected(found)  # also of our own bytes, where the same lay there before
        if not expected and self.object.state is State.SENDING and self._is_ours(found.etag):
            return self._end(Settle(found.etag, upload_may_be_open=self.object.origin_upload_id is not None))
        if not expected:
            return self._conflict(found)
        if self.object.multipart and self.object.origin_upload_id is None:
            self._step = _Step.BEGIN
            return [Begin()]
        return self._send_parts()

    def _is_ours(self, etag: str | None) -> bool:
        own = [unquote(one) for one in (self.object.etag, self._finished_as) if one]
        return etag is not None and unquote(etag) in own

    def _is_expected(self, found: Headed) -> bool:
        base = self.object.base
        if base.known or base.allows(found.etag):
            return base.allows(found.etag)
        return found.etag is None or found.last_modified < base.asked_at - CLOCKS_APART_SECONDS

    def _conflict(self, found: Headed) -> Sequence[Instruction]:
        self.object = replace(self.object, state=State.CONFLICT)
        return self._end(Keep(found.etag))

    # Parts

    def _send_parts(self) -> Sequence[Instruction]:
        self._step = _Step.PARTS
        unsent = self._unsent() if self.object.multipart else []
        if not unsent and not self._under_way:
            return self._finish()
        chosen = [part for part in unsent if part.number not in self._under_way]
        chosen = chosen[: PARTS_AT_ONCE - len(self._under_way)]
        self._under_way |= {part.number for part in chosen}
        return [SendPart(self.object.origin_upload_id or "", part) for part in chosen]

    def _unsent(self) -> list[Part]:
        return [part for part in self.object.parts if part.origin_etag is None]

    def _part_sent(self, event: PartSent) -> Sequence[Instruction]:
        if event.origin_upload_id != self.object.origin_upload_id:
            return []  # that upload is given up
        self._under_way.discard(event.number)
        self.object = with_part_sent(self.object, event)
        self._failures = 0
        return self._send_parts() if self._step is _Step.PARTS else []

    # Becoming visible

    def _finish(self) -> Sequence[Instruction]:
        self._step = _Step.FINISH
        self.object = replace(self.object, state=State.SENDING)
        return [Finish(self._found.etag)]

    def _send_deletion(self) -> Sequence[Instruction]:
        self._step = _Step.FINISH
        self.object = replace(self.object, state=State.SENDING)
        return [Delete()]

    def _finished(self, event: Finished) -> Sequence[Instruction]:
        if self.object.deleted:
            return self._end(Settle(None))
        self._finished_as = event.etag or self.object.etag
        self._step = _Step.VERIFY
        return [Head()]

    def _verified(self, found: Headed) -> Sequence[Instruction]:
        """The origin has said that it has done it: what is there now is ours, or came after it, or it has lost it."""
        if found.etag is None:
            return self._conflict(found)
        return self._end(Settle(self._finished_as))

    # Failures

    def _part_failed(self, event: PartFailed) -> Sequence[Instruction]:
        if event.origin_upload_id != self.object.origin_upload_id:
            return []
        self._under_way.discard(event.number)
        if self._step is not _Step.PARTS:
            return []  # another has failed before, and all is looked at again
        return self._pause(event.reason, event.code)

    def _failed(self, event: Refused | Lost) -> Sequence[Instruction]:
        if self._step in (_Step.PARTS, _Step.PAUSE, _Step.END):
            raise ValueError(f"{event} does not follow from {self._step.name}")
        return self._pause(event.reason, None) if isinstance(event, Lost) else self._pause(event.code, event.code)

    def _pause(self, reason: str, code: str | None) -> Sequence[Instruction]:
        step, self._step = self._step, _Step.PAUSE
        self._failures += 1
        waiting = Wait(self._failures, reason)
        if code in _UPLOAD_OF_NO_USE and step in (_Step.PARTS, _Step.FINISH):
            return [*self._start_over(step), waiting]
        return [waiting]

    def _start_over(self, step: _Step) -> Sequence[Instruction]:
        """The upload is of no use, which it also is once it has been completed: the next check tells which."""
        parts = [replace(part, origin_etag=None) for part in self.object.parts]
        state = self.object.state if step is _Step.FINISH else State.WAITING
        self.object = replace(self.object, origin_upload_id=None, parts=parts, state=state)
        self._under_way.clear()  # what comes of them is about another upload
        return [StartOver()]

    def _end(self, instruction: Instruction) -> Sequence[Instruction]:
        self._step = _Step.END
        return [instruction]


def with_part_sent(pending: PendingObject, event: PartSent) -> PendingObject:
    """The object, one of whose parts the origin has."""
    parts = [replace(one, origin_etag=event.etag) if one.number == event.number else one for one in pending.parts]
    return replace(pending, parts=parts)
