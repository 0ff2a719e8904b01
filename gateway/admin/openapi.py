"""What the admin port offers, as an OpenAPI 3.1 document."""

from __future__ import annotations

from typing import Any, get_args

from gateway import __version__
from gateway.admin.media_types import MANIFEST_TYPE
from gateway.admin.openapi_overview import overview_schema
from gateway.admin.openapi_parts import ALLOW_EMPTY, OBJECT_NAME, PREFIX_OF_BUCKET, always_whole, flag, query
from gateway.admin.openapi_requests import REQUESTS
from gateway.admin.openapi_snapshots import snapshot_paths
from gateway.admin.openapi_writeback import SUMMARY, writeback_paths
from gateway.admin.origin_check import OriginState
from gateway.admin.requests import LIMIT, LIMIT_MAX
from gateway.jobs.job import JobKind, JobState
from gateway.telemetry.metrics import DISK_STATES

_PROCESS = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "process_id": {"type": ["integer", "null"]},
        "ready": {"type": "boolean"},
        "restarts": {"type": "integer"},
        "generation": {"type": "integer", "description": "of the settings that it keeps to"},
        "hangs": {"type": "boolean", "description": "it has not answered for seconds; killed after 30"},
        "last_end": {"type": ["string", "null"], "description": "how it has ended unasked the last time"},
        "last_end_at": {"type": ["number", "null"], "description": "seconds since 1970-01-01 UTC"},
    },
}
_GATEWAY = {
    "type": ["object", "null"],
    "properties": {
        "version": {"type": "string"},
        "instance_id": {"type": "string"},
        "process_id": {"type": "integer"},
        "started_at": {"type": "number", "description": "seconds since 1970-01-01 UTC"},
        "s3_url": {"type": "string"},
        "admin_url": {"type": "string"},
        "directory": {"type": "string"},
        "closed": {"type": ["string", "null"], "description": "why the cache directory cannot be used"},
        "draining": {"type": "boolean"},
        "ready": {"type": "boolean"},
        "processes": {"type": "array", "items": _PROCESS},
        "config_file": {"type": ["string", "null"], "description": "the settings' file; null: there is none"},
        "generation": {"type": "integer", "description": "how often settings were changed since the start"},
        "settings_problem": {
            "type": ["string", "null"],
            "description": "why the configuration, read anew at the last SIGHUP, is not in force",
        },
    },
}
_ORIGIN_FOUND = {
    "endpoint_url": {"type": "string"},
    "region": {"type": "string"},
    "reachable": {"type": "boolean", "description": "it has answered a signed question, or refused it"},
    "state": {"enum": list(get_args(OriginState))},
    "problem": {"type": ["string", "null"], "description": "what is wrong, in words"},
}
_ORIGIN = {
    "type": "object",
    "properties": {
        **_ORIGIN_FOUND,
        "differing": {
            "type": "array",
            "description": "[[buckets]], and slots with origin_credentials",
            "items": {
                "type": "object",
                "properties": {
                    "prefix": {"type": "string"},
                    "slot": {"type": ["string", "null"], "description": "null: it is a bucket's"},
                    "credentials": {"type": "string", "description": "whose key signs, in words"},
                    **_ORIGIN_FOUND,
                },
            },
        },
    },
}
_FIGURES = {
    "usage_bytes": {"type": "integer"},
    "hit_bytes": {"type": "integer"},
    "miss_bytes": {"type": "integer"},
    "pinned_bytes": {"type": "integer", "description": "of usage_bytes"},
    "hit_ratio": {"type": ["number", "null"]},
}
_DISK_STATE = {
    "enum": list(DISK_STATES),
    "description": "the worst that any process has found; full, too, where no write finds room",
}
_DISK = {
    "type": "object",
    "properties": {
        "state": _DISK_STATE,
        "processes": {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "how many processes have found what",
        },
        "journal_failing_processes": {
            "type": "integer",
            "description": "of how many processes the write-back journal takes nothing now: they acknowledge and flush "
            "nothing until it is tried again with success",
        },
    },
}
_SCRUB = {
    "type": ["object", "null"],
    "description": "the scrubber's pass under way, or its last",
    "properties": {
        "started_at": {"type": "number", "description": "seconds since 1970-01-01 UTC"},
        "ended_at": {"type": ["number", "null"]},
        "next_at": {"type": "number"},
        "part_done": {"type": "number", "minimum": 0, "maximum": 1},
        "blocks": {"type": "integer"},
        "read_bytes": {"type": "integer"},
        "dropped_blocks": {"type": "integer"},
    },
}
_CACHE = {
    "type": "object",
    "properties": {
        "directory": {"type": "string"},
        "capacity_bytes": {"type": "integer"},
        "block_size_bytes": {"type": "integer"},
        "disk": _DISK,
        "scrub": _SCRUB,
        **_FIGURES,
    },
}
_SLOT = {
    "type": "object",
    "properties": {
        **{name: {"type": "string"} for name in ("name", "prefix", "mode", "eviction")},
        "capacity_bytes": {"type": "integer", "description": "guaranteed to the slot"},
        "capacity_limit_bytes": {"type": "integer", "description": "the slot never has more"},
        **_FIGURES,
    },
}
_FROZEN = {
    "type": "object",
    "properties": {
        "slot": {"type": "string"},
        "snapshot": {"type": "string"},
        "problem": {"type": ["string", "null"], "description": "why requests in the slot are refused"},
    },
}
_INDEX = {
    "type": "object",
    "properties": {
        "slot": {"type": "string"},
        "prefix": {"type": "string"},
        "refresh_seconds": {"type": ["number", "null"], "description": "null: crawled once"},
        "state": {"enum": ["starting", "inventory", "crawling", "waiting", "failing"]},
        "complete": {"type": "boolean", "description": "LIST of the prefix is answered without the origin"},
        "known_since": {"type": ["number", "null"], "description": "seconds since 1970-01-01 UTC: the oldest part"},
        "age_seconds": {"type": ["number", "null"], "description": "of the oldest part"},
        "started_at": {"type": ["number", "null"], "description": "of the crawl under way, or the last one"},
        "ended_at": {"type": ["number", "null"], "description": "of the last crawl that came to its end"},
        "next_at": {"type": ["number", "null"]},
        "keys": {
            "type": "integer",
            "description": "that the crawl under way, or the last one, has listed, and those that it need not list",
        },
        "pages": {"type": "integer"},
        "keys_before": {"type": ["integer", "null"], "description": "at the end of the last crawl"},
        "crawls": {"type": "integer", "description": "that have come to their end, since the gateway started"},
        "changed": {"type": "integer", "description": "keys that were found changed or gone"},
        "error": {"type": ["string", "null"]},
        "inventory": {"type": ["string", "null"], "description": "s3://bucket/path/manifest.json to begin with"},
        "inventory_error": {"type": ["string", "null"], "description": "why it could not be used"},
    },
}
_INDEXES = {"type": "object", "properties": {"indexes": {"type": "array", "items": _INDEX}}}
_STATUS = {
    "type": "object",
    "properties": {
        "gateway": _GATEWAY,
        "origin": _ORIGIN,
        "cache": _CACHE,
        "pins": {"type": "array", "items": {"type": "string", "description": "s3://bucket/prefix"}},
        "frozen": {"type": "array", "items": _FROZEN},
        "indexes": {"type": "array", "items": _INDEX},
        "writeback": SUMMARY,
        "slots": {"type": "array", "items": _SLOT},
    },
}
_SETTINGS = {"type": "object", "properties": {name: {"type": "object"} for name in ("settings", "defaults")}}
_HEALTH = {"type": "object", "properties": {"status": {"const": "ok"}}}
_READINESS = {
    "type": "object",
    "properties": {
        "ready": {"type": "boolean"},
        "draining": {"type": "boolean"},
        "workers_ready": {"type": "array", "items": {"type": "string"}},
        "origin_reachable": {"type": "boolean"},
        "origin_problem": {"type": ["string", "null"]},
        "frozen_slots_missing": {
            "type": "array",
            "items": {"type": "string"},
            "description": "slots whose snapshot is not there or cannot be used",
        },
        "cache_disk": _DISK_STATE,
    },
}


_JOB = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "kind": {"enum": [one.value for one in JobKind]},
        "name": {"type": "string", "description": "of the snapshot that is made"},
        "prefix": {"type": "string", "description": "empty where a manifest lists the objects"},
        "manifest": {"type": "boolean"},
        "state": {"enum": [one.value for one in JobState]},
        "created_at": {"type": "number", "description": "seconds since 1970-01-01 UTC"},
        "ended_at": {"type": ["number", "null"]},
        "place": {"type": "integer", "description": "how far in its list everything is done"},
        "objects_found": {"type": "integer"},
        "bytes_found": {"type": "integer"},
        "found_all": {"type": "boolean", "description": "the listing is complete"},
        "objects_done": {"type": "integer"},
        "bytes_done": {"type": "integer", "description": "of an eviction: what it has dropped, of every version"},
        "bytes_fetched": {"type": "integer", "description": "of bytes_done, what came from the origin for this job"},
        "bytes_per_second": {
            "type": ["number", "null"],
            "description": "over the last half minute, of what has arrived",
        },
        "seconds_left": {
            "type": ["number", "null"],
            "description": "at that rate; null: not everything is found, nothing moves, or the rate is not known yet",
        },
        "full": {"type": "boolean", "description": "the cache has no room for the rest"},
        "objects_failed": {"type": "integer"},
        "errors": {"type": "array", "items": {"type": "string"}},
        "allow_empty": {"type": "boolean", "description": "of a pin or a snapshot: finding no object is no failure"},
        "was_pinned": {"type": "boolean", "description": "before the job, so it stays pinned however the job ends"},
    },
}
_PINS = {"type": "object", "properties": {"pins": {"type": "array", "items": {"type": "string"}}}}
_PREFIX = {"type": "object", "properties": {"prefix": PREFIX_OF_BUCKET}, "required": ["prefix"]}
_PREFIX_TO_PIN = {**_PREFIX, "properties": {"prefix": PREFIX_OF_BUCKET, "allow_empty": ALLOW_EMPTY}}
_JOBS = {"type": "object", "properties": {"jobs": {"type": "array", "items": _JOB}}}
_EVENT = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "where in the document it stands"},
        "event": {"type": "string"},
        "bucket": {"type": "string"},
        "key": {"type": "string"},
        "outcome": {"enum": ["applied", "ignored", "malformed"]},
        "why": {"type": "string", "description": "where it was not applied"},
    },
    "required": ["place", "outcome"],
}
_EVENTS = {
    "type": "object",
    "properties": {
        **{name: {"type": "integer"} for name in ("applied", "ignored", "malformed")},
        "results": {"type": "array", "items": _EVENT},
    },
}


def describe() -> dict[str, Any]:
    """The document."""
    document = _described()
    for item in document["paths"].values():
        for method in item.keys() & {"get", "put", "post", "delete"}:
            item[method] |= {"responses": always_whole(item[method]["responses"])}
    return document


def _described() -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forebay admin port", "version": __version__},
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/healthz": _get("The background process answers.", "application/json", _HEALTH, guarded=False),
            "/readyz": _get("Every process serves; 503 otherwise.", "application/json", _READINESS, guarded=False),
            "/metrics": _get("Metrics in Prometheus' text format.", "text/plain", {"type": "string"}),
            "/": _get("The dashboard.", "text/html", {"type": "string"}, guarded=False),
            "/api/v1/status": _get("Processes, origin, cache and slots.", "application/json", _STATUS),
            "/api/v1/overview": _overview(),
            "/api/v1/settings": _get("Settings in force, and defaults.", "application/json", _SETTINGS),
            "/api/v1/warm": _start("Fetch objects that are not in the cache yet."),
            "/api/v1/evict": _start("Drop objects from the cache."),
            "/api/v1/pin": _start("Fetch everything under a prefix, and never evict it.", manifest=False),
            "/api/v1/unpin": _unpin(),
            "/api/v1/pins": _get("The pinned prefixes.", "application/json", _PINS),
            "/api/v1/events": _events(),
            "/api/v1/explain": _explain(),
            "/api/v1/indexes": _get("Indexes of slots.", "application/json", _INDEXES),
            "/api/v1/callers": _get("Callers, and which limit binds each.", "application/json", _CALLERS),
            "/api/v1/requests": _requests(),
            "/api/v1/slots": _get("Slots, and which limit binds each.", "application/json", _SLOTS),
            "/api/v1/slots/{name}": _slot(),
            "/api/v1/reload": _reload(),
            "/api/v1/jobs": _get("Jobs, the oldest first.", "application/json", _JOBS),
            "/api/v1/jobs/{job_id}": _job(),
            **snapshot_paths(_JOB, _GUARDED),
            **writeback_paths(_GUARDED),
            "/api/openapi.json": _get("This document.", "application/json", {"type": "object"}),
        },
    }


def _overview() -> dict[str, Any]:
    schema = overview_schema(_STATUS, _SLOTS, _JOB, _CALLERS)
    found = _get("What the dashboard shows, in one document.", "application/json", schema)
    found["get"]["parameters"] = [flag("history", "true: with the counts of the last 15 minutes")]
    found["get"]["responses"]["400"] = {"description": "history is neither true nor false."}
    return found


def _of_direction(what: str) -> dict[str, Any]:
    return {
        "type": "object",
        "description": f"{what} the origin, bytes per second",
        "properties": {
            "bytes_per_second": {"type": "integer", "description": "over the last second"},
            "guarantee": {"type": ["integer", "null"]},
            "ceiling": {"type": ["integer", "null"]},
            "share": {
                "type": ["integer", "null"],
                "description": "by its weight, if all slots that move something now wanted all they could get; null: "
                "the link's capacity is not set",
            },
            "waited_seconds": {
                "type": "object",
                "description": "that pieces of bodies were held back since the gateway started, all of them together",
                "properties": {"ceiling": {"type": "number"}, "link": {"type": "number"}},
            },
            "bound_by": {"enum": ["ceiling", "link", None], "description": "what held pieces back in the last second"},
        },
    }


_COUNT = {"type": "integer"}
_LINK = {
    "type": "object",
    "properties": {
        "capacity": {"type": ["integer", "null"], "description": "bytes per second; null: no limit, or not found yet"},
        "capacity_found": {"type": "boolean", "description": 'it is "auto": found out while the link is used'},
        "delay_seconds": {
            "type": ["number", "null"],
            "description": "by how much the last answers were later than without a queue, where that is found out",
        },
        "bytes_per_second": _COUNT,
    },
}
_SLOTS = {
    "type": "object",
    "properties": {
        "link": {"type": "object", "properties": {"read": _LINK, "write": _LINK}},
        "slots": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    **{name: {"type": "string"} for name in ("name", "prefix", "mode", "consistency", "write")},
                    "authorization": {"enum": ["gateway", "origin"]},
                    "weight": _COUNT,
                    "capacity": {
                        "type": "object",
                        "properties": {
                            "guaranteed_bytes": _COUNT,
                            "limit_bytes": {"type": ["integer", "null"]},
                            "used_bytes": _COUNT,
                            "reserved_bytes": {"type": "integer", "description": "for fills in progress"},
                            "pinned_bytes": {"type": "integer", "description": "of used_bytes"},
                            "borrowed_bytes": {"type": "integer", "description": "beyond what is guaranteed"},
                            "lendable_bytes": {"type": "integer", "description": "guaranteed and not in use"},
                        },
                    },
                    "hit_ratio": {"type": ["number", "null"]},
                    "misses": {"type": "object", "additionalProperties": _COUNT, "description": "by reason"},
                    "unflushed": {"type": ["object", "null"], "properties": {"objects": _COUNT, "bytes": _COUNT}},
                    "read_bandwidth": _of_direction("from"),
                    "write_bandwidth": _of_direction("to"),
                    "origin_requests": {
                        "type": "object",
                        "properties": {
                            "throttled": {**_COUNT, "description": "held back, as the origin refuses some"},
                            "waited_seconds": {"type": "number", "description": "for which they were"},
                            "in_vain": {**_COUNT, "description": "held back for too long, and not sent"},
                            "slow_down": {**_COUNT, "description": "refused by the origin for their number"},
                        },
                    },
                    "binds": {
                        "type": "array",
                        "items": {
                            "enum": [
                                "read-ceiling",
                                "read-link",
                                "write-ceiling",
                                "write-link",
                                "capacity-limit",
                                "buffer",
                                "request-rate",
                            ]
                        },
                    },
                },
            },
        },
    },
}


def _by(names: tuple[str, ...], schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, schema)}


_BY_LIMIT = ("concurrency", "rate", "read", "write")
_USED = ("requests", "sent_bytes", "received_bytes")
_CALLERS = {
    "type": "object",
    "properties": {
        "callers": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "scope": {"enum": ["credential", "class"]},
                    "name": {"type": "string"},
                    "limits": _by(
                        ("max_concurrent_requests", "requests_per_second", "read_bandwidth", "write_bandwidth"),
                        {"type": ["number", "null"]},
                    ),
                    "running": {"type": "integer", "description": "0 where nothing limits it"},
                    "waiting": _COUNT,
                    "throttled": _by(_BY_LIMIT, _COUNT),
                    "waited_seconds": _by(_BY_LIMIT, {"type": "number"}),
                    "refused": _by(_BY_LIMIT, _COUNT),
                    "used": {**_by(_USED, _COUNT), "type": ["object", "null"]},
                    "per_second": {**_by(_USED, {"type": "number"}), "type": ["object", "null"]},
                    "binds": {"type": "array", "items": {"enum": list(_BY_LIMIT)}},
                },
            },
        },
    },
}


def _nullable(*kinds: str) -> dict[str, Any]:
    return {"type": [*kinds, "null"]}


_EXPLAINED = {
    "type": "object",
    "properties": {
        "bucket": {"type": "string"},
        "key": {"type": "string"},
        "slot": {
            "type": "object",
            "properties": {
                **{name: {"type": "string"} for name in ("name", "prefix", "mode", "consistency")},
                "metadata_ttl_seconds": _nullable("number"),
                "snapshot": _nullable("string"),
                "write": {"type": "string"},
                "authorization": {"enum": ["gateway", "origin"], "description": "who judges callers"},
                "authorization_ttl_seconds": _nullable("number"),
            },
        },
        "known": {
            "type": "object",
            "properties": {
                "by": {"enum": ["catalog", "snapshot", None], "description": "who knows a version"},
                "state": {
                    "enum": ["fresh", "stale", "useless", "unknown"],
                    "description": "fresh: answers without the origin; stale: where the origin does not",
                },
                "age_seconds": _nullable("number"),
                "exists": _nullable("boolean"),
                "etag": _nullable("string"),
                "bytes": _nullable("integer"),
            },
        },
        "pins": {"type": "array", "items": {"type": "string"}},
        "blocks": {
            "type": ["object", "null"],
            "description": "of that version",
            "properties": {
                "total": {"type": "integer"},
                "looked_at": {"type": "integer", "description": "of a very long object not all are looked at"},
                "here": {"type": "integer"},
                "partly_here": {"type": "integer"},
                "evicted": {"type": "integer", "description": "were here, as far as is remembered"},
                "bytes_here": {"type": "integer"},
                "missing": {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}},
                    "description": "first and last byte of the first runs of blocks that are not here whole",
                },
            },
        },
        "held": {
            "type": "object",
            "description": "of all versions",
            "properties": {"blocks": {"type": "integer"}, "bytes": {"type": "integer"}},
        },
        "why_not_kept": _nullable("string"),
        "pending": {"type": ["object", "null"], "description": "as in /api/v1/writeback/objects"},
    },
}


def _explain() -> dict[str, Any]:
    found = _get("What this node knows of an object, and which of its blocks are here.", "application/json", _EXPLAINED)
    found["get"]["parameters"] = [
        query("object", "s3://bucket/key", OBJECT_NAME, required=True),
    ]
    found["get"]["responses"] |= {
        "400": {"description": "The object's name is not valid."},
        "409": {"description": "The snapshot of its slot cannot be used."},
        "503": {"description": "The cache directory is not open."},
    }
    return found


def _start(summary: str, *, manifest: bool = True) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _PREFIX if manifest else _PREFIX_TO_PIN}}
    refused: dict[str, Any] = {}
    if manifest:
        content[MANIFEST_TYPE] = {"schema": {"type": "string", "description": "one s3://bucket/key a line"}}
    else:
        refused["409"] = {"description": "A pinned prefix overlaps it."}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": content},
            "responses": {
                "202": {"description": "The job.", "content": {"application/json": {"schema": _JOB}}},
                "400": {"description": "The prefix or a line is not valid."},
                **_GUARDED,
                **refused,
                "415": {"description": "Another content type."},
                "429": {"description": "Too many jobs are running."},
                "503": {"description": "The cache directory is not open."},
            },
            "security": [{"token": []}, {}],
        }
    }


def _unpin() -> dict[str, Any]:
    return {
        "post": {
            "summary": "Let the gateway evict a pinned prefix again.",
            "requestBody": {"required": True, "content": {"application/json": {"schema": _PREFIX}}},
            "responses": {
                "200": {"description": "The prefix.", "content": {"application/json": {"schema": _PREFIX}}},
                "400": {"description": "The prefix is not valid."},
                **_GUARDED,
                "404": {"description": "It is not pinned."},
                "415": {"description": "Another content type."},
                "503": {"description": "The cache directory is not open."},
            },
            "security": [{"token": []}, {}],
        }
    }


def _events() -> dict[str, Any]:
    document = {"description": "S3's event notifications, as they are or in SNS, SQS or EventBridge; at most 1 MiB"}
    answered = {"content": {"application/json": {"schema": _EVENTS}}}
    return {
        "post": {
            "summary": "Forget what the gateway remembers of the objects that the origin's events name.",
            "requestBody": {"required": True, "content": {"application/json": {"schema": document}}},
            "responses": {
                "200": {"description": "The outcome of each.", **answered},
                "400": {"description": "No events, or malformed ones only; says where."},
                **_GUARDED,
                "415": {"description": "Another content type."},
                "503": {"description": "The cache directory is not open."},
            },
            "security": [{"token": []}, {}],
        }
    }


def _job() -> dict[str, Any]:
    responses = {
        "200": {"description": "The job.", "content": {"application/json": {"schema": _JOB}}},
        **_GUARDED,
        "404": {"description": "There is no such job."},
        "503": {"description": "The cache directory is not open."},
    }
    parameters = [{"name": "job_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    security: list[dict[str, list[str]]] = [{"token": []}, {}]
    return {
        "parameters": parameters,
        "get": {"summary": "One job.", "responses": responses, "security": security},
        "delete": {"summary": "Cancel a job.", "responses": responses, "security": security},
    }


_GUARDED = {
    "401": {"description": "The request lacks the token, or has another one than admin.token."},
    "403": {"description": "Without admin.token, the Host header must name this machine."},
}


def _change_responses(**properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {**properties, "in_force": {"type": "boolean"}}}
    changed = {"content": {"application/json": {"schema": schema}}}
    return {
        "200": {"description": "All processes keep to it.", **changed},
        "202": {
            "description": "It is set; a process that is stopped keeps to it when it goes on.",
            **changed,
        },
        "401": {"description": "The request lacks the token, or has another one than admin.token."},
        "403": {"description": "Not from this machine, and there is no admin.token."},
        "409": {
            "description": "Refused, with why: the configuration has this slot, the settings cannot be together, or "
            "the slot has what the origin does not have yet."
        },
        "503": {"description": "The supervisor has not answered, or too many changes are under way."},
    }


def _reload() -> dict[str, Any]:
    file = {"type": ["string", "null"], "description": "what was read besides the environment"}
    changed = {"type": "array", "items": {"type": "string"}, "description": "the keys of what is another than before"}
    responses = _change_responses(file=file, changed=changed)
    responses["409"] = {"description": "Refused, with why: nothing has changed. Keys that need a restart are named."}
    summary = "Read the configuration anew, as at SIGHUP."
    return {"post": {"summary": summary, "responses": responses, "security": [{"token": []}, {}]}}


def _slot() -> dict[str, Any]:
    responses = {**_change_responses(name={"type": "string"}), "400": {"description": "The body is no slot."}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    security: list[dict[str, list[str]]] = [{"token": []}, {}]
    body = {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"prefix": PREFIX_OF_BUCKET},
                    "required": ["prefix"],
                    "description": "the keys of [[slots]], with the values that they have in the file",
                }
            }
        },
    }
    return {
        "parameters": [name],
        "put": {
            "summary": "Set a slot beside those of the configuration, while the gateway runs.",
            "requestBody": body,
            "responses": responses,
            "security": security,
        },
        "delete": {
            "summary": "Remove a slot that was set here.",
            "responses": {status: answer for status, answer in responses.items() if status != "400"},
            "security": security,
        },
    }


def _requests() -> dict[str, Any]:
    summary = "Requests of late that were slow, failed or were refused, and failures of the origin."
    found = _get(summary, "application/json", REQUESTS)
    limit = {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX, "default": LIMIT, "description": "of each list"}
    found["parameters"] = [{"name": "limit", "in": "query", "schema": limit}]
    found["get"]["responses"]["400"] = {"description": "A limit that is none."}
    return found


def _get(summary: str, media_type: str, schema: dict[str, Any], *, guarded: bool = True) -> dict[str, Any]:
    content = {"content": {media_type: {"schema": schema}}}
    responses: dict[str, Any] = {"200": {"description": summary, **content}}
    if guarded:
        responses["401"] = {"description": "The request lacks the token, or has another one than admin.token."}
    else:
        responses["503"] = {"description": "Not ready.", **content}
    security: list[dict[str, list[str]]] = [{"token": []}, {}] if guarded else []
    return {"get": {"summary": summary, "responses": responses, "security": security}}
