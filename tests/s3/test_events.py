"""S3's event notifications in every envelope they come in."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.s3.events import MalformedEvents, ObjectEvent, OtherEvent, parse_events


def record(key: str = "a", **more: Any) -> dict[str, Any]:
    """As in the S3 user guide."""
    return {
        "eventVersion": "2.1",
        "eventSource": "aws:s3",
        "awsRegion": "us-east-1",
        "eventTime": "1970-01-01T00:00:00.000Z",
        "eventName": "ObjectCreated:Put",
        "s3": {
            "s3SchemaVersion": "1.0",
            "bucket": {"name": "bucket", "arn": "arn:aws:s3:::bucket"},
            "object": {"key": key, "size": 1024, "eTag": "d41d", "sequencer": "0055AED6DCD90281E5"},
        },
    } | more


def bridge(key: str = "a", **more: Any) -> dict[str, Any]:
    """As in the EventBridge user guide."""
    return {
        "version": "0",
        "detail-type": "Object Created",
        "source": "aws.s3",
        "detail": {"bucket": {"name": "bucket"}, "object": {"key": key, "etag": "d41d", "size": 1}},
    } | more


BARE = {"Records": [record()]}
SNS = {"Type": "Notification", "MessageId": "1", "TopicArn": "arn", "Message": json.dumps(BARE)}
SQS = {"Records": [{"messageId": "1", "eventSource": "aws:sqs", "body": json.dumps(BARE)}]}
RECEIVED = {"Messages": [{"MessageId": "1", "ReceiptHandle": "r", "Body": json.dumps(SNS)}]}
TO_LAMBDA = {"Records": [{"EventSource": "aws:sns", "Sns": {"Type": "Notification", "Message": json.dumps(BARE)}}]}
DEEP = {"Records": [{"messageId": "1", "body": json.dumps(SNS)}]}


def parsed(document: Any) -> list[ObjectEvent | OtherEvent]:
    return parse_events(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("document", "place"),
    [
        (BARE, "the document.Records[0].s3"),
        (SNS, "the document.Message.Records[0].s3"),
        (SQS, "the document.Records[0].body.Records[0].s3"),
        (RECEIVED, "the document.Messages[0].Body.Message.Records[0].s3"),
        (TO_LAMBDA, "the document.Records[0].Sns.Message.Records[0].s3"),
        (DEEP, "the document.Records[0].body.Message.Records[0].s3"),
        ({"Body": json.dumps(BARE)}, "the document.Body.Records[0].s3"),
        ([BARE], "the document[0].Records[0].s3"),
    ],
)
def test_a_record_is_found_in_every_envelope(document: Any, place: str) -> None:
    """S3 itself, SNS, SQS, SNS in SQS, Lambda's batches of either, what ReceiveMessage gives, pipes' lists."""
    assert parsed(document) == [ObjectEvent(place, "ObjectCreated:Put", "bucket", "a", "d41d", 0.0)]


def test_event_bridge_gives_keys_as_they_are() -> None:
    """`+` and `%` mean themselves there; in notifications they do not."""
    assert parsed(bridge("a+b%20c")) == [
        ObjectEvent("the document.detail", "Object Created", "bucket", "a+b%20c", "d41d")
    ]
    assert parsed([bridge("a"), bridge("b")])[1].place == "the document[1].detail"


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
def test_keys_of_notifications_are_decoded(key: str) -> None:
    """Percent-encoded UTF-8, and a space as `+`."""
    found = parsed({"Records": [record(quote_plus(key))]})
    assert [event.key for event in found if isinstance(event, ObjectEvent)] == [key]


def test_other_servers_keys_are_read_both_ways() -> None:
    """Not all of them encode: void one key too many rather than the wrong one."""
    found = parsed({"Records": [record("a+b", eventSource="ceph:s3"), record("plain", eventSource="minio:s3")]})
    assert [event.key for event in found if isinstance(event, ObjectEvent)] == ["a b", "a+b", "plain"]


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "bucket"}, "test event"),
        ({"Type": "SubscriptionConfirmation", "SubscribeURL": "https://example.com/", "Message": "You…"}, "no URL"),
        ({"Type": "UnsubscribeConfirmation", "SubscribeURL": "https://example.com/", "Message": "You…"}, "no URL"),
        (bridge(source="aws.ec2"), "aws.ec2"),
        ({"Records": [record(eventSource="aws:dynamodb")]}, "aws:dynamodb"),
    ],
)
def test_what_tells_of_no_object_says_so(document: Any, word: str) -> None:
    """Tests, confirmations and other services' events are no mistakes."""
    (found,) = parsed(document)
    assert isinstance(found, OtherEvent)
    assert not found.malformed
    assert word in found.why


@pytest.mark.parametrize(
    ("broken", "place"),
    [
        ({"s3": {"bucket": {"name": "bucket"}, "object": {}}}, "Records[0].s3.object.key"),
        ({"s3": {"bucket": {}, "object": {"key": "a"}}}, "Records[0].s3.bucket.name"),
        ({"s3": {"bucket": {"name": "bucket"}, "object": {"key": "%FF"}}}, "Records[0].s3.object.key"),
        ({"s3": {"bucket": {"name": "a/b"}, "object": {"key": "a"}}}, "Records[0].s3"),
        ({"s3": {"bucket": {"name": "bucket"}, "object": {"key": "a" * 1025}}}, "Records[0].s3"),
        ({"s3": 5}, "Records[0].s3.bucket.name"),
    ],
)
def test_a_broken_record_spoils_no_other(broken: dict[str, Any], place: str) -> None:
    """It says where it is broken; its neighbour counts."""
    first, second = parsed({"Records": [record(**broken), record("b")]})
    assert isinstance(first, OtherEvent)
    assert (first.malformed, first.place) == (True, f"the document.{place}")
    assert isinstance(second, ObjectEvent)


def test_a_broken_message_spoils_no_other() -> None:
    """The same one level further down."""
    first, second = parsed({"Records": [{"body": "{"}, {"body": json.dumps(BARE)}]})
    assert isinstance(first, OtherEvent)
    assert "Records[0].body is not JSON" in first.why
    assert isinstance(second, ObjectEvent)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "the document is not JSON"),
        (b"5", "must be an object or a list"),
        (b"{}", "has none of"),
        (b'{"Records": 5}', "the document.Records must be a list"),
        (b'{"Message": "no"}', "the document.Message is not JSON"),
        (b"[[[[[[{}]]]]]]", "too deep"),
        (b"[" * 5000, "not JSON"),
    ],
)
def test_what_is_no_document_of_events_says_where(body: bytes, word: str) -> None:
    """A sender can find its mistake."""
    with pytest.raises(MalformedEvents, match=word.replace("[", r"\[")):
        parse_events(body)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-10, 10), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["Records", "s3", "bucket", "object", "name", "key", "eventSource", "Message", "body",
                             "Type", "Sns", "detail", "detail-type", "source", "Messages"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_any_json_is_understood_or_refused(document: Any) -> None:
    """Nothing that is sent makes it fail in another way."""
    try:
        found = parsed(document)
    except MalformedEvents:
        return
    assert all(event.place for event in found)
