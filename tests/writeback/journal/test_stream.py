"""A second copy of a journal is what was streamed, or nothing: no frame is lost, repeated, changed, or of another.

That it says the same after any history: test_transaction_histories.py.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.writeback.journal.records import CreateAttempt, Write
from gateway.writeback.journal.schema import prepare
from gateway.writeback.journal.stream import apply, records
from gateway.writeback.journal.transaction import JournalTransaction
from tests.support.journal_rows import said_by
from tests.support.writeback import PlainPresence, key, part, pending, upload


@contextmanager
def new_journal() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        yield connection


def write_some(connection: sqlite3.Connection) -> list[Write]:
    """Objects, an upload with a part, something that was flushed."""
    tx = JournalTransaction(connection, PlainPresence())
    made = [tx.writes.acknowledge(pending(key(name), name)) for name in ("a", "é", "flushed", "z€")]
    tx.writes.settle(made[2].id, '"e"', Moment(5.0))
    tx.uploads.begin(upload("node.u", key("open")))
    tx.uploads.put_part("node.u", part(3, "part"), Moment(2.0))
    tx.uploads.ask(key("asked"), "slot", CreateAttempt(0, Moment(1.0)))
    return made


@given(data=st.data())
def test_what_is_harmed_on_its_way_leaves_nothing(data: st.DataObject) -> None:
    """A byte changed, a frame lost, repeated, exchanged or of another journal's stream: refused as a whole."""
    with new_journal() as connection, new_journal() as other, new_journal() as copy:
        write_some(connection)
        write_some(other)
        frames, foreign = list(records(connection)), list(records(other))
        at = data.draw(st.integers(0, len(frames) - 1))
        match data.draw(st.sampled_from(["changed", "lost", "twice", "foreign", "short", "no end"])):
            case "changed":
                place = data.draw(st.integers(0, len(frames[at]) - 1))
                flipped = frames[at][place] ^ data.draw(st.integers(1, 255))
                frames[at] = frames[at][:place] + bytes([flipped]) + frames[at][place + 1 :]
            case "lost":
                del frames[at]
            case "twice":
                frames.insert(at, frames[at])
            case "foreign":
                frames[at] = foreign[at]
            case "short":
                frames[at] = frames[at][: data.draw(st.integers(0, len(frames[at]) - 1))]
            case "no end":
                del frames[at:]
        empty = said_by(copy)
        with pytest.raises(BufferDamaged):
            apply(copy, frames)
        assert said_by(copy) == empty


def test_a_copy_that_has_the_rest_takes_what_is_new() -> None:
    """`since` leaves out what was acknowledged before, its parts and its files; open uploads come in any case."""
    with new_journal() as connection, new_journal() as copy:
        made = write_some(connection)
        apply(copy, records(connection, made[1].sequence))
        tx = JournalTransaction(copy, PlainPresence())
        assert [one.key for one in tx.writes.waiting(0, 10)] == [key("z€")]
        assert [one.number for one in tx.parts.of(made[3].id)] == [1]
        opened = tx.uploads.upload("node.u")
        assert opened is not None
        assert [one.number for one in tx.parts.of(opened.id)] == [3]
        assert [tx.files.knows(name) for name in ("a", "z€", "part")] == [False, True, True]


def test_ids_and_sequences_go_on() -> None:
    """What the copy acknowledges is called as the original would have called it: nothing has two names."""
    with new_journal() as connection, new_journal() as copy:
        write_some(connection)
        apply(copy, records(connection))
        names = []
        for one in (connection, copy):
            tx = JournalTransaction(one, PlainPresence())
            written = tx.writes.acknowledge(pending(key("next"), "next"))
            names.append((tx.node(), written.id, written.sequence))
        assert names[0] == names[1]


def test_only_an_empty_journal_takes_a_stream() -> None:
    """Two nodes' writes do not mix."""
    with new_journal() as connection, new_journal() as copy:
        write_some(connection)
        write_some(copy)
        before = said_by(copy)
        with pytest.raises(ValueError, match="not empty"):
            apply(copy, records(connection))
        assert said_by(copy) == before


def test_a_stream_of_another_version_is_refused() -> None:
    """Whatever it says."""
    with new_journal() as connection, new_journal() as copy, pytest.MonkeyPatch.context() as patch:
        write_some(connection)
        patch.setattr("gateway.writeback.journal.stream.VERSION", 2)
        frames = list(records(connection))
        patch.undo()
        with pytest.raises(ValueError, match="version 2"):
            apply(copy, frames)
