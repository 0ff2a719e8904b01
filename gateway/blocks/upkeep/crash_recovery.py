"""What a dead worker has left: fills begun, files appended to, and files that were not unlinked yet.

The index names them all. All of this blocks; nobody else may have the worker's number meanwhile.
"""

from __future__ import annotations

import structlog

from gateway.blocks.directory import BlockDirectory
from gateway.blocks.index.records import WorkerFile
from gateway.errors import StoreUnavailable

_log = structlog.get_logger("forebay.cache")


def clear_up(directory: BlockDirectory, worker: int) -> None:
    """Remove what it was about to write or unlink, count what it had appended, and give back the room.

    What cannot be removed stays counted, and is tried again later.
    """
    index, store = directory.index, directory.store
    with index.reading() as transaction:
        unlinked = {one: size for one, size in transaction.pending_unlinks().items() if one.worker == worker}
        reserved = [holder for holder in transaction.reserved() if holder.worker == worker]
        appended = [holder for holder in reserved if transaction.file(holder.file) is not None]
    begun = {holder: 0 for holder in reserved if holder not in appended}
    left = {holder: size or _size(directory, holder) for holder, size in {**unlinked, **begun}.items()}
    try:
        directory.unlink_pending(left)
        store.clean_slot(worker)
    except StoreUnavailable as error:
        _log.warning("files of a worker that has ended cannot be removed", worker=worker, error=str(error))
    for holder in appended:
        index.settle(worker, holder.file, store.disk_bytes(holder.file))
    with index.writing() as transaction:
        for holder in reserved:
            transaction.release_file(holder)


def _size(directory: BlockDirectory, holder: WorkerFile) -> int:
    """What a file takes that may have been published, or be gone."""
    return directory.store.disk_bytes(holder.file) or 0
