"""Jobs and the parts that they use. A job is on disk while it exists: a file that is replaced as a whole, and a list.

<cache>/jobs/<id>.json      the record
<cache>/jobs/<id>.objects   the list of the objects that it is about (worklist.py)
<cache>/jobs/inventories/   inventories that are being sorted (indexing/inventory.py)
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import orjson
import structlog

from gateway.blocks.cache import BlockCache
from gateway.core.clock import Clock
from gateway.core.errors import store_errors
from gateway.core.model import Homes
from gateway.disk.atomic_write import write_durably
from gateway.metadata.catalog import Catalog
from gateway.metadata.snapshots.store import SnapshotStore
from gateway.origin.client import Origin
from gateway.policy.slots import Slots

T = TypeVar("T")

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
    Of a warm-up or pin of the `cluster` each block goes to the node that looks after it, and no copy stays here.
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
    cluster: bool = False

    def failed_with(self, error: str) -> Job:
        """One object more could not be done."""
        errors = self.errors if len(self.errors) >= ERRORS_KEPT else (*self.errors, error)
        return replace(self, objects_failed=self.objects_failed + 1, errors=errors)

    def pack(self) -> bytes:
        return orjson.dumps({"format": FORMAT_VERSION, "job": self}, option=orjson.OPT_INDENT_2)

    @classmethod
    def unpack(cls, content: bytes) -> Job | None:
        """Return the job; None for anything that this version has not written."""
        try:
            document = orjson.loads(content)
            if document["format"] != FORMAT_VERSION:
                return None
            fields = document["job"]
            made = {"kind": JobKind(fields["kind"]), "state": JobState(fields["state"])}
            return cls(**fields | made | {"errors": tuple(fields["errors"])})
        except (ValueError, KeyError, TypeError):
            return None


_DIRECTORY_MODE = 0o700
_LIST_SUFFIX = ".objects"
_log = structlog.get_logger("forebay.jobs")


class JobStore:
    """The jobs of one cache directory. The background process alone uses it.

    Each method raises StoreUnavailable, and nothing else, when the disk fails.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.scratch = directory / "inventories"
        with store_errors("the directory of jobs cannot be made"):
            directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)

    def load(self) -> list[Job]:
        """Every job, the oldest first. What cannot be read is left where it is, and is no job."""
        with store_errors("the directory of jobs cannot be read"):
            names = sorted(os.listdir(self._directory))
        records = (self._directory / name for name in names if name.endswith(".json"))
        found = [job for path in records if (job := self._read(path)) is not None]
        return sorted(found, key=lambda job: (job.created_at, job.id))

    def sweep(self, running: Collection[str]) -> None:
        """Before anything is sorted, remove what ended jobs and killed processes left, but the lists of `running`."""
        with store_errors("what nobody needs any more cannot be removed"):
            if self.scratch.exists():
                shutil.rmtree(self.scratch)
            for path in self._directory.iterdir():
                if path.suffix == _LIST_SUFFIX and path.stem not in running:
                    path.unlink(missing_ok=True)

    def save(self, job: Job) -> None:
        """Replace the record of a job. After a crash either the old or the new record is there, whole."""
        with store_errors("a job cannot be written down"):
            write_durably(self._record(job.id), job.pack())

    def remove(self, job_id: str) -> None:
        """Forget a job and its list."""
        with store_errors("a job cannot be removed"):
            for path in (self.objects(job_id), self._record(job_id)):
                path.unlink(missing_ok=True)

    def drop_objects(self, job_id: str) -> None:
        """Remove the list of a job that has ended."""
        with store_errors("the list of a job cannot be removed"):
            self.objects(job_id).unlink(missing_ok=True)

    def objects(self, job_id: str) -> Path:
        """Return the path of a job's list, which need not exist."""
        return self._directory / f"{job_id}{_LIST_SUFFIX}"

    def _record(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.json"

    def _read(self, path: Path) -> Job | None:
        try:
            return Job.unpack(path.read_bytes())
        except OSError as error:
            _log.warning("the record of a job cannot be read", path=str(path), error=str(error))
            return None


async def steadily(
    work: Callable[[], T], *, stop: Callable[[], None] | None = None, unwanted: Callable[[T], None] | None = None
) -> T:
    """Return the result of `work`, run in a thread. A cancelled caller waits for its end, because it uses open files.

    The caller then first calls `stop`, and at the end `unwanted` with the result.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.wait({running})
        if not running.cancelled() and running.exception() is None and unwanted is not None:
            unwanted(running.result())
        raise


@dataclass(frozen=True, slots=True)
class Unpinned:
    """The end of a pin. `not_told`: addresses of the nodes that do not answer, and may keep it."""

    was_pinned: bool
    not_told: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class JobDependencies:
    """The parts that jobs use. `homes` says where buckets are, as snapshots record it.

    `unpin_at_others` has the other nodes of the cluster let go of a prefix: see `Unpinned`.
    """

    origin: Origin
    catalog: Catalog
    blocks: BlockCache
    slots: Slots
    clock: Clock
    snapshots: SnapshotStore
    homes: Homes
    unpin_at_others: Callable[[str], Awaitable[Unpinned]] | None = None
