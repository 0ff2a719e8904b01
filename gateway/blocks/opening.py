"""Opening and closing the cache directory: its format, leftovers of crashes, the trust in the index, and its rebuild.

    FORMAT   "forebay blocks 1": any other content is refused, never misread
    HOME     the main origin's endpoint when the directory was begun: blocks of it bear no home's name (layout.py)
    PINS     the prefixes whose blocks stay (pins.py)
    BOOT     the kernel's boot id when the index was last opened or begun anew
    CLEAN    there while no process has the directory open and the index is synced to disk

The index is not synced while it is in use, so one of another boot without CLEAN is dropped, and built anew from the
files' headers while the cache is in use: a block that the rebuild has not come to is a miss, and its bytes are on no
slot's account. Every step is short and complete in itself, so a rebuild that is broken off goes on. The index names a
dead worker's leftovers. A worker lives as long as it holds a lock on its slot's file, which the kernel releases.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb
import structlog

from gateway.blocks.directory import BlockDirectory
from gateway.blocks.eviction import capacity_of, fingerprint_of
from gateway.blocks.fetch_locks import FetchLocks
from gateway.blocks.index import BlockIndex, PinnedPrefixes
from gateway.blocks.layout import BlockRecord, BlockSettings, FileRecord, Rows, WorkerFile, rows_of, set_home_tags
from gateway.blocks.pins import Pins
from gateway.blocks.policies import Queue
from gateway.blocks.store import DIRECTORIES, DIRECTORY_MODE, FILE_MODE, BlockStore, ScannedFile
from gateway.blocks.transaction import IndexTransaction
from gateway.core.errors import BlockError, StartupError, StoreUnavailable, opening_failure
from gateway.disk.atomic_write import remove_durably, write_durably
from gateway.disk.file_lock import lock_within, try_lock
from gateway.disk.lmdb_environment import is_cut_short
from gateway.policy.slots import DEFAULT_SLOT, Slots
from gateway.shared.heartbeats import Heartbeats

_log = structlog.get_logger("forebay.cache")


OPENING_LOOKS_MAX = 45
OPENING_LOOK_SECONDS = 1.0
"""Seconds between looks at a process that opens the directory. After OPENING_LOOKS_MAX looks, counted as the machine
may stand still, it is not waited for: the supervisor has failed to end it."""


class WorkerLocks:
    """The lock files of a directory: `slots/w<n>.lock` for each slot, `slots/opening.lock` for opening and closing."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._directory = directory / "slots"
        self._worker = worker
        self._own: int | None = None

    @contextmanager
    def opening(self, stamp: Callable[[int], int]) -> Iterator[None]:
        """Alone among the processes that open or close the directory. Blocks.

        One that opens it is waited for as long as it turns: `stamp` gives a worker's last heartbeat. BlockingIOError
        where it does not.
        """
        self._directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        descriptor = self._open("opening.lock")
        try:
            self._wait_for(descriptor, stamp)
            try:
                os.pwrite(descriptor, b"%-8d" % self._worker, 0)
            except OSError:  # a full disk: then its owner is unknown
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
            yield
        finally:
            os.close(descriptor)

    def _wait_for(self, descriptor: int, stamp: Callable[[int], int]) -> None:
        looks = 0
        seen: tuple[int | None, int] = None, 0
        while not lock_within(descriptor, OPENING_LOOK_SECONDS):
            text = os.pread(descriptor, 8, 0).strip()
            holder = int(text) if text.isdigit() else None
            before, seen = seen, (holder, stamp(holder) if holder is not None else 0)
            looks = looks + 1 if seen == before and holder is not None else 0
            if looks >= OPENING_LOOKS_MAX:
                raise BlockingIOError(errno.EAGAIN, f"worker {holder} hangs while it opens or closes it")

    def take_own(self) -> None:
        """Take this worker's slot; StartupError when a living process has it."""
        descriptor = self._open(f"w{self._worker}.lock")
        if not try_lock(descriptor):
            os.close(descriptor)
            raise StartupError(
                f"another process runs as worker {self._worker} on {self._directory.parent}: "
                "stop it, or give this gateway a cache directory of its own"
            )
        self._own = descriptor

    def give_back_own(self) -> None:
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def dead_slots(self) -> list[int]:
        """Every slot ever used that no process holds now, the own one excepted. Call while `opening`."""
        return [worker for worker in self._others() if self._is_free(worker)]

    def alone(self) -> bool:
        """Return True if no other process has the directory open. Call while `opening`."""
        return all(self._is_free(worker) for worker in self._others())

    def _others(self) -> list[int]:
        names = (path.stem[1:] for path in self._directory.glob("w*.lock"))
        return sorted({int(name) for name in names if name.isdecimal()} - {self._worker})

    def _is_free(self, worker: int) -> bool:
        descriptor = self._open(f"w{worker}.lock")
        try:
            return try_lock(descriptor)
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> int:
        return os.open(self._directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


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
    sizes = {**unlinked, **begun}
    left = {holder: size or store.disk_bytes(holder.file) or 0 for holder, size in sizes.items()}
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


FORMAT = b"forebay blocks 1\n"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BEFORE_FORMAT = {"FORMAT.new", "slots", "shared"}


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """A cache directory that this process has open as worker slot `worker`."""

    path: Path
    worker: int
    blocks: BlockDirectory
    heartbeats: Heartbeats
    locks: FetchLocks
    worker_locks: WorkerLocks

    def close(self) -> None:
        """Leave nothing of this slot behind; the last process to close makes the index durable and says so."""
        with self.worker_locks.opening(self.heartbeats.stamp):
            clear_up(self.blocks, self.worker)
            self.locks.forget(self.worker)
            self.locks.close()
            self.heartbeats.close()
            alone = self.worker_locks.alone()
            self.blocks.index.close(sync=alone)
            if alone:
                write_durably(self.path / "CLEAN", b"")
            self.worker_locks.give_back_own()

    def let_go(self) -> None:
        """Close what is open, and leave the directory as it is: for a disk that takes nothing any more."""
        self.locks.close()
        self.heartbeats.close()
        self.blocks.index.close()
        self.worker_locks.give_back_own()


def open_directory(settings: BlockSettings, worker: int, now: Callable[[], float] = time.time) -> OpenDirectory:
    """Open, create, recover or rebuild; `now` is in seconds since 1970.

    StartupError is a mistake to be put right, StoreUnavailable a disk that fails.
    """
    try:
        return _open(settings, worker, now)
    except (OSError, BlockError, lmdb.Error) as error:
        raise opening_failure(f"the cache directory {settings.directory}", error) from error


def _open(settings: BlockSettings, worker: int, now: Callable[[], float]) -> OpenDirectory:
    path = settings.directory
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    _refuse_other_formats(path)
    slots = WorkerLocks(path, worker)
    shared = settings.shared_directory or path / "shared"  # where the files lie that all processes have in memory
    shared.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
    with ExitStack() as undo:
        heartbeats = Heartbeats(shared / "heartbeats")
        undo.callback(heartbeats.close)
        with slots.opening(heartbeats.stamp):
            _refuse_other_formats(path)
            if not (path / "FORMAT").exists():
                write_durably(path / "FORMAT", FORMAT)
            slots.take_own()
            undo.callback(slots.give_back_own)
            set_home_tags(settings.homes, _first_home(path, settings.homes.main))
            store = BlockStore(path, worker)
            store.prepare()
            with suppress(StoreUnavailable):  # the disk is full already: cached blocks can be read all the same
                store.keep_ballast()
            index = _open_index(settings, store, slots, worker)
            undo.callback(index.close)
            capacity = capacity_of(settings.capacity_bytes, settings.slots, settings.daily_writes_bytes)
            blocks = BlockDirectory(store, index, capacity, Pins(index, path / "PINS"), now)
            index.apply_settings(capacity)
            blocks.pins.recover()
            heartbeats.beat(worker)
            locks = FetchLocks(shared, worker, heartbeats, has_one_worker=settings.has_one_worker)
            undo.callback(locks.close)
            for slot in (worker, *slots.dead_slots()):  # what dead processes had begun
                clear_up(blocks, slot)
                locks.forget(slot)
            blocks.shrink()  # the capacity may have been lowered
        undo.pop_all()
        return OpenDirectory(path, worker, blocks, heartbeats, locks, slots)


def _refuse_other_formats(path: Path) -> None:
    try:
        found = (path / "FORMAT").read_bytes()
    except FileNotFoundError:
        foreign = sorted({entry.name for entry in path.iterdir()} - _BEFORE_FORMAT)
        if (path / "FORMAT").exists():  # another process that opens it has just written it
            _refuse_other_formats(path)
        elif foreign:
            raise StartupError(
                f"{path} is not empty and not a block cache (it holds {foreign[0]!r}): give an empty directory"
            ) from None
        return
    if found != FORMAT:
        raise StartupError(
            f"{path} has the block format {found[:40]!r}, this version reads {FORMAT!r}: "
            "run the version that wrote it, or empty the directory (Forebay fetches the blocks again)"
        )


def _first_home(path: Path, main: str) -> str:
    """Return the home whose blocks bear no home's name: the main one at the time when the directory was begun."""
    file = path / "HOME"
    if file.exists():
        return file.read_text(encoding="utf-8")
    with suppress(OSError):  # a full disk: the next start writes it, and cached blocks can be read
        write_durably(file, main.encode())
    return main


def _open_index(settings: BlockSettings, store: BlockStore, slots: WorkerLocks, worker: int) -> BlockIndex:
    """Open the index, or begin a new one if it cannot be trusted. CLEAN is gone then, and BOOT is current."""
    path, boot = settings.directory, BOOT_ID.read_bytes()
    fingerprint = fingerprint_of(settings.slots)
    believable = (path / "CLEAN").exists() or (
        _read(path / "BOOT") == boot and not (slots.alone() and is_cut_short(path / "index"))
    )
    remove_durably(path / "CLEAN")
    index = _try_open(settings, worker) if believable else None
    if index is None:
        if not slots.alone():
            raise StartupError(f"the index of {path} cannot be read while other processes use it: stop them first")
        index = _begin_anew(settings, store, fingerprint, worker)
    elif slots.alone() and not slots_are(index, fingerprint):
        # If others are at work, slots were changed meanwhile: they follow when all have the same slots.
        begin_rebuild(index, fingerprint, dict.fromkeys(range(DIRECTORIES), 0))
    if _read(path / "BOOT") != boot:
        write_durably(path / "BOOT", boot)
    return index


def _try_open(settings: BlockSettings, worker: int) -> BlockIndex | None:
    """None where LMDB itself says that the files are not an index; an absent directory is an absent index."""
    directory = settings.directory / "index"
    if not (directory / "data.mdb").exists():
        return None
    try:
        return BlockIndex(directory, worker, settings.index_bytes_max)
    except (lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PageNotFoundError):
        return None


def _begin_anew(settings: BlockSettings, store: BlockStore, fingerprint: bytes, worker: int) -> BlockIndex:
    """Return an empty index, to be built from all files there: only their size is looked at now."""
    path = settings.directory
    shutil.rmtree(path / "index", ignore_errors=True)
    (path / "BOOT").unlink(missing_ok=True)  # a beginning that is killed half-way is begun again
    (path / "index").mkdir(mode=DIRECTORY_MODE)
    store.clean_all_slots()
    unknown_bytes = {number: count for number in store.directories() if (count := store.bytes_on_disk(number))}
    index = BlockIndex(path / "index", worker, settings.index_bytes_max)
    # The sequence begins after every file's time, by which the rebuild orders what it finds.
    begin_rebuild(index, fingerprint, unknown_bytes, first_sequence=time.time_ns())
    return index


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


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
        described = {one.name: rows_of(BlockRecord(block.id, extent) for block, extent in one.blocks) for one in found}
        with index.writing() as transaction:
            prefixes = index.pinned_prefixes(transaction)
            in_transit = {holder.file for holder in (*transaction.reserved(), *transaction.pending_unlinks())}
            entered: Rows = {}
            taken_bytes = 0
            for file in found:
                known = transaction.file(file.name)
                if known is not None:
                    self.put_right(transaction, known, file)
                elif file.name not in in_transit and self.directory.store.is_published(file.name):
                    # Under the transaction's lock: one that leaves the index is pending until it is unlinked.
                    unknown, _ = transaction.without_known(described[file.name])
                    blocks = {key: row for key, row in unknown.items() if key not in entered}
                    if blocks:
                        entered |= blocks
                        transaction.put(self._file_record(transaction, prefixes, file, len(blocks)))
                    else:
                        transaction.set_pending_unlink(WorkerFile(index.worker, file.name))
                        superfluous[file.name] = file.disk_bytes
                    taken_bytes += file.disk_bytes
            transaction.put_rows(entered)
            unindexed_bytes = transaction.unindexed().get(self.number, 0)
            transaction.set_unindexed(self.number, max(0, unindexed_bytes - taken_bytes))
        return superfluous

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
        name = self._slot_of(file)
        slot = transaction.slot(name)
        sequence = min(file.modified_ns, transaction.sequence() - 1)
        pin = max(self.directory.pin_of(prefixes, block, name) for block, _ in file.blocks) if prefixes else 0
        queue = Queue.PINNED if pin else Queue.MAIN
        return FileRecord(file.name, slot, file.disk_bytes, sequence, blocks, queue, pin=pin)

    def _slot_of(self, file: ScannedFile) -> str:
        """Return the first block's slot: a segment goes as a whole, whatever became of the slots of its objects."""
        key = file.blocks[0][0].version.key
        return self.slots.find(key.bucket, key.key).name
