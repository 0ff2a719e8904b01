"""What is pending, as a listing sees it: keys and common prefixes in order, read where a page needs them.

Nothing is scanned that rolls up: behind a common prefix the next key is looked for at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import takewhile
from typing import NamedTuple

from gateway.metadata.listing.pages import ListRequest, key_successor, prefix_end
from gateway.s3.list_token import ListPlace
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.records import PendingObject

_READ_AT_ONCE_MAX = 128
_TOMBSTONES_PASSED_MAX = 128
"""Under a common prefix, in search of an object; with more, it is left to whoever merges."""


class Fate(Enum):
    """What the journal says of a key or common prefix."""

    LISTED = "listed"
    GONE = "gone"
    """A tombstone: the key is not listed, whatever the origin says."""

    UNSURE = "unsure"
    """Under the common prefix are tombstones: whether anything else is must be found out."""


class PendingRow(NamedTuple):
    """A key, or a common prefix: then `pending` is None."""

    name: bytes
    fate: Fate
    pending: PendingObject | None = None


class PendingRows(NamedTuple):
    """Rows in order. Behind `end` there may be more; None: these are all."""

    rows: Sequence[PendingRow]
    end: ListPlace | None


def pending_rows(book: Book, bucket: str, wanted: ListRequest, count: int) -> PendingRows:
    """The first rows of a listing, `count` or a few more; `wanted.limit` does not matter."""
    rows: list[PendingRow] = []
    place, at_once = wanted.start, 1
    while len(rows) < count:
        found = book.listing(bucket, place, wanted.stop, at_once) if place < wanted.stop else ()
        plain = list(takewhile(lambda one: wanted.rolled_up(_name(one)) is None, found))
        rows += [PendingRow(_name(one), Fate.GONE if one.deleted else Fate.LISTED, one) for one in plain]
        if len(plain) < len(found):
            common = wanted.rolled_up(_name(found[len(plain)])) or b""
            if wanted.is_behind(common):
                rows.append(PendingRow(common, _fate(book, bucket, common)))
            place, at_once = prefix_end(common), 1
        elif len(found) < at_once:
            return PendingRows(rows, None)
        else:
            place, at_once = key_successor(_name(found[-1])), min(4 * at_once, _READ_AT_ONCE_MAX)
    last = rows[-1]
    return PendingRows(rows, ListPlace(last.name, last.pending is None))


def _fate(book: Book, bucket: str, common: bytes) -> Fate:
    """Of a common prefix under which something is pending."""
    for count in (1, _TOMBSTONES_PASSED_MAX):
        if any(not one.deleted for one in book.listing(bucket, common, prefix_end(common), count)):
            return Fate.LISTED
    return Fate.UNSURE


def _name(pending: PendingObject) -> bytes:
    return pending.key.key.encode()
