"""Jobs on disk: one file each, replaced as a whole, and a list of the objects that it is about. All of it blocks.

<cache>/jobs/<id>.json      the record
<cache>/jobs/<id>.objects   the list (worklist.py)
<cache>/jobs/inventories/   inventories that are being sorted (indexing/inventory.py)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from gateway.core.errors import StoreUnavailable
from gateway.disk.atomic_write import write_durably
from gateway.jobs.job import Job, pack, unpack

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
        with _store_errors("the directory of jobs cannot be made"):
            directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)

    def load(self) -> list[Job]:
        """Every job, the oldest first. What cannot be read is left where it is, and is no job."""
        with _store_errors("the directory of jobs cannot be read"):
            names = sorted(os.listdir(self._directory))
        records = (self._directory / name for name in names if name.endswith(".json"))
        found = [job for path in records if (job := self._read(path)) is not None]
        return sorted(found, key=lambda job: (job.created_at, job.id))

    def sweep(self, running: Collection[str]) -> None:
        """Before anything is sorted, remove what ended jobs and killed processes left, but the lists of `running`."""
        with _store_errors("what nobody needs any more cannot be removed"):
            if self.scratch.exists():
                shutil.rmtree(self.scratch)
            for path in self._directory.iterdir():
                if path.suffix == _LIST_SUFFIX and path.stem not in running:
                    path.unlink(missing_ok=True)

    def save(self, job: Job) -> None:
        """Replace the record of a job. After a crash either the old or the new record is there, whole."""
        with _store_errors("a job cannot be written down"):
            write_durably(self._record(job.id), pack(job))

    def remove(self, job_id: str) -> None:
        """Forget a job and its list."""
        with _store_errors("a job cannot be removed"):
            for path in (self.objects(job_id), self._record(job_id)):
                path.unlink(missing_ok=True)

    def drop_objects(self, job_id: str) -> None:
        """Remove the list of a job that has ended."""
        with _store_errors("the list of a job cannot be removed"):
            self.objects(job_id).unlink(missing_ok=True)

    def objects(self, job_id: str) -> Path:
        """Return the path of a job's list, which need not exist."""
        return self._directory / f"{job_id}{_LIST_SUFFIX}"

    def _record(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.json"

    def _read(self, path: Path) -> Job | None:
        try:
            return unpack(path.read_bytes())
        except OSError as error:
            _log.warning("the record of a job cannot be read", path=str(path), error=str(error))
            return None


@contextmanager
def _store_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"{what}: {error}") from error
