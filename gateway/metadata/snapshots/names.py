"""Names of snapshots. A name becomes a directory's, so that nothing but a valid one may ever reach the disk."""

from __future__ import annotations

import re

SNAPSHOT_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ALLOWED = "letters, digits, `-`, `_`, `.`; at most 64, the first a letter or a digit"

_NAME = re.compile(SNAPSHOT_NAME[:-1] + r"\Z")


def valid_name(name: str) -> str:
    """The name itself; ValueError when it is none."""
    if not _NAME.match(name):
        raise ValueError(f"{name!r} is no name of a snapshot: {ALLOWED.replace('`', '')}")
    return name
