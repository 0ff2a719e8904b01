"""A cache directory in which a gateway has been at work, for tests that lay something into it."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.serve.claim import lock_directory, prepare_directory


def begun(directory: Path) -> Path:
    """`directory`, made and locked once."""
    prepare_directory(directory)
    os.close(lock_directory(directory))
    return directory
