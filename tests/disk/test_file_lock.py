"""Locks on whole files."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.disk.file_lock import lock_within, try_lock


def test_a_lock_keeps_others_out_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    """Within one process, too: each opening of the file is somebody of his own. Who has it may ask again."""
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2))
    assert try_lock(first)
    assert try_lock(first)
    assert not try_lock(second)
    assert not lock_within(second, 0.03)
    os.close(first)
    assert lock_within(second, 0.03)
    os.close(second)
