"""S3 event notifications in whatever they come: bare, from SNS, SQS or EventBridge, one in another. Pure.

    {"Records": [...]}                       S3 itself, MinIO, Ceph
    {"Type": "Notification", "Message": …}   SNS: the message is a document again, as text
    {"body": …} {"Messages": [{"Body": …}]}  SQS, as Lambda and as ReceiveMessage give it
    {"detail-type": …, "detail": …}          EventBridge
    [...]                                    several of these

Sources: S3 user guide, "Event message structure"; SNS developer guide, "HTTP/HTTPS message formats"; Lambda developer
guide, "Using Lambda with Amazon SQS"; EventBridge user guide, "AWS service event metadata".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from gateway.s3.event_records import Event, ObjectEvent, OtherEvent, of_event_bridge, of_notification

__all__ = ["Event", "MalformedEvents", "ObjectEvent", "OtherEvent", "parse_events"]

_NESTED_MAX = 4
"""Documents in documents: EventBridge or S3 to SNS to SQS to Lambda makes three."""

_MESSAGE_TEXTS = ("Message", "Body", "body")


class MalformedEvents(ValueError):
    """These bytes are no events; says where they cease to be."""


def parse_events(body: bytes) -> list[Event]:
    """All that a document tells, in order. Parts that tell of no object are there too, and why."""
    return list(_of_text(body, "the document", 0))


def _of_text(text: bytes | str, place: str, depth: int) -> Iterator[Event]:
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise MalformedEvents(f"{place} is not JSON: {error}") from None
    yield from _of_document(document, place, depth)


def _of_document(document: Any, place: str, depth: int) -> Iterator[Event]:
    if depth > _NESTED_MAX:
        raise MalformedEvents(f"{place} lies too deep in other documents")
    if isinstance(document, list):
        for number, one in enumerate(document):
            yield from _of_document(one, f"{place}[{number}]", depth + 1)
        return
    if not isinstance(document, dict):
        raise MalformedEvents(f"{place} must be an object or a list")
    for name in ("Records", "Messages"):
        if name in document:
            yield from _of_list(document[name], f"{place}.{name}", depth)
            return
    yield from _of_envelope(document, place, depth)


def _of_list(records: Any, place: str, depth: int) -> Iterator[Event]:
    if not isinstance(records, list):
        raise MalformedEvents(f"{place} must be a list")
    for number, record in enumerate(records):
        here = f"{place}[{number}]"
        if isinstance(record, dict) and "s3" in record:
            yield from of_notification(record, here)
        else:
            yield from _of_wrapped(record, here, depth + 1)


def _of_wrapped(record: Any, place: str, depth: int) -> Iterator[Event]:
    """One of several, whose faults are its own."""
    try:
        yield from _of_document(record, place, depth)
    except MalformedEvents as error:
        yield OtherEvent(place, str(error), malformed=True)


def _of_envelope(document: dict[str, Any], place: str, depth: int) -> Iterator[Event]:
    if "detail-type" in document:
        yield of_event_bridge(document, place)
    elif document.get("Event") == "s3:TestEvent":
        yield OtherEvent(place, "a test event: S3 sends one when notifications are set up")
    elif document.get("Type") in ("SubscriptionConfirmation", "UnsubscribeConfirmation"):
        yield OtherEvent(place, f"{document['Type']}: confirm it yourself, no URL that is sent here is fetched")
    elif isinstance(document.get("Sns"), dict):
        yield from _of_envelope(document["Sns"], f"{place}.Sns", depth)
    else:
        yield from _of_message(document, place, depth)


def _of_message(document: dict[str, Any], place: str, depth: int) -> Iterator[Event]:
    for name in _MESSAGE_TEXTS:
        if isinstance(document.get(name), str):
            yield from _of_text(document[name], f"{place}.{name}", depth + 1)
            return
    raise MalformedEvents(f"{place} has none of Records, Messages, detail-type, Message, Body, body")
