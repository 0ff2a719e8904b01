"""An operation of the admin API, as its handler declares it: the gateway routes by it, OpenAPI describes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.admin.responses import Refused, json_answer, problem
from gateway.api.documents import PREFIX_OF_BUCKET, Document
from gateway.core.errors import (
    BufferUnavailable,
    NoSuchSnapshot,
    NothingPending,
    NotToBeDecided,
    OriginUnreachable,
    PinRefused,
    SnapshotError,
    StoreUnavailable,
)
from gateway.jobs.runner import TooManyJobs
from gateway.jobs.snapshot_service import BadLine
from gateway.jobs.worklist import BadManifest

JSON_TYPE = "application/json"

Schema: TypeAlias = dict[str, Any]
Refusals: TypeAlias = Mapping[int, str]
Answer: TypeAlias = type[Document] | Mapping[str, Schema]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Document | Response]])


class Operation(NamedTuple):
    """A method of a path. `answer` is a document, or the schema of each media type; `status` that of success.

    `also` are other statuses that come with the answer; an operation that `is_open` needs no token.
    """

    name: str
    summary: str
    answer: Answer
    refusals: Refusals
    status: int = 200
    parameters: Sequence[Schema] = ()
    body: Mapping[str, Schema] | None = None
    also: Mapping[int, str] = MappingProxyType({})
    is_open: bool = False

    @property
    def method(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def path(self) -> str:
        return self.name.partition(" ")[2]


TOKEN: Refusals = {401: "The request lacks the token, or has another one than admin.token."}
GUARDED: Refusals = {**TOKEN, 403: "Without admin.token, the Host header must name this machine."}
CLOSED: Refusals = {503: "The cache directory is not open."}
KIND: Refusals = {415: "Another content type."}
BUSY: Refusals = {429: "Too many jobs are running."}

TEXT: Schema = {"type": "string"}
OBJECT: Schema = TEXT | {"pattern": r"^s3://[^/]+/[\s\S]+$", "examples": ["s3://bucket/key"]}


def parameter(place: str, name: str, schema: Schema, description: str = "", *, required: bool = False) -> Schema:
    told = {"description": description} if description else {}
    return {"name": name, "in": place, "required": required, "schema": schema} | told


def query(name: str, description: str, schema: Schema, *, required: bool = False) -> Schema:
    return parameter("query", name, schema, description, required=required)


def flag_of(name: str, description: str) -> Schema:
    return query(name, description, {"type": "boolean", "default": False})


def number(least: int, most: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most} | more


def body(*required: str, **properties: Schema) -> dict[str, Schema]:
    """Describe a small document that a request brings; it has all members unless some are named as required."""
    return {JSON_TYPE: {"type": "object", "properties": properties, "required": list(required or properties)}}


OF_OBJECT = (query("object", "s3://bucket/key", OBJECT, required=True),)
BUCKET_BODY = body(prefix=PREFIX_OF_BUCKET)
ALLOW_EMPTY: Schema = {"type": "boolean", "default": False, "description": "finding no object is no failure"}

_declared: dict[Any, Operation] = {}


def operation(
    name: str, summary: str, answer: Answer, refusals: Refusals = TOKEN, status: int = 200, **more: Any
) -> Callable[[Handler], Handler]:
    """Declare the operation that a handler carries out; `more` are other fields of `Operation`."""

    def declare(handler: Handler) -> Handler:
        _declared[handler] = Operation(name, summary, answer, refusals, status, **more)
        return handler

    return declare


def operations_of(kind: type) -> Iterator[tuple[str, Operation]]:
    """Yield the handlers of a class, by name, with their operations."""
    return ((name, _declared[handler]) for name, handler in vars(kind).items() if handler in _declared)


_STATUSES: dict[type[Exception], int] = {
    BadLine: 400,
    BadManifest: 400,
    ClientDisconnect: 400,
    ValueError: 400,
    NoSuchSnapshot: 404,
    NothingPending: 404,
    NotToBeDecided: 409,
    PinRefused: 409,
    SnapshotError: 409,
    TooManyJobs: 429,
    OriginUnreachable: 502,
    BufferUnavailable: 503,
    StoreUnavailable: 503,
}
"""The status of each error; the first class that fits counts."""

_ALWAYS = (409, 503)
"""Any operation may answer so; with 400 or 502 only one that says so."""


def answering(one: Operation, handler: Callable[[Request], Awaitable[Document | Response]]) -> Endpoint:
    """Make an endpoint: the handler's document, and what it raises, become answers."""

    async def endpoint(request: Request) -> Response:
        try:
            found = await handler(request)
        except Refused as refusal:
            return problem(refusal.status, str(refusal))
        except ValidationError:  # of a document that is made here: no fault of the client
            raise
        except tuple(_STATUSES) as error:
            status = next(status for kind, status in _STATUSES.items() if isinstance(error, kind))
            if status not in (*one.refusals, *_ALWAYS):
                raise
            return problem(status, "the request broke off" if isinstance(error, ClientDisconnect) else str(error))
        return found if isinstance(found, Response) else json_answer(found, one.status)

    return endpoint
