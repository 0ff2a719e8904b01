"""The record of a job, which is on disk while the job exists."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

import orjson

FORMAT_VERSION = 1
ERRORS_KEPT = 10
"""The first of them are kept with their messages; all are counted."""


class JobKind(StrEnum):
    """The work that a job does with its objects."""

    WARM = "warm"
    EVICT = "evict"
    PIN = "pin"
    SNAPSHOT = "snapshot"


class JobState(StrEnum):
    """RUNNING jobs go on after a restart; the others have ended."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Job:
    """One job, as it stands.

    It is about the keys under `prefix` (`s3://bucket/prefix`), or those that a `manifest` lists, in its order. `place`
    says up to where in its list everything is done. What lies behind it is done again after a restart, which costs a
    look at the index and no transfer.

    `objects_found` and `bytes_found` grow while the listing goes on, until `found_all` (a manifest tells no sizes);
    `objects_done` and `bytes_done` follow. `bytes_fetched` of them came from the origin, the others were there.
    `bytes_done` of an eviction are those that it has dropped, of every version. `full` says that the cache had no room
    for the rest. Times are seconds since 1970. `name` is that of the snapshot that a job makes: its objects are done as
    they are found. With `allow_empty`, finding none is no failure. What `was_pinned` before stays so.
    """

    id: str
    kind: JobKind
    prefix: str
    manifest: bool = False
    state: JobState = JobState.RUNNING
    created_at: float = 0.0
    ended_at: float | None = None
    place: int = 0
    objects_found: int = 0
    bytes_found: int = 0
    found_all: bool = False
    objects_done: int = 0
    bytes_done: int = 0
    bytes_fetched: int = 0
    full: bool = False
    objects_failed: int = 0
    errors: tuple[str, ...] = field(default_factory=tuple)
    name: str = ""
    allow_empty: bool = False
    was_pinned: bool = False

    def failed_with(self, error: str) -> Job:
        """One object more could not be done."""
        errors = self.errors if len(self.errors) >= ERRORS_KEPT else (*self.errors, error)
        return replace(self, objects_failed=self.objects_failed + 1, errors=errors)


def pack(job: Job) -> bytes:
    """Return the bytes of the job's file."""
    return orjson.dumps({"format": FORMAT_VERSION, "job": job}, option=orjson.OPT_INDENT_2)


def unpack(content: bytes) -> Job | None:
    """Return the job; None for anything that this version has not written."""
    try:
        document = orjson.loads(content)
        if document["format"] != FORMAT_VERSION:
            return None
        fields = document["job"]
        made = {"kind": JobKind(fields["kind"]), "state": JobState(fields["state"]), "errors": tuple(fields["errors"])}
        return Job(**fields | made)
    except (ValueError, KeyError, TypeError):
        return None
