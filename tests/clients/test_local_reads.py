"""fsspec's `forebay://`, and what reads through it, before a gateway with a local socket; and the example."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.commands import client_environment
from tests.clients.content import MIB, random_bytes
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

pytestmark = pytest.mark.clients

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[tuple[StrictOrigin, GatewayProcess, Path]]:
    path = tmp_path / "read.sock"
    with StrictOrigin() as origin:
        config: dict[str, Any] = {
            "origin": origin.settings,
            "server": {"local_socket": str(path)},
            "cache": {"block_size": "8MiB", "capacity": "256MiB"},
            "slots": [{"name": "data", "prefix": "s3://bucket/", "consistency": "ttl"}],
        }
        origin.model.put("bucket", "first", b"x")
        with GatewayProcess(config, directory=tmp_path / "cache") as running:
            yield origin, running, path


@pytest.fixture
def filesystem(gateway: tuple[StrictOrigin, GatewayProcess, Path]) -> Any:
    import fsspec

    _, running, path = gateway
    reader = {"socket_path": str(path), "http_threads": 2}
    keys = {"key": ACCESS_KEY_ID, "secret": SECRET_ACCESS_KEY, "endpoint_url": running.s3_url}
    found = fsspec.filesystem("forebay", reader=reader, skip_instance_cache=True, **keys)
    yield found
    found.reader.close()


def test_files_round_trip(filesystem: Any, tmp_path: Path) -> None:
    """Written by s3fs, read from files: whole, in ranges, by lines, from the end."""
    for size in (0, 1, 114_660, 23 * MIB + 11):
        content, path = random_bytes(size), f"bucket/folder/file+{size} é"
        with filesystem.open(f"forebay://{path}", "wb") as file:
            file.write(content)
        for _ in range(3):
            assert filesystem.cat_file(path) == content
            with filesystem.open(path) as file:
                assert file.read(None) == content
        assert filesystem.info(path)["size"] == size
        if size > 1:
            assert filesystem.cat_file(path, 10, 1000) == content[10:1000]
            assert filesystem.cat_file(path, -100) == content[-100:]
            assert filesystem.cat_ranges([path] * 3, [0, 5, 10], [1, 5, None]) == [content[:1], b"", content[10:]]
    assert filesystem.reader.local_reads > 10
    assert len(filesystem.ls("bucket/folder")) == 4
    filesystem.get("forebay://bucket/folder", str(tmp_path / "got"), recursive=True)
    assert sorted(one.stat().st_size for one in (tmp_path / "got").iterdir()) == [0, 1, 114_660, 23 * MIB + 11]
    with pytest.raises(FileNotFoundError):
        filesystem.cat_file("bucket/missing")
    found = filesystem.cat_ranges(["bucket/first", "bucket/missing"], None, None)
    assert found[0] == b"x"
    assert isinstance(found[1], FileNotFoundError)
    filesystem.rm("forebay://bucket/folder", recursive=True)
    assert not filesystem.exists("bucket/folder/file+1 é")


def test_an_open_file_is_of_one_version(filesystem: Any) -> None:
    """A change of the object is an error for who has it open, and never a mixture."""
    old = random_bytes(9 * MIB)
    new = old[::-1]
    filesystem.pipe_file("bucket/changing", old)
    for _ in range(3):
        assert filesystem.cat_file("bucket/changing") == old
    with filesystem.open("bucket/changing", block_size=MIB) as file:
        assert file.read(1000) == old[:1000]
        filesystem.pipe_file("bucket/changing", new)
        file.seek(8 * MIB)
        with pytest.raises(OSError, match="412"):
            file.read()
    assert filesystem.cat_file("bucket/changing") == new


def test_small_reads_share_questions(filesystem: Any) -> None:
    """In order, and as readers of archives do: to the end of each member, and back to its beginning. A reader that
    jumps about a large file reads little of it."""
    size, step = 8 * MIB, 70_000
    content = random_bytes(size)
    filesystem.pipe_file("bucket/archive", content)
    with filesystem.open("bucket/archive") as file:
        for first in range(0, size - step, step):
            for place, count in ((first, 4), (first + step - 100, 100), (first, 200), (first + 200, 65_000)):
                file.seek(place)
                assert file.read(count) == content[place : place + count]
    reader = filesystem.reader
    assert reader.local_reads + reader.http_reads < 25
    with filesystem.open("bucket/archive") as file:
        for number in range(30):
            place = number * 7 % 30 * 250_000
            file.seek(place)
            target = bytearray(100)
            assert file.readinto(target) == 100
            assert target == content[place : place + 100]
            assert sum(len(held) for _, held in file.cache._held) < MIB


def test_a_file_that_is_here_is_opened_without_http(filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """ETag and size come with its first bytes."""
    content = random_bytes(3 * MIB)
    filesystem.pipe_file("bucket/here", content)
    while filesystem.reader.begin("bucket/here", 1) is None:
        assert filesystem.cat_file("bucket/here") == content
    monkeypatch.setattr(type(filesystem), "s3", None)
    before = filesystem.reader.http_reads
    with filesystem.open("bucket/here") as file:
        assert (file.size, file.read(10), file.seek(-10, 2), file.read()) == (
            3 * MIB,
            content[:10],
            3 * MIB - 10,
            content[-10:],
        )
    assert filesystem.reader.http_reads == before


def test_readers_of_formats(filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet by pyarrow, a tar by WebDataset, tensors by safetensors."""
    import fsspec
    import numpy
    import pyarrow
    import pyarrow.parquet
    import safetensors.numpy
    import webdataset
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    table = pyarrow.table({"number": list(range(200_000)), "text": [str(n) for n in range(200_000)]})
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink, row_group_size=20_000)
    filesystem.pipe_file("bucket/table.parquet", sink.getvalue())
    tensors: dict[str, Any] = {"weight": numpy.arange(500_000, dtype=numpy.float32)}
    filesystem.pipe_file("bucket/model.safetensors", safetensors.numpy.save(tensors))
    with filesystem.open("bucket/shard.tar", "wb") as file, tarfile.open(fileobj=file, mode="w|") as tar:
        for number in range(20):
            member = tarfile.TarInfo(f"{number:03d}.bin")
            member.size = len(random_bytes(1000))
            tar.addfile(member, io.BytesIO(random_bytes(1000)))
    monkeypatch.setitem(fsspec.config.conf, "forebay", filesystem.storage_options)
    monkeypatch.setitem(webdataset.gopen_schemes, "forebay", lambda url, mode, bufsize: fsspec.open(url, mode).open())
    arrow = PyFileSystem(FSSpecHandler(filesystem))
    for _ in range(3):
        assert pyarrow.parquet.read_table("bucket/table.parquet", filesystem=arrow) == table
        column = pyarrow.parquet.read_table("bucket/table.parquet", filesystem=arrow, columns=["number"])
        assert column.num_rows == 200_000
        assert pyarrow.parquet.read_table("fsspec+forebay://bucket/table.parquet") == table
        samples = list(webdataset.WebDataset("forebay://bucket/shard.tar", shardshuffle=False))
        assert [one["bin"] for one in samples] == [random_bytes(1000)] * 20
        loaded = safetensors.numpy.load(filesystem.cat_file("bucket/model.safetensors"))
        assert numpy.array_equal(loaded["weight"], tensors["weight"])
    assert filesystem.reader.local_reads > 0


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
def test_distributed_checkpoints(filesystem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch saves one, twice in the same place, and loads it."""
    import fsspec
    import torch
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    monkeypatch.setitem(fsspec.config.conf, "forebay", filesystem.storage_options)
    for seed in range(2):
        saved = {str(number): torch.full((300_000,), float(number + seed)) for number in range(4)}
        writer = FsspecWriter("forebay://bucket/checkpoint", overwrite=True)
        checkpoint.save(saved, storage_writer=writer, no_dist=True)
        for _ in range(3):
            loaded = {name: torch.zeros(300_000) for name in saved}
            checkpoint.load(loaded, storage_reader=FsspecReader("forebay://bucket/checkpoint"), no_dist=True)
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_the_example_reads_files(gateway: tuple[StrictOrigin, GatewayProcess, Path], tmp_path: Path) -> None:
    """Half of its reads at least: the second time all is there."""
    _, running, path = gateway
    environment = client_environment(running.s3_url, None, tmp_path) | {
        "FOREBAY_LOCAL_SOCKET": str(path),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "PATH": os.environ["PATH"],
    }
    command = [sys.executable, "examples/local_reads.py", "s3://bucket/folder"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert int(ended.stdout.split()[3]) > 50, ended.stdout
