"""Operations of the admin API, as their handlers declare them: the gateway routes by them, OpenAPI describes them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import orjson
from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway import __version__
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


class RefusedRequest(Exception):
    """The request is not carried out; `status` is what HTTP calls the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def json_answer(
    document: Document | dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    if isinstance(document, Document):
        body = document.model_dump_json(indent=2, exclude_unset=True).encode() + b"\n"
    else:
        body = orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"
    return Response(body, status, {"cache-control": "no-store"} | (headers or {}), "application/json")


def problem(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return json_answer({"error": message}, status, headers)


DOCUMENT_BYTES_MAX = 64 * 1024


async def posted(request: Request) -> bytes:
    """Return the body of a request that brings a small document; raise ValueError if it is too long."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > DOCUMENT_BYTES_MAX:
            raise ValueError("the document is too long")
    return body


async def posted_json(request: Request) -> Any:
    """Return the document of a request; raise RefusedRequest for another type, ValueError for what is no JSON."""
    if content_type(request) != "application/json":
        raise RefusedRequest(415, "Content-Type must be application/json")
    return orjson.loads(await posted(request))


def flag(request: Request, name: str) -> bool:
    """Return a parameter that is `true` or `false` (also if it is missing); raise ValueError for anything else."""
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise ValueError(f"{name} must be true or false")
    return given == "true"


_NUMBER = re.compile("[0-9]{1,18}")


def number_of(request: Request, name: str, least: int, most: int, default: int | None = None) -> int:
    """Return a parameter that is a whole number in plain digits; ValueError."""
    given = request.query_params.get(name, "" if default is None else str(default))
    if not _NUMBER.fullmatch(given) or not least <= int(given) <= most:
        raise ValueError(f"{name} must be a number from {least} to {most}")
    return int(given)


def content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


JSON_TYPE = "application/json"

Schema: TypeAlias = dict[str, Any]
Refusals: TypeAlias = Mapping[int, str]
Answer: TypeAlias = type[Document] | Mapping[str, Schema]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Document | Response]])


class AdminOperation(NamedTuple):
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

_declared: dict[Any, AdminOperation] = {}


def operation(
    name: str, summary: str, answer: Answer, refusals: Refusals = TOKEN, status: int = 200, **more: Any
) -> Callable[[Handler], Handler]:
    """Declare the operation that a handler carries out; `more` are other fields of `AdminOperation`."""

    def declare(handler: Handler) -> Handler:
        _declared[handler] = AdminOperation(name, summary, answer, refusals, status, **more)
        return handler

    return declare


def operations_of(kind: type) -> Iterator[tuple[str, AdminOperation]]:
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


def answering(one: AdminOperation, handler: Callable[[Request], Awaitable[Document | Response]]) -> Endpoint:
    """Make an endpoint: the handler's document, and what it raises, become answers."""

    async def endpoint(request: Request) -> Response:
        try:
            found = await handler(request)
        except RefusedRequest as refusal:
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


_NOT_TOLD = ("title", "default")
"""Keywords that say nothing about an answer."""


def document_of(operations: Iterable[AdminOperation]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _described(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forebay admin port", "version": __version__},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


def _described(one: AdminOperation) -> dict[str, Any]:
    content = _content({JSON_TYPE: _schema(one.answer)} if isinstance(one.answer, type) else one.answer)
    answers = {one.status: "All processes keep to it." if one.also else one.summary, **one.also}
    if one.is_open:
        answers |= one.refusals
    responses: dict[str, Any] = {str(status): {"description": text} for status, text in one.refusals.items()}
    responses |= {str(status): {"description": text, "content": content} for status, text in answers.items()}
    found = {"summary": one.summary, "responses": responses, "security": [] if one.is_open else [{"token": []}, {}]}
    if one.parameters:
        found["parameters"] = list(one.parameters)
    if one.body is not None:
        found["requestBody"] = {"required": True, "content": _content(one.body)}
    return found


def _content(schemas: Mapping[str, Schema]) -> dict[str, Any]:
    return {media_type: {"schema": schema} for media_type, schema in schemas.items()}


class _Schema(GenerateJsonSchema):
    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        """Say `"type": ["string", "null"]`, and `anyOf` where the type is not one word."""
        inner = self.generate_inner(schema["schema"])
        if isinstance(inner.get("type"), str):
            return inner | {"type": [inner["type"], "null"]}
        return {"anyOf": [inner, {"type": "null"}]}


@cache
def _schema(document: type[Document]) -> Schema:
    """Return the schema of an answer, with the schemas of its parts in their places."""
    found = document.model_json_schema(mode="serialization", schema_generator=_Schema)
    definitions = found.pop("$defs", {})

    def whole(schema: Any) -> Any:
        if isinstance(schema, list):
            return [whole(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        told = {name: value for name, value in schema.items() if name not in _NOT_TOLD and value is not True}
        ref = told.pop("$ref", "").rpartition("/")[2]
        if ref:
            told = whole(definitions[ref]) | told
        told = {name: value if name == "properties" else whole(value) for name, value in told.items()}
        match told.get("anyOf"):
            case [{"type": "object", **rest}, {"type": "null"}]:
                del told["anyOf"]
                told = {"type": ["object", "null"], **rest, **told}
        if "properties" in told:
            told["properties"] = {name: whole(value) for name, value in told["properties"].items()}
            told.setdefault("required", list(told["properties"]))
        return told

    schema: Schema = whole(found)
    return schema
