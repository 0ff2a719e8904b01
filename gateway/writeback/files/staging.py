"""The directory of staged files: made, sealed, opened, removed.

    staged/w<slot>/<32 hex digits>    one file per PutObject or UploadPart, made by that worker slot

Sealed means: the file is synced, and its directory has been synced since the file is there. Only then may the journal
name it, and only then may the client hear of it. A file that the journal does not name was never acknowledged; `sweep`
removes it when its worker is dead. All of this but `create` blocks.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from gateway.durable import sync_directory
from gateway.errors import BufferDamaged, BufferUnavailable
from gateway.file_lease import FileLease, SharedFile
from gateway.writeback.files.staged_file import StagedFile, StagedWriter

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Staging:
    """The staged files of one buffer, as worker slot `worker` makes them."""

    def __init__(self, directory: Path, worker: int) -> None:
        self._root = directory / "staged"
        self._own = f"w{worker}"
        self._names = _GroupSync(self._root / self._own)

    def prepare(self) -> None:
        """Make the directories, durably; OSError when the disk does not take them."""
        for path in (self._root, self._root / self._own):
            path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        sync_directory(self._root)
        sync_directory(self._root.parent)

    def create(self) -> StagedWriter:
        """A new file, which the first write makes; who gets it seals it, or discards it. Does not block."""
        name = f"{self._own}/{secrets.token_hex(16)}"
        return StagedWriter(name, partial(os.open, self._root / name, _NEW, FILE_MODE), self._names.begin)

    def seal(self, writer: StagedWriter, md5: bytes) -> StagedFile:
        """Have a complete file, whose MD5 is given, survive a power cut, name and all, and close it.

        BufferUnavailable when it may not: then the file is removed, whatever a later attempt to sync it would say.
        """
        try:
            sealed = writer.sync(md5)
        except OSError as error:
            self.discard(writer)
            raise BufferUnavailable(f"a staged file cannot be synced: {error}") from error
        writer.close()
        return sealed

    def discard(self, writer: StagedWriter) -> None:
        """Remove a file that nobody was told of."""
        writer.close()
        self.remove(writer.name)

    def remove(self, name: str) -> None:
        """Give the room of a file back. One that cannot be removed now goes with the next sweep."""
        with suppress(OSError):
            os.unlink(self._root / name)

    def open(self, file: StagedFile) -> FileLease[SharedFile]:
        """Open a file for reading. FileNotFoundError when the file has gone.

        BufferDamaged when it has not the length that was acknowledged.
        """
        descriptor = os.open(self._root / file.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        lease = FileLease(SharedFile(descriptor))
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != file.size_bytes:
            lease.close()
            raise BufferDamaged(f"staged file {file.name} has {size_bytes} bytes, not {file.size_bytes}")
        return lease

    def path(self, file: StagedFile) -> Path:
        """Where it lies, for who gives it a second name."""
        return self._root / file.name

    def names(self, worker: int | None = None) -> Iterator[str]:
        """Every file of a worker slot, or of all."""
        for directory in sorted(self._root.glob("w*" if worker is None else f"w{worker}")):
            for entry in os.scandir(directory):
                yield f"{directory.name}/{entry.name}"

    def sweep(self, is_known: Callable[[str], bool], worker: int | None = None) -> int:
        """Remove what the journal does not name, of a worker slot whose process is dead, or of all; how many."""
        unknown = [name for name in self.names(worker) if not is_known(name)]
        for name in unknown:
            self.remove(name)
        return len(unknown)


class _GroupSync:
    """Syncs a directory for several at once, on a thread: whoever asks gets a sync that begins after he did."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writeback-names")
        self._lock = threading.Lock()
        self._next: Future[None] | None = None

    def begin(self) -> Future[None]:
        """Done when what was in the directory by now survives a power cut; OSError when it may not."""
        with self._lock:
            if self._next is None:
                self._next = Future()
                self._thread.submit(self._run, self._next)
            return self._next

    def _run(self, led: Future[None]) -> None:
        with self._lock:
            self._next = None  # it begins: who comes from now on may have made a file that it misses
        try:
            sync_directory(self._path)
        except OSError as error:
            led.set_exception(error)
        else:
            led.set_result(None)
