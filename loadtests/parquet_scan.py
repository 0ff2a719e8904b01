"""Scans of Parquet with projection and filter: straight to a bucket at an object store's distance, and through Forebay.

    python -m loadtests.parquet_scan [--rounds 5] [--scale 1] [--record]

A table of 8 files of about 20 MB, 8 row groups each. The origin takes 30 ms to the first byte, and each connection has
90 MB/s, as S3 does. pyarrow's dataset, polars and DuckDB count and sum what matches a filter that leaves half of
the row groups: they read three of eight columns, row groups in parallel ranges. In each round each client scans
straight, then through Forebay (a slot with `consistency = "immutable"`) a table that is not in the cache, then the
same again. Origin and client share a core. Every result is compared with
the right one. polars and DuckDB take part where they are installed; DuckDB needs its extension httpfs, which it
downloads where it may (`HTTPFS_FILE`: the extension's file, where it may not). Who is left out is said.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loadtests.harness import command
from loadtests.harness.cold import Memory
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET
from loadtests.harness.gateway import gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_least
from loadtests.harness.tools import Missing
from tests.support.gateway_process import ORIGIN_KEYS

_FILES, _ROW_GROUPS, _ROWS = 8, 8, 40_000
_LATENCY_SECONDS, _BYTES_PER_SECOND = 0.030, 90e6
_LABEL, _LABELS = 3, 10
_REGION = "us-east-1"

Result = tuple[int, int]
"""How many rows match, and the sum of their values."""

Scan = Callable[[str, str, int], Result]
"""Of the table under a prefix, at the server of a URL: rows of a label from some day on."""


def _write_table(directory: Path, rows: int) -> tuple[list[Path], Result, int]:
    """The files, the right result, and the day that half of the row groups begin before."""
    import numpy
    import pyarrow
    import pyarrow.parquet

    random: Any = numpy.random.default_rng(1)
    files, count, total = list[Path](), 0, 0
    days = _FILES * _ROW_GROUPS
    for number in range(_FILES):
        day: Any = numpy.repeat(numpy.arange(number * _ROW_GROUPS, (number + 1) * _ROW_GROUPS), rows)
        label = random.integers(0, _LABELS, len(day))
        value = random.integers(0, 2**40, len(day))
        columns = {"day": day, "label": label, "value": value}
        columns |= {f"feature_{index}": random.random(len(day)) for index in range(5)}
        files.append(directory / f"part-{number}.parquet")
        pyarrow.parquet.write_table(pyarrow.table(columns), files[-1], row_group_size=rows)
        matches = (day >= days // 2) & (label == _LABEL)
        count, total = count + int(matches.sum()), total + int(value[matches].sum())
    return files, (count, total), days // 2


def _pyarrow(url: str, prefix: str, day: int) -> Result:
    import pyarrow.compute
    import pyarrow.dataset
    from pyarrow import fs

    store = fs.S3FileSystem(access_key=ORIGIN_KEYS[0], secret_key=ORIGIN_KEYS[1], region=_REGION, endpoint_override=url)
    table = pyarrow.dataset.dataset(f"{BUCKET}/{prefix}", filesystem=store, format="parquet")
    field = pyarrow.dataset.field
    found = table.to_table(columns=["value"], filter=(field("day") >= day) & (field("label") == _LABEL))
    return found.num_rows, pyarrow.compute.sum(found["value"]).as_py()


def _polars(url: str, prefix: str, day: int) -> Result:
    import polars

    options = {
        "aws_endpoint_url": url,
        "aws_allow_http": "true",
        "aws_access_key_id": ORIGIN_KEYS[0],
        "aws_secret_access_key": ORIGIN_KEYS[1],
        "aws_region": _REGION,
    }
    table = polars.scan_parquet(f"s3://{BUCKET}/{prefix}/*.parquet", storage_options=options)
    matching = table.filter((polars.col("day") >= day) & (polars.col("label") == _LABEL))
    count, total = matching.select(polars.len(), polars.col("value").sum()).collect().row(0)
    return count, total


def _duckdb(url: str, prefix: str, day: int) -> Result:
    import duckdb

    with duckdb.connect() as sql:
        _load_httpfs(sql)
        key_id, secret = ORIGIN_KEYS
        sql.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{key_id}', SECRET '{secret}', REGION '{_REGION}', "
            f"ENDPOINT '{urlsplit(url).netloc}', URL_STYLE 'path', USE_SSL false)"
        )
        table = f"'s3://{BUCKET}/{prefix}/*.parquet'"
        query = f"SELECT count(*), sum(value)::BIGINT FROM {table} WHERE day >= {day} AND label = {_LABEL}"
        [(count, total)] = sql.execute(query).fetchall()
        return count, total


def _load_httpfs(sql: Any) -> None:
    """duckdb.Error where it is neither here nor to be had."""
    file = os.environ.get("HTTPFS_FILE")
    if file is None:
        sql.install_extension("httpfs")  # nothing where it is installed
    sql.load_extension(file or "httpfs")


def _missing(name: str) -> str | None:
    """Why a client takes no part; None: it does."""
    if any(importlib.util.find_spec(one) is None for one in (name, "numpy")):
        return "it or numpy is not installed"
    if name == "duckdb":
        import duckdb

        try:
            with duckdb.connect() as sql:
                _load_httpfs(sql)
        except duckdb.Error as error:
            return f"its extension httpfs cannot be loaded ({str(error).splitlines()[0]})"
    return None


_SCANS: dict[str, Scan] = {"pyarrow": _pyarrow, "polars": _polars, "duckdb": _duckdb}


def test(options: Options) -> Report:
    rows = options.of(_ROWS, least=1000)
    missing = {name: why for name in _SCANS if (why := _missing(name)) is not None}
    scans = {name: scan for name, scan in _SCANS.items() if name not in missing}
    if "pyarrow" not in scans:
        raise Missing("pyarrow")
    report = Report("parquet_scan", "Parquet scans, origin with 30 ms", options.command("parquet_scan"))
    report.notes += [f"{name} was left out: {why}" for name, why in missing.items()]
    seconds: dict[str, list[float]] = {}
    memory = Memory()
    with tempfile.TemporaryDirectory(prefix="forebay-parquet-") as made:
        files, expected, day = _write_table(Path(made), rows)
        prefixes = [f"{name}/{number}" for name in scans for number in range(options.rounds + 1)]
        keys = {f"{prefix}/{file.name}": file for prefix in prefixes for file in files}
        with LoadOrigin([], keys) as origin, gateway(origin) as ours:
            origin.shape(latency_seconds=_LATENCY_SECONDS, bytes_per_second=_BYTES_PER_SECOND)

            def scanned(name: str, url: str, prefix: str) -> float:
                began = time.perf_counter()
                result = scans[name](url, prefix, day)
                took = time.perf_counter() - began
                if result != expected:
                    raise RuntimeError(f"{name} found {result} at {url}, and {expected} is right")
                return took

            for name in scans:  # what a client loads and starts once is no part of a scan
                scanned(name, origin.url, f"{name}/{options.rounds}")
            for number in range(options.rounds):
                for name in turn(list(scans), number):
                    progress(f"round {number + 1}: {name}")
                    prefix = f"{name}/{number}"
                    memory.touch(sum(file.stat().st_size for file in files))
                    found = {"direct": scanned(name, origin.url, prefix)}
                    found |= {which: scanned(name, ours.url, prefix) for which in ("first", "second")}
                    for which, took in found.items():
                        seconds.setdefault(f"{name}, {which}", []).append(took)
        size_mb = sum(file.stat().st_size for file in files) / 1e6
    for name in scans:
        direct = seconds[f"{name}, direct"]
        first, second = (ratio_of(direct, seconds[f"{name}, {which}"]) for which in ("first", "second"))
        report.verdicts.append(Verdict(f"{name}: direct / second scan through forebay, time", second, at_least(2)))
        report.verdicts.append(Verdict(memory.of(f"{name}: direct / first scan through forebay, time"), first))
    report.notes.append(memory.note())
    report.tables.append(Measured(f"scan of a table of {size_mb:.0f} MB", "s", seconds))
    return report


if __name__ == "__main__":
    command.main(test, __doc__)
