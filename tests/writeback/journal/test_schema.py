"""The mechanism by which a journal of an older version becomes one of this version."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from gateway.core.errors import StartupError
from gateway.writeback.journal import schema

Conversion = Callable[[sqlite3.Connection], None]


def add_a_table(connection: sqlite3.Connection) -> None:
    """An example of a conversion: a later version keeps notes, and one node has the first already."""
    connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL) STRICT")
    connection.execute("INSERT INTO notes SELECT NULL, value FROM node WHERE name = 'id'")


def a_journal(path: Path) -> None:
    with closing(schema.connect(str(path))) as connection:
        schema.prepare(connection)


def read_by_a_later_version(monkeypatch: pytest.MonkeyPatch, conversion: Conversion) -> None:
    monkeypatch.setattr(schema, "VERSION", 2)
    monkeypatch.setattr(schema, "CONVERSIONS", {1: conversion})


def state(path: Path) -> tuple[int, bool]:
    """The journal's version, and whether it has notes."""
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        tables = connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'notes'").fetchone()
        return version, tables[0] == 1


def test_an_older_journal_becomes_one_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with what it held."""
    a_journal(tmp_path / "journal")
    assert state(tmp_path / "journal") == (1, False)
    read_by_a_later_version(monkeypatch, add_a_table)
    for _ in range(2):
        a_journal(tmp_path / "journal")
        assert state(tmp_path / "journal") == (2, True)
    with closing(sqlite3.connect(tmp_path / "journal")) as connection:
        notes = connection.execute("SELECT text FROM notes").fetchall()
        assert notes == connection.execute("SELECT value FROM node WHERE name = 'id'").fetchall()


def test_a_kill_amid_a_conversion_leaves_the_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete; the next start converts it."""
    a_journal(tmp_path / "journal")

    def killed(connection: sqlite3.Connection) -> None:
        add_a_table(connection)
        os.kill(os.getpid(), signal.SIGKILL)

    read_by_a_later_version(monkeypatch, killed)
    child = os.fork()
    if child == 0:
        a_journal(tmp_path / "journal")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert state(tmp_path / "journal") == (1, False)
    read_by_a_later_version(monkeypatch, add_a_table)
    a_journal(tmp_path / "journal")
    assert state(tmp_path / "journal") == (2, True)


def test_a_conversion_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, say."""
    a_journal(tmp_path / "journal")

    def refused(connection: sqlite3.Connection) -> None:
        add_a_table(connection)
        raise sqlite3.OperationalError("database or disk is full")

    read_by_a_later_version(monkeypatch, refused)
    with pytest.raises(sqlite3.OperationalError):
        a_journal(tmp_path / "journal")
    assert state(tmp_path / "journal") == (1, False)


def test_a_later_journal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names both versions."""
    with monkeypatch.context() as later:
        read_by_a_later_version(later, add_a_table)
        a_journal(tmp_path / "journal")
    with pytest.raises(StartupError, match="has version 2, this version of Forebay reads 1:"):
        a_journal(tmp_path / "journal")
