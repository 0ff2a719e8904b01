"""What a node tells the registry of the cluster is what its journal has pending: all of it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.core.model import CLAIMS_MAX, Claim
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import State, Write
from gateway.writeback.pending_claims import DAMAGED, PendingClaims
from tests.support.writeback import key, pending, upload


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path, lambda _: None)
    yield opened
    opened.close()


def acknowledge(journal: Journal, name: str, at: float, *, deleted: bool = False) -> Write:
    write = pending(key(name), None if deleted else f"file-{at}", deleted=deleted)
    return asyncio.run(journal.change(lambda tx: tx.writes.acknowledge(replace(write, acknowledged_at=at))))


def all_of(journal: Journal, count: int) -> list[Claim]:
    claims, found, place = PendingClaims(journal), list[Claim](), 0
    while True:
        page, place = claims.page(place, count)
        if not page:
            return found
        found += [one.claim for one in page]


@pytest.mark.parametrize("count", [1, 2, 100])
def test_pages_are_of_what_is_pending_in_the_order_of_acknowledgement(journal: Journal, count: int) -> None:
    """Objects and tombstones, each key's last write; no open upload, and nothing that the bucket has."""
    acknowledge(journal, "again", 1.5)
    done = acknowledge(journal, "done", 2.5)
    acknowledge(journal, "deleted", 3.25, deleted=True)
    acknowledge(journal, "again", 4.5)
    asyncio.run(journal.change(lambda tx: tx.uploads.begin(upload("u", key("upload")))))
    asyncio.run(journal.change(lambda tx: tx.writes.settle(done.id, done.etag, Moment(10.0))))
    assert all_of(journal, count) == [Claim(key("deleted"), "3.25"), Claim(key("again"), "4.5")]


def test_with_a_write_the_claims_of_those_are_over_that_it_has_replaced(journal: Journal) -> None:
    """Whichever of them had claimed the key first. The last ones: a key may be overwritten for long."""
    sent = acknowledge(journal, "key", 0.5)
    asyncio.run(journal.change(lambda tx: tx.writes.update(replace(sent, state=State.PUBLISHING))))
    acknowledge(journal, "key", 2.5)
    acknowledge(journal, "key", 1.5, deleted=True)
    write_id = acknowledge(journal, "key", 3.5).id
    kept = journal.read(lambda tx: tx.writes.get(write_id))
    assert kept is not None
    assert [one.token for one in kept.claims] == ["2.5", "1.5", "3.5"]
    for number in range(CLAIMS_MAX):
        last = acknowledge(journal, "key", 4.5 + number)
    assert [one.token for one in last.claims] == [f"{number + 3}.5" for number in range(CLAIMS_MAX + 1)]


@pytest.mark.parametrize("count", [1, 100])
def test_where_a_later_write_waits_for_one_that_is_being_sent_the_claim_is_of_the_later_one(
    journal: Journal, count: int
) -> None:
    """A new run of the registry keeps the first claim of a key: the end of the first write must not settle it."""
    sent = acknowledge(journal, "key", 1.5)
    asyncio.run(journal.change(lambda tx: tx.writes.update(replace(sent, state=State.PUBLISHING))))
    acknowledge(journal, "between", 2.5)
    acknowledge(journal, "key", 3.5)
    last = Claim(key("key"), "3.5")
    assert all_of(journal, count) == [last, Claim(key("between"), "2.5"), last]


def test_the_last_pending_write_of_each_key_is_told(journal: Journal) -> None:
    sent = acknowledge(journal, "pending", 1.5)
    asyncio.run(journal.change(lambda tx: tx.writes.update(replace(sent, state=State.PUBLISHING))))
    acknowledge(journal, "pending", 2.5)
    done = acknowledge(journal, "flushed", 3.5)
    asyncio.run(journal.change(lambda tx: tx.writes.settle(done.id, done.etag, Moment(10.0))))
    asked = [key("pending"), key("flushed"), key("never")]
    assert {name: one.claim for name, one in PendingClaims(journal).last(asked).items()} == {
        key("pending"): Claim(key("pending"), "2.5")
    }


def test_a_claim_has_the_order_of_its_write(journal: Journal) -> None:
    """And of none that cannot be read: it ends no other node's claim."""
    for name, order in (("first", 7), ("second", 0), ("damaged", 9)):
        write = replace(pending(key(name), f"file-{name}"), order=order)
        last = asyncio.run(journal.change(lambda tx: tx.writes.acknowledge(write)))  # noqa: B023
    asyncio.run(
        journal.change(lambda tx: tx.writes._change("UPDATE writes SET record = ? WHERE id = ?", b"x" * 40, last.id))
    )
    page, _ = PendingClaims(journal).page(0, 10)
    assert [(one.key, one.order) for one in page] == [(key("first"), 7), (key("second"), 7), (key("damaged"), 0)]
    assert PendingClaims(journal).last([key("second")])[key("second")].order == 7


def test_a_damaged_row_is_claimed_all_the_same(journal: Journal) -> None:
    """Nobody may read an older version from the bucket meanwhile."""
    acknowledge(journal, "whole", 1.5)
    damaged = acknowledge(journal, "damaged", 2.5)
    asyncio.run(
        journal.change(lambda tx: tx.writes._change("UPDATE writes SET record = ? WHERE id = ?", b"x" * 40, damaged.id))
    )
    assert all_of(journal, 10) == [Claim(key("whole"), "1.5"), Claim(key("damaged"), DAMAGED)]


def test_the_slots_with_something_pending_are_known(journal: Journal) -> None:
    """Also by a name that no slot has any more."""
    assert PendingClaims(journal).slots() == []
    one = acknowledge(journal, "one", 1.5)
    assert PendingClaims(journal).slots() == [one.spec.slot]
