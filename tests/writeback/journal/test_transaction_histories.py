"""What the journal says is what a model of S3 says, after any history of writes; every file is accounted for; and
whatever the history, all of it gets to the origin, in whichever order its turns come, and nothing before its time."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.clock import Moment
from gateway.core.errors import InConflict, PartInUse
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.journal.buckets import LastOwnWrite
from gateway.writeback.journal.files import Usage
from gateway.writeback.journal.records import CreateAttempt, ExpectedVersion, Part, State, Write
from gateway.writeback.journal.schema import prepare
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.order import with_order
from gateway.writeback.pending_key_filter import hash_slot_of
from tests.support.slots import Slot
from tests.support.writeback import PlainPresence, key, part, pending, spec, upload

KEYS = [key(name) for name in ("a", "é", "d/x", "d/_SUCCESS", "d/e/x", "d/e/latest", "latest")]
ORDERED = Slot("strict", Prefix.parse("s3://bucket/"), write="back", buffer_bytes=1000, order="strict")
SLOTS: Mapping[str, Slot | None] = {"slot": None, "strict": ORDERED}
"""A key's slot changes now and then: somebody has changed the configuration."""

NOW = 50.0


@dataclass
class Mine:
    """A write as the model sees it. `since` is the place of the first write whose place it has taken."""

    write: Write
    parts: dict[int, Part] = field(default_factory=dict)
    since: int = 0

    @property
    def whole(self) -> Write:
        return replace(self.write, parts=tuple(self.parts[number] for number in sorted(self.parts)))


Wanted = Callable[[Mine], bool]


def in_order(one: Mine) -> bool:
    return one.write.sequence > 0


def is_open(one: Mine) -> bool:
    """An upload that its client may still do something about."""
    return not one.write.is_acknowledged


def has_parts(one: Mine) -> bool:
    return is_open(one) and bool(one.parts)


def is_pending(one: Mine) -> bool:
    return one.write.is_acknowledged


def is_asked_for(one: Mine) -> bool:
    """Its client waits until the origin has completed it."""
    return one.write.is_completed_at_origin


def is_conflict(one: Mine) -> bool:
    return one.write.state is State.CONFLICT


def blockers(one: Mine, among: Mapping[int, Mine]) -> set[int]:
    """What is to be at the origin before this one."""
    write, found = one.write, set[int]()
    for write_id, other in among.items():
        before = other.write
        if other is one or not before.sequence or not write.sequence:
            continue
        is_before = before.sequence < write.sequence
        if is_before and (before.key == write.key or (write.in_order and before.spec.slot == write.spec.slot)):
            found.add(write_id)
        if write.behind is not None and before.is_acknowledged and before.key.key.startswith(write.behind):
            found |= {write_id} if other.since < write.sequence else set()
    return found


class Histories(RuleBasedStateMachine):
    """Random histories of uploads, writes, copies, deletions, Completes at the origin, conflicts and flushes."""

    @initialize()
    def begin(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None)
        prepare(self.connection)
        self.pending_keys = PlainPresence()
        self.tx = JournalTransaction(self.connection, self.pending_keys)
        self.mine: dict[int, Mine] = {}
        self.doomed: set[str] = set()
        self.asked: set[int] = set()
        self.ended: dict[str, str | None] = {}
        self.made: set[str] = set()
        self.own: dict[ObjectKey, ExpectedVersion | None] = {}
        self.count = 0

    def new(self) -> str:
        self.count += 1
        return f"n{self.count:03}"

    def new_part(self, number: int) -> Part:
        made = part(number, self.new())
        self.made.add(made.file.name)
        return made

    def has(self, wanted: Wanted) -> bool:
        return any(wanted(one) for one in self.mine.values())

    def pick(self, data: st.DataObject, wanted: Wanted) -> Mine:
        return self.mine[data.draw(st.sampled_from([name for name, one in sorted(self.mine.items()) if wanted(one)]))]

    def may_begin(self, one: Mine) -> bool:
        return is_pending(one) and not is_conflict(one) and not blockers(one, self.mine)

    # Uploads

    @rule(at=st.sampled_from(KEYS), slot=st.sampled_from(sorted(SLOTS)))
    def create(self, at: ObjectKey, slot: str) -> None:
        new = upload(self.new(), at)
        opened = self.tx.uploads.begin(replace(new, spec=replace(new.spec, slot=slot)))
        self.mine[opened.id] = Mine(opened)

    @rule(at=st.sampled_from(KEYS))
    def ask(self, at: ObjectKey) -> None:
        self.asked.add(self.tx.uploads.ask(at, "slot", CreateAttempt(0, Moment(NOW))))

    @precondition(lambda self: self.asked and self.has(is_open))
    @rule(data=st.data())
    def begun(self, data: st.DataObject) -> None:
        """The origin has an upload for one that is open; perhaps the second one."""
        one, asked = self.pick(data, is_open), data.draw(st.sampled_from(sorted(self.asked)))
        self.asked.remove(asked)
        origin_upload_id = self.new()
        is_first = one.write.origin_upload_id is None
        found = self.tx.uploads.begun(one.write.id, origin_upload_id, asked)
        assert found is not None
        if is_first:
            one.write = replace(one.write, origin_upload_id=origin_upload_id)
        else:
            self.doom(origin_upload_id)
        assert found == one.write

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), is_known=st.booleans())
    def nobody_knows(self, data: st.DataObject, *, is_known: bool) -> None:
        """What came of an upload that the origin was asked for; or it has said that there is none."""
        asked = data.draw(st.sampled_from(sorted(self.asked)))
        if is_known:
            self.tx.uploads.forget(asked)
            self.asked.remove(asked)
        else:
            self.tx.uploads.mark_in_doubt(asked, Moment(NOW))

    @precondition(lambda self: self.has(is_open))
    @rule(data=st.data(), number=st.integers(1, 4), is_here=st.booleans())
    def store(self, data: st.DataObject, number: int, *, is_here: bool) -> None:
        """A part; perhaps one for which there was no room here. None of which the origin completes the upload now."""
        one, stored = self.pick(data, is_open), self.new_part(number)
        if one.write.is_completed_of(number):
            with pytest.raises(PartInUse):
                self.tx.uploads.put_part(one.write.upload_id or "", stored, Moment(NOW))
            self.made.remove(stored.file.name)
            return
        if not is_here:
            self.made.remove(stored.file.name)
            stored = replace(stored, file=replace(stored.file, name=""), origin_etag=stored.file.etag)
        assert self.tx.uploads.put_part(one.write.upload_id or "", stored, Moment(NOW))
        one.parts[number] = stored
        one.write = replace(one.write, touched=Moment(NOW))

    @precondition(lambda self: self.has(has_parts))
    @rule(data=st.data())
    def origin_has_part(self, data: st.DataObject) -> None:
        one = self.pick(data, has_parts)
        number = data.draw(st.sampled_from(sorted(one.parts)))
        sent = replace(one.parts[number], origin_etag='"at the origin"')
        assert self.tx.uploads.part_sent(one.write.id, sent) == one.write
        replaced = replace(part(number, self.new()), origin_etag='"of a part that was replaced"')
        assert self.tx.uploads.part_sent(one.write.id, replaced) == one.write
        one.parts[number] = sent

    def chosen(self, data: st.DataObject, one: Mine) -> Write:
        numbers = data.draw(st.lists(st.sampled_from(sorted(one.parts)), min_size=1, unique=True).map(sorted))
        of = pending(one.write.key, parts=[one.parts[number] for number in numbers], multipart=True)
        made = replace(of, spec=one.write.spec, upload_id=one.write.upload_id, completed_of=self.new())
        return with_order(made, SLOTS[one.write.spec.slot])

    @precondition(lambda self: self.has(has_parts))
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        one = self.pick(data, has_parts)
        made = self.chosen(data, one)
        state = State.COMMITTED if one.write.state is State.OPEN else State.PUBLISHING
        if state is State.COMMITTED and any(is_conflict(other) for other in self.before(made.key, made, one)[0]):
            state = State.CONFLICT  # a later write ends none
        completed = self.tx.uploads.complete(made)
        assert completed is not None
        assert (completed.id, completed.state) == (one.write.id, state)
        one.parts = {each.number: each for each in made.parts}
        self.entered(one, completed)

    @precondition(lambda self: self.has(has_parts))
    @rule(data=st.data())
    def complete_at_origin(self, data: st.DataObject) -> None:
        """Its client waits, and perhaps asks again."""
        one = self.pick(data, has_parts)
        made = replace(
            self.chosen(data, one), conditions={"if-none-match": "*"}, asked_as=self.new(), touched=Moment(NOW)
        )
        before, other = one.write.sequence, (one.write.completed_of, one.write.conditions)
        if is_asked_for(one) and one.write.answer is None and other != (made.completed_of, made.conditions):
            assert not self.tx.uploads.complete_at_origin(made)
            return
        assert self.tx.uploads.complete_at_origin(made)
        found = self.tx.writes.get(one.write.id)
        assert found is not None
        assert (found.state, found.conditions, found.asked_as) == (State.PUBLISHING, made.conditions, made.asked_as)
        assert not before or found.sequence == before
        one.write = found

    @precondition(lambda self: self.has(is_asked_for))
    @rule(data=st.data(), is_over=st.booleans())
    def origin_answers(self, data: st.DataObject, *, is_over: bool) -> None:
        """A refusal, or nobody knows."""
        one = self.pick(data, is_asked_for)
        self.tx.uploads.answer(one.write.id, "PreconditionFailed", is_over=is_over)
        found = self.tx.writes.get(one.write.id)
        assert found is not None
        assert (found.state, found.answer) == (State.OPEN if is_over else State.PUBLISHING, "PreconditionFailed")
        one.write = found

    @precondition(lambda self: self.has(lambda one: is_asked_for(one) and not blockers(one, self.mine)))
    @rule(data=st.data())
    def origin_completes(self, data: st.DataObject) -> None:
        one = self.pick(data, lambda one: is_asked_for(one) and not blockers(one, self.mine))
        self.tx.uploads.completed(one.write.id, '"made there"', Moment(NOW))
        if in_order(one):
            self.over(one, ExpectedVersion.exactly('"made there"'), '"made there"')
            return
        for other in self.chain(one.write.key):  # nobody knows which of them came first
            expected = other.write.expected
            other.write = replace(other.write, expected=replace(expected, etags=(*expected.etags, '"made there"')))
        self.own[one.write.key] = ExpectedVersion.exactly('"made there"')
        self.gone(one, '"made there"')

    @precondition(lambda self: self.has(is_asked_for))
    @rule(data=st.data())
    def nobody_waits_any_longer(self, data: st.DataObject) -> None:
        """For a Complete of which nobody knows."""
        one = self.pick(data, is_asked_for)
        self.tx.uploads.leave_order(one.write.id, NOW)
        one.write = replace(one.write, sequence=0)

    @precondition(lambda self: self.has(is_open))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        one = self.pick(data, is_open)
        is_at_origin = one.write.is_completed_at_origin and one.write.answer is None
        is_busy = is_at_origin and self.tx.uploads.is_being_completed(one.write)  # not where it waits for one before it
        assert self.tx.uploads.abort(one.write.upload_id or "", Moment(NOW)) == (not is_busy)
        if is_busy:
            return
        assert not self.tx.uploads.abort(one.write.upload_id or "", Moment(NOW))
        self.doom(one.write.origin_upload_id)
        self.gone(one, None)

    # Writes

    def fresh(self, at: ObjectKey, slot: str, *, deleted: bool = False) -> Write:
        new = pending(at, parts=() if deleted else (self.new_part(1),), deleted=deleted)
        return with_order(replace(new, spec=replace(new.spec, slot=slot)), SLOTS[slot])

    def acknowledged(self, stored: Write) -> None:
        one = Mine(replace(stored, parts=()), {each.number: each for each in stored.parts})
        self.mine[stored.id] = one
        self.entered(one, stored)

    @rule(at=st.sampled_from(KEYS), slot=st.sampled_from(sorted(SLOTS)))
    def put(self, at: ObjectKey, slot: str) -> None:
        self.acknowledged(self.tx.writes.acknowledge(self.fresh(at, slot)))

    @rule(at=st.sampled_from(KEYS), slot=st.sampled_from(sorted(SLOTS)))
    def delete(self, at: ObjectKey, slot: str) -> None:
        new = self.fresh(at, slot, deleted=True)
        replaced, stays = self.before(at, new)
        if any(is_conflict(one) for one in [*replaced, *stays]):
            try:
                self.tx.writes.write_tombstone(new)
            except InConflict:
                return
            raise AssertionError("a person was to decide")
        nobody_need_wait = not stays and bool(replaced) and replaced[0].write.expected.is_nothing
        buried, stored = self.tx.writes.write_tombstone(new), self.tx.writes.latest(at)
        assert (buried is None) == nobody_need_wait
        assert stored is not None
        assert stored == (buried or stored)
        self.acknowledged(stored)

    @precondition(lambda self: self.has(is_pending))
    @rule(data=st.data(), to=st.sampled_from(KEYS))
    def copy(self, data: st.DataObject, to: ObjectKey) -> None:
        source = self.pick(data, is_pending).whole
        copied = replace(
            pending(to, parts=source.parts, deleted=source.deleted),
            spec=replace(spec(to), slot="other"),
            etag=source.etag,
            multipart=source.multipart,
        )
        if all(each.file.is_here for each in source.parts):
            self.acknowledged(self.tx.writes.acknowledge(with_order(copied, None)))

    def before(self, at: ObjectKey, new: Write, but: Mine | None = None) -> tuple[list[Mine], list[Mine]]:
        """What of the key's chain a new write takes the place of, and what it follows."""
        chain = [one for one in self.chain(at) if one is not but]
        stays = [
            one
            for one in chain
            if one.write.state is State.PUBLISHING
            or new.in_order
            or (new.behind is not None and self.is_spoken_for(one))
        ]
        return [one for one in chain if one not in stays], stays

    def is_spoken_for(self, one: Mine) -> bool:
        """Whether another marker, which came later, waits for it."""
        markers = [other.write for other in self.mine.values() if other.write.behind is not None]
        return any(
            each.key != one.write.key
            and each.sequence > one.write.sequence
            and one.write.key.key.startswith(each.behind or "")
            for each in markers
        )

    def chain(self, at: ObjectKey) -> list[Mine]:
        found = [one for one in self.mine.values() if one.write.key == at and in_order(one)]
        return sorted(found, key=lambda one: one.write.sequence)

    def entered(self, one: Mine, stored: Write) -> None:
        """It is the last one of all."""
        assert stored.sequence > max(
            (other.write.sequence for other in self.mine.values() if other is not one), default=0
        )
        replaced, _ = self.before(stored.key, stored, one)
        own = self.own.get(stored.key)
        expected = replaced[0].write.expected if replaced else own
        assert expected is None or stored.expected == expected
        for other in replaced:
            self.doom(other.write.origin_upload_id)
            self.gone(other, other.write.etag)
        one.write = replace(stored, parts=())
        one.since = stored.sequence
        if stored.behind is None:
            one.since = min([stored.sequence, *(other.since for other in replaced)])

    # At the origin

    @precondition(lambda self: self.has(self.may_begin))
    @rule(data=st.data(), is_certain=st.booleans())
    def send(self, data: st.DataObject, *, is_certain: bool) -> None:
        """It may be there from now on; or, after a refusal, it is not."""
        one = self.pick(data, self.may_begin)
        state, other = (State.COMMITTED, State.PUBLISHING) if is_certain else (State.PUBLISHING, State.COMMITTED)
        changed = self.tx.writes.change(replace(one.write, state=state), other)
        assert changed == (one.write.state is other)
        one.write = replace(one.write, state=state)

    @precondition(lambda self: self.has(self.may_begin))
    @rule(data=st.data(), etag=st.sampled_from([None, '"e"']), is_open=st.booleans())
    def settle(self, data: st.DataObject, etag: str | None, *, is_open: bool) -> None:
        one = self.pick(data, self.may_begin)
        self.tx.writes.settle(one.write.id, etag, Moment(NOW), upload_may_be_open=is_open)
        if is_open:
            self.doom(one.write.origin_upload_id)
        self.over(one, ExpectedVersion.exactly(etag))

    @precondition(lambda self: self.has(self.may_begin))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        one = self.pick(data, self.may_begin)
        assert self.tx.writes.keep(one.write.id, "others have changed it")
        one.write = replace(one.write, state=State.CONFLICT)

    @precondition(lambda self: self.has(is_conflict))
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        one = self.pick(data, is_conflict)
        assert self.tx.writes.overwrite(one.write.id, ExpectedVersion(('"theirs"',)), NOW)
        assert not self.tx.writes.overwrite(one.write.id, ExpectedVersion(), NOW)
        one.write = replace(one.write, state=State.COMMITTED, expected=ExpectedVersion(('"theirs"',)))

    @precondition(lambda self: self.has(is_pending))
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        one = self.pick(data, is_pending)
        assert self.tx.writes.discard(one.write.id, Moment(NOW), only_conflict=True) == is_conflict(one)
        if not is_conflict(one):
            assert self.tx.writes.discard(one.write.id, Moment(NOW), only_conflict=False)
        self.doom(one.write.origin_upload_id)
        expected = one.write.expected
        if one.write.state is State.PUBLISHING:
            expected = replace(expected, etags=(*expected.etags, one.write.etag))
            self.own[one.write.key] = None
        self.expect(one, expected)
        self.gone(one, one.write.etag)

    @rule()
    def origin_forgets_uploads(self) -> None:
        for one in self.tx.uploads.aborting():
            if one.origin_upload_id is not None:
                self.tx.uploads.forget(one.id)
        self.doomed.clear()

    def doom(self, origin_upload_id: str | None) -> None:
        self.doomed |= {origin_upload_id} if origin_upload_id is not None else set()

    def over(self, one: Mine, expected: ExpectedVersion, etag: str | None = None) -> None:
        """The origin has this now, by our doing."""
        self.own[one.write.key] = expected
        self.expect(one, expected)
        self.gone(one, etag or one.write.etag)

    def expect(self, done: Mine, expected: ExpectedVersion) -> None:
        """What follows a write finds this; what is behind an upload that may come to nothing, too."""
        for one in self.chain(done.write.key):
            if one.write.sequence > done.write.sequence:
                one.write = replace(one.write, expected=expected)
                if one.write.is_acknowledged:
                    return

    def gone(self, one: Mine, etag: str | None) -> None:
        del self.mine[one.write.id]
        if one.write.upload_id is not None:
            self.ended[one.write.upload_id] = etag

    # What must be so

    @invariant()
    def every_row_is_what_was_written(self) -> None:
        for write_id, one in self.mine.items():
            assert self.tx.writes.whole(write_id) == one.whole
        every = sorted((one for one in self.mine.values() if is_pending(one)), key=lambda one: one.write.sequence)
        assert self.tx.writes.waiting(0, 1000) == [one.write for one in every]
        assert self.tx.writes.newest() == (every[-1].write.sequence if every else 0)
        assert self.tx.counts() == (len(every), sum(is_open(one) for one in self.mine.values()))
        assert self.tx.writes.hash_slots() == {hash_slot_of(one.write.key) for one in every}

    @invariant()
    def each_key_has_its_last_write(self) -> None:
        shown = []
        for at in KEYS:
            mine = [one for one in self.chain(at) if is_pending(one)]
            assert self.tx.writes.latest(at) == (mine[-1].write if mine else None)
            chain = self.chain(at)
            assert self.tx.writes.earliest(at) == (chain[0].write if chain else None)
            assert not mine or self.pending_keys.may_be(at)
            shown += [mine[-1].write] if mine else []
        shown.sort(key=lambda one: one.key.key.encode())
        assert self.tx.writes.listing("bucket", b"", None, 100) == shown

    @invariant()
    def uploads_are_open_or_have_ended(self) -> None:
        opened = {one.write.upload_id: one.write for one in self.mine.values() if is_open(one)}
        assert {one.upload_id: one for one in self.tx.uploads.under("bucket")} == opened
        for upload_id, one in opened.items():
            assert self.tx.uploads.upload(upload_id or "") == one
            assert self.tx.uploads.ended(upload_id or "") is None
        for upload_id, etag in self.ended.items():
            ended = self.tx.uploads.ended(upload_id)
            assert ended is not None
            assert ended.etag == etag
            assert self.tx.uploads.upload(upload_id) is None
        for write in (one.write for one in self.mine.values() if is_pending(one)):
            if write.upload_id is not None:
                ended = self.tx.uploads.ended(write.upload_id)
                assert ended is not None
                assert (ended.etag, ended.parts) == (write.etag, write.completed_of)

    @invariant()
    def every_upload_of_the_origins_is_known(self) -> None:
        aborting = self.tx.uploads.aborting()
        assert {one.origin_upload_id for one in aborting if one.origin_upload_id is not None} == self.doomed
        assert {one.id for one in aborting if one.asked is not None} == self.asked
        assert self.tx.uploads.are_any_aborting() == bool(aborting)
        known = {one.write.origin_upload_id for one in self.mine.values()} | self.doomed
        assert set().union(*(self.tx.uploads.origin_upload_ids(at) for at in KEYS)) - {None} == known - {None}

    @invariant()
    def every_file_is_accounted_for(self) -> None:
        used = {each.file.name for one in self.mine.values() for each in one.parts.values() if each.file.is_here}
        assert {name for name in self.made if self.tx.files.knows(name)} == used
        assert not self.made or set(self.tx.files.unknown(sorted(self.made))) == self.made - used
        assert used.isdisjoint(self.tx.files.freed)
        assert self.made - used <= set(self.tx.files.freed)

    @invariant()
    def the_counters_say_what_there_is(self) -> None:
        counted = {slot: usage for slot, usage in self.tx.files.usages().items() if usage != Usage()}
        assert counted == self.tx.files.counted()
        files = {each.file.name: each.file for one in self.mine.values() for each in one.parts.values()}
        staged_bytes = sum(file.size_bytes for file in files.values() if file.is_here)
        assert sum(usage.staged_bytes for usage in counted.values()) == staged_bytes
        assert sum(usage.objects for usage in counted.values()) == sum(is_pending(one) for one in self.mine.values())
        for slot in counted:
            waiting = [one.write for one in self.mine.values() if is_pending(one) and one.write.spec.slot == slot]
            ages = [one.acknowledged_at for one in waiting if one.state is not State.CONFLICT]
            oldest = self.tx.writes.oldest(slot)
            assert (None if oldest is None else oldest.at) == min(ages, default=None)

    @invariant()
    def each_waits_for_what_it_must_and_for_nothing_else(self) -> None:
        for write_id, one in self.mine.items():
            turn, before = self.tx.turns.of(write_id), blockers(one, self.mine)
            assert turn is not None
            if is_conflict(one):
                assert turn.due_at is None
            elif before:
                assert turn.due_at is None
                assert turn.after_sequence in {self.mine[other].write.sequence for other in before}
            else:
                assert (turn.due_at is not None, turn.after_sequence) == (True, None)

    @rule(seed=st.integers(0, 1000))
    def all_gets_to_the_origin(self, seed: int) -> None:
        """In any order of what is due; conflicts when a person has decided. On a copy: the history goes on."""
        dice = random.Random(seed)
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
            self.connection.backup(copy)
            _settle_all(
                JournalTransaction(copy, PlainPresence()), {name: replace(one) for name, one in self.mine.items()}, dice
            )
            assert copy.execute("SELECT count(*) FROM writes WHERE pending = 1 OR sequence > 0").fetchone() == (0,)
            assert copy.execute("SELECT count(*) FROM usage WHERE objects <> 0").fetchone() == (0,)

    def teardown(self) -> None:
        if hasattr(self, "connection"):
            self.connection.close()


def _settle_all(tx: JournalTransaction, left: dict[int, Mine], dice: random.Random) -> None:
    query = "SELECT id FROM writes WHERE sequence IS NOT NULL AND due_at IS NOT NULL AND state < 5"
    while True:
        due = [write_id for (write_id,) in tx._rows.execute(query)]
        due += [write_id for write_id, one in left.items() if is_conflict(one)]
        if not due:
            break
        write_id = dice.choice(due)
        one = left[write_id]
        assert is_conflict(one) or not blockers(one, left), "before its time"
        if is_conflict(one) and dice.random() < 0.5:
            assert tx.writes.overwrite(write_id, ExpectedVersion(absent=True), NOW)
            one.write = replace(one.write, state=State.COMMITTED)
            continue
        if is_conflict(one):
            assert tx.writes.discard(write_id, Moment(NOW), only_conflict=True)
        elif is_pending(one):
            tx.writes.settle(write_id, '"e"', Moment(NOW))
        elif dice.random() < 0.5:
            tx.uploads.completed(write_id, '"e"', Moment(NOW))
        else:
            tx.uploads.answer(write_id, "PreconditionFailed", is_over=True)
        del left[write_id]
    assert not any(in_order(one) for one in left.values()), "nothing is due, and something is left"


Histories.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase


def test_own_doings_outlive_what_has_done_them() -> None:
    """The model above takes them for its own."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        prepare(connection)
        tx = JournalTransaction(connection, PlainPresence())
        stored = tx.writes.acknowledge(pending(KEYS[0], "one"))
        tx.writes.settle(stored.id, '"e"', Moment(NOW))
        assert tx.buckets.last_own_write(KEYS[0]) == LastOwnWrite(NOW, '"e"')
