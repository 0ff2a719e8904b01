"""The size of a slot's write-back buffer and its limits: what holds where nothing is said, and what cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gateway.config.defaults import DiskUsage
from gateway.config.settings import Settings
from gateway.config.slot_checks import not_fitting
from tests.support.cache_directory import begun
from tests.support.settings import load, problems

GIB = 2**30
SLOT = '[[slots]]\nname = "{0}"\nprefix = "s3://{0}/"\n'


def cache(tmp_path: Path, capacity: str = "1GiB") -> str:
    return f'[cache]\ndirectory = "{tmp_path}/cache"\npersistent = true\ncapacity = "{capacity}"\n'


def back(name: str, more: str = "") -> str:
    return f'{SLOT.format(name)}write = "back"\n{more}'


def buffers(settings: Settings) -> list[int | None]:
    return [slot.buffer_bytes for slot in settings.slots]


def test_buffers_share_a_quarter_of_the_capacity_where_nothing_is_said(tmp_path: Path) -> None:
    """Evenly, over all slots that write back, whether they say a size of their own or not; others have none."""
    text = cache(tmp_path) + back("a") + back("b", 'buffer = "100MiB"\n') + SLOT.format("c")
    assert buffers(load(tmp_path, text).settings) == [GIB // 8, 100 * 2**20, None]
    assert buffers(load(tmp_path, cache(tmp_path) + back("a")).settings) == [GIB // 4]


def test_a_buffer_holds_a_few_parts_at_least(tmp_path: Path) -> None:
    """A small cache gets more than a quarter of itself; less than one part of the usual size is refused."""
    text = cache(tmp_path, "100MiB") + back("a") + back("b")
    assert buffers(load(tmp_path, text).settings) == [64 * 2**20] * 2
    assert list(problems(tmp_path, cache(tmp_path) + back("a", 'buffer = "7MiB"\n'))) == ["slots[0].buffer"]


@pytest.mark.parametrize(
    ("total", "more", "expected"),
    [(GIB + 300 * 2**20, "", 128), (GIB + 60 * 2**20, "", 30), (GIB + 200 * 2**20, 'buffer = "150MiB"\n', 50)],
)
def test_what_is_not_said_fits_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, more: str, expected: int
) -> None:
    """A small disk makes the buffers smaller of which nothing was said: nobody is refused for a default."""
    monkeypatch.setattr("gateway.config.defaults.disk_usage", lambda _: DiskUsage(total, 0, total))
    monkeypatch.setattr("gateway.config.slot_checks.disk_usage", lambda _: DiskUsage(total, 0, total))
    settings = load(tmp_path, cache(tmp_path) + back("a") + back("b", more)).settings
    assert buffers(settings)[0] == expected * 2**20


def test_limits_are_read(tmp_path: Path) -> None:
    """With their units; without, there is none."""
    more = 'when_buffer_full = "slow-down"\nmax_unflushed_bytes = "3GiB"\nmax_unflushed_age = "10m"\n'
    first, second = load(tmp_path, cache(tmp_path) + back("a", more) + back("b")).settings.slots
    assert (first.when_buffer_full, first.unflushed_bytes_max, first.unflushed_age_seconds_max) == (
        "slow-down",
        3 * GIB,
        600,
    )
    assert (second.when_buffer_full, second.unflushed_bytes_max, second.unflushed_age_seconds_max) == (
        "through",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('buffer = "1GiB"', "slots[0].buffer"),
        ('when_buffer_full = "through"', "slots[0].when_buffer_full"),
        ('max_unflushed_bytes = "1GiB"', "slots[0].max_unflushed_bytes"),
        ('max_unflushed_age = "1m"', "slots[0].max_unflushed_age"),
    ],
)
def test_without_write_back_they_would_do_nothing(tmp_path: Path, line: str, key: str) -> None:
    """So they are refused, each by its own name."""
    found = problems(tmp_path, f"{cache(tmp_path)}{SLOT.format('a')}{line}\n")
    assert list(found) == [key]
    assert "needs write = back" in found[key]


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('max_unflushed_bytes = "0"', "slots[0].max_unflushed_bytes"),
        ('max_unflushed_age = "500ms"', "slots[0].max_unflushed_age"),
        ('when_buffer_full = "wait"', "slots[0].when_buffer_full"),
    ],
)
def test_values_that_make_no_sense_are_refused(tmp_path: Path, line: str, key: str) -> None:
    """Under their own keys."""
    assert list(problems(tmp_path, cache(tmp_path) + back("a", f"{line}\n"))) == [key]


def test_what_no_disk_of_this_size_could_hold_is_refused(tmp_path: Path) -> None:
    """Buffers and cache.capacity together are more than the whole file system."""
    total = shutil.disk_usage(tmp_path).total
    found = problems(tmp_path, cache(tmp_path) + back("a", f"buffer = {total}\n"))
    assert "of slot a: together with cache.capacity" in found["slots[0].buffer"]
    assert f"slots[0].buffer = {total}: " in found["slots[0].buffer"]


def test_a_disk_that_others_have_filled_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more: a gateway that did not start could not flush what it has acknowledged."""
    begun(tmp_path / "cache")
    (tmp_path / "cache" / "held").write_bytes(bytes(2**20))
    settings = load(tmp_path, cache(tmp_path) + back("a")).settings
    needed = GIB + GIB // 4 - 2**20

    def with_free(free: int) -> list[str]:
        usage = DiskUsage(10 * GIB, 10 * GIB - free, free)
        monkeypatch.setattr("gateway.config.slot_checks.disk_usage", lambda _: usage)
        return not_fitting(settings)

    assert with_free(needed) == []
    (warning,) = with_free(needed - 2**20)
    assert "the cache will yield" in warning
