"""The number of an environment's last commit, as all processes see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from gateway.lmdb_commits import last_commit

_ANOTHER_PROCESS = """
import lmdb, sys
environment = lmdb.open(sys.argv[1], sync=False)
with environment.begin(write=True) as transaction:
    transaction.put(b"key", b"of another process")
"""


@pytest.fixture
def environment(tmp_path: Path) -> lmdb.Environment:
    return lmdb.open(str(tmp_path), sync=False, lib_version=0)


def _put(environment: lmdb.Environment, value: bytes) -> None:
    with environment.begin(write=True) as transaction:
        transaction.put(b"key", value)


def test_it_is_the_number_that_lmdb_tells(environment: lmdb.Environment) -> None:
    number = last_commit(environment)
    for value in (b"1", b"2", b"3"):
        _put(environment, value)
        assert number() == environment.info()["last_txnid"]
        with environment.begin() as transaction:
            assert number() == transaction.id()


def test_looking_and_what_is_given_up_do_not_change_it(environment: lmdb.Environment) -> None:
    number = last_commit(environment)
    before = number()
    with environment.begin() as transaction:
        assert transaction.get(b"key") is None
    given_up = environment.begin(write=True)
    given_up.put(b"key", b"value")
    given_up.abort()
    assert number() == before


def test_what_another_process_writes_changes_it(environment: lmdb.Environment, tmp_path: Path) -> None:
    number = last_commit(environment)
    before = number()
    subprocess.run([sys.executable, "-c", _ANOTHER_PROCESS, str(tmp_path)], check=True, timeout=60)
    assert number() != before


def test_an_engine_that_is_not_known_gives_another_number_each_time(tmp_path: Path) -> None:
    environment = lmdb.open(str(tmp_path), sync=False, lib_version=1)
    number = last_commit(environment)
    assert number() != number()
