"""Files of certificates and keys: read once, and used as they were then, whatever becomes of the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

BYTES_MAX = 4 * 2**20
"""Ten times what all authorities take that browsers trust."""


@dataclass(frozen=True, slots=True)
class PemFile:
    """A file with what it held when it was read; None before. Its repr shows no key."""

    path: Path
    content: bytes | None = field(default=None, repr=False)

    def read(self) -> PemFile:
        """Read the file's present content. Raises OSError, and ValueError when it is too large."""
        with self.path.open("rb") as file:
            content = file.read(BYTES_MAX + 1)
        if len(content) > BYTES_MAX:
            raise ValueError(f"a file of at most {BYTES_MAX} bytes")
        return replace(self, content=content)

    @contextmanager
    def in_memory(self) -> Iterator[str]:
        """Yield a path to the content for OpenSSL, which takes nothing but paths."""
        descriptor = os.memfd_create("forebay-pem", os.MFD_CLOEXEC)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(self.content or b"")
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
