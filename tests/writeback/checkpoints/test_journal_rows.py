"""Checkpoints in the journal: what writes make of them, in the same transactions, and what is forgotten of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.clock import Moment
from gateway.policy.slots import Prefix
from gateway.writeback.journal import checkpoints
from gateway.writeback.journal import local as local_writes
from gateway.writeback.journal.buckets import LastOwnWrite
from gateway.writeback.journal.checkpoints import AGAIN_SECONDS
from gateway.writeback.journal.files import Usage
from gateway.writeback.journal.records import State, Write
from gateway.writeback.journal.schema import prepare
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.order import with_order
from tests.support.slots import Slot, slot_with
from tests.support.writeback import PlainPresence, key, part, pending, upload

SLOT = Slot("slot", Prefix("bucket"))
RUN = "run/step-1/"


class Book:
    """A journal in memory, and short ways to write to it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.rows = connection
        self.tx = JournalTransaction(connection, PlainPresence())
        self._count = 0

    def put(self, name: str, at: float = 100.0, *, deleted: bool = False, slot: Slot = SLOT) -> Write:
        self._count += 1
        new = pending(key(name), None if deleted else f"file{self._count}", deleted=deleted)
        return self.tx.writes.acknowledge(with_order(replace(new, began_at=at - 1, acknowledged_at=at), slot))

    def settle(self, write: Write, at: float = 200.0) -> None:
        self.tx.writes.settle(write.id, '"e"', Moment(at))

    def checkpoints(self) -> list[tuple[Any, ...]]:
        found = self.rows.execute("SELECT prefix, step, layout, slot, began_at FROM checkpoints ORDER BY prefix")
        return [(prefix.decode(), *rest) for prefix, *rest in found]

    def objects(self) -> dict[str, float | None]:
        """Keys, and since when the origin has them."""
        found = self.rows.execute("SELECT key, durable_at FROM checkpoint_objects ORDER BY key")
        return {name.decode(): at for name, at in found}


@pytest.fixture
def book() -> Iterator[Book]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        yield Book(connection)


def test_what_is_acknowledged_and_settled_is_of_its_checkpoint(book: Book) -> None:
    """And what belongs to none leaves no row."""
    shard, _ = book.put(f"{RUN}__3_0.distcp"), book.put("run/latest")
    assert book.checkpoints() == [(RUN, 1, "dcp", "slot", 99.0)]
    assert book.rows.execute("SELECT rank, write_id, size_bytes FROM checkpoint_objects").fetchall() == [
        (3, shard.id, shard.size_bytes)
    ]
    book.settle(shard)
    assert book.objects() == {f"{RUN}__3_0.distcp": 200.0}


def test_a_layout_is_told_by_whichever_object_tells_it(book: Book) -> None:
    """A number alone tells little."""
    book.put(f"{RUN}config.json")
    assert book.checkpoints() == [(RUN, 1, "step", "slot", 99.0)]
    book.put(f"{RUN}.metadata")
    book.put(f"{RUN}rank_1.pt")
    assert book.checkpoints() == [(RUN, 1, "dcp", "slot", 99.0)]


def test_a_manifest_that_is_renamed_by_copy_and_delete_ends_under_its_name(book: Book) -> None:
    """As DCP renames `.metadata.tmp`."""
    book.put(f"{RUN}.metadata.tmp")
    book.put(f"{RUN}.metadata")
    book.put(f"{RUN}.metadata.tmp", deleted=True)
    assert list(book.objects()) == [f"{RUN}.metadata"]


def test_a_checkpoint_goes_with_its_last_object(book: Book) -> None:
    """Whether the origin has it or not, here or there."""
    book.put(f"{RUN}a")
    kept = book.put(f"{RUN}b")
    book.settle(kept)
    book.put(f"{RUN}a", deleted=True)
    assert list(book.objects()) == [f"{RUN}b"]
    member = kept.member
    book.tx.writes.changed_past(key(f"{RUN}b"), LastOwnWrite(300.0), "slot", member)
    assert (book.objects(), book.checkpoints()) == ({}, [])


def test_what_the_origin_was_asked_to_delete_counts_no_more(book: Book) -> None:
    """Of a DeleteObjects; what is pending under the key does."""
    for name in ("a", "b"):
        book.settle(book.put(f"{RUN}{name}"))
    book.put(f"{RUN}b")
    for name in ("a", "b"):
        book.tx.writes.leave_checkpoint(key(f"{RUN}{name}"))
    assert list(book.objects()) == [f"{RUN}b"]


def test_what_goes_through_is_of_its_checkpoint_too(book: Book) -> None:
    """The origin has it already. Where nobody knows what became of it, nothing is changed."""
    member = with_order(pending(key(f"{RUN}__1_0.distcp"), "x"), SLOT).member
    book.tx.writes.changed_past(key(f"{RUN}__1_0.distcp"), LastOwnWrite(300.0, '"e"'), "slot", member, 5)
    row = book.rows.execute("SELECT rank, size_bytes, durable_at FROM checkpoint_objects").fetchone()
    assert row == (1, 5, 300.0)
    book.tx.writes.changed_past(key(f"{RUN}__1_0.distcp"), LastOwnWrite(400.0, known=False), "slot", member)
    assert book.objects() == {f"{RUN}__1_0.distcp": 300.0}


def test_what_goes_through_does_not_take_the_place_of_what_is_pending(book: Book) -> None:
    """It is not at the origin yet."""
    write = book.put(f"{RUN}a")
    book.tx.writes.changed_past(write.key, LastOwnWrite(300.0, '"e"'), "slot", write.member, 5)
    assert book.objects() == {f"{RUN}a": None}


def test_an_object_that_is_overwritten_is_not_durable(book: Book) -> None:
    """Nor is it when only what was there before has arrived."""
    first = book.put(f"{RUN}a")
    book.tx.writes.change(replace(first, state=State.PUBLISHING), State.COMMITTED)
    second = book.put(f"{RUN}a")
    book.settle(first)
    assert book.objects() == {f"{RUN}a": None}
    book.settle(second, 300.0)
    assert book.objects() == {f"{RUN}a": 300.0}


def test_a_write_that_is_given_up_counts_no_more(book: Book) -> None:
    """Nothing will come of it."""
    write = book.put(f"{RUN}a")
    book.tx.writes.keep(write.id, "others")
    assert list(book.objects()) == [f"{RUN}a"]
    assert book.tx.writes.discard(write.id, Moment(200.0), only_conflict=True)
    assert (book.objects(), book.checkpoints()) == ({}, [])


def test_an_upload_begins_the_save(book: Book) -> None:
    """With its first byte; completed, it is an object as others; aborted, it was none."""
    opened = with_order(replace(upload("u", key(f"{RUN}__0_0.distcp")), began_at=50.0), SLOT)
    book.tx.uploads.begin(opened)
    assert (book.checkpoints(), book.objects()) == ([(RUN, 1, "dcp", "slot", 50.0)], {})
    book.tx.uploads.put_part("u", part(1, "p"), Moment(60.0))
    made = replace(opened, parts=(part(1, "p"),), etag='"x-1"', size_bytes=1, acknowledged_at=70.0)
    assert book.tx.uploads.complete(made) is not None
    assert (book.checkpoints(), list(book.objects())) == ([(RUN, 1, "dcp", "slot", 50.0)], [f"{RUN}__0_0.distcp"])
    book.tx.uploads.begin(with_order(replace(upload("v", key("run/step-2/x")), began_at=80.0), SLOT))
    book.tx.forget_ended(Moment(90.0))
    assert len(book.checkpoints()) == 2
    book.tx.uploads.abort("v", Moment(90.0))
    book.tx.forget_ended(Moment(90.0))
    assert len(book.checkpoints()) == 1


def test_an_upload_that_the_origin_completes_is_durable_at_once(book: Book) -> None:
    """Its client waited for that."""
    opened = with_order(replace(upload("u", key(f"{RUN}a"), "o"), began_at=50.0), SLOT)
    write_id = book.tx.uploads.begin(opened).id
    book.tx.uploads.put_part("u", part(1, "p"), Moment(60.0))
    made = with_order(replace(opened, parts=(part(1, "p"),), etag='"x-1"', size_bytes=1, touched=Moment(61.0)), SLOT)
    assert book.tx.uploads.complete_at_origin(made)
    assert book.objects() == {}
    book.tx.uploads.completed(write_id, '"x-1"', Moment(70.0))
    assert book.objects() == {f"{RUN}a": 70.0}


def test_the_same_name_saved_again_is_another_save(book: Book) -> None:
    """When an object comes again long after the last; a repeated request is none."""
    book.put(f"{RUN}a", 100.0)
    book.put(f"{RUN}b", 110.0)
    book.put(f"{RUN}b", 115.0)
    assert book.checkpoints()[0][-1] == 99.0
    again = 115.0 + AGAIN_SECONDS + 10
    book.put(f"{RUN}b", again)
    assert book.checkpoints()[0][-1] == again - 1
    book.put(f"{RUN}a", again + 5)
    assert book.checkpoints()[0][-1] == again - 1
    assert len(book.checkpoints()) == 1


def test_rules_of_the_slot_say_what_belongs_together(book: Book) -> None:
    """Its own patterns, or none at all."""
    book.put("mine-7/x", slot=slot_with(SLOT, checkpoints=("mine-{step}/",)))
    book.put("run/step-1/x", slot=slot_with(SLOT, checkpoints=()))
    assert book.checkpoints() == [("mine-7/", 7, "pattern", "slot", 99.0)]


# What is forgotten


def forget(book: Book) -> None:
    while book.tx.forget_ended(Moment(1000.0), 3):
        pass


def test_the_newest_of_a_slot_are_remembered(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the origin has; what is pending stays in any case."""
    monkeypatch.setattr(checkpoints, "DURABLE_MAX", 2)
    waiting = book.put("run/step-0/x", 10.0)
    for step in range(1, 6):
        for name in "abcd":
            book.settle(book.put(f"run/step-{step}/{name}", 100.0 + step))
    forget(book)
    assert [row[0] for row in book.checkpoints()] == ["run/step-0/", "run/step-4/", "run/step-5/"]
    assert len(book.objects()) == 9
    book.settle(waiting)
    forget(book)
    assert [row[0] for row in book.checkpoints()] == ["run/step-4/", "run/step-5/"]


def test_so_many_objects_are_remembered(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest that the origin has go first; never what it does not have."""
    monkeypatch.setattr(checkpoints, "OBJECTS_MAX", 4)
    for step in (1, 2):
        for name in "abc":
            book.settle(book.put(f"run/step-{step}/{name}", 100.0 + step))
    forget(book)
    assert len(book.objects()) == 4
    waiting = [book.put(f"run/step-1/w{number}", 101.0) for number in range(6)]
    forget(book)
    assert sorted(book.objects()) == sorted(write.key.key for write in waiting)


def test_what_was_overwritten_under_other_rules_is_forgotten(book: Book) -> None:
    """Nothing tells any more what became of it."""
    book.put(f"{RUN}a")
    book.put(f"{RUN}a", slot=slot_with(SLOT, checkpoints=()))
    forget(book)
    assert (book.objects(), book.checkpoints()) == ({}, [])


# Whatever happens


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "settle", "delete", "keep", "discard", "publish"]), st.integers(0, 5)),
        max_size=30,
    )
)
def test_what_is_said_to_be_durable_is_what_the_origin_has(steps: list[tuple[str, int]]) -> None:
    """After any history of writes, deletions, flushes and decisions."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        book = Book(connection)
        at_origin: dict[str, int] = {}
        for number, (what, chosen) in enumerate(steps):
            name = f"run/step-{chosen % 2}/{chosen}"
            first = book.tx.writes.earliest(key(name))
            if what == "put":
                book.put(name, 100.0 + number)
            elif what == "delete":
                if book.tx.writes.latest(key(name)) is not None:
                    book.put(name, 100.0 + number, deleted=True)
            elif first is None:
                continue
            elif what == "settle" and first.state is not State.CONFLICT:
                at_origin[name] = 0 if first.deleted else first.id
                book.settle(first, 100.0 + number)
            elif what == "publish":
                book.tx.writes.change(replace(first, state=State.PUBLISHING), State.COMMITTED)
            elif what == "keep":
                book.tx.writes.keep(first.id, "others")
            elif what == "discard":
                book.tx.writes.discard(first.id, Moment(100.0 + number), only_conflict=True)
        forget(book)
        found = connection.execute("SELECT key, write_id, durable_at FROM checkpoint_objects").fetchall()
        for name, write_id, durable_at in found:
            latest = book.tx.writes.latest(key(name.decode()))
            if durable_at is None:
                assert latest is not None
                assert latest.id == write_id
            else:
                assert at_origin[name.decode()] == write_id
                assert latest is None
        for latest in book.tx.writes.waiting(0, 100):
            newest = book.tx.writes.latest(latest.key)
            if newest == latest and not latest.deleted:
                assert (latest.key.key.encode(), latest.id, None) in found


OTHER_RULES = Slot("slot", Prefix("bucket"), checkpoints=())


def test_what_other_rules_had_counted_counts_until_its_key_is_changed(book: Book) -> None:
    """Nothing is called durable whose key was given something else since, and nothing is shown that was deleted."""
    names = [f"{RUN}{one}" for one in ("left", "overwritten", "deleted", "past", "completed")]
    for name in names:
        book.settle(book.put(name))
    book.put(names[1], slot=OTHER_RULES)
    book.put(names[2], slot=OTHER_RULES, deleted=True)
    book.tx.writes.changed_past(key(names[3]), LastOwnWrite(300.0, '"e"'), "slot", None, 5)
    opened = with_order(replace(upload("u", key(names[4]), "o"), began_at=250.0), OTHER_RULES)
    write_id = book.tx.uploads.begin(opened).id
    book.tx.uploads.put_part("u", part(1, "p"), Moment(260.0))
    made = replace(opened, parts=(part(1, "p"),), etag='"x-1"', size_bytes=1, touched=Moment(261.0))
    assert book.tx.uploads.complete_at_origin(with_order(made, OTHER_RULES))
    book.tx.uploads.completed(write_id, '"x-1"', Moment(300.0))
    assert book.objects() == {names[0]: 200.0}
    book.put(names[0], slot=OTHER_RULES)
    assert book.checkpoints() == []


# What is kept here only


SCRATCH = Slot("slot", Prefix("bucket"), write="scratch")


def local(book: Book) -> tuple[int, int]:
    """Bytes and objects that are not to be sent, as they are counted, and as they are."""
    usage, counted = book.tx.files.usage("slot"), book.tx.files.counted().get("slot", Usage())
    assert (usage.local_bytes, usage.local_objects) == (counted.local_bytes, counted.local_objects)
    return usage.local_bytes, usage.local_objects


def test_what_is_written_to_scratch_is_pending_and_never_due(book: Book) -> None:
    """It is the key's last state, takes the place of what was there before, and gives it to what comes after."""
    first = book.put("a", slot=SCRATCH)
    assert (book.tx.writes.latest(key("a")), book.tx.turns.lanes()) == (replace(first, parts=()), {})
    assert local(book) == (first.size_bytes, 1)
    book.put("a", slot=SCRATCH)
    assert local(book) == (first.size_bytes, 1)
    sent = book.put("a")
    assert (local(book), sent.state) == ((0, 0), State.COMMITTED)
    assert book.tx.turns.of(sent.id).due_at is not None  # type: ignore[union-attr]
    assert book.tx.files.usage("slot").unsent_bytes == book.tx.files.usage("slot").staged_bytes


def test_nothing_waits_for_what_is_kept_here(book: Book) -> None:
    """Neither a marker nor, in a slot that was made strict since, what comes later."""
    book.put(f"{RUN}a.pt", slot=SCRATCH)
    marker, strict = book.put(f"{RUN}.metadata"), book.put("z", slot=slot_with(SLOT, order="strict"))
    assert [book.tx.turns.of(one.id).after_sequence for one in (marker, strict)] == [None, marker.sequence]  # type: ignore[union-attr]


def test_keeping_a_checkpoint_here_spares_what_may_be_visible(book: Book) -> None:
    """What is publishing, in conflict, or waited for goes on; what is durable stays so; a marker is let go."""
    names = [f"{RUN}{name}.pt" for name in "abcde"]
    a, b, c, d, e = (book.put(name) for name in names)
    marker = book.put("run/latest")
    assert book.tx.turns.of(marker.id).after_sequence == e.sequence  # type: ignore[union-attr]
    book.settle(a)
    book.tx.writes.change(replace(b, state=State.PUBLISHING), State.COMMITTED)
    book.tx.writes.keep(c.id, "others")
    book.tx.turns.prioritise(d.key, 0.0)
    assert book.tx.local.keep_here(1, 300.0) == 1
    assert local(book) == (e.size_bytes, 1)
    assert book.tx.turns.living([b.id, c.id, d.id, e.id]) == {b.id, c.id, d.id}
    assert book.tx.turns.of(marker.id).after_sequence == d.sequence  # type: ignore[union-attr]
    assert not book.tx.writes.keep(e.id, "a run of before")
    assert book.tx.local.send_after_all(e.id, 400.0)
    assert (local(book), book.tx.local.keep_here(1, 500.0)) == ((0, 0), 0)  # somebody waits for it


def test_a_marker_that_may_name_what_is_left_out_is_left_out_with_it(book: Book) -> None:
    """One that came when the newer checkpoint was whole names that; both are sent when their checkpoint is."""
    shard = book.put(f"{RUN}a.pt", 100.0)
    of_first = book.put("run/latest", 110.0)
    other = book.put("other/latest", 115.0)
    assert book.tx.local.keep_here(1, 300.0, 200.0) == 2
    assert [book.tx.writes.latest(one.key).state for one in (shard, of_first, other)] == [  # type: ignore[union-attr]
        State.LOCAL,
        State.LOCAL,
        State.COMMITTED,
    ]
    assert book.tx.local.send_checkpoint_after_all("slot", None, 400.0) == 0  # it still may name what is kept here
    of_second = book.put("run/latest", 210.0)
    assert of_second.state is State.COMMITTED
    assert book.tx.turns.of(of_second.id).after_sequence is None  # type: ignore[union-attr]
    assert book.tx.local.send_checkpoint_after_all("slot", 1, 500.0) == 1
    assert local(book) == (0, 0)


def test_a_marker_that_may_name_what_was_overwritten_since_is_left_out_with_it(book: Book) -> None:
    """The file that came before the marker has a later one in its place, which is not sent either."""
    first = book.put(f"{RUN}a.pt", 100.0)
    marker = book.put("run/latest", 110.0)
    book.put(first.key.key, 120.0)
    assert book.tx.local.keep_here(1, 300.0, 200.0) == 2
    assert book.tx.writes.latest(marker.key).state is State.LOCAL  # type: ignore[union-attr]
    assert book.tx.local.send_checkpoint_after_all("slot", None, 400.0) == 0
    assert book.tx.local.send_checkpoint_after_all("slot", 1, 400.0) == 1
    assert book.tx.local.send_checkpoint_after_all("slot", None, 500.0) == 1


def test_markers_that_are_kept_here_do_not_hold_each_other(book: Book) -> None:
    """One was written again behind the other: it was the first, and is the last."""
    for shard in ("a.pt", "b.pt"):
        book.put(f"{RUN}{shard}")
        book.put("run/latest")
        if shard == "a.pt":
            book.put("run/_SUCCESS")
        assert book.tx.local.keep_here(1, 300.0, 200.0) >= 2
    assert book.tx.local.send_checkpoint_after_all("slot", 1, 400.0) == 2
    assert book.tx.local.send_checkpoint_after_all("slot", None, 400.0) == 2


def test_a_manifest_is_never_sent_without_what_was_left_out_before_it(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few objects one transaction takes: the manifest is among the first."""
    monkeypatch.setattr(local_writes, "TAKEN_AT_ONCE", 1)
    shards = [book.put(f"{RUN}model-0000{number}-of-00002.safetensors") for number in (1, 2)]
    manifest = book.put(f"{RUN}model.safetensors.index.json")
    for _ in range(3):
        assert book.tx.local.keep_here(1, 300.0) == 1
        assert book.tx.writes.latest(manifest.key).state is State.LOCAL  # type: ignore[union-attr]
    assert [book.tx.writes.latest(one.key).state for one in shards] == [State.LOCAL] * 2  # type: ignore[union-attr]


def test_nothing_is_left_out_that_a_manifest_names_which_is_sent(book: Book) -> None:
    """Somebody waits for the manifest, or decides about it: it still waits for its files, and they are sent."""
    shards = [book.put(f"{RUN}__{rank}_0.distcp") for rank in range(2)]
    manifest = book.put(f"{RUN}.metadata")
    book.tx.turns.raise_priority("bucket", manifest.key.key.encode(), manifest.key.key.encode() + b"\0", 200.0)
    assert book.tx.local.keep_here(1, 300.0) == 0
    assert book.tx.turns.of(manifest.id).after_sequence == shards[-1].sequence  # type: ignore[union-attr]


def test_what_is_kept_here_is_removed_the_oldest_first_as_checkpoints(book: Book) -> None:
    """Nothing of which something came lately; a checkpoint is gone with the last of its objects."""
    for name, at in (("run/step-1/a.pt", 100.0), ("x", 200.0), ("run/step-1/b.pt", 300.0), ("run/step-2/a.pt", 400.0)):
        book.put(name, at, slot=SCRATCH)
    size_bytes = local(book)[0] // 4
    assert book.tx.local.remove("slot", Moment(410.0), 1, 150.0) == (1, size_bytes)  # step-1 is too young
    assert book.tx.writes.latest(key("x")) is None
    assert book.tx.local.remove("slot", Moment(450.0), size_bytes, 60.0) == (2, 2 * size_bytes)
    assert [prefix for prefix, *_ in book.checkpoints()] == ["run/step-2/"]
    assert book.tx.local.remove("slot", Moment(10_000.0)) == (1, size_bytes)
    assert (local(book), book.checkpoints(), book.tx.counts()) == ((0, 0), [], (0, 0))


def test_a_deletion_of_what_is_kept_here_need_not_be_waited_for(book: Book) -> None:
    """Nothing of it was ever sent; that the key is deleted is pending all the same."""
    book.put("a", slot=SCRATCH)
    gone = with_order(replace(pending(key("a"), deleted=True), acknowledged_at=2.0), SCRATCH)
    assert book.tx.writes.write_tombstone(gone) is None
    found = book.tx.writes.latest(key("a"))
    assert found is not None
    assert (found.deleted, found.state, local(book)) == (True, State.COMMITTED, (0, 0))


def test_checkpoints_are_numbered_within_their_run(book: Book) -> None:
    """As they were begun; a run of its own counts for itself."""
    for name in ("run/step-3/a.pt", "run/step-1/a.pt", "other/step-1/a.pt", "run/step-3/b.pt"):
        book.put(name)
    found = book.rows.execute("SELECT prefix, ordinal FROM checkpoints ORDER BY prefix").fetchall()
    assert found == [(b"other/step-1/", 1), (b"run/step-1/", 2), (b"run/step-3/", 1)]


def test_saves_are_in_the_order_in_which_they_began_whatever_the_clock_says(book: Book) -> None:
    """It goes back by an hour, and a checkpoint that is saved again is the newest, then too."""
    for name, at in (("run/step-1/a.pt", 10_000.0), ("run/step-2/a.pt", 6_400.0), ("run/step-1/a.pt", 6_500.0)):
        book.put(name, at)
        newest = book.rows.execute("SELECT prefix FROM checkpoints ORDER BY save_order DESC LIMIT 1").fetchone()
        assert newest == (name.removesuffix("a.pt").encode(),)


def test_an_upload_that_took_long_is_no_newer_save(book: Book) -> None:
    """Two of a key at once, as after a repeated request: the one that began first ends last."""
    book.put("run/step-1/a.pt", 1_000.0)
    book.put("run/step-2/a.pt", 1_010.0)
    late = with_order(replace(pending(key("run/step-1/a.pt"), "late"), began_at=900.0, acknowledged_at=1_020.0), SLOT)
    book.tx.writes.acknowledge(late)
    found = book.rows.execute("SELECT prefix FROM checkpoints ORDER BY save_order").fetchall()
    assert found == [(b"run/step-1/",), (b"run/step-2/",)]
