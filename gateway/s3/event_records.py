"""One event record: what it says changed (S3 user guide, "Event message structure" and "EventBridge event structure").

S3 percent-encodes keys in its notifications and writes a space as `+`; EventBridge has them as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import unquote_plus

from gateway.errors import S3Error
from gateway.s3.addressing import check_bucket, check_key


class ObjectEvent(NamedTuple):
    """Something happened to an object. `etag` is without quotes, None where the event does not give it."""

    place: str
    name: str
    bucket: str
    key: str
    etag: str | None


class OtherEvent(NamedTuple):
    """A part of a document that tells of no object, and why; `place` is where in the document it stands."""

    place: str
    why: str
    malformed: bool = False


Event = ObjectEvent | OtherEvent


def of_notification(record: dict[str, Any], place: str) -> list[Event]:
    """An element of `Records`, by any S3 server.

    Servers other than AWS are not all known to encode keys: where that makes a difference, both readings are meant.
    """
    source, s3 = record.get("eventSource"), record.get("s3")
    if not isinstance(source, str) or not source.endswith(":s3"):
        return [OtherEvent(place, f"eventSource is {source!r}, and not S3's")]
    bucket, found = _child(s3, "bucket"), _child(s3, "object")
    raw = found.get("key")
    event = _event(f"{place}.s3", record.get("eventName"), bucket.get("name"), _decoded(raw), found.get("eTag"))
    if source == "aws:s3" or not isinstance(event, ObjectEvent) or event.key == raw:
        return [event]
    return [event, _event(f"{place}.s3", event.name, event.bucket, raw, event.etag)]


def of_event_bridge(document: dict[str, Any], place: str) -> Event:
    """An event as EventBridge delivers it."""
    source, detail = document.get("source"), document.get("detail")
    if source != "aws.s3":
        return OtherEvent(place, f"source is {source!r}, and not 'aws.s3'")
    bucket, found = _child(detail, "bucket"), _child(detail, "object")
    name, etag = document.get("detail-type"), found.get("etag")
    return _event(f"{place}.detail", name, bucket.get("name"), found.get("key"), etag)


def _event(place: str, name: Any, bucket: Any, key: Any, etag: Any) -> Event:
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
    return ObjectEvent(place, name if isinstance(name, str) else "", bucket, key, etag or None)


def _decoded(raw: Any) -> str | None:
    """None where it is no text, or not UTF-8 once decoded."""
    try:
        return unquote_plus(raw, errors="strict") if isinstance(raw, str) else None
    except UnicodeDecodeError:
        return None


def _child(document: Any, name: str) -> dict[str, Any]:
    child = document.get(name) if isinstance(document, dict) else None
    return child if isinstance(child, dict) else {}
