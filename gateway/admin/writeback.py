"""What the origin does not have yet, over the admin port: shown, flushed now, and decided about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import wraps
from typing import Any, Protocol, TypeAlias

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.admin.responses import content_type, flag, json_answer, number, posted, problem
from gateway.core.errors import BufferUnavailable, NothingPending, NotToBeDecided, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix

PAGE = 100
PAGE_MAX = 1000

THROUGH_MAX = 10**18 - 1
ABORTS_MAX = 100
"""Uploads that one request ends: each costs a commit."""


class WritebackBackend(Protocol):
    """Who sees to it (`writeback.admin.WritebackAdmin`). ValueError for a token or decision that is none."""

    async def summary(self) -> dict[str, Any]: ...

    async def objects(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]: ...

    async def problems(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]: ...

    async def uploads(self, prefix: Prefix, after: str, count: int) -> dict[str, Any]: ...

    async def checkpoints(self, prefix: Prefix, after: str, count: int, states: Collection[str]) -> dict[str, Any]: ...

    async def flush(self, prefix: Prefix) -> dict[str, Any]: ...

    async def progress(self, prefix: Prefix, through: int, *, is_name: bool = False) -> dict[str, Any]: ...

    async def versions(self, key: ObjectKey) -> dict[str, Any]: ...

    async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> dict[str, Any]: ...

    async def abort(self, upload_ids: Sequence[str]) -> dict[str, Any]: ...


class WritebackHolder:
    """Where the background process puts its backend once the cache directory is open."""

    def __init__(self) -> None:
        self.backend: WritebackBackend | None = None

    async def summary(self) -> dict[str, Any] | None:
        """What the origin does not have yet, slot by slot; None while that cannot be told."""
        try:
            return await self.backend.summary() if self.backend is not None else None
        except BufferUnavailable:
            return None


_Endpoint: TypeAlias = Callable[["WritebackApi", WritebackBackend, Request], Awaitable[Response]]


def _answered(endpoint: _Endpoint) -> Callable[[WritebackApi, Request], Awaitable[Response]]:
    """The endpoint, with what it raises as answers."""

    @wraps(endpoint)
    async def answered(api: WritebackApi, request: Request) -> Response:
        if api.holder.backend is None:
            return problem(503, "the cache directory is not open yet")
        try:
            return await endpoint(api, api.holder.backend, request)
        except ValueError as error:
            return problem(400, str(error))
        except NothingPending as error:
            return problem(404, str(error))
        except NotToBeDecided as error:
            return problem(409, str(error))
        except OriginUnreachable as error:
            return problem(502, str(error))
        except BufferUnavailable as error:
            return problem(503, str(error))
        except ClientDisconnect:
            return problem(400, "the request broke off")

    return answered


class WritebackApi:
    """The endpoints."""

    def __init__(self, holder: WritebackHolder) -> None:
        self.holder = holder

    @_answered
    async def show(self, backend: WritebackBackend, _request: Request) -> Response:
        return json_answer(await backend.summary())

    @_answered
    async def objects(self, backend: WritebackBackend, request: Request) -> Response:
        """A page of what is pending under `prefix`; with `problems=true`, of what does not get to the origin."""
        page = backend.problems if flag(request, "problems") else backend.objects
        return json_answer(await page(_asked_prefix(request), request.query_params.get("after", ""), _limit(request)))

    @_answered
    async def uploads(self, backend: WritebackBackend, request: Request) -> Response:
        """A page of the uploads that are open under `prefix`."""
        after = request.query_params.get("after", "")
        return json_answer(await backend.uploads(_asked_prefix(request), after, _limit(request)))

    @_answered
    async def checkpoints(self, backend: WritebackBackend, request: Request) -> Response:
        """A page of the checkpoints under `prefix`; with `state=failed,conflict`, of those in such a state."""
        after, states = request.query_params.get("after", ""), request.query_params.get("state", "")
        asked = [state for state in states.split(",") if state]
        return json_answer(await backend.checkpoints(_asked_prefix(request), after, _limit(request), asked))

    @_answered
    async def flush(self, backend: WritebackBackend, request: Request) -> Response:
        """`{"prefix": "s3://bucket/prefix"}`: try all of it now that is pending by now."""
        document = await _posted(request)
        if document is None:
            return problem(415, "Content-Type must be application/json")
        return json_answer(await backend.flush(Prefix.parse(_text(document, "prefix"))), 202)

    @_answered
    async def progress(self, backend: WritebackBackend, request: Request) -> Response:
        """What is left of what was acknowledged as `through` or before it."""
        through = number(request, "through", 0, THROUGH_MAX)
        is_name = flag(request, "is_name")
        return json_answer(await backend.progress(_asked_prefix(request), through, is_name=is_name))

    @_answered
    async def versions(self, backend: WritebackBackend, request: Request) -> Response:
        """`?object=s3://bucket/key`: what this node has, and what the origin has, so that somebody can decide."""
        return json_answer(await backend.versions(_key(request.query_params.get("object", ""))))

    @_answered
    async def resolve(self, backend: WritebackBackend, request: Request) -> Response:
        """`{"object": "s3://bucket/key", "decision": "keep-ours"}`: decide what is to become of it."""
        document = await _posted(request)
        if document is None:
            return problem(415, "Content-Type must be application/json")
        sequence = document.get("sequence")
        if sequence is not None and (type(sequence) is not int or not 0 <= sequence <= THROUGH_MAX):  # True is an int
            raise ValueError("sequence must be the object's number, as it is listed")
        return json_answer(
            await backend.resolve(_key(_text(document, "object")), _text(document, "decision"), sequence)
        )

    @_answered
    async def abort(self, backend: WritebackBackend, request: Request) -> Response:
        """`{"upload_ids": ["..."]}`: end these open uploads, here and at the origin."""
        document = await _posted(request)
        if document is None:
            return problem(415, "Content-Type must be application/json")
        upload_ids = document.get("upload_ids")
        if not isinstance(upload_ids, list) or not all(isinstance(one, str) for one in upload_ids):
            raise ValueError("the document must say upload_ids, as a list of strings")
        if not 1 <= len(upload_ids) <= ABORTS_MAX:
            raise ValueError(f"upload_ids must be 1 to {ABORTS_MAX}")
        return json_answer(await backend.abort(upload_ids))


async def _posted(request: Request) -> dict[str, Any] | None:
    """The document of a request; None when it is of another type, ValueError when it is none."""
    if content_type(request) != "application/json":
        return None
    document: Any = orjson.loads(await posted(request))
    if not isinstance(document, dict):
        raise ValueError("the document must be a JSON object")
    return document


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise ValueError(f"the document must say {name}, as a string")
    return value


def _asked_prefix(request: Request) -> Prefix:
    return Prefix.parse(request.query_params.get("prefix", "s3://"))


def _limit(request: Request) -> int:
    return number(request, "limit", 1, PAGE_MAX, PAGE)


def _key(name: str) -> ObjectKey:
    parsed = Prefix.parse(name)
    if not parsed.bucket or not parsed.key_prefix:
        raise ValueError("the object must be s3://bucket/key")
    return ObjectKey(parsed.bucket, parsed.key_prefix)
