"""Bringing the index in line with the files: after an unclean boot, and when keys belong to other slots than before.

The index can be used all the while: a block that the rebuild has not come to is a miss, and its bytes are on no slot's
account. Every step is short and complete in itself, so a rebuild that is broken off is carried on from its directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gateway.blocks.directory import BlockDirectory
from gateway.blocks.eviction import fingerprint_of
from gateway.blocks.index import BlockIndex
from gateway.blocks.pins import PinnedPrefixes
from gateway.blocks.policies import Queue
from gateway.blocks.rows import BlockRecord, FileRecord, WorkerFile
from gateway.blocks.store import DIRECTORIES, ScannedFile
from gateway.blocks.transaction import IndexTransaction
from gateway.policy.slots import DEFAULT_SLOT, Slots

BLOCKS_PER_STEP = 512
FILES_PER_STEP = 64
"""A transaction of a few milliseconds: others wait for it."""

_FINGERPRINT = b"slots"


def slots_are(index: BlockIndex, fingerprint: bytes) -> bool:
    """Return True if files are on the accounts of slots with this fingerprint, or a rebuild will put them there."""
    with index.reading() as transaction:
        return transaction.counter(_FINGERPRINT) == fingerprint


def move_between_slots(directory: BlockDirectory, slots: Slots) -> frozenset[str]:
    """Begin a rebuild that puts every file on the account of its present slot, if earlier slots gave it to another.

    Return the files that are being written: they may still come on an earlier account (`account_late`).
    """
    index, fingerprint = directory.index, fingerprint_of(slots)
    if slots_are(index, fingerprint):
        return frozenset()
    begin_rebuild(index, fingerprint, dict.fromkeys(range(DIRECTORIES), 0))
    with index.reading() as transaction:
        return frozenset(holder.file for holder in transaction.reserved())


def account_late(directory: BlockDirectory, slots: Slots, begun: frozenset[str]) -> frozenset[str]:
    """Correct the accounts of files that were written while slots changed; return those that still are."""
    # A segment that is appended to may be for long: it goes as it is.
    index, store = directory.index, directory.store
    with index.reading() as transaction:
        reserved = {holder.file for holder in transaction.reserved()}
        known = {file for file in begun if transaction.file(file) is not None}
    found = [file for name in known if (file := store.describe(name)) is not None]
    with index.writing() as transaction:
        for file in found:
            entered = transaction.file(file.name)
            if entered is not None:
                _Step(directory, slots, 0).put_right(transaction, entered, file)
    return (begun & reserved) - known


def begin_rebuild(
    index: BlockIndex, fingerprint: bytes, unknown_bytes: Mapping[int, int], first_sequence: int = 0
) -> None:
    """Begin a rebuild of directories; `unknown_bytes` gives the bytes in each that the index does not know.

    A directory that already waits for a rebuild keeps its number.
    """
    with index.writing() as transaction:
        waiting = transaction.unindexed()
        for number, count in unknown_bytes.items():
            if number not in waiting:
                transaction.set_unindexed(number, count)
        transaction.set_counter(_FINGERPRINT, fingerprint)
        transaction.begin_sequence_at(first_sequence)


def rebuild(directory: BlockDirectory, slots: Slots) -> Iterator[None]:
    """Go through what is marked for it, a step at a time: every `next` blocks for a few milliseconds.

    Ends when the index knows every file, each on the account of the slot that its key belongs to.
    """
    with directory.index.reading() as transaction:
        waiting = list(transaction.unindexed())
    for number in waiting:
        for few in _few_blocks(directory, directory.store.listing(number)):
            directory.unlink(_Step(directory, slots, number).take_in(few))
            yield
        with directory.index.writing() as transaction:
            transaction.set_unindexed(number, None)
        directory.shrink()
        yield


def _few_blocks(directory: BlockDirectory, names: Sequence[str]) -> Iterator[list[ScannedFile]]:
    """Yield the files' own descriptions, in portions of BLOCKS_PER_STEP blocks, or one file that holds more."""
    few: list[ScannedFile] = []
    blocks = 0
    for name in names:
        file = directory.store.describe(name)
        if file is None:
            continue
        if few and (blocks + len(file.blocks) > BLOCKS_PER_STEP or len(few) == FILES_PER_STEP):
            yield few
            few, blocks = [], 0
        few.append(file)
        blocks += len(file.blocks)
    if few:
        yield few


@dataclass(frozen=True, slots=True)
class _Step:
    directory: BlockDirectory
    slots: Slots
    number: int

    def take_in(self, found: Sequence[ScannedFile]) -> dict[str, int]:
        """Enter new and intact files; return the others and their sizes, for unlinking."""
        index, superfluous = self.directory.index, {}
        described = {file.name: self._records(file) for file in found}
        with index.writing() as transaction:
            prefixes = self.directory.pins.prefixes(transaction)
            in_transit = {holder.file for holder in (*transaction.reserved(), *transaction.pending_unlinks())}
            entered: list[BlockRecord] = []
            known_ids: set[bytes] = set()
            taken_bytes = 0
            for file in found:
                known = transaction.file(file.name)
                if known is not None:
                    self.put_right(transaction, known, file)
                elif file.name not in in_transit and self.directory.store.is_published(file.name):
                    # Under the transaction's lock: one that leaves the index is pending until it is unlinked.
                    unknown = transaction.unknown(described[file.name])
                    blocks = [block for block in unknown if block.block_id not in known_ids]
                    if blocks:
                        known_ids.update(block.block_id for block in blocks)
                        entered += blocks
                        transaction.put(self._file_record(transaction, prefixes, file, len(blocks)))
                    else:
                        transaction.set_pending_unlink(WorkerFile(index.worker, file.name))
                        superfluous[file.name] = file.disk_bytes
                    taken_bytes += file.disk_bytes
            transaction.put_rows(entered)
            unindexed_bytes = transaction.unindexed().get(self.number, 0)
            transaction.set_unindexed(self.number, max(0, unindexed_bytes - taken_bytes))
        return superfluous

    def _records(self, file: ScannedFile) -> list[BlockRecord]:
        return [BlockRecord(block.id, extent) for block, extent in file.blocks]

    def put_right(self, transaction: IndexTransaction, known: FileRecord, file: ScannedFile) -> None:
        """Move a file in the index to the account of its keys' slot."""
        if file.blocks:
            slot = transaction.slot(self._slot_of(file))
        else:  # the header is gone, or there never was one, as in own writes: reading finds out about the rest
            names = {DEFAULT_SLOT.name, *(one.name for one in self.slots)}
            is_known = any(number == known.slot and name in names for name, number in transaction.slots().items())
            slot = known.slot if is_known else transaction.slot(DEFAULT_SLOT.name)
        if slot != known.slot:
            transaction.move(known, slot)

    def _file_record(
        self, transaction: IndexTransaction, prefixes: PinnedPrefixes, file: ScannedFile, blocks: int
    ) -> FileRecord:
        """Under a pin that one of the blocks is under."""
        slot = transaction.slot(self._slot_of(file))
        sequence = min(file.modified_ns, transaction.sequence() - 1)
        pin = max(prefixes.number_of(block.version.key) for block, _ in file.blocks) if prefixes else 0
        queue = Queue.PINNED if pin else Queue.MAIN
        return FileRecord(file.name, slot, file.disk_bytes, sequence, blocks, queue, pin=pin)

    def _slot_of(self, file: ScannedFile) -> str:
        """Return the first block's slot: a segment goes as a whole, whatever became of the slots of its objects."""
        key = file.blocks[0][0].version.key
        return self.slots.find(key.bucket, key.key).name
