"""Snapshots over the admin port: made, listed, compared, deleted, taken out and brought in."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from gateway.admin.backends import Backends, opened
from gateway.admin.jobs import job_document, prefix_of
from gateway.admin.operations import (
    ALLOW_EMPTY,
    BUSY,
    CLOSED,
    GUARDED,
    KIND,
    TEXT,
    Schema,
    body,
    flag_of,
    operation,
    parameter,
    query,
)
from gateway.admin.responses import Refused, content_type, flag, posted_json
from gateway.api import LINES_TYPE
from gateway.api import documents as to
from gateway.api.documents import PREFIX_OF_BUCKET

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
            raise Refused(415, f"Content-Type must be {LINES_TYPE}")
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
