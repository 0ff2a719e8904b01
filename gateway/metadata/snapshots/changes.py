"""A number in shared memory that grows whenever a snapshot comes or goes, so that every worker sees it at once."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_SIZE_BYTES = 8
_FILE_MODE = 0o600


class Changes:
    """One process's view of the number. Nothing is durable about it: who begins looks at the directory anyway."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _FILE_MODE)
        try:
            if os.fstat(descriptor).st_size < _SIZE_BYTES:
                os.ftruncate(descriptor, _SIZE_BYTES)
            self._map = mmap.mmap(descriptor, _SIZE_BYTES)
        finally:
            os.close(descriptor)
        self._number = memoryview(self._map).cast("Q")

    @property
    def number(self) -> int:
        """Another one than before: something has changed."""
        return self._number[0]

    def tell(self) -> None:
        """Something has changed. The background process alone says so."""
        self._number[0] += 1

    def close(self) -> None:
        self._number.release()
        self._map.close()
