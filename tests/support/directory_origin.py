"""An origin that is a directory, for tests, which also look at the directory itself."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from gateway.core.clock import SystemClock
from gateway.origin.client import OriginSettings
from gateway.origin.stores.directory import origin
from gateway.origin.stores.directory.store import DirectoryStore

BUCKET = "bucket"


class DirectoryOrigin(origin.DirectoryOrigin):
    """`root/bucket` is there. Make it where an event loop runs."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.bucket = root / BUCKET
        self.bucket.mkdir(exist_ok=True)
        self.skipped = Counter[str]()
        self.files = DirectoryStore(root, OriginSettings(**settings), self._skip)
        super().__init__(self.files, SystemClock(), name="directory")

    def _skip(self, reason: str) -> None:
        self.skipped[reason] += 1

    def write(self, key: str, data: bytes, *, age_seconds: float = 3600.0) -> Path:
        """A file that somebody else has written. Its ctime is now, whatever its age."""
        path = self.bucket / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        moment = time.time() - age_seconds
        os.utime(path, (moment, moment))
        return path
