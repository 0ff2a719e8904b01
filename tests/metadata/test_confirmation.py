"""What a listing may confirm of a remembered object, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.model import ObjectKey
from gateway.metadata.entries import is_confirmed, is_settled, object_head
from gateway.s3.list_result import EntryTemplate, ListedEntry

STANDARD = EntryTemplate("", None, "<StorageClass>STANDARD</StorageClass>")
LISTED = ListedEntry(b"k", "2026-01-01T00:00:00.000Z", '"e"', 5, STANDARD)
HEADERS = {
    "etag": '"e"',
    "content-length": "5",
    "content-type": "image/jpeg",
    "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT",
    "date": "Thu, 01 Jan 2026 00:01:00 GMT",
    "x-amz-meta-label": "cat",
    "x-amz-server-side-encryption": "AES256",
}


def confirmed(listed: ListedEntry, **headers: str) -> bool:
    head = object_head(ObjectKey("b", "k"), HEADERS | {name.replace("_", "-"): text for name, text in headers.items()})
    return is_confirmed(head, listed)


def of_class(name: str) -> EntryTemplate:
    return EntryTemplate("", None, f"<StorageClass>{name}</StorageClass>")


@pytest.mark.parametrize(
    "listed",
    [
        *({"modified": f"2026-01-01T00:00:00{fraction}"} for fraction in (".000Z", ".999Z", "Z")),
        *({"etag": etag} for etag in ("e", '""e""', 'W/"e"')),
        {"template": EntryTemplate("", None, "")},
    ],
)
def test_the_same_etag_size_and_second_confirm(listed: dict[str, Any]) -> None:
    """However the ETag is written. HEAD tells seconds; a listing may tell more, or not. Some servers list no storage
    class; HEAD leaves STANDARD out."""
    assert confirmed(LISTED._replace(**listed))


@pytest.mark.parametrize(
    "other",
    [
        {"etag": '"f"'},
        {"etag": "E"},
        {"size_bytes": 6},
        {"modified": "2026-01-01T00:00:01.000Z"},
        {"modified": "2026-01-01T00:00:00.000+01:00"},
        {"template": of_class("STANDARD_IA")},
    ],
)
def test_whatever_differs_does_not(other: dict[str, Any]) -> None:
    """Another ETag, size, date or storage class is another object, or may be."""
    assert not confirmed(LISTED._replace(**other))


@pytest.mark.parametrize(
    "name",
    [
        "x_amz_tagging_count",
        "x_amz_restore",
        "x_amz_expiration",
        "x_amz_replication_status",
        "x_amz_object_lock_mode",
        "x_amz_archive_status",
        "x_amz_something_new",
    ],
)
def test_what_changes_without_a_write_is_not_confirmed(name: str) -> None:
    """S3 changes these of an object as it lies there: no listing says what they are."""
    assert not confirmed(LISTED, **{name: "1"})


@pytest.mark.parametrize(
    ("storage_class", "expected"),
    [("STANDARD_IA", True), ("GLACIER", False), ("DEEP_ARCHIVE", False), ("INTELLIGENT_TIERING", False)],
)
def test_another_storage_class_is_confirmed_by_itself(storage_class: str, *, expected: bool) -> None:
    """The listing says it, too. What may be restored is not: that comes and goes, and HEAD tells it."""
    listed = LISTED._replace(template=of_class(storage_class))
    assert confirmed(listed, x_amz_storage_class=storage_class) is expected
    assert not confirmed(LISTED, x_amz_storage_class=storage_class)


@pytest.mark.parametrize(
    ("date", "settled"),
    [
        ("Thu, 01 Jan 2026 00:01:00 GMT", True),
        ("Thu, 01 Jan 2026 00:00:59 GMT", False),
        ("Wed, 31 Dec 2025 23:00:00 GMT", False),
        ("yesterday", False),
    ],
)
def test_settled_is_what_was_asked_long_after_its_date(date: str, *, settled: bool) -> None:
    """By the origin's own clock: another version of the same second can no more come."""
    assert is_settled(object_head(ObjectKey("b", "k"), HEADERS | {"date": date})) is settled


@pytest.mark.parametrize("missing", ["date", "last-modified"])
def test_without_dates_nothing_is_settled(missing: str) -> None:
    """An origin that gives none is asked each time."""
    headers = {name: value for name, value in HEADERS.items() if name != missing}
    assert not is_settled(object_head(ObjectKey("b", "k"), headers))
