"""Snapshots over the admin port: made, listed, compared, deleted, taken out and brought in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import wraps
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from gateway.admin.jobs import asked, job_document
from gateway.admin.media_types import LINES_TYPE
from gateway.admin.responses import content_type, flag, json_answer, problem
from gateway.core.errors import NoSuchSnapshot, SnapshotConflict, SnapshotError, StoreUnavailable
from gateway.jobs.runner import TooManyJobs
from gateway.jobs.snapshot_service import BadLine, SnapshotService

_Endpoint: TypeAlias = Callable[["SnapshotsApi", SnapshotService, Request], Awaitable[Response]]


class SnapshotsHolder:
    """Where the background process puts its service once the cache directory is open."""

    def __init__(self) -> None:
        self.service: SnapshotService | None = None


def _answered(endpoint: _Endpoint) -> Callable[[SnapshotsApi, Request], Awaitable[Response]]:
    """The endpoint, with what it raises as answers."""

    @wraps(endpoint)
    async def answered(api: SnapshotsApi, request: Request) -> Response:
        if api.holder.service is None:
            return problem(503, "the cache directory is not open yet")
        try:
            return await endpoint(api, api.holder.service, request)
        except (BadLine, ValueError) as error:
            return problem(400, str(error))
        except NoSuchSnapshot as error:
            return problem(404, str(error))
        except (SnapshotConflict, SnapshotError) as error:
            return problem(409, str(error))
        except TooManyJobs as error:
            return problem(429, str(error))
        except StoreUnavailable as error:
            return problem(503, str(error))
        except ClientDisconnect:
            return problem(400, "the request broke off")

    return answered


class SnapshotsApi:
    """The endpoints."""

    def __init__(self, holder: SnapshotsHolder) -> None:
        self.holder = holder

    @_answered
    async def list(self, service: SnapshotService, _request: Request) -> Response:
        """Every snapshot, by name."""
        return json_answer({"snapshots": await service.all()})

    @_answered
    async def create(self, service: SnapshotService, request: Request) -> Response:
        """`{"name": "v1", "prefix": "s3://bucket/prefix"}`: freeze what is there now. 202 and the job."""
        if content_type(request) != "application/json":
            return problem(415, "Content-Type must be application/json")
        document, prefix, allow_empty = await asked(request)
        if not isinstance(name := document.get("name"), str):
            raise ValueError('the document must be {"name": "NAME", "prefix": "s3://bucket/prefix"}')
        return json_answer(job_document(await service.create(name, prefix, allow_empty=allow_empty)), 202)

    @_answered
    async def show(self, service: SnapshotService, request: Request) -> Response:
        """One snapshot."""
        return json_answer(await service.one(_name(request)))

    @_answered
    async def put(self, service: SnapshotService, request: Request) -> Response:
        """Make one of the lines that `objects` gives. 201 and the snapshot."""
        if content_type(request) != LINES_TYPE:
            return problem(415, f"Content-Type must be {LINES_TYPE}")
        return json_answer(await service.imported(_name(request), request.stream()), 201)

    @_answered
    async def delete(self, service: SnapshotService, request: Request) -> Response:
        """Delete one for good; with `?force=true` also one that freezes a slot."""
        name = _name(request)
        await service.delete(name, force=flag(request, "force"))
        return json_answer({"name": name})

    @_answered
    async def objects(self, service: SnapshotService, request: Request) -> Response:
        """Its objects as JSON lines."""
        return _lines(await service.exported(_name(request)))

    @_answered
    async def diff(self, service: SnapshotService, request: Request) -> Response:
        """What is different in the snapshot `with`, or without it at the origin now, as JSON lines."""
        return _lines(await service.compared(_name(request), request.query_params.get("with")))


def _lines(pieces: AsyncGenerator[bytes, None]) -> Response:
    return StreamingResponse(pieces, media_type=LINES_TYPE, headers={"cache-control": "no-store"})


def _name(request: Request) -> str:
    return str(request.path_params["name"])
