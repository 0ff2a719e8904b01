"""What a dead worker's slot has left: fills begun, files appended to, and doomed files that are not unlinked yet.

The index names them all. All of this blocks; nobody else may have the slot meanwhile.
"""

from __future__ import annotations

from gateway.blocks.directory import BlockDirectory
from gateway.blocks.index import records, tables
from gateway.blocks.index.index import BlockIndex


def clear_up(directory: BlockDirectory, worker: int) -> None:
    """Remove what it was about to write or unlink, count what it had appended, and give back the room."""
    index, store = directory.index, directory.store
    begun, appended = _files(index, worker)
    for file in begun:
        store.unlink(file)
    for file in appended:
        index.settle(worker, file, store.disk_bytes(file))
    store.clean_slot(worker)
    _forget(index, worker)


def _files(index: BlockIndex, worker: int) -> tuple[list[str], list[str]]:
    """The files that may be there and in which no block lies, and those with blocks to which it was about to append."""
    with index.reading() as ledger:
        doomed = list(ledger.files_of(ledger.tables.doomed, worker))
        reserved = list(ledger.files_of(ledger.tables.reserved, worker))
        begun = [file for file in reserved if ledger.file(file) is None]
        appended = [file for file in reserved if ledger.file(file) is not None]
    return doomed + begun, appended


def _forget(index: BlockIndex, worker: int) -> None:
    """Drop reservations, doomed files and leads, when all that they name is gone from the disk or counted."""
    with index.writing() as ledger:
        for table in (ledger.tables.reserved, ledger.tables.doomed):
            tables.clear_prefix(ledger.transaction, table, records.worker_key(worker))
        for fill_key, packed in list(tables.items(ledger.transaction, ledger.tables.fills)):
            if records.unpack_holder(packed).worker == worker:
                ledger.transaction.delete(fill_key, db=ledger.tables.fills)
