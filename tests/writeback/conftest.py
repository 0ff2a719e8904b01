"""Buffers for tests that are coroutines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flushing import Buffer
from tests.support.opening import Opening
from tests.support.writeback_admin import AdminHarness


@pytest.fixture
def buffer(tmp_path: Path) -> Opening:
    return Opening(lambda: Buffer(tmp_path))


@pytest.fixture
def harness(tmp_path: Path) -> Opening:
    return Opening(lambda: AdminHarness(tmp_path))
