"""Files that settings are read from: whole, and only as far as a file of settings can be long."""

from __future__ import annotations

import codecs
from pathlib import Path

CONFIGURATION_BYTES_MAX = 4 * 2**20
"""Ten thousand slots."""

SECRET_BYTES_MAX = 64 * 1024

OVERLAY_BYTES_MAX = 128 * 2**20
"""The gateway wrote it itself, but it may have been changed since."""


def content_of(path: Path, bytes_max: int) -> bytes:
    """Return what a file holds; raise OSError, or ValueError for a file that cannot be the one. Blocks."""
    with path.open("rb") as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise ValueError(f"it has more than {bytes_max} bytes")
    if content.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it begins with a byte order mark (BOM): save it as UTF-8 without one")
    return content
