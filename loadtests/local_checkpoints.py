"""PyTorch loads a checkpoint through fsspec's forebay://, and from a local file, both in the page cache.

    python -m loadtests.local_checkpoints [--rounds 5] [--scale 1] [--record]

8 tensors of 32 MiB and 200 of 64 KiB: saved by torch.distributed.checkpoint (DCP), and by torch.save. One thread loads;
the gateway runs on the server core. CPU is that of client and gateway together.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.comparison import turn
from loadtests.harness.content import BUCKET
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import ratio_of
from loadtests.harness.report import Measured, Report, Verdict, at_most
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

_LOCAL, _FOREBAY = "local file", "forebay://"


def test(options: Options) -> Report:
    count = options.of(8)
    report = Report("local_checkpoints", f"Loading a checkpoint of {count * 35} MB, page cache warm", "")
    report.command = options.command("local_checkpoints")
    try:
        import torch
    except ImportError:
        report.notes.append("Nothing was measured: PyTorch is not installed.")
        return report
    torch.set_num_threads(1)
    state = {f"large{number}": torch.full((8 * 1024**2,), float(number)) for number in range(count)}
    state |= {f"small{number}": torch.full((16 * 1024,), float(number)) for number in range(25 * count)}
    seconds, cpu = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory(prefix="forebay-load-") as name, _saved(state, Path(name)) as (running, files):
        ways = _ways(state, Path(name), files)
        for load in ways.values():
            load()
        by_http = files.reader.http_reads
        for number in range(options.rounds):
            for way in turn(list(ways), number):
                progress(f"round {number + 1}: {way}")
                used, begun = _cpu_seconds(running), time.perf_counter()
                ways[way]()
                seconds[way].append((time.perf_counter() - begun) * 1e3)
                cpu[way].append((_cpu_seconds(running) - used) * 1e3)
        assert files.reader.http_reads == by_http, "bytes came by HTTP"
        files.reader.close()
    for what in ("DCP", "torch.load"):
        ours, theirs = f"{what}, {_FOREBAY}", f"{what}, {_LOCAL}"
        times = ratio_of(seconds[ours], seconds[theirs])
        report.verdicts.append(Verdict(f"{what}: time, {_FOREBAY} / {_LOCAL}", times, at_most(1.2)))
        report.verdicts.append(Verdict(f"{what}: CPU, {_FOREBAY} / {_LOCAL}", ratio_of(cpu[ours], cpu[theirs])))
    report.tables += [Measured("time", "ms", seconds), Measured("CPU, client and gateway", "ms", cpu)]
    return report


def _cpu_seconds(running: Gateway) -> float:
    return sum(machine.cpu_nanoseconds_by_thread(pid).total() for pid in (os.getpid(), running.worker_pid)) / 1e9


@contextmanager
def _saved(state: dict[str, Any], directory: Path) -> Iterator[tuple[Gateway, Any]]:
    """The checkpoint in a directory, and a gateway that has it in its files; and the file system of that."""
    import fsspec
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import FileSystemWriter

    checkpoint.save(state, storage_writer=FileSystemWriter(directory / "saved"), no_dist=True)
    torch.save(state, directory / "saved/state.pt")
    names, path = [one.name for one in (directory / "saved").iterdir()], str(directory / "read.sock")
    with StrictOrigin() as origin:
        for name in names:
            origin.model.put(BUCKET, f"saved/{name}", (directory / "saved" / name).read_bytes())
        with gateway(None, link=origin.settings, server={"local_socket": path}) as running:
            given = {"key": ACCESS_KEY_ID, "secret": SECRET_ACCESS_KEY, "endpoint_url": running.url}
            fsspec.config.conf["forebay"] = given | {"reader": {"socket_path": path}}
            files = fsspec.filesystem("forebay", **fsspec.config.conf["forebay"])
            _fill(files.reader, [f"{BUCKET}/saved/{name}" for name in names])
            yield running, files


def _fill(reader: Any, keys: Sequence[str]) -> None:
    deadline, before = time.monotonic() + 300, -1
    while reader.http_reads != before:
        assert time.monotonic() < deadline, "objects do not come from files"
        before = reader.http_reads
        for key in keys:
            reader.read(key)
        time.sleep(0.2)


def _ways(state: dict[str, Any], directory: Path, files: Any) -> dict[str, Callable[[], None]]:
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    def distributed(reader: Any) -> None:
        checkpoint.load(state, storage_reader=reader, no_dist=True)

    def plain(opened: Any) -> None:
        with opened as file:
            torch.load(file, weights_only=True)

    return {
        f"DCP, {_FOREBAY}": lambda: distributed(FsspecReader(f"forebay://{BUCKET}/saved")),
        f"DCP, {_LOCAL}": lambda: distributed(FileSystemReader(directory / "saved")),
        f"torch.load, {_FOREBAY}": lambda: plain(files.open(f"{BUCKET}/saved/state.pt")),
        f"torch.load, {_LOCAL}": lambda: plain(open(directory / "saved/state.pt", "rb")),
    }


if __name__ == "__main__":
    command.main(test, __doc__)
