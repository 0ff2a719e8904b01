"""Jobs on disk: one file each, replaced as a whole, and a list of the objects that it is about. All of it blocks.

<cache>/jobs/<id>.json      the record
<cache>/jobs/<id>.objects   the list (worklist.py)
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gateway.durable import write_durably
from gateway.errors import StoreUnavailable
from gateway.jobs.records import Job, pack, unpack

_DIRECTORY_MODE = 0o700


class JobStore:
    """The jobs of one cache directory. The background process alone uses it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"the directory of jobs cannot be made: {error}") from error

    def load(self) -> list[Job]:
        """Every job, the oldest first. What cannot be read is left where it is, and is no job."""
        found = [job for path in self._directory.glob("*.json") if (job := self._read(path)) is not None]
        return sorted(found, key=lambda job: (job.created_at, job.id))

    def save(self, job: Job) -> None:
        """Replace what is kept of a job; after a crash it is there whole, as it is now or as it was before."""
        try:
            write_durably(self._record(job.id), pack(job))
        except OSError as error:
            raise StoreUnavailable(f"a job cannot be written down: {error}") from error

    def remove(self, job_id: str) -> None:
        """Forget a job and its list."""
        for path in (self._record(job_id), self.objects(job_id)):
            with suppress(FileNotFoundError):
                path.unlink()

    def drop_objects(self, job_id: str) -> None:
        """Remove the list of a job that has ended."""
        with suppress(FileNotFoundError):
            self.objects(job_id).unlink()

    def objects(self, job_id: str) -> Path:
        """Where a job's list lies, or would."""
        return self._directory / f"{job_id}.objects"

    def _record(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.json"

    def _read(self, path: Path) -> Job | None:
        try:
            return unpack(path.read_bytes())
        except OSError:
            return None
