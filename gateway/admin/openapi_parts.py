"""What the parts of the OpenAPI document share: how requests name things, and what answers always have."""

from __future__ import annotations

from typing import Any

PREFIX: dict[str, Any] = {
    "type": "string",
    "pattern": r"^s3://([^/]+(/[\s\S]*)?)?$",
    "examples": ["s3://bucket/prefix"],
    "description": "s3:// is everything",
}
PREFIX_OF_BUCKET: dict[str, Any] = {
    "type": "string",
    "pattern": r"^s3://[^/]+(/[\s\S]*)?$",
    "examples": ["s3://bucket/prefix"],
}
ALLOW_EMPTY = {"type": "boolean", "default": False, "description": "finding no object is no failure"}
OBJECT_NAME: dict[str, Any] = {
    "type": "string",
    "pattern": r"^s3://[^/]+/[\s\S]+$",
    "examples": ["s3://bucket/key"],
}
SNAPSHOT_NAME_SCHEMA: dict[str, Any] = {
    "type": "string",
    "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
    "examples": ["v1"],
}


def query(name: str, description: str, schema: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    """A parameter behind the question mark."""
    return {"name": name, "in": "query", "description": description, "required": required, "schema": schema}


def flag(name: str, description: str) -> dict[str, Any]:
    """One that is `true` or `false`."""
    return query(name, description, {"type": "boolean", "default": False})


def always_whole(schema: Any) -> Any:
    """A schema of answers whose objects always have every member that is named, but where `required` says which."""
    if isinstance(schema, list):
        return [always_whole(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: always_whole(value) for name, value in schema.items()}
    properties = found.get("properties")
    if isinstance(properties, dict) and "object" in found.get("type", ()):
        found.setdefault("required", list(properties))
    return found
