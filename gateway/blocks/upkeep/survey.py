"""Bringing the index in line with the files: after an unclean boot, and when keys belong to other slots than before.

The index can be used all the while: a block that the survey has not come to is a miss, and its bytes count as nobody's.
Every step is short and complete in itself, so a survey that is broken off is carried on from its directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from gateway.blocks import layout
from gateway.blocks.directory import BlockDirectory
from gateway.blocks.files.store import ScannedFile
from gateway.blocks.index import survey_marks
from gateway.blocks.index.keeping.book import Queue
from gateway.blocks.index.ledger import Ledger
from gateway.blocks.index.pins import number_of
from gateway.blocks.index.records import BlockRecord, FileRecord
from gateway.policy.slots import Slots

FILES_PER_STEP = 32
"""A transaction of about a millisecond: others wait for it."""


def survey(directory: BlockDirectory, slots: Slots) -> Iterator[None]:
    """Survey what is marked for it, a step at a time: every `next` blocks for a few milliseconds.

    Ends when the index knows every file, each on the account of the slot that its key belongs to.
    """
    for number in survey_marks.unsurveyed(directory.index):
        names = iter(directory.store.listing(number))
        while batch := list(islice(names, FILES_PER_STEP)):
            found = [file for name in batch if (file := directory.store.describe(name)) is not None]
            for few in _few_blocks(found):
                directory.unlink_doomed(_Step(directory, slots, number).take_in(few))
                yield
        survey_marks.surveyed(directory.index, number)
        directory.shrink()
        yield


def _few_blocks(found: Sequence[ScannedFile]) -> Iterator[list[ScannedFile]]:
    """The files in portions of FILES_PER_STEP blocks, or of one file that holds more."""
    few: list[ScannedFile] = []
    for file in found:
        if few and sum(len(one.blocks) for one in (*few, file)) > FILES_PER_STEP:
            yield few
            few = []
        few.append(file)
    if few:
        yield few


@dataclass(frozen=True, slots=True)
class _Step:
    directory: BlockDirectory
    slots: Slots
    number: int

    def take_in(self, found: Sequence[ScannedFile]) -> list[str]:
        """Enter what is new and whole; returns what is neither, which is doomed."""
        doomed = []
        with self.directory.index.writing() as ledger:
            in_transit = set(ledger.in_transit())
            for file in found:
                known = ledger.file(file.name)
                if known is not None:
                    self._put_right(ledger, known, file)
                elif file.name not in in_transit and self.directory.store.is_published(file.name):
                    # Under the transaction's lock: one that leaves the index is doomed until it is unlinked.
                    if not self._enter(ledger, file):
                        ledger.doom(file.name)
                        doomed.append(file.name)
                    ledger.found_in_survey(self.number, file.disk_bytes)
        return doomed

    def _put_right(self, ledger: Ledger, known: FileRecord, file: ScannedFile) -> None:
        if not file.blocks:
            return  # the header is gone or there never was one; reading finds out about the rest
        slot = ledger.slot(self._slot_of(file))
        if slot != known.slot:
            ledger.move(known, slot)

    def _enter(self, ledger: Ledger, file: ScannedFile) -> bool:
        described = (
            BlockRecord(block.id, layout.object_id(block.version.key), extent) for block, extent in file.blocks
        )
        blocks = ledger.unknown(described)
        if not blocks:
            return False
        slot = ledger.slot(self._slot_of(file))
        tick = min(file.modified_ns, ledger.next_tick(0) - 1)
        pin = self._pin_of(ledger, file)
        queue = Queue.PINNED if pin else Queue.MAIN
        ledger.insert(FileRecord(file.name, slot, file.disk_bytes, tick, len(blocks), queue, pin=pin), blocks)
        return True

    def _pin_of(self, ledger: Ledger, file: ScannedFile) -> int:
        """A pin that one of the blocks is under."""
        pins = ledger.pins()
        return max(number_of(pins, block.version.key) for block, _ in file.blocks) if pins else 0

    def _slot_of(self, file: ScannedFile) -> str:
        """The slot of the first block: a segment goes as a whole, whatever became of the slots of its objects."""
        key = file.blocks[0][0].version.key
        return self.slots.find(key.bucket, key.key).name
