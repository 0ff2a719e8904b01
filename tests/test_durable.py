"""Small files replaced as a whole."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from gateway.durable import write_durably

ROOM_BYTES = 64 * 1024


def test_a_file_that_is_not_taken_whole_is_not_replaced(tmp_path: Path) -> None:
    """The kernel takes the beginning only, as a full disk does: that is an error, and the old content stays."""
    path = tmp_path / "PINS"
    write_durably(path, b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_durably(path, bytes(2 * ROOM_BYTES))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    write_durably(path, b"after")
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode & 0o777 == 0o600
