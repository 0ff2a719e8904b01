"""Where shared metrics lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.serve.metrics_directory import in_memory_directory, make_metrics_directory, remove_metrics_directory


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Stands in for /dev/shm."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def test_they_lie_in_memory_and_begin_empty(tmp_path: Path, memory: Path) -> None:
    """What a killed run left is gone."""
    left = in_memory_directory(tmp_path / "cache", memory)
    left.mkdir()
    (left / "counter_worker0.db").touch()
    made = make_metrics_directory(tmp_path / "cache", 3, memory)
    assert made == left
    assert list(made.iterdir()) == []
    assert made.stat().st_mode & 0o777 == 0o700
    remove_metrics_directory(made)
    assert not made.exists()


def test_gateways_on_other_directories_have_others(tmp_path: Path, memory: Path) -> None:
    """Two gateways on one machine do not count into each other's files."""
    assert make_metrics_directory(tmp_path / "a", 3, memory) != make_metrics_directory(tmp_path / "b", 3, memory)


def test_without_room_in_memory_they_lie_in_the_cache_directory(tmp_path: Path, memory: Path) -> None:
    """Containers often have 64 MiB of shared memory."""
    made = make_metrics_directory(tmp_path / "cache", 2**40, memory)
    assert made == tmp_path / "cache" / "run" / "metrics"
    assert made.stat().st_mode & 0o777 == 0o700


def test_without_shared_memory_they_lie_in_the_cache_directory(tmp_path: Path) -> None:
    """Not every machine has it."""
    made = make_metrics_directory(tmp_path / "cache", 3, tmp_path / "absent")
    assert made == tmp_path / "cache" / "run" / "metrics"


def test_what_another_put_in_that_place_is_not_followed(tmp_path: Path, memory: Path) -> None:
    """Everybody may write to shared memory: a link of that name leads where its maker wants."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").touch()
    in_memory_directory(tmp_path / "cache", memory).symlink_to(target)
    made = make_metrics_directory(tmp_path / "cache", 3, memory)
    assert made == tmp_path / "cache" / "run" / "metrics"
    assert (target / "precious").exists()
