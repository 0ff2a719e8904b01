"""A catalog that finds no room when it is opened is begun anew: it can be learned again (docs/semantics.md, 8.2)."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from gateway.core.errors import StoreUnavailable, is_no_room
from gateway.core.model import Homes
from gateway.disk.lmdb_environment import NEW_ENGINE, open_environment
from gateway.metadata.listing.dirty_keys import DirtyKeys
from gateway.metadata.opening import open_directory
from tests.support.disks import fill_up, small_disk

ORIGIN = Homes("https://origin.example")


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """One that was closed in order, and has a file that goes when it is begun anew."""
    open_directory(tmp_path / "catalog", ORIGIN).close()
    (tmp_path / "catalog" / "answers").mkdir()
    return tmp_path / "catalog"


def fail(monkeypatch: pytest.MonkeyPatch, method: str, until: Callable[[], bool], number: int) -> None:
    real = getattr(DirtyKeys, method)

    def called(*arguments: object) -> None:
        if not until():
            error = lmdb.DiskError("mdb_txn_commit")
            vars(error)["code"] = number
            raise error
        real(*arguments)

    monkeypatch.setattr(DirtyKeys, method, called)


@pytest.mark.parametrize("method", ["__init__", "recover"])
def test_it_is_begun_anew_where_that_makes_room(catalog: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Whatever of it could not be written."""
    fail(monkeypatch, method, until=lambda: not (catalog / "answers").exists(), number=errno.ENOSPC)
    opened = open_directory(catalog, ORIGIN)
    opened.close()
    assert not (catalog / "answers").exists()


def test_where_that_makes_no_room_it_is_done_without(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For good: nobody tries for ever."""
    fail(monkeypatch, "recover", until=lambda: False, number=errno.ENOSPC)
    with pytest.raises(StoreUnavailable, match="mdb_txn_commit"):
        open_directory(catalog, ORIGIN)


def test_a_disk_that_fails_drops_nothing(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be well tomorrow."""
    fail(monkeypatch, "recover", until=lambda: False, number=errno.EIO)
    with pytest.raises(StoreUnavailable):
        open_directory(catalog, ORIGIN)
    assert (catalog / "answers").exists()


def test_what_other_processes_use_is_not_begun_anew(catalog: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have it open and know what lies in it."""
    fail(monkeypatch, "__init__", until=lambda: False, number=errno.ENOSPC)
    with (catalog / "users.lock").open() as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with pytest.raises(StoreUnavailable):
            open_directory(catalog, ORIGIN)
    assert (catalog / "answers").exists()


@pytest.mark.root
def test_lmdb_says_that_a_disk_is_full(tmp_path: Path) -> None:
    """By the system's number, as it says all that the disk does."""
    with small_disk(tmp_path / "disk", 2**20) as disk:
        environment, [table] = open_environment(disk, [b"t"], map_bytes=2**24, engine=NEW_ENGINE)
        try:
            fill_up(disk)
            with pytest.raises(lmdb.Error) as failed, environment.begin(write=True) as transaction:
                transaction.put(b"k", bytes(2**20), db=table)
            assert is_no_room(failed.value)
        finally:
            environment.close()
