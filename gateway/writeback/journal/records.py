"""What the journal holds, as values: writes, their parts, and what is known of buckets and keys at the origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Self

from gateway.core.clock import Clock, Moment
from gateway.core.model import ObjectKey
from gateway.s3.headers import is_of_parts, unquote
from gateway.writeback.checkpoints.layouts import Member
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.key_forms import forms_of

LAST_OWN_WRITE_KEPT_SECONDS = 600.0
"""What this gateway has put at the origin longer ago, a question about the base that is asked since has seen. (An
absorb that takes longer asks again.) Longer only where an upload of the key has been open for longer."""

UPLOAD_LOOK_SECONDS = 180.0
"""An open upload that its client has left alone for so long may have been ended at the bucket."""

IDLE_SECONDS_MIN = 10.0
"""An open upload of which nothing has come for so long is looked at where others find no room."""

DATED_EARLIER_SECONDS_MAX = 7 * 24 * 3600.0
"""S3 dates an object of parts by when its upload was begun ("the date of initiation", System-defined object metadata):
it may have been completed so much later."""


class State(IntEnum):
    """Where a write is. The journal has the numbers."""

    LOCAL = -1
    """Acknowledged, and kept here only: it is not sent to the origin. It is removed by age, or when room is needed."""

    OPEN = 0
    """An upload that its client has not completed."""

    COMMITTED = 1
    """Acknowledged. The origin has nothing of it that could become visible."""

    PUBLISHING = 2
    """A request that makes it visible at the origin, or deletes the key, may be on its way: what comes of it is to be
    found out. Of an upload that was not acknowledged: its client waits for the origin to complete it."""

    CONFLICT = 3
    """Others have changed the key at the origin, or what the origin has is not what was sent: a person decides."""

    ABORTING = 4
    """An upload of the origin's that nothing here needs: it is to go there. One that the origin is just being asked to
    begin is written down so, too, until it is known what it is for."""

    DONE = 5
    """Over: what is left answers a repeated CompleteMultipartUpload."""


class Priority(IntEnum):
    """Whose turn it is: each has places of its own in a bucket, so that none waits for another."""

    URGENT = 0
    """Somebody waits for it."""

    SMALL = 1
    LARGE = 2

    RETRY = 3
    """It has failed."""

    UPLOAD = 4
    """An open upload: its parts go ahead."""

    ABORT = 5

    REFUSED = 6
    """The origin has refused it for good, as it says: it is tried seldom."""


@dataclass(frozen=True, slots=True)
class ExpectedVersion:
    """What the origin may have under a key for the flush to be no surprise: nobody else's write is overwritten.

    `etags` are any of its versions that were there when the absorb began, or that our own flush has put there since;
    `absent` says whether there may be none. Where `known` is false the origin could not be asked when the absorb began,
    at `asked_at` (seconds since 1970): then only what is older than that may be there, and `etags`, which this gateway
    has seen, or put, there before. How long ago that was is told by the monotonic clock, while the machine has the same
    boot.
    """

    etags: tuple[str, ...] = ()
    absent: bool = False
    known: bool = True
    asked_at: float = 0.0
    asked: Moment | None = None

    def allows(self, etag: str | None) -> bool:
        """Whether this version (None: no object) is one of those that were expected."""
        return self.absent if etag is None else unquote(etag) in map(unquote, self.etags)

    @property
    def asked_then(self) -> Moment:
        """When the origin was asked."""
        return self.asked or Moment(self.asked_at)

    @property
    def is_exact(self) -> bool:
        """Whether it is one version and no other: a condition says the same."""
        return self.known and len(self.etags) + self.absent == 1

    @property
    def is_nothing(self) -> bool:
        return self.known and self.absent and not self.etags

    @classmethod
    def unknown(cls, clock: Clock, seen: str | None = None) -> Self:
        """Nothing is known of the key, as of now; a version of it that was seen there before may still be there."""
        return cls(() if seen is None else (seen,), known=False, asked_at=clock.now(), asked=Moment.of(clock))

    @classmethod
    def exactly(cls, etag: str | None) -> Self:
        """This version and no other; None: no object."""
        return cls((), True) if etag is None else cls((etag,))


@dataclass(frozen=True, slots=True)
class WriteSpec:
    """What PutObject or CreateMultipartUpload fixed besides the bytes: replayed at the flush, unchanged.

    `headers` are those that the origin is to get, lower-case names, without any that is about the request's own body.
    `slot` is the one that the key belonged to.
    """

    key: ObjectKey
    headers: Mapping[str, str]
    slot: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part as the client sent it. `checksums` are what it promised of it: algorithm → base64.

    `origin_etag` is set once the origin has these very bytes as this part of the upload. Where there was no room here,
    it alone has them: then `file` has no name.
    """

    number: int
    file: StagedFile
    stored_at: float
    checksums: Mapping[str, str] = field(default_factory=dict)
    origin_etag: str | None = None


class Run(NamedTuple):
    """Parts of an object that follow each other and are of one size: `length` of them, from the number `first` on."""

    first: int
    length: int
    size_bytes: int


def runs_of(parts: Sequence[Part]) -> tuple[Run, ...]:
    """The parts of an object, in order, in few words."""
    runs: list[Run] = []
    for part in parts:
        last = runs[-1] if runs else None
        if last is not None and part.number == last.first + last.length and part.file.size_bytes == last.size_bytes:
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(Run(part.number, 1, part.file.size_bytes))
    return tuple(runs)


@dataclass(frozen=True, slots=True)
class CreateAttempt:
    """The origin is being asked to begin an upload, by the process of a worker slot, since `begun`; `suspect` is set
    once nobody will tell what came of it.
    """

    worker: int
    begun: Moment
    in_doubt_since: Moment | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """A write of a key, from its beginning to its end. `id` is given by the journal, and `sequence`, its place in the
    order of this node's writes, when it is acknowledged or is to be completed at the origin; 0: not yet.

    A tombstone (`deleted`) has no parts: the key is to be deleted at the origin. `multipart` says whether the object
    is to be made of parts there, even of one; otherwise `parts` is the one body. `upload_id` is what the client was
    told; the origin's may come later. `runs` are the parts that the object is made of, once that is said; `parts` may
    be left out of it, being rows of their own.

    `conditions` are the headers of a CompleteMultipartUpload that the origin is to judge, and carries out while its
    client waits: conditions, and checksums of the whole. It was asked for as `asked_as`, and `answer` is the error that
    it came to, where it did. `asked` is set of uploads that the origin is asked to begin.
    """

    spec: WriteSpec
    expected: ExpectedVersion
    began_at: float
    state: State = State.COMMITTED
    etag: str = ""
    size_bytes: int = 0
    parts: Sequence[Part] = ()
    multipart: bool = False
    deleted: bool = False
    upload_id: str | None = None
    origin_upload_id: str | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    acknowledged_at: float = 0.0
    runs: Sequence[Run] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)
    asked_as: str | None = None
    answer: str | None = None
    asked: CreateAttempt | None = None
    touched: Moment | None = None
    """When its client has last done something about an open upload; None: not since it has begun it with an earlier
    version of Forebay."""
    acknowledged: Moment | None = None
    """The same as `acknowledged_at`, for ages; None: an earlier version of Forebay has acknowledged it."""
    completed_of: str = ""
    """The parts that its client has completed it of (`codec.parts_digest`)."""
    behind: str | None = None
    """A marker: what lies under this prefix, and came before it, is to be at the origin first."""
    in_order: bool = False
    """All that came before it in its slot and bucket is to be at the origin first."""
    member: Member | None = None
    """The checkpoint that it belongs to, by the rules of its slot when it was acknowledged."""
    is_etag_local: bool = False
    """The bucket's ETag could not be foretold: `etag` is this node's own."""
    restarts: int = 0
    """How often its upload at the origin was of no use, and all parts had to be sent again."""

    id: int = 0
    sequence: int = 0

    @property
    def key(self) -> ObjectKey:
        return self.spec.key

    @property
    def touched_then(self) -> Moment:
        return self.touched or Moment(self.began_at)

    @property
    def acknowledged_then(self) -> Moment:
        return self.acknowledged or Moment(self.acknowledged_at)

    @property
    def parts_count(self) -> int:
        return sum(run.length for run in self.runs)

    @property
    def is_acknowledged(self) -> bool:
        return self.acknowledged_at > 0

    @property
    def is_completed_at_origin(self) -> bool:
        return self.state is State.PUBLISHING and not self.is_acknowledged

    def is_completed_of(self, number: int) -> bool:
        """Whether the origin is asked to complete it of its part of this number."""
        return self.is_completed_at_origin and any(0 <= number - run.first < run.length for run in self.runs)


@dataclass(frozen=True, slots=True)
class Turn:
    """When a write is looked at, and how it has fared: the columns of schema.py.

    `failing_since` is None while only the bucket keeps it waiting, which ends without a person.
    """

    due_at: float | None
    attempts: int = 0
    failing_since: float | None = None
    last_error: str | None = None
    priority: Priority = Priority.SMALL
    after_sequence: int | None = None
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """How an upload has ended, for those who repeat its last request: completed with an ETag, or aborted (None).

    `parts` says which parts it was completed of (`parts_digest`).
    """

    upload_id: str
    key: ObjectKey
    ended_at: float
    etag: str | None
    parts: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)


class Honoured(IntEnum):
    """What an origin makes of a condition on a request that changes something."""

    UNKNOWN = 0
    YES = 1
    IGNORED = 2
    """It takes the request as if there was none."""

    REFUSED = 3
    """It answers 501, or 412 whether the condition holds or not."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Which conditions a bucket honours, by the kind of request; `learned_at` 0: nobody has tried."""

    put: Honoured = Honoured.UNKNOWN
    complete: Honoured = Honoured.UNKNOWN
    delete: Honoured = Honoured.UNKNOWN
    learned_at: float = 0.0


@dataclass(frozen=True, slots=True)
class BucketCapabilities:
    """What was learned of a bucket from its own answers.

    `md5_etags`: its ETags are MD5s, so that they can be foretold. `may_look`: the gateway's own key pair may HEAD its
    objects, and is told where there is none: else no flush could tell what it overwrites. `multipart_etags`: those of
    objects of parts can be foretold, too, so far as anybody knows. `storage_classes` are those besides STANDARD that it
    has taken, `refused_forms` what keys are like that it has refused for good (key_forms.py).
    """

    md5_etags: bool
    may_look: bool
    learned_at: float
    conditions: Conditions = Conditions()
    multipart_etags: bool = True
    storage_classes: frozenset[str] = frozenset()
    refused_forms: frozenset[str] = frozenset()

    def foretells(self, *, of_parts: bool) -> bool:
        """Whether the ETag of an object, or of one of parts, is known before the bucket has seen it."""
        return self.md5_etags and (self.multipart_etags or not of_parts)

    def refuses(self, key: str) -> bool:
        """Whether the bucket has refused for good what was acknowledged under a key like this one."""
        return bool(self.refused_forms) and not self.refused_forms.isdisjoint(forms_of(key))


@dataclass(frozen=True, slots=True)
class LastOwnWrite:
    """What this gateway itself has put under a key at the origin, at a time (seconds since 1970).

    `etag` None: it has deleted the object. Where `known` is false a forwarded request has changed it, who knows how,
    and `etag` is what was put there before that, if that is known. `answered` is the ETag by which it was acknowledged
    here, if that was another than `etag`.
    """

    at: float
    etag: str | None = None
    known: bool = True
    moment: Moment | None = field(default=None, compare=False)
    answered: str | None = field(default=None, compare=False)

    @classmethod
    def now(cls, now: Moment, etag: str | None = None, *, known: bool = True, answered: str | None = None) -> Self:
        """At this time."""
        is_other = etag is not None and answered is not None and unquote(etag) != unquote(answered)
        return cls(now.at, etag, known, now, answered if is_other else None)

    @property
    def kept_seconds(self) -> float:
        """How long it is remembered: who asks for the base since then has seen it. An object of parts is to be known
        as long as others' of the same date may come after it."""
        return (
            DATED_EARLIER_SECONDS_MAX
            if self.etag is not None and is_of_parts(self.etag)
            else LAST_OWN_WRITE_KEPT_SECONDS
        )

    def seconds_after(self, moment: Moment) -> float:
        return (self.moment or Moment(self.at)).since(moment)[0]
