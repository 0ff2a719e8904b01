"""File systems mounted straight from a bucket that is 20 ms away, and through Forebay: what writing and reading take.

    sudo python -m loadtests.mounts [--rounds 1] [--scale 1] [--record]

s3fs, rclone and JuiceFS, mounted by the scripts of examples/. A file of 256 MB is written with fsync and close, and
read; 200 files of 4 KiB are written and closed, listed, and read again. Before each reading the file system is mounted
anew, so that nothing is in its own caches: it reads from the bucket, or what Forebay kept when it acknowledged it. Then
twelve files of 4 KiB, each with "is it there?" before and its size behind. `forebay mount` reads what s3fs has written.
All processes share all cores. Through Forebay the slot has `write = "back"`; JuiceFS's is `immutable`, the others' are
`ttl` with an index.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from loadtests.harness import command, machine, tools
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET
from loadtests.harness.intervals import mean_of
from loadtests.harness.mount_work import FEW, SMALL_BYTES, files, large_bytes
from loadtests.harness.report import Measured, Report, Verdict, at_most
from tests.clients.boto import boto3_client
from tests.support import root
from tests.support.gateway_process import GatewayProcess
from tests.support.mounts import KINDS, Mount
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

_AWAY_SECONDS = 0.02
_LIMIT_SECONDS = 300.0
_KEYS = (ACCESS_KEY_ID, SECRET_ACCESS_KEY)

_Series = dict[str, list[float]]

_TABLES = {
    "write_large": "write 256 MB, fsync, close",
    "read_large": "read 256 MB, mounted anew",
    "write_files": "write 200 files of 4 KiB",
    "list_files": "list them with their sizes, mounted anew",
    "read_files": "read them",
    "few_files": "12 files: is it there? write, size",
}


def test(options: Options) -> Report:
    title = f"Files in mounts, with the bucket {1000 * _AWAY_SECONDS:g} ms away"
    report = Report("mounts", title, options.command("mounts"))
    if os.geteuid() != 0:
        report.notes = ["Only root may mount: nothing was measured."]
        return report
    report.notes = tools.missing(*KINDS)
    kinds = [kind for kind in KINDS if not tools.missing(kind)]
    root.begin_test(is_marked=True)
    asked: _Series = defaultdict(list)
    series: dict[str, _Series] = {name: defaultdict(list) for name in _TABLES}
    with machine.on_cores(machine.all_cores()), StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        with tempfile.TemporaryDirectory() as here, _gateway(origin.endpoint_url, f"{here}/read.sock") as gateway:
            ways = {"direct": origin.endpoint_url, "forebay": gateway.s3_url}
            for number in range(options.rounds):
                for kind in kinds:
                    for way in turn(list(ways), number):
                        progress(f"round {number + 1}: {kind}, {way}")
                        path = (
                            f"{BUCKET}/{kind}-{way}-{number}"
                            if kind == "juicefs"
                            else f"{BUCKET}/{kind}/{way}-{number}"
                        )
                        with Mount(kind, ways[way], path, _KEYS) as mount:
                            _learn(mount, gateway)
                            origin.latency_seconds = _AWAY_SECONDS
                            for name, seconds in _measured(mount, f"round-{number}", options.scale, gateway):
                                series[name][f"{kind}, {way}"].append(seconds)
                                if (name, kind, way) == ("read_files", "s3fs", "forebay"):
                                    of_mount = _read_only(mount, f"{here}/read.sock", f"round-{number}", options.scale)
                                    for read, took in of_mount:
                                        series[read]["forebay mount"].append(took)
                            asked[f"{kind}, {way}"].append(1 + _asked(origin, mount))
    report.tables = [Measured(what, "s", series[name]) for name, what in _TABLES.items()]
    if few := series["few_files"]["s3fs, forebay"]:
        report.verdicts = [Verdict(f"{FEW} small files through s3fs and Forebay, s", mean_of(few), at_most(0.4))]
        report.tables.append(Measured(f"HEADs at the bucket that find nothing, for these {FEW}", "and one", asked))
        none = mean_of(asked["s3fs, forebay"])
        report.verdicts.append(Verdict("HEADs at the bucket for them that find nothing, and one", none, at_most(1)))
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    report.notes += [f"Load of the machine at the end, over 1, 5 and 15 minutes: {load}."]
    return report


def _asked(origin: StrictOrigin, mount: Mount) -> int:
    """Return how often the bucket was asked for one of the few files before it was there."""
    calls = origin.run_inside(lambda: list(origin.model.calls))
    few = [one for one in calls if (one.key or "").startswith(mount.key_prefix) and "/few-" in (one.key or "")]
    return sum(one.method == "HEAD" and one.status == 404 for one in few)


def _learn(mount: Mount, gateway: GatewayProcess) -> None:
    """Write until the bucket is known: its first write goes through, and the first flush finds out the rest."""
    for _ in range(3):
        _do(mount, "write_files", "learn", 0)
    _until_flushed(gateway)


def _measured(mount: Mount, directory: str, scale: float, gateway: GatewayProcess) -> Iterator[tuple[str, float]]:
    for name in _TABLES:
        if name in ("read_large", "list_files"):
            _wait_until_sent(mount, scale, 0 if name == "read_large" else files(scale))
            mount.unmount()
            mount.forget()
            _until_flushed(gateway)
            mount.mount()
        yield name, _do(mount, name, directory, scale)


def _read_only(other: Mount, socket: str, directory: str, scale: float) -> Iterator[tuple[str, float]]:
    """Yield what reading takes by `forebay mount` of the prefix of another mount."""
    for names in (["read_large"], ["list_files", "read_files"]):
        mount = Mount("forebay", other.environment["AWS_ENDPOINT_URL"], other.path, _KEYS)
        mount.environment["FOREBAY_LOCAL_SOCKET"] = socket
        with mount:
            for name in names:
                yield name, _do(mount, name, directory, scale)


def _wait_until_sent(mount: Mount, scale: float, count: int) -> None:
    """rclone sends later, and what it has not sent when it is unmounted is lost."""
    if mount.kind != "rclone":
        return
    expected = large_bytes(scale) + count * SMALL_BYTES
    with closing(boto3_client(mount.environment["AWS_ENDPOINT_URL"])) as client:

        def is_sent() -> bool:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=mount.key_prefix)
            sizes: list[int] = [
                one["Size"] for page in pages for one in page.get("Contents", []) if "/round-" in one["Key"]
            ]
            return sum(sizes) == expected

        eventually(is_sent, "rclone did not send everything", seconds=_LIMIT_SECONDS)


def _do(mount: Mount, name: str, directory: str, scale: float) -> float:
    words: list[str | Path] = ["-m", "loadtests.harness.mount_work", name, mount.where / directory, str(scale)]
    return float(mount.run("python", *words, timeout_seconds=_LIMIT_SECONDS))


def _until_flushed(gateway: GatewayProcess) -> None:
    eventually(
        lambda: not any(one["objects"] for one in gateway.status()["writeback"]["slots"]),
        "the flush did not end",
        seconds=_LIMIT_SECONDS,
    )


@contextmanager
def _gateway(origin_url: str, local_socket: str) -> Iterator[GatewayProcess]:
    back = {"mode": "read-write", "write": "back", "buffer": "1GiB"}
    indexed = back | {"consistency": "ttl", "negative_ttl": "60s", "index": True, "index_refresh": "30s"}
    config: dict[str, Any] = {
        "origin": {"endpoint_url": origin_url, "access_key_id": _KEYS[0], "secret_access_key": _KEYS[1]},
        "server": {"local_socket": local_socket},
        "cache": {"capacity": "4GiB", "persistent": True},
        "slots": [
            {"name": "s3fs", "prefix": f"s3://{BUCKET}/s3fs/"} | indexed,
            {"name": "rclone", "prefix": f"s3://{BUCKET}/rclone/"} | indexed,
            {"name": "juicefs", "prefix": f"s3://{BUCKET}/juicefs-"} | back | {"consistency": "immutable"},
        ],
    }
    with GatewayProcess(config) as gateway:
        yield gateway


if __name__ == "__main__":
    command.main(test, __doc__)
