"""S3 event notifications in whatever they come: bare, from SNS, SQS or EventBridge, one in another. Pure.

    {"Records": [...]}                       S3 itself, MinIO, Ceph
    {"Type": "Notification", "Message": …}   SNS: the message is a document again, as text
    {"body": …} {"Messages": [{"Body": …}]}  SQS, as Lambda and as ReceiveMessage give it
    {"detail-type": …, "detail": …}          EventBridge
    [...]                                    several of these

S3 percent-encodes keys in its notifications and writes a space as `+`; EventBridge has them as they are.

Sources: S3 user guide, "Event message structure" and "EventBridge event structure"; SNS developer guide, "HTTP/HTTPS
message formats"; Lambda developer guide, "Using Lambda with Amazon SQS"; EventBridge user guide, "AWS service event
metadata".
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

import orjson

from gateway.core.errors import S3Error
from gateway.s3.requests import check_bucket, check_key


class ObjectEvent(NamedTuple):
    """Something happened to an object, at a time in seconds since 1970.

    `etag` is without quotes. It and the time are None where the event does not give them.
    """

    place: str
    name: str
    bucket: str
    key: str
    etag: str | None
    at: float | None = None


class OtherEvent(NamedTuple):
    """A part of a document that names no object, with the reason and its `place` in the document."""

    place: str
    why: str
    malformed: bool = False


Event = ObjectEvent | OtherEvent


_NESTED_MAX = 4
"""Documents in documents: EventBridge or S3 to SNS to SQS to Lambda makes three."""


class MalformedEvents(ValueError):
    """These bytes are no events; says where they cease to be."""


def parse_events(body: bytes) -> list[Event]:
    """Return all events of a document in order, and an OtherEvent for each part that names no object."""
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
    """Yield the events of several records: the faults of each are its own."""
    if not isinstance(records, list):
        raise MalformedEvents(f"{place} must be a list")
    for number, record in enumerate(records):
        here = f"{place}[{number}]"
        if isinstance(record, dict) and "s3" in record:
            yield from _of_notification(record, here)
            continue
        try:
            yield from _of_document(record, here, depth + 1)
        except MalformedEvents as error:
            yield OtherEvent(here, str(error), malformed=True)


def _of_envelope(document: dict[str, Any], place: str, depth: int) -> Iterator[Event]:
    if "detail-type" in document:
        yield _of_event_bridge(document, place)
    elif document.get("Event") == "s3:TestEvent":
        yield OtherEvent(place, "a test event: S3 sends one when notifications are set up")
    elif document.get("Type") in ("SubscriptionConfirmation", "UnsubscribeConfirmation"):
        yield OtherEvent(place, f"{document['Type']}: confirm it yourself, no URL that is sent here is fetched")
    elif isinstance(document.get("Sns"), dict):
        yield from _of_envelope(document["Sns"], f"{place}.Sns", depth)
    elif name := next((one for one in ("Message", "Body", "body") if isinstance(document.get(one), str)), None):
        yield from _of_text(document[name], f"{place}.{name}", depth + 1)
    else:
        raise MalformedEvents(f"{place} has none of Records, Messages, detail-type, Message, Body, body")


def _of_notification(record: dict[str, Any], place: str) -> list[Event]:
    """Return what an element of `Records`, by any S3 server, means.

    Servers other than AWS are not all known to encode keys: where that makes a difference, both readings are meant.
    """
    source, s3 = record.get("eventSource"), record.get("s3")
    if not isinstance(source, str) or not source.endswith(":s3"):
        return [OtherEvent(place, f"eventSource is {source!r}, and not S3's")]
    bucket, found = _child(s3, "bucket"), _child(s3, "object")
    raw = found.get("key")
    name, at = record.get("eventName"), record.get("eventTime")
    event = _event(f"{place}.s3", name, bucket.get("name"), _decoded(raw), found.get("eTag"), at)
    if source == "aws:s3" or not isinstance(event, ObjectEvent) or event.key == raw:
        return [event]
    return [event, _event(f"{place}.s3", event.name, event.bucket, raw, event.etag, at)]


def _of_event_bridge(document: dict[str, Any], place: str) -> Event:
    """Return an event as EventBridge delivers it."""
    source, detail = document.get("source"), document.get("detail")
    if source != "aws.s3":
        return OtherEvent(place, f"source is {source!r}, and not 'aws.s3'")
    bucket, found = _child(detail, "bucket"), _child(detail, "object")
    name, etag = document.get("detail-type"), found.get("etag")
    return _event(f"{place}.detail", name, bucket.get("name"), found.get("key"), etag, document.get("time"))


def _event(place: str, name: Any, bucket: Any, key: Any, etag: Any, at: Any) -> Event:
    if not isinstance(bucket, str) or not bucket:
        return OtherEvent(f"{place}.bucket.name", "must be the name of a bucket", malformed=True)
    if not isinstance(key, str) or not key:
        return OtherEvent(f"{place}.object.key", "must be a key", malformed=True)
    try:
        check_bucket(bucket)
        check_key(key).encode()
    except (S3Error, UnicodeEncodeError):
        return OtherEvent(place, "no object has such a name", malformed=True)
    etag = etag.strip('"') if isinstance(etag, str) else None
    return ObjectEvent(place, name if isinstance(name, str) else "", bucket, key, etag or None, _time_of(at))


def _time_of(text: Any) -> float | None:
    """Return an ISO 8601 time in seconds since 1970; None where it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _decoded(raw: Any) -> str | None:
    """None where it is no text, or not UTF-8 once decoded."""
    try:
        return unquote_plus(raw, errors="strict") if isinstance(raw, str) else None
    except UnicodeDecodeError:
        return None


def _child(document: Any, name: str) -> dict[str, Any]:
    child = document.get(name) if isinstance(document, dict) else None
    return child if isinstance(child, dict) else {}
