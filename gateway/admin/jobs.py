"""Work over the admin port: warm, evict, pin; snapshots; events that name what others have changed at the origin."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.admin.backends import Backends, Changes, opened
from gateway.admin.operations import (
    ALLOW_EMPTY,
    BUCKET_BODY,
    BUSY,
    CLOSED,
    GUARDED,
    JSON_TYPE,
    KIND,
    TEXT,
    RefusedRequest,
    Schema,
    body,
    content_type,
    flag,
    flag_of,
    json_answer,
    operation,
    parameter,
    posted_json,
    query,
)
from gateway.api import LINES_TYPE, MANIFEST_TYPE
from gateway.api import documents as to
from gateway.api.documents import PREFIX_OF_BUCKET
from gateway.jobs.job import Job, JobKind
from gateway.jobs.runner import UNKNOWN_PACE, Jobs, Pace
from gateway.policy.slots import Prefix
from gateway.s3.events import Event, MalformedEvents, ObjectEvent, parse_events
from gateway.telemetry.metrics import ORIGIN_EVENTS

_WORK = {**GUARDED, 400: "The prefix or a line is not valid.", **KIND, **BUSY, **CLOSED}
_KEYS = BUCKET_BODY | {MANIFEST_TYPE: TEXT | {"description": "one s3://bucket/key a line"}}
_NO_JOB = {**GUARDED, 404: "There is no such job.", **CLOSED}
_OF_JOB = (parameter("path", "job_id", TEXT, required=True),)


class JobsApi:
    def __init__(self, lent: Backends) -> None:
        self._lent = lent

    @operation(
        "POST /api/v1/warm",
        "Fetch objects that are not in the cache yet.",
        to.JobDocument,
        _WORK,
        202,
        body=_KEYS,
        parameters=[flag_of("cluster", "true: each block goes to the node of the cluster that owns it")],
    )
    async def warm(self, request: Request) -> to.JobDocument:
        return await self._start(JobKind.WARM, request, cluster=flag(request, "cluster"))

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
        parameters=[flag_of("cluster", "true: each node of the cluster pins the blocks that it owns")],
    )
    async def pin(self, request: Request) -> to.JobDocument:
        return await self._start(JobKind.PIN, request, cluster=flag(request, "cluster"))

    @operation(
        "POST /api/v1/unpin",
        "Let the gateway evict a pinned prefix again.",
        to.Unpinned,
        {**GUARDED, 400: "The prefix is not valid.", 404: "It is not pinned.", **KIND, **CLOSED},
        body=BUCKET_BODY,
        parameters=[flag_of("cluster", "true: what is pinned over the cluster, on all its nodes")],
    )
    async def unpin(self, request: Request) -> to.Unpinned:
        jobs = opened(self._lent.jobs)
        is_of_cluster = flag(request, "cluster")
        prefix, _ = prefix_of(await posted_json(request))
        unpinned = await jobs.unpin(prefix, cluster=is_of_cluster)
        if not unpinned.was_pinned and not unpinned.not_told:
            raise RefusedRequest(404, f"{prefix} is not pinned")
        return to.Unpinned(prefix=prefix, not_told=list(unpinned.not_told))

    @operation(
        "POST /api/v1/refresh",
        "See what others have changed under a prefix: list it anew where an index has it, else forget its bucket.",
        to.Refresh,
        {**GUARDED, 400: "The prefix is not valid.", **KIND, **CLOSED},
        202,
        body=BUCKET_BODY,
    )
    async def refresh(self, request: Request) -> to.Refresh:
        changes, indexes = opened(self._lent.changes), opened(self._lent.indexes)
        prefix = Prefix.parse(prefix_of(await posted_json(request))[0])
        slots, is_whole = indexes.refresh(prefix)
        if not is_whole:
            await changes.forget_bucket(prefix.bucket)
        await changes.forget_elsewhere(prefix.bucket)
        return to.Refresh(prefix=str(prefix), indexes=slots, voided=not is_whole)

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

    async def _start(self, kind: JobKind, request: Request, *, cluster: bool = False) -> to.JobDocument:
        jobs, given = opened(self._lent.jobs), content_type(request)
        if given == MANIFEST_TYPE and kind is not JobKind.PIN:
            return _shown(jobs, await jobs.start_listed(kind, request.stream(), cluster=cluster))
        if given != "application/json":
            manifest = "" if kind is JobKind.PIN else f" or {MANIFEST_TYPE}"
            raise RefusedRequest(415, f"Content-Type must be application/json{manifest}")
        prefix, allow_empty = prefix_of(await posted_json(request))
        return _shown(jobs, await jobs.start(kind, prefix, allow_empty=allow_empty, cluster=cluster))


def job_document(job: Job, pace: Pace = UNKNOWN_PACE) -> to.JobDocument:
    return to.JobDocument.model_validate(
        asdict(job) | {"bytes_per_second": pace.bytes_per_second, "seconds_left": pace.seconds_left}
    )


def job_documents(jobs: Jobs) -> list[to.JobDocument]:
    return [_shown(jobs, job) for job in jobs.all()]


def _shown(jobs: Jobs, job: Job | None) -> to.JobDocument:
    if job is None:
        raise RefusedRequest(404, "there is no such job")
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


SNAPSHOT_NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_NAME: Schema = TEXT | {"pattern": SNAPSHOT_NAME, "examples": ["v1"]}
_NAMED = (parameter("path", "name", _NAME, required=True),)
_LINES = {LINES_TYPE: TEXT | {"description": "one JSON document a line"}}
_REFUSED = {**GUARDED, 400: "What is given is wrong; the message says where.", **CLOSED}
_ONE = {**_REFUSED, 404: "There is no snapshot of that name."}
_USED = {**_ONE, 409: "It is damaged, or of another version."}
_MADE = {**_REFUSED, 409: "There is one of that name, or it is being made.", **KIND}


class SnapshotsApi:
    def __init__(self, lent: Backends) -> None:
        self._lent = lent

    @operation("GET /api/v1/snapshots", "The snapshots, by name.", to.Snapshots, {**GUARDED, **CLOSED})
    async def list(self, _request: Request) -> to.Snapshots:
        return to.Snapshots(snapshots=await opened(self._lent.snapshots).all())

    @operation(
        "POST /api/v1/snapshots",
        "Freeze what is there now.",
        to.JobDocument,
        {**_MADE, **BUSY},
        202,
        body=body("name", "prefix", name=_NAME, prefix=PREFIX_OF_BUCKET, allow_empty=ALLOW_EMPTY),
    )
    async def create(self, request: Request) -> to.JobDocument:
        service, document = opened(self._lent.snapshots), await posted_json(request)
        if not isinstance(document, dict) or not all(isinstance(document.get(one), str) for one in ("name", "prefix")):
            raise ValueError('the document must be {"name": "NAME", "prefix": "s3://bucket/prefix"}')
        prefix, allow_empty = prefix_of(document)
        return job_document(await service.create(document["name"], prefix, allow_empty=allow_empty))

    @operation("GET /api/v1/snapshots/{name}", "One snapshot.", to.SnapshotDocument, _ONE, parameters=_NAMED)
    async def show(self, request: Request) -> to.SnapshotDocument:
        return await opened(self._lent.snapshots).one(_name(request))

    @operation(
        "PUT /api/v1/snapshots/{name}",
        "Make one of JSON lines.",
        to.SnapshotDocument,
        _MADE,
        201,
        parameters=_NAMED,
        body=_LINES,
    )
    async def put(self, request: Request) -> to.SnapshotDocument:
        service = opened(self._lent.snapshots)
        if content_type(request) != LINES_TYPE:
            raise RefusedRequest(415, f"Content-Type must be {LINES_TYPE}")
        return await service.imported(_name(request), request.stream())

    @operation(
        "DELETE /api/v1/snapshots/{name}",
        "Delete it for good.",
        to.SnapshotDeleted,
        {**_ONE, 409: "It freezes a slot."},
        parameters=[*_NAMED, flag_of("force", "true: though it freezes a slot")],
    )
    async def delete(self, request: Request) -> to.SnapshotDeleted:
        name = _name(request)
        await opened(self._lent.snapshots).delete(name, force=flag(request, "force"))
        return to.SnapshotDeleted(name=name)

    @operation("GET /api/v1/snapshots/{name}/objects", "Its objects.", _LINES, _USED, parameters=_NAMED)
    async def objects(self, request: Request) -> Response:
        return _lines(await opened(self._lent.snapshots).exported(_name(request)))

    @operation(
        "GET /api/v1/snapshots/{name}/diff",
        "What is different.",
        _LINES,
        _USED,
        parameters=[*_NAMED, query("with", "the name of another; without it the bucket now", _NAME)],
    )
    async def diff(self, request: Request) -> Response:
        compared = opened(self._lent.snapshots).compared
        return _lines(await compared(_name(request), request.query_params.get("with")))


def _lines(pieces: AsyncGenerator[bytes, None]) -> Response:
    return StreamingResponse(pieces, media_type=LINES_TYPE, headers={"cache-control": "no-store"})


def _name(request: Request) -> str:
    return str(request.path_params["name"])


DOCUMENT_BYTES_MAX = 1024 * 1024
"""The most that SNS, SQS and EventBridge carry."""

_SNS_HEADER = "x-amz-sns-message-type"
_TOLD = "S3's event notifications, as they are or in SNS, SQS or EventBridge; at most 1 MiB"


class EventsApi:
    def __init__(self, lent: Backends) -> None:
        self._lent = lent

    @operation(
        "POST /api/v1/events",
        "Forget what the gateway remembers of the objects that the origin's events name.",
        to.EventResults,
        {**GUARDED, 400: "No events, or malformed ones only; says where.", **KIND, **CLOSED},
        body={JSON_TYPE: {"description": _TOLD}},
    )
    async def post(self, request: Request) -> to.EventResults | Response:
        changes = opened(self._lent.changes)
        # Web pages may send neither to other sites without asking first; SNS sends its JSON as text/plain.
        if content_type(request) != JSON_TYPE and _SNS_HEADER not in request.headers:
            raise RefusedRequest(415, f"Content-Type must be application/json, or the header {_SNS_HEADER} be there")
        try:
            events = parse_events(await _body(request))
        except MalformedEvents:
            ORIGIN_EVENTS.add(1, "malformed")
            raise
        found = await _applied(changes, events)
        for outcome in ("applied", "ignored", "malformed"):
            if count := getattr(found, outcome):
                ORIGIN_EVENTS.add(count, outcome)
        if found.malformed and not found.applied and not found.ignored:
            first = found.results[0]
            return json_answer({"error": f"{first.place}: {first.why}", **found.document()}, 400)
        return found


async def _applied(changes: Changes, events: Sequence[Event]) -> to.EventResults:
    reasons = iter(await changes.apply([event for event in events if isinstance(event, ObjectEvent)]))
    results = [_result(event, next(reasons) if isinstance(event, ObjectEvent) else None) for event in events]
    outcomes = [one.outcome for one in results]
    applied, ignored, malformed = map(outcomes.count, ("applied", "ignored", "malformed"))
    return to.EventResults(applied=applied, ignored=ignored, malformed=malformed, results=results)


def _result(event: Event, reason: str | None) -> to.EventResult:
    if not isinstance(event, ObjectEvent):
        outcome = "malformed" if event.malformed else "ignored"
        return to.EventResult(place=event.place, outcome=outcome, why=event.why)
    of_object = {"place": event.place, "event": event.name, "bucket": event.bucket, "key": event.key}
    if reason is None:
        return to.EventResult(**of_object, outcome="applied")
    return to.EventResult(**of_object, outcome="ignored", why=reason)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > DOCUMENT_BYTES_MAX:
            raise MalformedEvents(f"the document is longer than {DOCUMENT_BYTES_MAX} bytes")
    return bytes(body)
