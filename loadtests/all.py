"""Every load test, one after another: tables, pictures, and at the end what missed its target.

    python -m loadtests.all [--quick] [--record] [--only NAME ...]

--quick: fewer and shorter rounds and smaller objects, about ten minutes. Without it, the sizes that the targets are
stated for. Exit code 1 when a test could not be run; a missed target is a result.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from loadtests import (
    auto_bandwidth,
    checkpoint_save,
    cluster,
    cold_epoch,
    cold_large,
    crawl,
    directory,
    epochs,
    fair_shares,
    flat,
    guarantees,
    heads,
    isolation,
    listing,
    local_checkpoints,
    local_reads,
    many_ranges,
    many_slots,
    mlperf_checkpoint,
    mounts,
    one_stream,
    parquet_scan,
    price,
    random_reads,
    receiving,
    region,
    replica,
    request_rates,
    restore_storm,
    single_file,
    slow_bodies,
    small_writes,
    stalled_bodies,
    strict_reads,
    training,
    warm_ranges,
    warm_small,
    writeback_burst,
    writeback_parts,
    writeback_scale,
)
from loadtests.harness import command, machine, tools
from loadtests.harness.command import Options, progress
from loadtests.harness.report import Report

TESTS: dict[str, tuple[command.Test, Options]] = {
    "warm_ranges": (warm_ranges.test, Options(2, 5, 1)),
    "warm_small": (warm_small.test, Options(2, 5, 1)),
    "strict_reads": (strict_reads.test, Options(2, 3, 0.2)),
    "price": (price.test, Options(2, 3, 0.2)),
    "flat": (flat.test, Options(2, 3, 0.01)),
    "many_slots": (many_slots.test, Options(2, 3, 0.1)),
    "heads": (heads.test, Options(2, 2, 1)),
    "one_stream": (one_stream.test, Options(2, 5, 1)),
    "cold_large": (cold_large.test, Options(2, 3, 1)),
    "cold_epoch": (cold_epoch.test, Options(2, 3, 0.3)),
    "stalled_bodies": (stalled_bodies.test, Options(2, 3, 1)),
    "region": (region.test, Options(2, 3, 0.3)),
    "replica": (replica.test, Options(2, 5, 0.2)),
    "random_reads": (random_reads.test, Options(2, 3, 0.3)),
    "parquet_scan": (parquet_scan.test, Options(2, 3, 1)),
    "single_file": (single_file.test, Options(2, 3, 0.3)),
    "many_ranges": (many_ranges.test, Options(2, 3, 1)),
    "slow_bodies": (slow_bodies.test, Options(2, 3, 1)),
    "local_reads": (local_reads.test, Options(1, 3, 0.3)),
    "local_checkpoints": (local_checkpoints.test, Options(1, 3, 0.25)),
    "listing": (listing.test, Options(2, 3, 0.1)),
    "receiving": (receiving.test, Options(2, 3, 0.5)),
    "small_writes": (small_writes.test, Options(2, 2, 0.5)),
    "mounts": (mounts.test, Options(2, 1, 0.1)),
    "writeback_parts": (writeback_parts.test, Options(2, 3, 0.5)),
    "writeback_burst": (writeback_burst.test, Options(2, 2, 0.5)),
    "writeback_scale": (writeback_scale.test, Options(2, 1, 0.1)),
    "checkpoint_save": (checkpoint_save.test, Options(2, 2, 0.125)),
    "restore_storm": (restore_storm.test, Options(2, 3, 0.5)),
    "mlperf_checkpoint": (mlperf_checkpoint.test, Options(2, 1, 0.25)),
    "auto_bandwidth": (auto_bandwidth.test, Options(2, 1, 1)),
    "fair_shares": (fair_shares.test, Options(2, 1, 0.5)),
    "request_rates": (request_rates.test, Options(10, 1, 1)),
    "guarantees": (guarantees.test, Options(2, 1, 1)),
    "isolation": (isolation.test, Options(2, 3, 0.5)),
    "crawl": (crawl.test, Options(2, 2, 0.1)),
    "directory": (directory.test, Options(2, 3, 0.2)),
    "epochs": (epochs.test, Options(2, 2, 1)),
    "training": (training.test, Options(2, 3, 0.5)),
    "cluster": (cluster.test, Options(2, 3, 0.3)),
}
"""In the order they run; with the options of --quick."""

_FULL = Options(5, 5, 1)


def main() -> None:
    parser = command.parser_of(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md and draw into results/")
    parser.add_argument("--only", nargs="+", choices=TESTS, default=list(TESTS), metavar="NAME")
    arguments = parser.parse_args()
    machine.prepare_client()
    for line in tools.missing(*tools.INSTALL):
        print(line, flush=True)
    reports, failed = _run(arguments.only, quick=arguments.quick, record=arguments.record)
    _sum_up(reports, failed)
    sys.exit(1 if failed else 0)


def _run(names: Sequence[str], *, quick: bool, record: bool) -> tuple[list[Report], list[str]]:
    """The reports, and why the others could not be made; each is told and kept as soon as it is there."""
    reports, failed = [], []
    if record:
        command.begin_record()
    for name in names:
        test, shortened = TESTS[name]
        progress(f"== {name}")
        try:
            report = test(shortened if quick else _FULL)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            progress(failed[-1])
            continue
        reports.append(report)
        command.tell(report)
        if record:
            command.keep(report)
    return reports, failed


def _sum_up(reports: list[Report], failed: list[str]) -> None:
    for report in reports:
        for one in report.verdicts:
            print(f"{one.outcome:10} {report.name}: {one.what}: {one.value}; target: {one.target or 'none'}")
    for line in failed:
        print(f"NOT RUN    {line}")


if __name__ == "__main__":
    main()
