"""Tests that need root: only they may mount, and where they cannot run they fail."""

from __future__ import annotations

import os
import shutil

MARKER = "root"
_TOOLS = {
    "mkfs.ext4": "e2fsprogs",
    "mount": "mount",
    "umount": "mount",
    "cc": "gcc",
    "ip": "iproute2",
    "nft": "nftables",
    "s3fs": "s3fs",
    "fusermount3": "fuse3",
    "git": "git",
}

_may_use_root = False
"""Whether the test that runs now bears the marker."""


def begin_test(*, is_marked: bool) -> str | None:
    """Called before each test. What a marked test lacks on this machine, in words; None where nothing is missing."""
    global _may_use_root
    _may_use_root = is_marked
    if not is_marked:
        return None
    if os.geteuid() != 0:
        return f"this test needs root, and runs as user {os.geteuid()}: run `sudo make test-root`"
    absent = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    return f"this test needs more of the system: apt-get install {' '.join(absent)}" if absent else None


def require_root_marker() -> None:
    """Called by what only root may do, so that root, too, sees a test without the marker fail."""
    assert _may_use_root, f"a test that needs root must be marked: @pytest.mark.{MARKER}"
