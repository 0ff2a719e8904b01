"""Which origins say nothing: found out by one worker, told to the others in a page of memory that all of them map."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from pathlib import Path

import structlog

BELIEVED_SECONDS = 10.0
"""What was told longer ago says nothing any more: whoever told it would have told it again."""

_RECORD = struct.Struct("=Qd")
_CELLS = 64
_SIZE_BYTES = _CELLS * _RECORD.size

log = structlog.get_logger(__name__)


class SilenceBoard:
    """For each host, when it was last found silent. Times are monotonic, the same for all processes.

    A cell is written without a lock. What is read of it half written, or overwritten by another host, costs a question
    to the origin at most.
    """

    def __init__(self, file: Path | None = None) -> None:
        """`file` is shared with other processes, made where it is missing. Without it, or room for it, this one is
        alone, and finds out by itself.
        """
        self._memory = mmap.mmap(-1, _SIZE_BYTES)
        if file is None:
            return
        try:
            self._memory = _shared_memory(file)
        except OSError as error:
            log.warning("workers cannot tell each other that the origin is silent", error=str(error))

    def cell(self, host: str) -> SilenceCell:
        """Where one host's record lies."""
        name = int.from_bytes(hashlib.blake2b(host.encode(), digest_size=8).digest(), "little")
        return SilenceCell(self._memory, name)


class SilenceCell:
    """One host's record."""

    __slots__ = ("_memory", "_name", "_offset")

    def __init__(self, memory: mmap.mmap, name: int) -> None:
        self._memory = memory
        self._name = name
        self._offset = name % _CELLS * _RECORD.size

    def tell(self, moment: float) -> None:
        """The host is silent."""
        _RECORD.pack_into(self._memory, self._offset, self._name, moment)

    def clear(self) -> None:
        """It is not."""
        if self._told():
            _RECORD.pack_into(self._memory, self._offset, self._name, 0.0)

    def is_silent(self, now: float, heard_at: float) -> bool:
        """Whether somebody found the host silent just now, and later than the caller has heard of it."""
        moment = self._told()
        return 0 < moment <= now < moment + BELIEVED_SECONDS and heard_at < moment

    def _told(self) -> float:
        name, moment = _RECORD.unpack_from(self._memory, self._offset)
        return moment if name == self._name else 0.0


def _shared_memory(file: Path) -> mmap.mmap:
    """Allocated, not only mapped: a page that a full file system cannot give kills whoever touches it."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, _SIZE_BYTES)
        return mmap.mmap(descriptor, _SIZE_BYTES)
    finally:
        os.close(descriptor)
