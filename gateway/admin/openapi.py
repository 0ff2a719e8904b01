"""The OpenAPI 3.1 document of the admin port, made of its operations and their documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from gateway import __version__
from gateway.admin.operations import JSON_TYPE, Operation, Schema
from gateway.api.documents import Document

_NOT_TOLD = ("title", "default")
"""Keywords that say nothing about an answer."""


def document_of(operations: Iterable[Operation]) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _described(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forebay admin port", "version": __version__},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


def _described(one: Operation) -> dict[str, Any]:
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
