"""Requests of late, as a part of the OpenAPI document."""

from __future__ import annotations

from typing import Any

_TEXT = {"type": ["string", "null"]}
_COMMON = {
    "process": {"type": "string", "description": "worker0, worker1, … or background"},
    "at": {"type": "number", "description": "when it was over, in seconds since 1970-01-01 UTC"},
    "bucket": _TEXT,
    "key": {"type": ["string", "null"], "description": "at most 200 bytes: the middle of a longer one is left out"},
    "slot": {"type": "string", "description": "none: refused before it was looked up"},
    "seconds": {"type": "number"},
}
_REQUEST = {
    "type": "object",
    "properties": {
        **_COMMON,
        "operation": {"type": "string"},
        "status": {"type": "string", "description": "the HTTP status, client-left or broken-off"},
        "cache": {"type": ["string", "null"], "description": "as in x-forebay-cache"},
        "reason": {"type": ["string", "null"], "description": "of a miss"},
        "error": {"type": ["string", "null"], "description": "S3's code, where the gateway has answered with it"},
        "sent_bytes": {"type": "integer"},
        "received_bytes": {"type": "integer"},
        "caller": {"type": "string", "description": "the credential, as in forebay_caller_requests_total"},
        "request_id": {"type": "string"},
    },
}
_TRY = {
    "type": "object",
    "properties": {
        **_COMMON,
        "method": {"type": "string"},
        "purpose": {"type": "string", "description": "as in forebay_origin_requests_total"},
        "status": {"type": "string", "description": "the HTTP status, or unreachable: there was no answer"},
    },
}
REQUESTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "slowest": {
            "type": "array",
            "items": _REQUEST,
            "description": "of the last five minutes, the slowest first",
        },
        "errors": {
            "type": "array",
            "items": _REQUEST,
            "description": "answered 5xx, or not to the end; the latest first",
        },
        "refusals": {
            "type": "array",
            "items": _REQUEST,
            "description": "answered 4xx, but for 404, 412 and 416; the latest first",
        },
        "origin_failures": {
            "type": "array",
            "items": _TRY,
            "description": "tries of requests to the origin: answered 5xx or 429, or not at all; the latest first",
        },
    },
}
