"""Walk the directory of a running gateway, which makes and removes files meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def living_files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield what lies below a directory, directories too, without what is gone before its look."""
    for above, directories, names in os.walk(directory):
        for name in (*directories, *names):
            path = Path(above, name)
            try:
                yield path, path.lstat()
            except FileNotFoundError:
                continue
