"""Simulated processes: each can be killed at any of its operations, and then does nothing more that anybody could see.

What the write-back imports to touch the world (`os`, `sqlite3`, threads, dice, secrets) is replaced by what asks the
process that runs whether it still lives, and by dice that a seed decides.
"""

from __future__ import annotations

import contextvars
import os
import random
import secrets
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import unquote

from tests.simulation.disk import SimulatedDisk
from tests.simulation.virtual_time import VirtualFuture, VirtualThreads, begin_anew

SEEN_FROM = ("gateway.writeback", "gateway.operations", "gateway.disk.atomic_write", "gateway.edge.asgi")


class Killed(BaseException):
    """This process is dead: whatever it does from now on, nobody sees."""


class Process:
    """One process of the node. `dies_in` operations more and it is killed, where that is set."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.dies_in: int | None = None
        self.connections: list[sqlite3.Connection] = []
        self.on_kill: Callable[[Process], None] = lambda _: None

    def operation(self) -> None:
        """About to do what others can see. Killed where it does not come to it."""
        if self.alive and self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                self.kill()
        if not self.alive:
            raise Killed(self.name)

    def kill(self) -> None:
        """From now on it does nothing; transactions that it has not committed are gone."""
        if self.alive:
            self.alive = False
            for connection in self.connections:
                connection.close()
            self.on_kill(self)


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def operation() -> None:
    """Of whichever process runs."""
    process = CURRENT.get()
    if process is not None:
        process.operation()


_SHORT_LOG = "PRAGMA wal_autocheckpoint = 16"
"""Pages: the log begins anew several times in a history. Each start reads all of it, in Python."""


class _Rows:
    """Gives rows that another cursor has read, as a cursor does."""

    def __init__(self, rows: Iterable[tuple[Any, ...]]) -> None:
        self._rows = iter(rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._rows

    def fetchone(self) -> tuple[Any, ...] | None:
        return next(self._rows, None)

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._rows)


class Connection(sqlite3.Connection):
    """A connection of one process to the journal.

    A reading transaction is begun at its first query whose rows this connection does not know: those that it has read
    since the journal was changed last it gives again. Most looks into a journal are at one that has stayed as it was.
    """

    _changes: ClassVar[Counter[str]] = Counter()
    """How often each journal was changed, by its path."""

    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        super().execute(_SHORT_LOG)
        self._path = unquote(str(path).removeprefix("file:").partition("?")[0])
        self._changes_before = 0
        self._is_reading = False
        self._known: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        self._known_changes = -1
        self._process = CURRENT.get()
        if self._process is not None:
            self._process.connections.append(self)

    def execute(self, *args: Any) -> Any:
        self._ask()
        statement = args[0]
        if statement == "BEGIN":
            self._is_reading = True
            return _Rows(())
        if self._is_reading:
            if statement.startswith("SELECT"):
                return self._rows_of(args)
            self._is_reading = statement not in ("ROLLBACK", "COMMIT")
            if not self.in_transaction:
                if not self._is_reading:
                    return _Rows(())
                super().execute("BEGIN")
        if statement == "BEGIN IMMEDIATE":
            self._changes_before = self.total_changes
        is_written = statement == "COMMIT" and self.total_changes != self._changes_before
        if is_written and _Disks.current is not None and _Disks.current.journal_is_full:
            raise _full()
        if not statement.startswith(("SELECT", "ROLLBACK")):
            self._changes[self._path] += 1
        return super().execute(*args)

    def _rows_of(self, args: tuple[Any, ...]) -> _Rows:
        if self._known_changes != self._changes[self._path]:
            self._known.clear()
            self._known_changes = self._changes[self._path]
        rows = self._known.get(args)
        if rows is None:
            if not self.in_transaction:
                super().execute("BEGIN")
            rows = self._known[args] = super().execute(*args).fetchall()
        return _Rows(rows)

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        self._ask()
        self._changes[self._path] += 1
        return super().executemany(*args)

    def _ask(self) -> None:
        if self._process is not None:
            self._process.operation()


def _full() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


class _Disks:
    """The one that is simulated."""

    current: SimulatedDisk | None = None


class _Shim(ModuleType):
    """A module, but for some names."""

    def __init__(self, made: ModuleType, **replaced: Any) -> None:
        super().__init__(made.__name__)
        self.__dict__.update(made.__dict__)
        self.__dict__.update(replaced)


@contextmanager
def simulated(dice: Random, disk: SimulatedDisk) -> Iterator[None]:
    """As long as this lasts the write-back touches nothing but what is simulated."""
    files = {name: _asking(getattr(disk, name, getattr(os, name))) for name in disk.CALLS}
    shims: dict[Any, Any] = {
        os: _Shim(os, **files),
        sqlite3: _Shim(sqlite3, connect=_connect),
        secrets: _Shim(
            secrets,
            token_hex=lambda count=16: dice.randbytes(count).hex(),
            token_urlsafe=lambda count=32: dice.randbytes(count).hex(),
        ),
        random: _Shim(random, Random=lambda *seed: Random(*seed) if seed else Random(dice.getrandbits(32))),
    }
    undo: list[tuple[ModuleType, str, Any]] = []
    for module in [one for name, one in sorted(sys.modules.items()) if name.startswith(SEEN_FROM)]:
        for name, value in list(vars(module).items()):
            made = shims.get(value) if isinstance(value, ModuleType) else None
            if value is ThreadPoolExecutor:
                made = VirtualThreads
            elif value is Future:
                made = VirtualFuture
            if made is not None:
                undo.append((module, name, value))
                setattr(module, name, made)
    begin_anew(dice)
    Connection._changes.clear()
    _Disks.current = disk
    try:
        yield
    finally:
        _Disks.current = None
        for module, name, value in undo:
            setattr(module, name, value)


def _asking(call: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*args: Any, **kwargs: Any) -> Any:
        operation()
        return call(*args, **kwargs)

    return asked


def _connect(*args: Any, **kwargs: Any) -> sqlite3.Connection:
    operation()
    return sqlite3.connect(*args, factory=Connection, **kwargs)
