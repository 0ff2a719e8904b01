"""`POST /api/v1/events`: what the origin's event notifications say of objects that others have changed."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.backends import Backends, Changes, opened
from gateway.admin.operations import CLOSED, GUARDED, JSON_TYPE, KIND, operation
from gateway.admin.responses import Refused, content_type, json_answer
from gateway.api import documents as to
from gateway.s3.events import Event, MalformedEvents, ObjectEvent, parse_events
from gateway.telemetry.metrics import ORIGIN_EVENTS

DOCUMENT_BYTES_MAX = 1024 * 1024
"""The most that SNS, SQS and EventBridge carry."""

_SNS_HEADER = "x-amz-sns-message-type"
_TOLD = "S3's event notifications, as they are or in SNS, SQS or EventBridge; at most 1 MiB"


class EventsApi:
    def __init__(self, lent: Backends) -> None:
        self._lent = lent

    @operation(
        "POST /api/v1/events",
        "Forget what the gateway remembers of the objects that the origin's events name.",
        to.EventResults,
        {**GUARDED, 400: "No events, or malformed ones only; says where.", **KIND, **CLOSED},
        body={JSON_TYPE: {"description": _TOLD}},
    )
    async def post(self, request: Request) -> to.EventResults | Response:
        changes = opened(self._lent.changes)
        # Web pages may send neither to other sites without asking first; SNS sends its JSON as text/plain.
        if content_type(request) != JSON_TYPE and _SNS_HEADER not in request.headers:
            raise Refused(415, f"Content-Type must be application/json, or the header {_SNS_HEADER} be there")
        try:
            events = parse_events(await _body(request))
        except MalformedEvents:
            ORIGIN_EVENTS.add(1, "malformed")
            raise
        found = await _applied(changes, events)
        for outcome in ("applied", "ignored", "malformed"):
            if count := getattr(found, outcome):
                ORIGIN_EVENTS.add(count, outcome)
        if found.malformed and not found.applied and not found.ignored:
            first = found.results[0]
            return json_answer({"error": f"{first.place}: {first.why}", **found.document()}, 400)
        return found


async def _applied(changes: Changes, events: Sequence[Event]) -> to.EventResults:
    reasons = iter(await changes.apply([event for event in events if isinstance(event, ObjectEvent)]))
    results = [_result(event, next(reasons) if isinstance(event, ObjectEvent) else None) for event in events]
    outcomes = [one.outcome for one in results]
    applied, ignored, malformed = map(outcomes.count, ("applied", "ignored", "malformed"))
    return to.EventResults(applied=applied, ignored=ignored, malformed=malformed, results=results)


def _result(event: Event, reason: str | None) -> to.EventResult:
    if not isinstance(event, ObjectEvent):
        outcome = "malformed" if event.malformed else "ignored"
        return to.EventResult(place=event.place, outcome=outcome, why=event.why)
    of_object = {"place": event.place, "event": event.name, "bucket": event.bucket, "key": event.key}
    if reason is None:
        return to.EventResult(**of_object, outcome="applied")
    return to.EventResult(**of_object, outcome="ignored", why=reason)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > DOCUMENT_BYTES_MAX:
            raise MalformedEvents(f"the document is longer than {DOCUMENT_BYTES_MAX} bytes")
    return bytes(body)
