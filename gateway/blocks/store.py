"""The block files: written under a partial name, header last, renamed into place, never changed again.

    data/3f/<block id>-<nonce>          published blocks, in 256 directories by the first byte of the id
    partial/w<slot>/<block id>-<nonce>  fills of one worker slot in progress

Blocks can be fetched again, so nothing is synced: after a power cut the checksums tell which files are whole. Space
returns by unlink only. Every function here blocks: never call it on the event loop, `open_published` of a file that was
read a moment ago excepted.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gateway.blocks import layout
from gateway.blocks.layout import Block, Extent
from gateway.blocks.open_file import OpenFile
from gateway.errors import BlockDamaged, StoreUnavailable

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class ScannedBlock:
    """A block found by its file's header."""

    block: Block
    extent: Extent
    modified_ns: int


class BlockStore:
    """The files of one directory, as worker slot `worker` writes them."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._data = directory / "data"
        self._partial_root = directory / "partial"
        self._partial = self._partial_of(worker)

    def prepare(self) -> None:
        """Make the directories."""
        for directory in (self._data, self._partial_root, self._partial):
            directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        for byte in range(256):
            (self._data / f"{byte:02x}").mkdir(mode=DIRECTORY_MODE, exist_ok=True)

    def create_partial(self, file: str) -> OpenFile:
        """A new file, locked until `unlock`, or until the kernel closes it behind a killed process."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(self._partial / file, flags, FILE_MODE)
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be created: {error}") from error
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return OpenFile(descriptor)

    def unlock(self, file: OpenFile) -> None:
        """Say that nobody writes the file any more."""
        fcntl.flock(file.descriptor, fcntl.LOCK_UN)

    def wake_watchers(self, file: OpenFile) -> None:
        """Have those who watch a file look at it: unlocking alone tells nobody."""
        with suppress(OSError):  # a file system gone read-only: they look for themselves a little later
            os.utime(file.descriptor)

    def open_of(self, worker: int, file: str) -> OpenFile | None:
        """A file that any slot fills, or has just published, for reading; None when there is none any more."""
        for path in (self._partial_of(worker) / file, self._place(file)):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreUnavailable(f"a fill's file cannot be opened: {error}") from error
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            return OpenFile(descriptor)
        return None

    def write(self, file: OpenFile, content: bytes | bytearray | memoryview, offset: int) -> None:
        """All of `content`; StoreUnavailable when the disk does not take it."""
        rest = memoryview(content)
        try:
            while rest:
                written = os.pwrite(file.descriptor, rest, offset)
                offset += written
                rest = rest[written:]
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be written: {error}") from error

    def publish(self, file: str) -> None:
        """Move a finished partial file to its place."""
        try:
            os.rename(self._partial / file, self._place(file))
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be renamed: {error}") from error

    def open_published(self, extent: Extent) -> OpenFile:
        """Open a block's file for reading.

        BlockDamaged when it is gone or too short; StoreUnavailable when it may well be there but cannot be opened now.
        """
        try:
            descriptor = os.open(self._place(extent.file), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise BlockDamaged("the block's file is gone") from error
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be opened: {error}") from error
        # Without this the kernel reads ahead of us: bytes would come from the device into memory behind our back.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return OpenFile(descriptor)

    def unlink(self, file: str) -> None:
        """Remove a file, published or partial, of this slot; one that is not there is fine."""
        self._unlink(self._place(file))
        self._unlink(self._partial / file)

    def unlink_of(self, worker: int, file: str) -> None:
        """The same for a file of any slot."""
        self._unlink(self._place(file))
        self._unlink(self._partial_of(worker) / file)

    def clean_slot(self, worker: int) -> None:
        """Remove every partial file of a slot that nobody fills in any more."""
        directory = self._partial_of(worker)
        if directory.is_dir():
            for path in directory.iterdir():
                self._unlink(path)

    def clean_all_slots(self) -> None:
        """Remove every partial file there is: nobody else may have the directory open."""
        for directory in self._partial_root.iterdir():
            for path in directory.iterdir():
                self._unlink(path)

    def scan(self) -> Iterator[ScannedBlock]:
        """Every block whose file is whole by its header and its length; all other files are removed.

        The bytes themselves are checked when they are read.
        """
        for directory in sorted(self._data.iterdir()):
            for path in directory.iterdir():
                try:
                    yield self._scan_file(path)
                except BlockDamaged:
                    self._unlink(path)

    def _scan_file(self, path: Path) -> ScannedBlock:
        with path.open("rb") as file:
            start = file.read(layout.ALIGNMENT_BYTES)
            header = start + file.read(layout.header_bytes(start) - len(start))
            facts = os.fstat(file.fileno())
        block, checksums = layout.unpack_header(header)
        if not path.name.startswith(f"{block.id.hex()}-"):
            raise BlockDamaged("the file's name is of another block")
        extent = Extent(path.name, layout.data_offset(block), block.length, checksums)
        if facts.st_size != extent.offset + extent.length:
            raise BlockDamaged("the file's length is not the block's")
        return ScannedBlock(block, extent, facts.st_mtime_ns)

    def _partial_of(self, worker: int) -> Path:
        return self._partial_root / f"w{worker}"

    def _place(self, file: str) -> str:
        return f"{self._data}/{file[:2]}/{file}"

    def _unlink(self, path: Path | str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StoreUnavailable(f"a block file cannot be removed: {error}") from error
