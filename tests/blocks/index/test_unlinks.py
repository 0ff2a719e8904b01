"""Files that cannot be unlinked: counted until they are, tried again, by whoever comes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks.layout import BlockSettings
from gateway.blocks.opening import OpenDirectory, open_directory
from gateway.blocks.small_block_fetch import SegmentAppender
from gateway.core.errors import StoreUnavailable
from gateway.policy.slots import Prefix, Slots
from tests.support.appending import append_all, small_blocks
from tests.support.blocks import MIB, block_files
from tests.support.slots import Slot

CAPACITY_BYTES = 4 * MIB


@contextmanager
def sticking(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """These files cannot be removed."""
    unlink = os.unlink

    def refuse(path: Any, **keywords: Any) -> None:
        if os.path.basename(path) in names:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        yield


def open_lru(directory: Path, worker: int = 0) -> OpenDirectory:
    slots = Slots([Slot("default", Prefix(""), eviction="lru")])
    return open_directory(BlockSettings(directory, CAPACITY_BYTES, 64 * 1024, slots=slots), worker)


def on_disk(directory: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in block_files(directory))


def fill(opened: OpenDirectory, prefix: str) -> None:
    """More than fits, whatever is refused."""
    appender = SegmentAppender(opened.blocks)
    for number in range(200):
        with suppress(StoreUnavailable):
            append_all(appender, small_blocks(f"{prefix}{number}/", 1, 40_000))


def counted(opened: OpenDirectory) -> int:
    usage = opened.blocks.index.usage()
    return usage.used_bytes + usage.reserved_bytes + usage.pending_unlink_bytes


def test_what_cannot_be_unlinked_stays_counted_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is filled beside it the capacity holds, also after a restart; once it can be removed, it is."""
    directory = tmp_path / "c"
    opened = open_lru(directory)
    fill(opened, "a")
    stuck = [path.name for path in block_files(directory)][:20]
    with sticking(monkeypatch, *stuck):
        fill(opened, "b")
        assert {path.name for path in block_files(directory)} >= set(stuck)
        assert on_disk(directory) <= CAPACITY_BYTES
        assert counted(opened) == on_disk(directory)
        with pytest.raises(StoreUnavailable):
            opened.blocks.retry_unlinks()
        opened.close()
        opened = open_lru(directory, worker=1)
        fill(opened, "c")
        assert counted(opened) == on_disk(directory) <= CAPACITY_BYTES
    opened.blocks.retry_unlinks()
    assert not {path.name for path in block_files(directory)} & set(stuck)
    assert opened.blocks.index.usage().pending_unlink_bytes == 0
    fill(opened, "d")
    assert counted(opened) == on_disk(directory) > CAPACITY_BYTES * 0.9
    opened.close()


def test_room_that_was_made_in_vain_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill that fails because what went for it could not be removed holds no room."""
    directory = tmp_path / "c"
    opened = open_lru(directory)
    fill(opened, "a")
    with sticking(monkeypatch, *(path.name for path in block_files(directory))):
        fill(opened, "b")
        assert opened.blocks.index.usage().reserved_bytes == 0
    opened.close()


@pytest.mark.parametrize("worker", [0, 5])
def test_what_a_killed_process_could_not_remove_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: int
) -> None:
    """By its successor, or by another process; a directory in which something sticks can be opened."""
    directory = tmp_path / "c"
    opened = open_lru(directory)
    fill(opened, "a")
    stuck = block_files(directory)[0].name
    with opened.blocks.index.writing() as transaction:
        file = transaction.file(stuck)
        assert file is not None
        transaction.evict(file)
    opened.blocks.index.close()  # as SIGKILL would
    opened.locks.close()
    opened.worker_locks.give_back_own()
    with sticking(monkeypatch, stuck):
        opened = open_lru(directory, worker)
        assert opened.blocks.index.usage().pending_unlink_bytes == file.disk_bytes
        assert counted(opened) == on_disk(directory)
    opened.blocks.retry_unlinks()
    assert counted(opened) == on_disk(directory)
    assert stuck not in {path.name for path in block_files(directory)}
    opened.close()
