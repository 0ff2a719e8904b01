"""Files that settings are read from: whole, and only as far as a file of settings can be long."""

from __future__ import annotations

from pathlib import Path

CONFIGURATION_BYTES_MAX = 4 * 2**20
"""Ten thousand slots."""

SECRET_BYTES_MAX = 64 * 1024

OVERLAY_BYTES_MAX = 128 * 2**20
"""The gateway wrote it itself, but it may have been changed since."""


class FileTooLarge(ValueError):
    """A file is too long to be of its kind."""


def content_of(path: Path, bytes_max: int) -> bytes:
    """Return a file's content; OSError, or FileTooLarge beyond `bytes_max`. Blocks."""
    with path.open("rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise FileTooLarge(f"it has more than {bytes_max} bytes")
    return content
