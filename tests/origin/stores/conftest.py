from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.origin.stores.directory import files
from tests.support.directory_origin import DirectoryOrigin


@pytest.fixture(params=["disk", "memory"])
def file_system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on the disk, and one on tmpfs."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            yield Path(name)


@pytest.fixture
def nas(file_system: Path) -> Iterator[DirectoryOrigin]:
    origin = DirectoryOrigin(file_system)
    yield origin
    origin.files.threads.end()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are taken for ten minutes older than they are, so that they have settled."""
    monkeypatch.setattr(files, "time", SimpleNamespace(time=lambda: time.time() + 600.0))
