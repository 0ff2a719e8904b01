"""What the admin port offers about the write-back buffer, as a part of the OpenAPI document."""

from __future__ import annotations

from typing import Any

from gateway.admin.openapi_parts import OBJECT_NAME, PREFIX, flag, query

_TIME = {"type": ["number", "null"], "description": "seconds since 1970-01-01 UTC"}
_SUMS = {
    "objects": {"type": "integer", "description": "acknowledged here, and not at the origin; deletions too"},
    "bytes": {"type": "integer", "description": "of these objects"},
    "oldest_acknowledged_at": _TIME,
    "open_uploads": {"type": "integer"},
    "open_upload_bytes": {"type": "integer", "description": "what parts of open uploads take here"},
    "conflicts": {"type": "integer", "description": "others have changed the object at the origin"},
    "damaged": {"type": "integer"},
    "failing": {"type": "integer", "description": "refused, and tried again and again"},
    "waiting_for_bucket": {"type": "integer", "description": "tried in vain: the bucket does not answer, or is busy"},
}
_STAGED = {"type": "integer", "description": "what is taken of the buffer, by parts of open uploads too"}
_LOCAL = {
    "local_objects": {"type": "integer", "description": "kept here only, and not to be sent; not among objects"},
    "local_bytes": {"type": "integer", "description": "of these"},
}
_SLOT = {
    "type": "object",
    "properties": {
        "slot": {"type": "string"},
        "buffer_bytes": {"type": ["integer", "null"], "description": "null: it does not write back any more"},
        "staged_bytes": _STAGED,
        **_LOCAL,
        **_SUMS,
        "oldest_upload_touched_at": {**_TIME, "description": "the last part of the one left alone longest"},
        "reason": {"type": ["string", "null"], "description": "why the last of its flushes failed that do"},
    },
}
_HONOURED = {"enum": ["yes", "ignored", "refused", "unknown"]}
_BUCKET = {
    "type": "object",
    "properties": {
        "bucket": {"type": "string"},
        "md5_etags": {"type": "boolean", "description": "otherwise nothing is absorbed"},
        "conditions": {
            "type": "object",
            "properties": {"put": _HONOURED, "complete": _HONOURED, "delete": _HONOURED},
            "description": "what the bucket makes of a condition on such a request",
        },
    },
}
_JOURNAL_PROBLEM = {
    "type": ["string", "null"],
    "description": "why nothing of what the origin takes can be written down: then nothing is flushed",
}
SUMMARY = {
    "type": ["object", "null"],
    "properties": {
        **_SUMS,
        **_LOCAL,
        "staged_bytes": _STAGED,
        "journal_problem": _JOURNAL_PROBLEM,
        "slots": {"type": "array", "items": _SLOT},
        "buckets": {"type": "array", "items": _BUCKET},
    },
}
OBJECT = {
    "type": "object",
    "properties": {
        "bucket": {"type": "string"},
        "key": {"type": "string"},
        "sequence": {"type": "integer", "description": "never given twice"},
        "slot": {"type": "string"},
        "state": {
            "enum": ["waiting", "sending", "local", "waiting for the bucket", "failed", "conflict", "damaged"],
            "description": "local: kept here only, and not to be sent",
        },
        "bytes": {"type": "integer"},
        "etag": {"type": ["string", "null"], "description": "as the origin will show it"},
        "deleted": {"type": ["boolean", "null"], "description": "the key is to be deleted at the origin"},
        "acknowledged_at": _TIME,
        "parts": {"type": "integer"},
        "parts_sent": {"type": "integer"},
        "bytes_sent": {"type": "integer", "description": "of the parts that the origin has"},
        "failures": {"type": "integer", "description": "in a row"},
        "failing_since": {**_TIME, "description": "null while only the bucket keeps it waiting"},
        "waits_for": {"type": ["integer", "null"], "description": "the sequence of what must be there before"},
        "reason": {"type": ["string", "null"], "description": "of the last failure, or what is damaged"},
    },
}
UPLOAD = {
    "type": "object",
    "properties": {
        "bucket": {"type": "string"},
        "key": {"type": "string"},
        "upload_id": {"type": "string"},
        "slot": {"type": "string"},
        "initiated_at": _TIME,
        "touched_at": _TIME,
        "parts": {"type": "integer"},
        "parts_sent": {"type": "integer"},
        "bytes": {"type": "integer", "description": "what they take here"},
        "reason": {"type": ["string", "null"], "description": "of the last failure"},
    },
}
_RESTORE = {
    "type": "object",
    "properties": {
        "state": {
            "enum": ["reading", "stalled", "over"],
            "description": "stalled: nothing has come for a minute, and files lag behind others of their kind",
        },
        "began_at": _TIME,
        "last_at": {**_TIME, "description": "the last byte that was sent"},
        "files": {"type": "integer", "description": "those of which something was read, and all of their kinds"},
        "files_begun": {"type": "integer", "description": "those of which something was read"},
        "files_behind": {"type": "integer", "description": "those that lag"},
        "bytes": {"type": "integer", "description": "of these files"},
        "bytes_read": {"type": "integer", "description": "of each file as much as it has at most"},
        "behind": {
            "type": "object",
            "properties": {
                "ranks": {"type": "array", "items": {"type": "integer"}, "description": "that wrote these objects"},
                "objects": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "key": {"type": "string"},
                            "bytes": {"type": "integer"},
                            "bytes_read": {"type": "integer"},
                            "last_at": {"type": ["number", "null"], "description": "null: nothing was read"},
                        },
                    },
                },
            },
            "description": "the first 100 that lag, those first that were read least",
        },
    },
}
_CHECKPOINT_STATES = [
    *("writing", "stalled", "acknowledged", "flushing", "durable", "local", "waiting for the bucket", "failed"),
    "conflict",
]
CHECKPOINT = {
    "type": "object",
    "properties": {
        "bucket": {"type": "string"},
        "prefix": {"type": "string", "description": "its directory; the key, where it is one object"},
        "step": {"type": ["integer", "null"]},
        "layout": {"type": "string", "examples": ["dcp", "huggingface", "pattern"]},
        "slot": {"type": "string"},
        "state": {"enum": _CHECKPOINT_STATES},
        "files": {"type": "integer", "description": "acknowledged objects"},
        "bytes": {"type": "integer", "description": "of these"},
        "bytes_flushed": {"type": "integer", "description": "what the origin has of them, parts too"},
        "bytes_local": {"type": "integer", "description": "what is not to be sent"},
        "ranks": {"type": "integer", "description": "how many have written something, as names tell"},
        "ranks_seen": {"type": "array", "items": {"type": "integer"}, "description": "the first 1000"},
        "began_at": {**_TIME, "description": "the first byte of the save"},
        "last_at": {**_TIME, "description": "the last thing that came of it"},
        "save_seconds": {
            "type": ["number", "null"],
            "description": "from the first byte to the last acknowledgement; null: nothing is acknowledged",
        },
        "flush_seconds_left": {
            "type": ["number", "null"],
            "description": "at the rate of the last minute; null: nothing is left, or the rate is not known yet",
        },
        "exposed_seconds": {
            "type": ["number", "null"],
            "description": "since the oldest object was acknowledged that only this node has; null: none is",
        },
        "kept": {"type": "boolean", "description": "it stays in the cache, by the slot's keep_last"},
        "kept_reason": {"type": ["string", "null"], "description": "why it does not, though it is to"},
        "missing": {
            "type": "object",
            "properties": {
                "ranks": {"type": "array", "items": {"type": "integer"}, "description": "the first 100"},
                "objects": {"type": "array", "items": {"type": "string"}, "description": "manifests and shards"},
                "open_uploads": {"type": "integer"},
            },
            "description": "what the save lacks still",
        },
        "reason": {"type": ["string", "null"], "description": "of a failure or conflict, or what a manifest waits for"},
        "restore": {
            "anyOf": [_RESTORE, {"type": "null"}],
            "description": "how far it was read through this gateway the last time; null: not within the last hour",
        },
    },
}
_NEXT = {"type": ["string", "null"], "description": "`after` of the next page; null: this is the last"}
_OBJECTS = {"type": "object", "properties": {"objects": {"type": "array", "items": OBJECT}, "next": _NEXT}}
_UPLOADS = {"type": "object", "properties": {"uploads": {"type": "array", "items": UPLOAD}, "next": _NEXT}}
_CHECKPOINTS = {
    "type": "object",
    "properties": {
        "checkpoints": {"type": "array", "items": CHECKPOINT},
        "next": _NEXT,
        "ungrouped": {
            "type": ["object", "null"],
            "properties": {
                "objects": {"type": "integer", "description": "1000 at most are counted"},
                "first": {"type": "string", "description": "one of them, as s3://bucket/key"},
                "slot": {"type": ["string", "null"], "description": "its slot, while it is pending"},
            },
            "description": "where there is no checkpoint, and no state was asked for: what this node has acknowledged "
            "under the prefix that belongs to none; null: nothing of late",
        },
    },
}
_PROGRESS = {
    "type": "object",
    "properties": {
        "prefix": PREFIX,
        "is_name": {
            "type": "boolean",
            "description": "it is about the object of that name, and all under it as under a directory",
        },
        "awaiting_files": {"type": "integer", "description": "manifests whose files are not all at the origin"},
        "files_missing": {"type": "integer", "description": "of these"},
        "through": {"type": "integer", "description": "what was acknowledged later does not count"},
        "local_objects": _LOCAL["local_objects"],
        **_SUMS,
        "bytes_sent": {"type": "integer"},
        "stuck": {"type": "integer", "description": "conflicts, damaged objects, and what waits behind these"},
        "held_up": {"type": "integer", "description": "what is stuck, what fails, and what waits behind these"},
        "longest_attempt_seconds": {
            "type": ["number", "null"],
            "description": "since the first of the attempts began that are under way; null: none is",
        },
        "journal_problem": _JOURNAL_PROBLEM,
        "origin_away": {"type": "boolean", "description": "it has not carried out several requests in a row"},
        "problems": {"type": "array", "items": OBJECT, "description": "the first of them"},
    },
}
_FLUSH = {"type": "object", "properties": {"prefix": PREFIX}, "required": ["prefix"]}
_DECISION = {"enum": ["keep-ours", "keep-theirs", "discard"]}
_RESOLVE = {
    "type": "object",
    "properties": {
        "object": OBJECT_NAME,
        "decision": _DECISION,
        "sequence": {"type": ["integer", "null"], "description": "it must be this very object"},
    },
    "required": ["object", "decision"],
}
_RESOLVED = {
    "type": "object",
    "properties": {
        "object": {"type": "string"},
        "sequence": {"type": "integer"},
        "decision": _DECISION,
        "etag_at_origin": {"type": ["string", "null"], "description": "keep-ours: what is overwritten, if it is there"},
    },
}
_AT_ORIGIN = {"bytes": {"type": ["integer", "null"]}, "etag": {"type": "string"}, "modified_at": _TIME}
_VERSIONS = {
    "type": "object",
    "properties": {
        "object": OBJECT,
        "at_origin": {"type": ["object", "null"], "properties": _AT_ORIGIN, "description": "null: nothing is there"},
    },
}
_UPLOAD_IDS = {"type": "array", "items": {"type": "string"}}
_ABORT = {
    "type": "object",
    "properties": {"upload_ids": {**_UPLOAD_IDS, "minItems": 1, "maxItems": 100}},
    "required": ["upload_ids"],
}
_ABORTED = {
    "type": "object",
    "properties": {
        "aborted": _UPLOAD_IDS,
        "not_open": {**_UPLOAD_IDS, "description": "completed or aborted before, or unknown"},
    },
}
_SECURITY: list[dict[str, list[str]]] = [{"token": []}, {}]
_WRONG = {"400": {"description": "What is given is wrong; the message says how."}}
_KIND = {"415": {"description": "Another content type."}}
_CLOSED = {"503": {"description": "The cache directory is not open, or the buffer cannot be read."}}


def writeback_paths(guarded: dict[str, Any]) -> dict[str, Any]:
    """The paths; `guarded` is how refusals of the guard are described."""
    asked = guarded | _WRONG | _CLOSED
    told = {
        **asked,
        **_KIND,
        "404": {"description": "Nothing is pending under the key, or another object by now."},
        "409": {"description": "It is on its way to the origin, or no conflict."},
        "502": {"description": "The origin does not say what it has."},
    }
    page = [
        query("prefix", "s3://bucket/prefix", {**PREFIX, "default": "s3://"}),
        query("after", "`next` of the page before", {"type": "string"}),
        query("limit", "how many", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}),
    ]
    name = query("object", "s3://bucket/key", OBJECT_NAME, required=True)
    problems = flag("problems", "true: only what does not get to the origin, the oldest first")
    one_state = f"({'|'.join(_CHECKPOINT_STATES)})"
    of_states = {"type": "string", "pattern": f"^({one_state}(,{one_state})*)?$"}
    state = query("state", "only those in a state, or in one of several: failed,conflict", of_states)
    number = {"type": "integer", "minimum": 0, "maximum": 10**18 - 1}
    through = query("through", "the number that POST has answered", number, required=True)
    is_name = flag("is_name", "true: as POST has answered it")
    return {
        "/api/v1/flush": {
            "post": _does("Flush now what is pending.", _PROGRESS, asked | _KIND, status="202", body=_FLUSH),
            "get": _does("What is left of it.", _PROGRESS, asked, parameters=[page[0], through, is_name]),
        },
        "/api/v1/writeback": {"get": _does("What only this node has, slot by slot.", SUMMARY, asked)},
        "/api/v1/writeback/objects": {
            "get": _does("What is pending.", _OBJECTS, asked, parameters=[*page, problems]),
        },
        "/api/v1/writeback/uploads": {"get": _does("Open uploads.", _UPLOADS, asked, parameters=page)},
        "/api/v1/checkpoints": {
            "get": _does("Checkpoints and their state.", _CHECKPOINTS, asked, parameters=[*page, state]),
        },
        "/api/v1/writeback/versions": {
            "get": _does("What is pending under a key, and what the origin has.", _VERSIONS, told, parameters=[name]),
        },
        "/api/v1/writeback/resolve": {"post": _does("Decide about an object.", _RESOLVED, told, body=_RESOLVE)},
        "/api/v1/writeback/abort": {"post": _does("Abort open uploads.", _ABORTED, asked | _KIND, body=_ABORT)},
    }


def _does(
    summary: str,
    schema: dict[str, Any],
    refusals: dict[str, Any],
    *,
    status: str = "200",
    body: dict[str, Any] | None = None,
    parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    answered = {status: {"description": summary, "content": _json(schema)}}
    operation: dict[str, Any] = {"summary": summary, "responses": answered | refusals, "security": _SECURITY}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    if parameters is not None:
        operation["parameters"] = parameters
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
