"""Jobs over the admin port: warm, evict, pin, and what becomes of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request

from gateway.admin.backends import Backends, opened
from gateway.admin.operations import (
    ALLOW_EMPTY,
    BUCKET_BODY,
    BUSY,
    CLOSED,
    GUARDED,
    KIND,
    TEXT,
    body,
    operation,
    parameter,
)
from gateway.admin.responses import Refused, content_type, posted_json
from gateway.api import MANIFEST_TYPE
from gateway.api import documents as to
from gateway.api.documents import PREFIX_OF_BUCKET
from gateway.jobs.job import Job, JobKind
from gateway.jobs.runner import UNKNOWN_PACE, Jobs, Pace
from gateway.policy.slots import Prefix

_WORK = {**GUARDED, 400: "The prefix or a line is not valid.", **KIND, **BUSY, **CLOSED}
_KEYS = BUCKET_BODY | {MANIFEST_TYPE: TEXT | {"description": "one s3://bucket/key a line"}}
_NO_JOB = {**GUARDED, 404: "There is no such job.", **CLOSED}
_OF_JOB = (parameter("path", "job_id", TEXT, required=True),)


class JobsApi:
    def __init__(self, lent: Backends) -> None:
        self._lent = lent

    @operation(
        "POST /api/v1/warm", "Fetch objects that are not in the cache yet.", to.JobDocument, _WORK, 202, body=_KEYS
    )
    async def warm(self, request: Request) -> to.JobDocument:
        return await self._start(JobKind.WARM, request)

    @operation("POST /api/v1/evict", "Drop objects from the cache.", to.JobDocument, _WORK, 202, body=_KEYS)
    async def evict(self, request: Request) -> to.JobDocument:
        return await self._start(JobKind.EVICT, request)

    @operation(
        "POST /api/v1/pin",
        "Fetch everything under a prefix, and never evict it.",
        to.JobDocument,
        {**_WORK, 409: "A pinned prefix overlaps it."},
        202,
        body=body("prefix", prefix=PREFIX_OF_BUCKET, allow_empty=ALLOW_EMPTY),
    )
    async def pin(self, request: Request) -> to.JobDocument:
        return await self._start(JobKind.PIN, request)

    @operation(
        "POST /api/v1/unpin",
        "Let the gateway evict a pinned prefix again.",
        to.Unpinned,
        {**GUARDED, 400: "The prefix is not valid.", 404: "It is not pinned.", **KIND, **CLOSED},
        body=BUCKET_BODY,
    )
    async def unpin(self, request: Request) -> to.Unpinned:
        jobs = opened(self._lent.jobs)
        prefix, _ = prefix_of(await posted_json(request))
        if not await jobs.unpin(prefix):
            raise Refused(404, f"{prefix} is not pinned")
        return to.Unpinned(prefix=prefix)

    @operation("GET /api/v1/pins", "The pinned prefixes.", to.PinsDocument)
    async def pins(self, _request: Request) -> to.PinsDocument:
        return to.PinsDocument(pins=opened(self._lent.jobs).pins())

    @operation("GET /api/v1/jobs", "Jobs, the oldest first.", to.JobsDocument)
    async def list(self, _request: Request) -> to.JobsDocument:
        return to.JobsDocument(jobs=job_documents(opened(self._lent.jobs)))

    @operation("GET /api/v1/jobs/{job_id}", "One job.", to.JobDocument, _NO_JOB, parameters=_OF_JOB)
    async def show(self, request: Request) -> to.JobDocument:
        jobs = opened(self._lent.jobs)
        return _shown(jobs, jobs.get(request.path_params["job_id"]))

    @operation("DELETE /api/v1/jobs/{job_id}", "Cancel a job.", to.JobDocument, _NO_JOB, parameters=_OF_JOB)
    async def cancel(self, request: Request) -> to.JobDocument:
        jobs = opened(self._lent.jobs)
        return _shown(jobs, await jobs.cancel(request.path_params["job_id"]))

    async def _start(self, kind: JobKind, request: Request) -> to.JobDocument:
        jobs, given = opened(self._lent.jobs), content_type(request)
        if given == MANIFEST_TYPE and kind is not JobKind.PIN:
            return _shown(jobs, await jobs.start_listed(kind, request.stream()))
        if given != "application/json":
            manifest = "" if kind is JobKind.PIN else f" or {MANIFEST_TYPE}"
            raise Refused(415, f"Content-Type must be application/json{manifest}")
        prefix, allow_empty = prefix_of(await posted_json(request))
        return _shown(jobs, await jobs.start(kind, prefix, allow_empty=allow_empty))


def job_document(job: Job, pace: Pace = UNKNOWN_PACE) -> to.JobDocument:
    return to.JobDocument.model_validate(
        asdict(job) | {"bytes_per_second": pace.bytes_per_second, "seconds_left": pace.seconds_left}
    )


def job_documents(jobs: Jobs) -> list[to.JobDocument]:
    return [_shown(jobs, job) for job in jobs.all()]


def _shown(jobs: Jobs, job: Job | None) -> to.JobDocument:
    if job is None:
        raise Refused(404, "there is no such job")
    return job_document(job, jobs.pace(job.id))


def prefix_of(document: Any) -> tuple[str, bool]:
    """Return the prefix that a document names, and its `allow_empty`; ValueError says what is wrong with it."""
    if not isinstance(document, dict) or not isinstance(document.get("prefix"), str):
        raise ValueError('the document must be {"prefix": "s3://bucket/prefix"}')
    prefix, allow_empty = Prefix.parse(document["prefix"]), document.get("allow_empty", False)
    if not prefix.bucket:
        raise ValueError("the prefix must name a bucket: s3://bucket/prefix")
    if not isinstance(allow_empty, bool):
        raise ValueError("allow_empty must be true or false")
    return str(prefix), allow_empty
