"""The journal's values: writes and their parts, and the records that their rows hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple, Self

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import Claim, ObjectKey
from gateway.core.steps import Steps, each
from gateway.s3.headers import unquote
from gateway.s3.xml import CompletedPart
from gateway.writeback.checkpoints.layouts import CheckpointName, Member
from gateway.writeback.journal.rows import as_moment, moment_record, pack, unpack
from gateway.writeback.staged_file import TRAILER_VERSION, StagedFile

UPLOAD_LOOK_SECONDS = 180.0
"""Seconds without client activity after which an open upload may have been ended at the bucket."""

IDLE_SECONDS_MIN = 10.0
"""Seconds without a part after which an open upload is looked at when other writes find no room."""


class State(IntEnum):
    """The state of a write. The journal stores the numbers."""

    LOCAL = -1
    """Acknowledged, and kept only here: not flushed, and removed by age, or when room is needed."""

    OPEN = 0
    """An upload that its client has not completed."""

    COMMITTED = 1
    """Acknowledged; the origin has nothing of it that could become visible."""

    PUBLISHING = 2
    """A request that makes it visible at the origin, or deletes the key, may be on its way; the reconciler finds out
    what came of it. If it is no acknowledged write, its client waits for the origin to complete an upload."""

    CONFLICT = 3
    """Others have changed the key at the origin, or the origin has other bytes than were sent: a person decides."""

    ABORTING = 4
    """An upload at the origin that nothing here needs, and that must go. An upload that the origin is just asked to
    begin counts as one, until its purpose is known."""

    DONE = 5
    """Ended: the record answers a repeated CompleteMultipartUpload."""


class Priority(IntEnum):
    """The turn of a write: each priority has places of its own in a bucket, so that none waits for another."""

    URGENT = 0
    """A request, or a person, waits for it."""

    SMALL = 1
    LARGE = 2

    RETRY = 3
    """It has failed before."""

    UPLOAD = 4
    """An open upload: its parts go ahead of its completion."""

    ABORT = 5

    REFUSED = 6
    """The origin has refused it for good; it is rarely tried again."""


@dataclass(frozen=True, slots=True)
class ExpectedVersion:
    """The versions that the origin may have when a write is flushed, so that it overwrites no other's write.

    `etags` were there when the request began, or our own flush has put them there since; `absent`: there may be none.
    If `known` is false, the origin could not be asked when the request began, at `asked_at` (seconds since 1970): then
    it may have versions older than that, and `etags`, which this gateway saw or put there before; so it is, too, if
    something that may be a proxy has answered that there is none (`absent`). The monotonic clock tells that age while
    the machine has not rebooted.
    """

    etags: tuple[str, ...] = ()
    absent: bool = False
    known: bool = True
    asked_at: float = 0.0
    asked: Moment | None = None

    def allows(self, etag: str | None) -> bool:
        """Return whether this version (None: no object) was expected."""
        return self.absent if etag is None else unquote(etag) in map(unquote, self.etags)

    @property
    def asked_then(self) -> Moment:
        return self.asked or Moment(self.asked_at)

    def and_also(self, etag: str | None) -> ExpectedVersion:
        """Expect this version too, if there is one."""
        return self if etag is None or self.allows(etag) else replace(self, etags=(*self.etags, etag))

    @property
    def is_exact(self) -> bool:
        """Return whether one version comes first, as a condition on a request can say.

        Where nothing is known, that is none: most writes are of new keys.
        """
        return len(self.etags) + self.absent == 1 or not (self.etags or self.known)

    @property
    def is_told(self) -> bool:
        return self.known or self.absent

    @property
    def is_nothing(self) -> bool:
        return self.absent and not self.etags

    @classmethod
    def unknown(cls, clock: Clock, seen: str | None = None) -> Self:
        """Expect any version older than now, and `seen`, which was there before."""
        return cls(() if seen is None else (seen,), known=False, asked_at=clock.now(), asked=Moment.of(clock))

    @classmethod
    def exactly(cls, etag: str | None) -> Self:
        """Expect this version alone; None: no object."""
        return cls((), True) if etag is None else cls((etag,))


@dataclass(frozen=True, slots=True)
class WriteSpec:
    """The properties that PutObject or CreateMultipartUpload fixed besides the bytes; the flush sends them unchanged.

    `headers` are for the origin, with lower-case names, without those about the request's own body. `slot` is the one
    that the key belonged to.
    """

    key: ObjectKey
    headers: Mapping[str, str]
    slot: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part as the client sent it. `checksums` are the client's: algorithm → base64.

    `origin_etag` is set once the origin has these bytes as this part of the upload. If there was no room here, only the
    origin has them: then `file` has no name.
    """

    number: int
    file: StagedFile
    stored_at: float
    checksums: Mapping[str, str] = field(default_factory=dict)
    origin_etag: str | None = None


class Run(NamedTuple):
    """Consecutive parts of one size: `length` of them, from the number `first` on."""

    first: int
    length: int
    size_bytes: int


def runs_of(parts: Sequence[Part]) -> tuple[Run, ...]:
    """Return the parts of an object, in order, as runs."""
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
    """A worker's request to the origin to begin an upload. `in_doubt_since`: no process knows what came of it."""

    worker: int
    begun: Moment
    in_doubt_since: Moment | None = None


def token_of(acknowledged_at: float) -> str:
    """Return the name, in the registry of the cluster, of the write of a key that is acknowledged then."""
    return repr(acknowledged_at)


@dataclass(frozen=True, slots=True)
class Write:
    """A write of a key, from its beginning to its end.

    The journal gives it `id`, and `sequence`, its place in the order of this node's writes, once it is acknowledged or
    sent to the origin for completion; 0: not yet. A tombstone (`deleted`) has no parts: it deletes the key at the
    origin. `multipart`: the origin makes the object of parts, even of one; otherwise `parts` is the one body.
    `upload_id` is the client's; the origin's may come later. `runs` are the object's parts, once chosen; `parts` may be
    left out, since they are rows of their own.

    `conditions` are headers of a CompleteMultipartUpload, conditions and checksums of the whole, that the origin judges
    while its client waits. `asked_as` identifies that request, and `answer` is the error with which it failed. `asked`
    is set of uploads that the origin is asked to begin.
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
    """The client's last action on an open upload; None: none since it began the upload with an earlier version of
    Forebay."""
    acknowledged: Moment | None = None
    """`acknowledged_at` for ages; None: an earlier version of Forebay has acknowledged it."""
    completed_of: str = ""
    """The parts that its client chose to complete it (`parts_digest`)."""
    behind: str | None = None
    """Set of a marker: earlier writes under this prefix reach the origin first."""
    in_order: bool = False
    """All earlier writes of its slot and bucket reach the origin first."""
    member: Member | None = None
    """The checkpoint that it belongs to, by its slot's rules when it was acknowledged."""
    is_etag_local: bool = False
    """The bucket's ETag could not be foretold: `etag` is this node's own."""
    restarts: int = 0
    """The number of times that all parts had to be sent again because the upload at the origin was of no use."""

    id: int = 0
    sequence: int = 0
    order: int = 0
    """Its place among the writes of all nodes, by the registry of the cluster; never less than that of an earlier write
    of this node. 0: no other node looks for it."""
    since_order: int = 0
    """The `order` of the first write that it has replaced, or its own."""
    replaced: tuple[str, ...] = ()
    """The tokens of the writes that it has replaced, the last ones: their claims are over with its own."""

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
    def token(self) -> str:
        """Return its name in the registry of the cluster: no other write of the key has it."""
        return token_of(self.acknowledged_at)

    @property
    def claims(self) -> Sequence[Claim]:
        """Return the claims that are over with it."""
        return [Claim(self.key, token) for token in (*self.replaced, self.token)]

    @property
    def is_completed_at_origin(self) -> bool:
        return self.state is State.PUBLISHING and not self.is_acknowledged

    def completed_as(self, made: Write) -> Write:
        """Return the upload with what its Complete has chosen and made."""
        return replace(
            self,
            etag=made.etag,
            size_bytes=made.size_bytes,
            checksums=made.checksums,
            completed_of=made.completed_of,
            behind=made.behind,
            in_order=made.in_order,
            member=made.member,
            is_etag_local=made.is_etag_local,
            runs=runs_of(made.parts),
        )

    def is_completed_of(self, number: int) -> bool:
        """Return whether the origin is asked to complete it with its part of this number."""
        return self.is_completed_at_origin and any(0 <= number - run.first < run.length for run in self.runs)


@dataclass(frozen=True, slots=True)
class Turn:
    """The due time of a write, and its failures: columns of schema.py.

    `failing_since` is None while only the bucket delays it, which ends without a person.
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
    """The end of an upload, for repetitions of its last request: completed with an ETag, or aborted (None).

    `parts` is the digest of the parts that completed it (`parts_digest`).
    """

    upload_id: str
    key: ObjectKey
    ended_at: float
    etag: str | None
    parts: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)


# Records of rows. JSON has the fields under names of its own; without those at their defaults


def pack_file(file: StagedFile) -> bytes:
    """Pack a file's row; `trailer` is the version of what lies behind the file's bytes."""
    return pack(("files", file.name), {"size": file.size_bytes, "md5": file.md5.hex(), "trailer": TRAILER_VERSION})


def unpack_file(name: str, packed: bytes) -> StagedFile:
    record = unpack(("files", name), packed)
    return StagedFile(name, record["size"], bytes.fromhex(record["md5"]))


def pack_part(write_id: int, part: Part) -> bytes:
    record = {
        "file": part.file.name,
        "stored": part.stored_at,
        "checksums": dict(part.checksums),
        "origin_etag": part.origin_etag,
    }
    if not part.file.is_here:
        record |= {"size": part.file.size_bytes, "md5": part.file.md5.hex()}
    return pack(("parts", write_id, part.number), record)


def unpack_part(write_id: int, number: int, packed: bytes, file: StagedFile | None) -> Part:
    """`file` None: only the origin has the part, or the row of its file is missing, which is BufferDamaged."""
    place = ("parts", write_id, number)
    record = unpack(place, packed)
    if file is None and record["file"]:
        raise BufferDamaged(f"the journal's row {place!r} names a file that it does not know")
    if file is None:
        file = StagedFile("", record["size"], bytes.fromhex(record["md5"]))
    return Part(number, file, record["stored"], record["checksums"], record["origin_etag"])


_ALWAYS = {
    "began": "began_at",
    "etag": "etag",
    "size": "size_bytes",
    "upload": "upload_id",
    "sequence": "sequence",
}
_IF_SET = {
    "deleted": "deleted",
    "multipart": "multipart",
    "origin_upload": "origin_upload_id",
    "checksums": "checksums",
    "acknowledged": "acknowledged_at",
    "conditions": "conditions",
    "asked_as": "asked_as",
    "answer": "answer",
    "completed_of": "completed_of",
    "behind": "behind",
    "in_order": "in_order",
    "etag_local": "is_etag_local",
    "restarts": "restarts",
    "order": "order",
    "since_order": "since_order",
}
"""Name in the record → attribute of a Write, of those that JSON has as they are. `_IF_SET` are left out at defaults."""

_BLANK = Write(WriteSpec(ObjectKey("", ""), {}, ""), ExpectedVersion(), 0.0)
_DEFAULTS = [(name, attribute, getattr(_BLANK, attribute)) for name, attribute in _IF_SET.items()]


def pack_write(write: Write) -> bytes:
    """Pack a write without its parts, which have their own rows."""
    base, asked, member = write.expected, write.asked, write.member
    record: dict[str, Any] = {
        "bucket": write.key.bucket,
        "key": write.key.key,
        "headers": write.spec.headers,
        "slot": write.spec.slot,
        "state": write.state,
        "base": {"etags": base.etags, "absent": base.absent, "known": base.known, "asked": base.asked_at},
    }
    record |= {name: getattr(write, attribute) for name, attribute in _ALWAYS.items()}
    for name, attribute, default in _DEFAULTS:
        if (value := getattr(write, attribute)) != default:
            record[name] = value
    if base.asked is not None:
        record["base"]["moment"] = moment_record(base.asked)
    if write.replaced:
        record["replaced"] = write.replaced
    if write.runs:
        record["runs"] = [tuple(run) for run in write.runs]
    if asked is not None:
        record["asked"] = asked.worker, moment_record(asked.begun), moment_record(asked.in_doubt_since)
    if write.touched is not None:
        record["touched"] = moment_record(write.touched)
    if write.acknowledged is not None:
        record["acknowledged_moment"] = moment_record(write.acknowledged)
    if member is not None:  # the length of its prefix is enough, as the key begins with it
        of = member.checkpoint
        record["checkpoint"] = len(of.prefix), of.step, of.layout, member.rank
    return pack(("writes", write.id), record)


def unpack_write(write_id: int, packed: bytes) -> Write:
    record = unpack(("writes", write_id), packed)
    key, base, asked, member = ObjectKey(record["bucket"], record["key"]), record["base"], None, None
    if "asked" in record:
        worker, begun, in_doubt_since = record["asked"]
        asked = CreateAttempt(worker, Moment(*begun), as_moment(in_doubt_since))
    if "checkpoint" in record:
        length, step, layout, rank = record["checkpoint"]
        member = Member(CheckpointName(key.bucket, key.key[:length], step, layout), rank)
    return Write(
        WriteSpec(key, record["headers"], record["slot"]),
        ExpectedVersion(
            tuple(base["etags"]), base["absent"], base["known"], base["asked"], as_moment(base.get("moment"))
        ),
        state=State(record["state"]),
        runs=tuple(Run(*run) for run in record.get("runs", ())),
        asked=asked,
        touched=as_moment(record.get("touched")),
        acknowledged=as_moment(record.get("acknowledged_moment")),
        member=member,
        id=write_id,
        replaced=tuple(record.get("replaced", ())),
        **{attribute: record[name] for name, attribute in _ALWAYS.items()},
        **{attribute: record[name] for name, attribute in _IF_SET.items() if name in record},
    )


_OF_ENDED = {
    "upload": "upload_id",
    "at": "ended_at",
    "etag": "etag",
    "parts": "parts",
    "checksums": "checksums",
}


def pack_ended(write_id: int, ended: UploadOutcome) -> bytes:
    record = {name: getattr(ended, attribute) for name, attribute in _OF_ENDED.items()}
    return pack(("ended", write_id), {"bucket": ended.key.bucket, "key": ended.key.key} | record)


def unpack_ended(write_id: int, packed: bytes) -> UploadOutcome:
    record = unpack(("ended", write_id), packed)
    key = ObjectKey(record["bucket"], record["key"])
    return UploadOutcome(key=key, **{attribute: record[name] for name, attribute in _OF_ENDED.items()})


def parts_digest(parts: Sequence[CompletedPart]) -> Steps[str]:
    """Return a digest of the numbers and unquoted ETags of a CompleteMultipartUpload."""
    lines = yield from each(lambda part: f"{part.number} {unquote(part.etag)}", parts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
