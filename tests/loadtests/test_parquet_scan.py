"""Who takes part in the Parquet scans: a client that cannot be had is left out, and that is said."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from loadtests import parquet_scan


class Unavailable(Exception):
    """As duckdb.Error."""


class DuckDB:
    """A connection, as far as extensions go."""

    def __init__(self, installs: bool, loads: bool) -> None:
        self._installs, self._loads = installs, loads
        self.loaded: list[str] = []

    def install_extension(self, _name: str) -> None:
        if not self._installs:
            raise Unavailable("HTTP Error: Failed to download extension\nwith hints")

    def load_extension(self, name: str) -> None:
        if not self._loads:
            raise Unavailable("IO Error: Extension not found")
        self.loaded.append(name)


@pytest.mark.parametrize(
    ("installs", "loads", "file", "expected"),
    [
        (True, True, None, None),
        (False, False, None, "its extension httpfs cannot be loaded (HTTP Error: Failed to download extension)"),
        (True, False, None, "its extension httpfs cannot be loaded (IO Error: Extension not found)"),
        (False, True, "/somewhere/httpfs.duckdb_extension", None),
        (False, False, "/nowhere", "its extension httpfs cannot be loaded (IO Error: Extension not found)"),
    ],
)
def test_duckdb_is_left_out_where_its_extension_cannot_be_had(
    installs: bool, loads: bool, file: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are measured without it. A file that was named needs no download."""
    sql = DuckDB(installs, loads)

    @contextmanager
    def connect() -> Iterator[DuckDB]:
        yield sql

    module: Any = ModuleType("duckdb")
    module.Error, module.connect = Unavailable, connect
    monkeypatch.setitem(sys.modules, "duckdb", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    if file is None:
        monkeypatch.delenv("HTTPFS_FILE", raising=False)
    else:
        monkeypatch.setenv("HTTPFS_FILE", file)
    assert parquet_scan._missing("duckdb") == expected
    assert sql.loaded == ([file or "httpfs"] if expected is None else [])


def test_a_client_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert {parquet_scan._missing(name) for name in parquet_scan._SCANS} == {"it or numpy is not installed"}
