"""The number of an environment's last commit, as all processes see it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from gateway.disk.lmdb_environment import LastCommit

_WRITES = """
import lmdb, sys
environment = lmdb.open(sys.argv[1], sync=False)
with environment.begin(write=True) as transaction:
    transaction.put(b"key", b"of another process")
"""

_LOCKS = """
import fcntl, sys
with open(sys.argv[1] + "/lock.mdb", "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except BlockingIOError:
        print("in use")
"""


@contextmanager
def watched(directory: Path, engine: int = 0) -> Iterator[tuple[lmdb.Environment, LastCommit]]:
    commits = LastCommit(directory)
    environment = lmdb.open(str(directory), sync=False, lib_version=engine)
    yield environment, commits
    environment.close()
    commits.close()


def put(environment: lmdb.Environment, value: bytes) -> None:
    with environment.begin(write=True) as transaction:
        transaction.put(b"key", value)


def another_process(code: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], check=True, timeout=60, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


def test_it_is_the_number_that_lmdb_tells(tmp_path: Path) -> None:
    with watched(tmp_path) as (environment, commits):
        for value in (b"1", b"2", b"3"):
            put(environment, value)
            assert commits.number() == environment.info()["last_txnid"]
            with environment.begin() as transaction:
                assert commits.number() == transaction.id()


def test_looking_and_what_is_given_up_do_not_change_it(tmp_path: Path) -> None:
    with watched(tmp_path) as (environment, commits):
        put(environment, b"value")
        before = commits.number()
        with environment.begin() as transaction:
            assert transaction.get(b"key") == b"value"
        given_up = environment.begin(write=True)
        given_up.put(b"key", b"another")
        given_up.abort()
        assert commits.number() == before


def test_what_another_process_writes_changes_it(tmp_path: Path) -> None:
    with watched(tmp_path) as (_, commits):
        before = commits.number()
        another_process(_WRITES, tmp_path)
        assert commits.number() != before


def test_lmdb_keeps_its_locks_while_it_is_looked_at(tmp_path: Path) -> None:
    """A process that does not see them takes the environment for its own, and begins its table of readers anew."""
    with watched(tmp_path) as (_, commits):
        commits.number()
        assert another_process(_LOCKS, tmp_path) == "in use"
    assert another_process(_LOCKS, tmp_path) == ""


def test_of_an_engine_that_is_not_known_it_is_another_each_time(tmp_path: Path) -> None:
    with watched(tmp_path, engine=1) as (_, commits):
        assert commits.number() != commits.number()


def test_once_closed_it_is_another_each_time(tmp_path: Path) -> None:
    commits = LastCommit(tmp_path)
    commits.close()
    commits.close()
    assert commits.number() != commits.number()


@pytest.mark.parametrize("size_bytes", [1, 3, 4095])
def test_a_lock_file_that_was_cut_short_is_written_anew(tmp_path: Path, size_bytes: int) -> None:
    (tmp_path / "lock.mdb").write_bytes(b"x" * size_bytes)
    with watched(tmp_path) as (environment, commits):
        put(environment, b"1")
        assert commits.number() == environment.info()["last_txnid"]
