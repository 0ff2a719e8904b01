"""The mark that a gateway leaves which had to do without its cache directory, and who heeds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.serve import claim as claims
from gateway.serve.claim import claim, leave_mark
from tests.support.cache_directory import begun


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(claims, "SHARED_MEMORY", tmp_path)
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def remember(directory: Path) -> None:
    begun(directory)
    (directory / "catalog").mkdir(exist_ok=True)
    (directory / "catalog" / "BOOT").touch()


def remembers_after_start(directory: Path) -> bool:
    lock, _ = claim(directory)
    assert lock is not None
    os.close(lock)
    return (directory / "catalog" / "BOOT").exists()


def test_what_was_remembered_before_is_forgotten_once(cache: Path) -> None:
    """Own writes could not be noted in it; what is learned from then on is believed, until that happens again."""
    for _ in range(2):
        remember(cache)
        assert remembers_after_start(cache)
        leave_mark(cache)
        assert not remembers_after_start(cache)


def test_a_directory_at_the_same_path_does_not_heed_the_mark_for_another(cache: Path) -> None:
    """Containers that share /dev/shm each have one there: the mark of one is for that one, whoever starts first."""
    remember(cache)
    leave_mark(cache)
    cache.rename(cache.with_name("first"))
    cache.mkdir()
    assert not remembers_after_start(cache)
    cache.rename(cache.with_name("second"))
    cache.with_name("first").rename(cache)
    assert not remembers_after_start(cache)


def test_a_mark_that_somebody_else_put_there_is_heeded_every_time(cache: Path, tmp_path: Path) -> None:
    """It says nothing about who has forgotten."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"%d:%d" % (cache.stat().st_dev, cache.stat().st_ino))
    claims.closed_mark(cache).symlink_to(elsewhere)
    for _ in range(2):
        remember(cache)
        assert not remembers_after_start(cache)
