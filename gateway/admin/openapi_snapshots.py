"""What the admin port offers about snapshots, as a part of the OpenAPI document."""

from __future__ import annotations

from typing import Any

from gateway.admin.media_types import LINES_TYPE
from gateway.admin.openapi_parts import ALLOW_EMPTY, PREFIX_OF_BUCKET, SNAPSHOT_NAME_SCHEMA, flag, query

SNAPSHOT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "prefix": {"type": "string", "description": "s3://bucket/prefix"},
        "origin": {"type": "string", "description": "where it was listed"},
        "objects": {"type": "integer"},
        "bytes": {"type": "integer", "description": "of all objects together"},
        "started_at": {"type": "number", "description": "when the listing began, seconds since 1970-01-01 UTC"},
        "ended_at": {"type": "number", "description": "when it ended: an object is as it was at some time in between"},
        "digest": {"type": "string", "description": "SHA-256 over all keys, ETags and sizes"},
        "problem": {"type": ["string", "null"], "description": "why it cannot be used; then the rest may be missing"},
        "slots": {"type": "array", "items": {"type": "string"}, "description": "the slots that it freezes"},
    },
    "required": ["name", "problem", "slots"],
}
_SNAPSHOTS = {"type": "object", "properties": {"snapshots": {"type": "array", "items": SNAPSHOT}}}
_NAME_AND_PREFIX = {
    "type": "object",
    "properties": {"name": SNAPSHOT_NAME_SCHEMA, "prefix": PREFIX_OF_BUCKET, "allow_empty": ALLOW_EMPTY},
    "required": ["name", "prefix"],
}
_NAMED = {"type": "object", "properties": {"name": {"type": "string"}}}
_LINES = {LINES_TYPE: {"schema": {"type": "string", "description": "one JSON document a line"}}}
_SECURITY: list[dict[str, list[str]]] = [{"token": []}, {}]

_MISSING = {"404": {"description": "There is no snapshot of that name."}}
_UNUSABLE = {"409": {"description": "It is damaged, or of another version."}}
_TAKEN = {"409": {"description": "There is one of that name, or it is being made."}}
_REFUSED = {"400": {"description": "What is given is wrong; the message says where."}}
_CLOSED = {"503": {"description": "The cache directory is not open."}}


def snapshot_paths(job: dict[str, Any], guarded: dict[str, Any]) -> dict[str, Any]:
    """The paths; `job` is how jobs are described, `guarded` how refusals of the guard are."""
    one = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": SNAPSHOT_NAME_SCHEMA}]}
    refusals = guarded | _REFUSED | _CLOSED
    kind = {"415": {"description": "Another content type."}}
    busy = {"429": {"description": "Too many jobs are running."}}
    made = _does("Freeze what is there now.", "202", _json(job), refusals | _TAKEN | kind | busy)
    put = _does("Make one of JSON lines.", "201", _json(SNAPSHOT), refusals | _TAKEN | kind)
    forced = {"parameters": [flag("force", "true: though it freezes a slot")]}
    compared = {"parameters": [query("with", "the name of another; without it the bucket now", SNAPSHOT_NAME_SCHEMA)]}
    gone = _does("Delete it for good.", "200", _json(_NAMED), refusals | _MISSING | _IN_USE) | forced
    different = _does("What is different.", "200", _LINES, refusals | _MISSING | _UNUSABLE) | compared
    return {
        "/api/v1/snapshots": {
            "get": _does("The snapshots, by name.", "200", _json(_SNAPSHOTS), guarded | _CLOSED),
            "post": made | _body(_json(_NAME_AND_PREFIX)),
        },
        "/api/v1/snapshots/{name}": one
        | {
            "get": _does("One snapshot.", "200", _json(SNAPSHOT), refusals | _MISSING),
            "put": put | _body(_LINES),
            "delete": gone,
        },
        "/api/v1/snapshots/{name}/objects": one
        | {"get": _does("Its objects.", "200", _LINES, refusals | _MISSING | _UNUSABLE)},
        "/api/v1/snapshots/{name}/diff": one | {"get": different},
    }


_IN_USE = {"409": {"description": "It freezes a slot."}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _does(summary: str, status: str, content: dict[str, Any], refusals: dict[str, Any]) -> dict[str, Any]:
    responses = {status: {"description": summary, "content": content}} | refusals
    return {"summary": summary, "responses": responses, "security": _SECURITY}


def _body(content: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": content}}
