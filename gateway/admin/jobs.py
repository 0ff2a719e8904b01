"""Jobs over the admin port: warm, evict, pin, and what becomes of them."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.admin.media_types import MANIFEST_TYPE
from gateway.admin.responses import content_type, json_answer, posted, problem
from gateway.core.errors import PinRefused, StoreUnavailable
from gateway.jobs.job import Job, JobKind, to_document
from gateway.jobs.runner import UNKNOWN_PACE, Jobs, Pace, TooManyJobs
from gateway.jobs.worklist import BadManifest
from gateway.policy.slots import Prefix


class JobsHolder:
    """Where the background process puts its jobs once the cache directory is open."""

    def __init__(self) -> None:
        self.jobs: Jobs | None = None

    def documents(self) -> list[dict[str, Any]]:
        """Every job, the oldest first; none while the directory is not open."""
        jobs = self.jobs
        return [] if jobs is None else [job_document(job, jobs.pace(job.id)) for job in jobs.all()]


class JobsApi:
    """The endpoints."""

    def __init__(self, holder: JobsHolder) -> None:
        self._holder = holder

    async def warm(self, request: Request) -> Response:
        """`{"prefix": "s3://bucket/prefix"}`, or a manifest: fetch what is not there yet. 202 and the job."""
        return await self._start(JobKind.WARM, request)

    async def evict(self, request: Request) -> Response:
        return await self._start(JobKind.EVICT, request)

    async def pin(self, request: Request) -> Response:
        """Fetch what lies under a prefix, and never evict it: a prefix only, no manifest."""
        return await self._start(JobKind.PIN, request)

    async def unpin(self, request: Request) -> Response:
        """Let the gateway evict a pinned prefix again."""
        jobs = self._holder.jobs
        if jobs is None:
            return _not_open()
        if content_type(request) != "application/json":
            return problem(415, "Content-Type must be application/json")
        try:
            _, prefix, _ = await asked(request)
            unpinned = await jobs.unpin(prefix)
        except ValueError as error:
            return problem(400, str(error))
        except StoreUnavailable as error:
            return problem(503, str(error))
        except ClientDisconnect:
            return problem(400, "the request broke off")
        return json_answer({"prefix": prefix}) if unpinned else problem(404, f"{prefix} is not pinned")

    async def pins(self, _request: Request) -> Response:
        """Every pinned prefix."""
        jobs = self._holder.jobs
        try:
            return _not_open() if jobs is None else json_answer({"pins": jobs.pins()})
        except StoreUnavailable as error:
            return problem(503, str(error))

    async def list(self, _request: Request) -> Response:
        """Every job, the oldest first."""
        jobs = self._holder.jobs
        return _not_open() if jobs is None else json_answer({"jobs": self._holder.documents()})

    async def show(self, request: Request) -> Response:
        """One job."""
        jobs = self._holder.jobs
        if jobs is None:
            return _not_open()
        return _shown(jobs, jobs.get(request.path_params["job_id"]))

    async def cancel(self, request: Request) -> Response:
        """End a job; what it has done stays done."""
        jobs = self._holder.jobs
        if jobs is None:
            return _not_open()
        return _shown(jobs, await jobs.cancel(request.path_params["job_id"]))

    async def _start(self, kind: JobKind, request: Request) -> Response:
        jobs = self._holder.jobs
        if jobs is None:
            return _not_open()
        given = content_type(request)
        try:
            if given == MANIFEST_TYPE and kind is not JobKind.PIN:
                job = await jobs.start_listed(kind, request.stream())
            elif given == "application/json":
                _, prefix, allow_empty = await asked(request)
                job = await jobs.start(kind, prefix, allow_empty=allow_empty)
            else:
                manifest = "" if kind is JobKind.PIN else f" or {MANIFEST_TYPE}"
                return problem(415, f"Content-Type must be application/json{manifest}")
        except (BadManifest, ValueError) as error:
            return problem(400, str(error))
        except TooManyJobs as error:
            return problem(429, str(error))
        except PinRefused as error:
            return problem(409, str(error))
        except StoreUnavailable as error:
            return problem(503, str(error))
        except ClientDisconnect:
            return problem(400, "the request broke off")
        return json_answer(job_document(job, jobs.pace(job.id)), 202)


def job_document(job: Job, pace: Pace = UNKNOWN_PACE) -> dict[str, Any]:
    """A job as it is shown: how it stands, and how fast it goes."""
    return to_document(job) | {"bytes_per_second": pace.bytes_per_second, "seconds_left": pace.seconds_left}


def _shown(jobs: Jobs, job: Job | None) -> Response:
    if job is None:
        return problem(404, "there is no such job")
    return json_answer(job_document(job, jobs.pace(job.id)))


async def asked(request: Request) -> tuple[dict[str, Any], str, bool]:
    """Return the document of a request, its prefix, and `allow_empty`; ValueError says what is wrong with it."""
    document: Any = orjson.loads(await posted(request))
    if not isinstance(document, dict) or not isinstance(document.get("prefix"), str):
        raise ValueError('the document must be {"prefix": "s3://bucket/prefix"}')
    prefix = Prefix.parse(document["prefix"])
    if not prefix.bucket:
        raise ValueError("the prefix must name a bucket: s3://bucket/prefix")
    allow_empty = document.get("allow_empty", False)
    if not isinstance(allow_empty, bool):
        raise ValueError("allow_empty must be true or false")
    return document, str(prefix), allow_empty


def _not_open() -> Response:
    return problem(503, "the cache directory is not open yet")
