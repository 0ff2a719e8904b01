"""Markers come last, and what a slot says of its order is kept; in any history, by the simulation."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.core.errors import InConflict
from gateway.core.model import MARKERS
from gateway.policy.slots import Prefix
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import ExpectedVersion, State, Write, WriteSpec
from gateway.writeback.journal.schema import prepare
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.order import is_marker, key_prefix_before, root_of, with_order
from tests.support.slots import Slot, slot_with
from tests.support.writeback import PlainPresence, key, part, pending, upload

NOW = 1000.0
SLOT = Slot("slot", Prefix.parse("s3://bucket/"), write="back", buffer_bytes=1000)
STRICT = slot_with(SLOT, order="strict")


class Order:
    """A journal, and whose turn it is in it."""

    def __init__(self, tx: JournalTransaction, slot: Slot = SLOT) -> None:
        self.tx = tx
        self.slot = slot

    def put(self, name: str, *, deleted: bool = False) -> Write:
        new = pending(key(name), None if deleted else f"{name}-{self.tx.writes.newest()}", deleted=deleted)
        return self.tx.writes.acknowledge(with_order(new, self.slot))

    def send(self, write: Write) -> None:
        assert self.tx.writes.change(replace(write, state=State.PUBLISHING), State.COMMITTED)

    def settle(self, write: Write) -> None:
        self.tx.writes.settle(write.id, write.etag, Moment(NOW))

    def is_due(self, write: Write) -> bool:
        turn = self.tx.turns.of(write.id)
        assert turn is not None
        assert (turn.due_at is None) == (turn.after_sequence is not None)
        return turn.due_at is not None


@pytest.fixture
def order() -> Iterator[Order]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        yield Order(JournalTransaction(connection, PlainPresence()))


# What is a marker


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ckpt/.metadata", True),
        ("ckpt/.metadata.tmp", True),
        ("model.safetensors.index.json", True),
        ("ckpt/latest", True),
        ("latest_checkpointed_iteration.txt", True),
        ("out/_SUCCESS", True),
        ("ckpt/manifest.json", True),
        ("mds/index.json", True),
        ("table/_metadata", True),
        ("table/_common_metadata", True),
        ("saved/dataset_info.json", True),
        ("saved/state.json", True),
        ("store/zarr.json", True),
        ("store/.zmetadata", True),
        ("lance/_versions/1.manifest", True),
        ("delta/_delta_log/00000000000000000001.json", True),
        ("delta/_delta_log/_last_checkpoint", True),
        ("_delta_log/00000000000000000001.json", True),
        ("hudi/.hoodie/20260101.commit", True),
        ("hudi/.hoodie/timeline/20260101.commit", True),
        ("iceberg/metadata/00001-ab.metadata.json", True),
        ("iceberg/metadata/version-hint.text", True),
        ("iceberg/metadata/v1.metadata.json.gz", True),
        ("paimon/snapshot/snapshot-12", True),
        ("paimon/snapshot/LATEST", True),
        ("icechunk/refs/branch.main/ref.json", True),
        ("icechunk/refs/ref.json", False),
        ("iceberg/metadata/snap-1.avro", False),
        ("delta/part-0.parquet", False),
        ("_delta_log", False),
        ("latest/shard-1", False),
        ("ckpt/.metadata/x", False),
        ("ckpt/shard.json", False),
        ("ckpt/_SUCCESSFUL", False),
        ("", False),
    ],
)
def test_the_last_part_of_a_path_makes_a_marker(name: str, *, expected: bool) -> None:
    """Of the names that are used; a directory that is called so makes none."""
    assert is_marker(name, MARKERS) == expected
    assert not is_marker(name, ())


def test_a_pattern_of_many_stars_is_soon_done_with_the_longest_key() -> None:
    """With a search that goes back from star to star this would not end."""
    assert not is_marker("a" * 1024, ["*a" * 100 + "*b", "*b"])
    assert is_marker("a" * 1023 + "b", ["*a" * 100 + "*b"])


def test_a_slot_says_what_its_markers_are() -> None:
    """Letters are what they are, whatever the system thinks of them. A name with slashes tells the directory, too."""
    slot = slot_with(SLOT, markers=("DONE*", "log/*.json"))
    assert with_order(pending(key("d/log/1.json")), slot).behind == "d/log/"
    assert with_order(pending(key("log/1.json")), slot).behind == "log/"
    assert with_order(pending(key("d/blog/1.json")), slot).behind is None
    assert with_order(pending(key("1.json")), slot).behind is None
    assert with_order(pending(key("d/DONE.1")), slot).behind == "d/"
    assert with_order(pending(key("d/done")), slot).behind is None
    assert with_order(pending(key("d/_SUCCESS")), slot).behind is None
    assert with_order(pending(key("d/_SUCCESS")), None).behind == "d/"


@pytest.mark.parametrize(
    ("name", "behind"), [("latest", ""), ("a/latest", "a/"), ("a/b/latest", "a/b/"), ("/latest", "/")]
)
def test_a_marker_speaks_for_its_directory(name: str, behind: str) -> None:
    """One without any speaks for the whole bucket."""
    assert with_order(pending(key(name)), SLOT).behind == behind


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("w/t/_delta_log/00000000000000000001.json", "w/t/"),
        ("w/t/_delta_log/_staged_commits/1.uuid.json", "w/t/"),
        ("w/t/_versions/1.manifest", "w/t/"),
        ("w/t/_transactions/1.txn", "w/t/"),
        ("w/t/.hoodie/timeline/1.commit", "w/t/"),
        ("w/t/.hoodie/metadata/.hoodie/1.commit", "w/t/"),
        ("w/t/metadata/v1.metadata.json", "w/t/"),
        ("w/t/manifest/00001.manifest", "w/t/"),
        ("w/t/snapshot/LATEST", "w/t/"),
        ("w/t/refs/branch.main/ref.json", "w/t/"),
        ("w/t/zarr.json", "w/t/"),
        ("w/t/array/zarr.json", "w/t/array/"),
        ("_delta_log/1.json", ""),
        ("metadata/1.metadata.json", ""),
        ("metadata/team/job/lock", "metadata/team/job/"),
        ("w/a_delta_log/1.json", "w/a_delta_log/"),
        ("w/_delta_log", "w/"),
        ("/_versions/1\n.manifest", "/"),
        ("lock", ""),
    ],
)
def test_what_lies_in_a_tables_log_speaks_for_the_table(name: str, root: str) -> None:
    """The data is beside the log, not in it. Any other object speaks for its own directory."""
    assert root_of(name) == root
    assert key_prefix_before(name, SLOT, is_conditional=True) == root
    assert with_order(pending(key(name)), slot_with(SLOT, markers=("*",))).behind == root


def test_a_condition_makes_a_marker_of_any_object() -> None:
    """In a strict slot, its table may begin above the slot."""
    assert key_prefix_before("d/shard", SLOT, is_conditional=False) is None
    assert key_prefix_before("d/shard", SLOT, is_conditional=True) == "d/"
    strict = slot_with(STRICT, prefix=Prefix.parse("s3://bucket/t/_delta_log/"))
    assert key_prefix_before("t/_delta_log/1.json", strict, is_conditional=True) == "t/"
    assert key_prefix_before("t/_delta_log/a/b", slot_with(strict, markers=()), is_conditional=False) == "t/_delta_log/"
    assert key_prefix_before("t/x/lock", STRICT, is_conditional=True) == ""


def test_deletions_and_others_wait_for_nothing_but_their_key() -> None:
    """Who deletes a marker takes its word back: the sooner the better."""
    assert with_order(pending(key("d/_SUCCESS"), deleted=True), SLOT).behind is None
    assert with_order(pending(key("d/shard")), SLOT) == pending(key("d/shard"))


def test_in_a_strict_slot_all_is_in_order_and_markers_are_like_others() -> None:
    """Deletions, too."""
    for new in (pending(key("d/_SUCCESS")), pending(key("x")), pending(key("x"), deleted=True)):
        assert (with_order(new, STRICT).in_order, with_order(new, STRICT).behind) == (True, None)


# Whose turn it is


def test_a_marker_waits_for_all_that_came_before_it_in_its_directory(order: Order) -> None:
    """Below it, too; and for nothing else."""
    shards = [order.put(name) for name in ("ckpt/1", "ckpt/sub/2", "ckpt/3")]
    other = order.put("ckpt-2/1")
    marker = order.put("ckpt/_SUCCESS")
    late = order.put("ckpt/4")
    assert [order.is_due(one) for one in (*shards, other, marker, late)] == [True] * 4 + [False, True]
    for one in (shards[2], shards[0]):
        order.settle(one)
        assert not order.is_due(marker)
    order.settle(shards[1])
    assert order.is_due(marker)


def test_a_shard_that_is_written_again_is_still_waited_for(order: Order) -> None:
    """Its first version may never get to the origin: the later one is as good, and then there is one."""
    order.put("ckpt/1")
    marker = order.put("ckpt/_SUCCESS")
    again = order.put("ckpt/1")
    assert not order.is_due(marker)
    once_more = order.put("ckpt/1")
    assert (order.tx.turns.living([again.id]), order.is_due(marker)) == (set(), False)
    order.settle(once_more)
    assert order.is_due(marker)


def test_a_shard_on_its_way_counts_and_what_follows_it_does_not(order: Order) -> None:
    """The version before the marker has been at the origin then."""
    shard = order.put("ckpt/1")
    order.send(shard)
    marker = order.put("ckpt/_SUCCESS")
    later = order.put("ckpt/1")
    order.settle(shard)
    assert order.is_due(marker)
    assert order.is_due(later)


def test_a_shard_that_is_deleted_again_is_waited_for(order: Order) -> None:
    """Whoever reads the marker finds what its writer has left."""
    shard = order.put("ckpt/1")
    order.send(shard)
    order.put("ckpt/2")
    gone = order.put("ckpt/1", deleted=True)
    marker = order.put("ckpt/_SUCCESS")
    order.settle(order.tx.writes.waiting(0, 10)[1])
    assert not order.is_due(marker)
    order.settle(shard)
    assert not order.is_due(marker)
    order.settle(gone)
    assert order.is_due(marker)


def test_a_multipart_shard_counts_from_its_complete(order: Order) -> None:
    """An upload that is open is no object that anybody was told of."""
    opened = order.tx.uploads.begin(upload("u", key("ckpt/1")))
    order.tx.uploads.put_part("u", part(1, "p"), Moment(NOW))
    first = order.put("ckpt/_SUCCESS")
    assert order.is_due(first)
    made = replace(pending(key("ckpt/1"), parts=[part(1, "p")], multipart=True), upload_id="u")
    completed = order.tx.uploads.complete(with_order(made, SLOT))
    assert completed is not None
    assert completed.id == opened.id
    second = order.put("ckpt/latest")
    assert (order.is_due(first), order.is_due(completed), order.is_due(second)) == (True, True, False)


def test_a_multipart_marker_waits_too(order: Order) -> None:
    """However its bytes have come."""
    shard = order.put("ckpt/1")
    order.tx.uploads.begin(upload("u", key("ckpt/_SUCCESS")))
    order.tx.uploads.put_part("u", part(1, "p"), Moment(NOW))
    made = replace(pending(key("ckpt/_SUCCESS"), parts=[part(1, "p")], multipart=True), upload_id="u")
    marker = order.tx.uploads.complete(with_order(made, SLOT))
    assert marker is not None
    assert not order.is_due(marker)
    order.settle(shard)
    assert order.is_due(marker)


def test_directories_in_directories(order: Order) -> None:
    """The outer marker waits for the inner one, and that for its own shards alone."""
    inner_shard, outer_shard = order.put("a/b/1"), order.put("a/1")
    inner, outer = order.put("a/b/_SUCCESS"), order.put("a/latest")
    order.settle(inner_shard)
    assert (order.is_due(inner), order.is_due(outer)) == (True, False)
    order.settle(outer_shard)
    assert not order.is_due(outer)
    order.settle(inner)
    assert order.is_due(outer)


def test_a_marker_in_conflict_that_is_written_again_is_still_waited_for(order: Order) -> None:
    """Until a person has decided; nothing waits for itself then."""
    for decide in ("discard", "overwrite"):
        first, second = order.put(f"{decide}/_SUCCESS"), order.put(f"{decide}/latest")
        order.tx.writes.keep(first.id, "others")
        again = order.put(f"{decide}/_SUCCESS")
        assert not any(map(order.is_due, (second, again)))
        if decide == "discard":
            assert order.tx.writes.discard(first.id, Moment(NOW), only_conflict=True)
        else:
            assert order.tx.writes.overwrite(first.id, ExpectedVersion(('"theirs"',)), NOW)
            assert [order.is_due(one) for one in (first, second, again)] == [True, False, False]
            order.settle(first)
        assert [order.is_due(one) for one in (second, again)] == [True, False]
        order.settle(second)
        assert order.is_due(again)


def test_a_marker_that_is_deleted_is_still_waited_for(order: Order) -> None:
    """And not sent, whatever waits for it."""
    first, second = order.put("a/_SUCCESS"), order.put("latest")
    gone = order.put("a/_SUCCESS", deleted=True)
    assert order.tx.turns.living([first.id]) == set()
    assert (order.is_due(gone), order.is_due(second)) == (True, False)
    order.settle(gone)
    assert order.is_due(second)


def test_a_marker_takes_the_place_of_one_that_nothing_waits_for(order: Order) -> None:
    """Markers elsewhere are others."""
    first = order.put("a/_SUCCESS")
    for elsewhere in ("b/latest", "a/c/latest", "ab/latest"):
        order.put(elsewhere)
    order.put("a/_SUCCESS")
    assert order.tx.turns.living([first.id]) == set()


def test_a_deleted_marker_waits_for_nothing(order: Order) -> None:
    """It takes the place of the one that waited."""
    order.put("a/1")
    marker = order.put("a/_SUCCESS")
    gone = order.put("a/_SUCCESS", deleted=True)
    assert (order.tx.turns.living([marker.id]), order.is_due(gone)) == (set(), True)


def test_a_marker_that_is_overwritten_speaks_for_more(order: Order) -> None:
    """What has come since the first one, it waits for as well."""
    first_shard = order.put("a/1")
    order.put("a/_SUCCESS")
    second_shard = order.put("a/2")
    marker = order.put("a/_SUCCESS")
    assert [one.id for one in order.tx.writes.waiting(0, 10)] == [first_shard.id, second_shard.id, marker.id]
    order.settle(first_shard)
    assert not order.is_due(marker)
    order.settle(second_shard)
    assert order.is_due(marker)


def test_a_complete_for_which_its_client_waits_is_in_a_strict_slots_order(order: Order) -> None:
    """What was acknowledged after it was asked for waits until it is over, one way or another."""
    order.slot = STRICT
    opened = order.tx.uploads.begin(upload("u", key("a")))
    order.tx.uploads.put_part("u", part(1, "p"), Moment(NOW))
    made = replace(pending(key("a"), parts=[part(1, "p")], multipart=True), upload_id="u")
    assert order.tx.uploads.complete_at_origin(made)
    later = order.put("b")
    assert not order.is_due(later)
    order.tx.uploads.answer(opened.id, "PreconditionFailed", is_over=True)
    assert order.is_due(later)


def test_of_two_markers_the_second_waits_for_the_first(order: Order) -> None:
    """Also when the first is written again: then both of it are sent, the second time behind what waited for it."""
    for where in ("a/", ""):
        first, second = order.put("a/_SUCCESS"), order.put(f"{where}latest")
        assert (order.is_due(first), order.is_due(second)) == (True, False)
        again = order.put("a/_SUCCESS")
        last = order.put("a/_SUCCESS")
        assert order.tx.turns.living([again.id]) == set()
        assert [order.is_due(one) for one in (first, second, last)] == [True, False, False]
        order.settle(first)
        assert (order.is_due(second), order.is_due(last)) == (True, not where)
        order.settle(second)
        assert order.is_due(last)
        order.settle(last)


def test_a_conflict_holds_the_marker_until_somebody_has_decided(order: Order) -> None:
    """Others' object is no part of it."""
    for decide in ("discard", "overwrite"):
        shard = order.put(f"{decide}/1")
        marker = order.put(f"{decide}/_SUCCESS")
        assert order.tx.writes.keep(shard.id, "others")
        assert not order.is_due(marker)
        if decide == "discard":
            assert order.tx.writes.discard(shard.id, Moment(NOW), only_conflict=True)
        else:
            assert order.tx.writes.overwrite(shard.id, ExpectedVersion(('"theirs"',)), NOW)
            assert not order.is_due(marker)
            order.settle(shard)
        assert order.is_due(marker)


def test_in_a_strict_slot_nobody_deletes_what_is_in_conflict(order: Order) -> None:
    """A person decides first, as elsewhere."""
    order.slot = STRICT
    order.tx.writes.keep(order.put("a").id, "others")
    with pytest.raises(InConflict):
        order.tx.writes.write_tombstone(with_order(pending(key("a"), None, deleted=True), STRICT))


def test_in_a_strict_slot_each_waits_for_all_before_it(order: Order) -> None:
    """Every version of a key gets to the origin; a conflict holds all; another slot, and another bucket, is another."""
    order.slot = STRICT
    writes = [order.put("a"), order.put("b"), order.put("a"), order.put("b", deleted=True)]
    other = order.tx.writes.acknowledge(
        replace(pending(key("c"), "c"), in_order=True, spec=replace(pending(key("c")).spec, slot="t"))
    )
    assert order.is_due(other)
    for number, one in enumerate(writes):
        assert [order.is_due(each) for each in writes[number:]] == [True] + [False] * (3 - number)
        if number == 1:
            order.tx.writes.keep(one.id, "others")
            assert not any(order.is_due(each) for each in writes[2:])
            order.tx.writes.overwrite(one.id, ExpectedVersion(absent=True), NOW)
        order.settle(one)


def test_an_upload_that_began_in_a_slot_of_another_name_is_ordered_by_the_one_of_now(tmp_path: Path) -> None:
    """A slot can be renamed over a restart: what its markers are it still says."""

    async def scenario() -> None:
        slot = Slot("two", Prefix.parse("s3://bucket/"), write="back", markers=("READY",))
        buffer = await WritebackBuffer.open(tmp_path, 0, [slot])
        try:
            opened = replace(upload("u", key("d/READY")), spec=WriteSpec(key("d/READY"), {}, "one"))
            await buffer.journal.change(lambda tx: tx.uploads.begin(opened))
            await buffer.put_part("u", part(1, "p"))
            made = replace(opened, parts=(part(1, "p"),), acknowledged_at=9.0, etag='"e-1"', size_bytes=1)
            stored = await buffer.complete(made)
            assert stored is not None
            assert stored.behind == "d/"
        finally:
            await buffer.close()

    asyncio.run(scenario())
