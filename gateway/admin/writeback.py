"""Shows over the admin port what the origin does not have yet, flushes it now, and takes decisions about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from gateway.admin.backends import Backends, opened
from gateway.admin.operations import (
    GUARDED,
    KIND,
    OBJECT,
    OF_OBJECT,
    TEXT,
    body,
    flag,
    flag_of,
    number,
    number_of,
    operation,
    posted_json,
    query,
)
from gateway.api import documents as to
from gateway.api.documents import CHECKPOINT_STATES, PREFIX
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix

if TYPE_CHECKING:
    from gateway.writeback.admin.writeback_admin import NoWriteback, WritebackAdmin

PAGE = 100
PAGE_MAX = 1000

THROUGH_MAX = 10**18 - 1

ABORTS_MAX = 100
"""Uploads that one request ends: each costs a commit."""

_ASKED = {
    **GUARDED,
    400: "What is given is wrong; the message says how.",
    503: "The cache directory is not open, or the buffer cannot be read.",
}
_DECIDED = {
    **_ASKED,
    **KIND,
    404: "Nothing is pending under the key, or another object by now.",
    409: "It is on its way to the origin, or no conflict.",
    502: "The origin does not say what it has.",
}
_UNDER = query("prefix", "s3://bucket/prefix", PREFIX | {"default": "s3://"})
_PAGE = (
    _UNDER,
    query("after", "`next` of the page before", TEXT),
    query("limit", "how many", number(1, PAGE_MAX, default=PAGE)),
)
_STATE = f"({'|'.join(CHECKPOINT_STATES)})"
_STATES = query(
    "state",
    "only those in a state, or in one of several: failed,conflict",
    TEXT | {"pattern": f"^({_STATE}(,{_STATE})*)?$"},
)
CHECKPOINTS_OF_ALL = (_UNDER, _PAGE[1], _STATES)
_THROUGH = query("through", "the number that POST has answered", number(0, 10**18 - 1), required=True)
_DECISION = body(
    "object",
    "decision",
    object=OBJECT,
    decision={"enum": ["keep-ours", "keep-theirs", "discard"]},
    sequence={
        "type": ["integer", "null"],
        "minimum": 0,
        "maximum": THROUGH_MAX,
        "description": "it must be this very object",
    },
)
_UPLOAD_IDS = {"type": "array", "items": TEXT, "minItems": 1, "maxItems": ABORTS_MAX}


class WritebackApi:
    def __init__(self, lent: Backends) -> None:
        self._lent = lent

    @property
    def _backend(self) -> WritebackAdmin | NoWriteback:
        return self._lent.writeback or opened(None)

    @operation("GET /api/v1/writeback", "What only this node has, slot by slot.", to.Writeback, _ASKED)
    async def show(self, _request: Request) -> to.Writeback:
        return await self._backend.summary()

    @operation(
        "GET /api/v1/writeback/objects",
        "What is pending.",
        to.PendingObjects,
        _ASKED,
        parameters=[*_PAGE, flag_of("problems", "true: only what does not get to the origin, the oldest first")],
    )
    async def objects(self, request: Request) -> to.PendingObjects:
        backend = self._backend
        page = backend.problems if flag(request, "problems") else backend.objects
        return await page(*_page(request))

    @operation("GET /api/v1/writeback/uploads", "Open uploads.", to.OpenUploadsDocument, _ASKED, parameters=_PAGE)
    async def uploads(self, request: Request) -> to.OpenUploadsDocument:
        return await self._backend.uploads(*_page(request))

    @operation(
        "GET /api/v1/checkpoints",
        "Checkpoints and their state.",
        to.CheckpointsDocument,
        _ASKED,
        parameters=[*_PAGE, _STATES],
    )
    async def checkpoints(self, request: Request) -> to.CheckpointsDocument:
        states = [state for state in request.query_params.get("state", "").split(",") if state]
        return await self._backend.checkpoints(*_page(request), states)

    @operation(
        "POST /api/v1/flush",
        "Flush now what is pending.",
        to.FlushProgress,
        {**_ASKED, **KIND},
        202,
        body=body(prefix=PREFIX),
    )
    async def flush(self, request: Request) -> to.FlushProgress:
        backend = self._backend
        return await backend.flush(Prefix.parse(posted_text(await posted_document(request), "prefix")))

    @operation(
        "GET /api/v1/flush",
        "What is left of it.",
        to.FlushProgress,
        _ASKED,
        parameters=[_UNDER, _THROUGH, flag_of("is_name", "true: as POST has answered it")],
    )
    async def progress(self, request: Request) -> to.FlushProgress:
        backend, through = self._backend, number_of(request, "through", 0, THROUGH_MAX)
        is_name = flag(request, "is_name")
        return await backend.progress(_prefix(request), through, is_name=is_name)

    @operation(
        "GET /api/v1/writeback/versions",
        "What is pending under a key, and what the origin has.",
        to.Versions,
        _DECIDED,
        parameters=OF_OBJECT,
    )
    async def versions(self, request: Request) -> to.Versions:
        return await self._backend.versions(_key(request.query_params.get("object", "")))

    @operation("POST /api/v1/writeback/resolve", "Decide about an object.", to.Resolved, _DECIDED, body=_DECISION)
    async def resolve(self, request: Request) -> to.Resolved:
        backend, document = self._backend, await posted_document(request)
        sequence = document.get("sequence")
        if sequence is not None and (type(sequence) is not int or not 0 <= sequence <= THROUGH_MAX):  # True is an int
            raise ValueError("sequence must be the object's number, as it is listed")
        return await backend.resolve(_key(posted_text(document, "object")), posted_text(document, "decision"), sequence)

    @operation(
        "POST /api/v1/writeback/abort",
        "Abort open uploads.",
        to.AbortedDocument,
        {**_ASKED, **KIND},
        body=body(upload_ids=_UPLOAD_IDS),
    )
    async def abort(self, request: Request) -> to.AbortedDocument:
        backend, document = self._backend, await posted_document(request)
        upload_ids = document.get("upload_ids")
        if not isinstance(upload_ids, list) or not all(isinstance(one, str) for one in upload_ids):
            raise ValueError("the document must say upload_ids, as a list of strings")
        if not 1 <= len(upload_ids) <= ABORTS_MAX:
            raise ValueError(f"upload_ids must be 1 to {ABORTS_MAX}")
        return await backend.abort(upload_ids)


async def posted_document(request: Request) -> dict[str, Any]:
    document = await posted_json(request)
    if not isinstance(document, dict):
        raise ValueError("the document must be a JSON object")
    return document


def posted_text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise ValueError(f"the document must say {name}, as a string")
    return value


def _prefix(request: Request) -> Prefix:
    return Prefix.parse(request.query_params.get("prefix", "s3://"))


def _page(request: Request) -> tuple[Prefix, str, int]:
    """Return the prefix, the place behind which the page begins, and how many entries it has at most."""
    prefix, limit = _prefix(request), number_of(request, "limit", 1, PAGE_MAX, PAGE)
    return prefix, request.query_params.get("after", ""), limit


def _key(name: str) -> ObjectKey:
    parsed = Prefix.parse(name)
    if not parsed.bucket or not parsed.key_prefix:
        raise ValueError("the object must be s3://bucket/key")
    return ObjectKey(parsed.bucket, parsed.key_prefix)
