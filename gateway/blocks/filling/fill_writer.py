"""The file of one fill, written from front to back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from gateway.blocks.directory import BlockDirectory, FillFile
from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.verification import ChunkChecksums, Fingerprint, fingerprint


@dataclass(slots=True)
class FillWriter:
    """Writes what comes, and notices when the file changes between two writes: others have no business there.

    `checksums` are of the bytes that were given to be written. `write` and `publish` block.
    """

    directory: BlockDirectory
    filled: FillFile
    checksums: ChunkChecksums = field(init=False)
    _written_bytes: int = 0
    _alone: bool = True
    _left: Fingerprint | None = None

    def __post_init__(self) -> None:
        self.checksums = ChunkChecksums(self.filled.block.length)

    def write(self, file: BlockLease, content: bytes | memoryview) -> None:
        """The block's next bytes, to `file`: a lease on the file of the fill. StoreUnavailable when the disk does not
        take them.
        """
        recorded = len(self.checksums.packed)
        self._look(file.descriptor)
        self.checksums.update(content)
        self.directory.record_checksums(file, self.filled.block, self.checksums.packed, recorded)
        self.directory.store.write(file, content, self.filled.data_offset + self._written_bytes)
        self._written_bytes += len(content)
        self._left = fingerprint(file.descriptor)

    def publish(self, file: BlockLease) -> Fingerprint | None:
        """Finish the file, and tell how it looks, if it is used and, as far as its times tell, holds what was given."""
        self._look(file.descriptor)
        if self.directory.finish(self.filled, file, bytes(self.checksums.packed)) is None or not self._alone:
            return None
        with suppress(OSError):  # it is published all the same, and verified when it is read
            return fingerprint(file.descriptor)
        return None

    def _look(self, descriptor: int) -> None:
        if self._left is not None and fingerprint(descriptor) != self._left:
            self._alone = False
