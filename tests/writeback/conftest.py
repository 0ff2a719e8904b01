"""Buffers for tests that are coroutines."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.writeback import pending_key_filter
from tests.support.flushing import Buffer
from tests.support.opening import Opening
from tests.support.writeback_admin import AdminHarness


@pytest.fixture
def buffer(tmp_path: Path) -> Opening:
    return Opening(lambda: Buffer(tmp_path))


@pytest.fixture
def looking_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which hours pass: other processes' news are looked for once in a second of them."""
    monkeypatch.setattr(pending_key_filter, "QUIET_SECONDS", pending_key_filter.LOOK_SECONDS)


@pytest.fixture
def harness(tmp_path: Path) -> Opening:
    return Opening(lambda: AdminHarness(tmp_path))
