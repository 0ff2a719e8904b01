"""`POST /api/v1/events`: what the origin's event notifications say of objects that others have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.admin.responses import json_answer, problem
from gateway.s3.events import Event, MalformedEvents, ObjectEvent, parse_events
from gateway.telemetry.metrics import ORIGIN_EVENTS

DOCUMENT_BYTES_MAX = 1024 * 1024
"""What SNS, SQS and EventBridge carry at most."""

_SNS_HEADER = "x-amz-sns-message-type"


class Changes(Protocol):
    """Who applies events (`operations.origin_events.OriginEvents`)."""

    async def apply(self, events: Sequence[ObjectEvent]) -> list[str | None]:
        """Why each was left alone, None where it was applied."""


class ChangesHolder:
    """Where the background process puts it once the cache directory is open."""

    def __init__(self) -> None:
        self.changes: Changes | None = None


class EventsApi:
    """The endpoint."""

    def __init__(self, holder: ChangesHolder) -> None:
        self._holder = holder

    async def post(self, request: Request) -> Response:
        """Apply a document of events. 200 with what became of each; 400 where there is nothing but mistakes in it."""
        if self._holder.changes is None:
            return problem(503, "the cache directory is not open yet")
        if not _is_trusted_type(request):
            return problem(415, f"Content-Type must be application/json, or the header {_SNS_HEADER} be there")
        try:
            events = parse_events(await _body(request))
        except MalformedEvents as error:
            ORIGIN_EVENTS.add(1, "malformed")
            return problem(400, str(error))
        except ClientDisconnect:
            return problem(400, "the request broke off")
        return _answer(await self._results(self._holder.changes, events))

    async def _results(self, changes: Changes, events: Sequence[Event]) -> list[dict[str, Any]]:
        told = [event for event in events if isinstance(event, ObjectEvent)]
        reasons = iter(await changes.apply(told))
        return [_result(event, next(reasons) if isinstance(event, ObjectEvent) else None) for event in events]


def _result(event: Event, reason: str | None) -> dict[str, Any]:
    if isinstance(event, ObjectEvent):
        outcome = {"outcome": "applied"} if reason is None else {"outcome": "ignored", "why": reason}
        return {"place": event.place, "event": event.name, "bucket": event.bucket, "key": event.key} | outcome
    outcome = {"outcome": "malformed" if event.malformed else "ignored", "why": event.why}
    return {"place": event.place} | outcome


def _answer(results: list[dict[str, Any]]) -> Response:
    counts = dict.fromkeys(("applied", "ignored", "malformed"), 0)
    for result in results:
        counts[result["outcome"]] += 1
    for outcome, count in counts.items():
        if count:
            ORIGIN_EVENTS.add(count, outcome)
    failed = counts["malformed"] > 0 and not counts["applied"] and not counts["ignored"]
    if failed:
        first = results[0]
        return json_answer({"error": f"{first['place']}: {first['why']}", **counts, "results": results}, 400)
    return json_answer({**counts, "results": results})


def _is_trusted_type(request: Request) -> bool:
    """Web pages may send neither to other sites without asking first; SNS sends its JSON as text/plain."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return content_type == "application/json" or _SNS_HEADER in request.headers


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > DOCUMENT_BYTES_MAX:
            raise MalformedEvents(f"the document is longer than {DOCUMENT_BYTES_MAX} bytes")
    return bytes(body)
