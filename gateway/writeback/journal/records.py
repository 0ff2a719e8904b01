"""What the journal holds, as values: uploads, parts, pending objects, and what is known of their keys at the origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Self

from gateway.objects import ObjectKey
from gateway.writeback.files.staged_file import StagedFile


@dataclass(frozen=True, slots=True)
class Base:
    """What the origin may have under a key for the flush to be no surprise: nobody else's write is overwritten.

    `etags` are any of its versions that were there when the absorb began, or that our own flush has put there since;
    `absent` says whether there may be none. Where `known` is false the origin could not be asked when the absorb began,
    at `asked_at` (seconds since 1970): then only what is older than that may be there, and `etags`, which this gateway
    has put there before.
    """

    etags: tuple[str, ...] = ()
    absent: bool = False
    known: bool = True
    asked_at: float = 0.0

    def allows(self, etag: str | None) -> bool:
        """Whether this version (None: no object) is one of those that were expected."""
        return self.absent if etag is None else etag in self.etags

    @classmethod
    def exactly(cls, etag: str | None) -> Self:
        """This version and no other; None: no object."""
        return cls((), True) if etag is None else cls((etag,))


@dataclass(frozen=True, slots=True)
class Fixed:
    """What PutObject or CreateMultipartUpload fixed besides the bytes: replayed at the flush, unchanged.

    `headers` are those that the origin is to get, lower-case names, without any that is about the request's own body.
    `slot` is the one that the key belonged to.
    """

    key: ObjectKey
    headers: Mapping[str, str]
    slot: str


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that is open. `upload_id` is what the client was told; the origin's may come later."""

    upload_id: str
    fixed: Fixed
    base: Base
    initiated_at: float
    origin_upload_id: str | None = None


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


class State(Enum):
    """Where a pending object is on its way."""

    WAITING = "waiting"
    """The origin has nothing of it that could become visible."""

    SENDING = "sending"
    """A request that makes it visible at the origin may have been sent: its outcome is to be found out."""

    CONFLICT = "conflict"
    """Others have changed the key at the origin: kept until somebody decides."""


@dataclass(frozen=True, slots=True)
class PendingObject:
    """An acknowledged write of a key that the origin does not have yet. `sequence` orders the writes of a node.

    A tombstone (`deleted`) has no parts: the key is to be deleted at the origin. `multipart` says whether the object
    is to be made of parts there, even of one; otherwise `parts` is the one body.
    """

    sequence: int
    fixed: Fixed
    base: Base
    acknowledged_at: float
    etag: str
    size_bytes: int
    parts: Sequence[Part] = ()
    multipart: bool = False
    deleted: bool = False
    upload_id: str | None = None
    origin_upload_id: str | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    state: State = State.WAITING

    @property
    def key(self) -> ObjectKey:
        return self.fixed.key


class Waiting(NamedTuple):
    """A pending object as far as its turn goes."""

    sequence: int
    key: ObjectKey


@dataclass(frozen=True, slots=True)
class Ended:
    """An upload that is over, remembered for those who repeat its last request: completed with an ETag, or aborted."""

    upload_id: str
    key: ObjectKey
    ended_at: float
    etag: str | None
    parts: Sequence[tuple[int, str]] = ()


@dataclass(frozen=True, slots=True)
class Orphan:
    """An upload at the origin that nothing will complete: to be aborted there, or it would be paid for for ever."""

    key: ObjectKey
    origin_upload_id: str


@dataclass(frozen=True, slots=True)
class Intent:
    """An upload that the origin is being asked to begin, by the process of a worker slot, since `asked_at`.

    `suspect_since` is set once nobody will tell what came of it. Times in seconds since 1970.
    """

    token: str
    worker: int
    key: ObjectKey
    asked_at: float
    suspect_since: float | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """What was learned of a bucket from its own answers.

    `md5_etags`: its ETags are MD5s, so that they can be foretold. `may_look`: the gateway's own key pair may HEAD its
    objects, without which no flush could tell what it overwrites.
    """

    md5_etags: bool
    may_look: bool
    learned_at: float

    @property
    def absorbs(self) -> bool:
        """Whether writes may be acknowledged before the bucket has seen them."""
        return self.md5_etags and self.may_look


@dataclass(frozen=True, slots=True)
class OwnDoing:
    """What this gateway itself has put under a key at the origin, at a time (seconds since 1970).

    `etag` None: it has deleted the object. Where `known` is false a forwarded request has changed it, who knows how.
    """

    at: float
    etag: str | None = None
    known: bool = True
