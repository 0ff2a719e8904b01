"""pyarrow's S3FileSystem, and Parquet through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.clients.boto import read
from tests.clients.commands import client_environment
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, random_bytes
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin

pytestmark = pytest.mark.clients


@pytest.fixture
def filesystem(http_endpoint: Endpoint) -> Any:
    """As people make it: S3FileSystem does not read AWS_ENDPOINT_URL, so the endpoint is given."""
    from pyarrow import fs

    return fs.S3FileSystem(
        access_key=ACCESS_KEY_ID,
        secret_key=SECRET_ACCESS_KEY,
        region=REGION,
        endpoint_override=http_endpoint.url.removeprefix("http://"),
        scheme="http",
    )


def test_streams_round_trip(filesystem: Any, direct: Any, bucket: str, origin: Origin) -> None:
    """An output stream arrives at the origin; an input stream gives it back, the second time from cache."""
    content = random_bytes(23 * MIB + 11)
    with filesystem.open_output_stream(f"{bucket}/folder/stream+1") as stream:
        stream.write(content)
    assert read(direct, bucket, "folder/stream+1") == content
    for _ in range(2):
        before = len(origin.object_reads(bucket))
        with filesystem.open_input_stream(f"{bucket}/folder/stream+1") as stream:
            assert stream.read() == content
        reads = origin.object_reads(bucket)[before:]
    assert reads == []


def test_random_access(filesystem: Any, direct: Any, bucket: str) -> None:
    """Reads at any offset, over block boundaries and up to the end, are the object's bytes."""
    content = random_bytes(17 * MIB)
    direct.put_object(Bucket=bucket, Key="object", Body=content)
    with filesystem.open_input_file(f"{bucket}/object") as file:
        assert file.size() == len(content)
        for offset, size in ((0, 1), (8 * MIB - 3, 7), (16 * MIB, MIB), (17 * MIB - 5, 100), (5, 12 * MIB)):
            assert file.read_at(size, offset) == content[offset : offset + size]


def test_parquet_round_trip(filesystem: Any, direct: Any, bucket: str, origin: Origin) -> None:
    """A table written through the gateway is read back equal, whole and by column, the second time from cache."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": range(200_000), "payload": [random_bytes(20, seed=row) for row in range(200_000)]})
    pyarrow.parquet.write_table(table, f"{bucket}/table.parquet", filesystem=filesystem, row_group_size=50_000)
    straight = pyarrow.parquet.read_table(pyarrow.BufferReader(read(direct, bucket, "table.parquet")))
    assert straight.equals(table)
    for _ in range(2):
        before = len(origin.object_reads(bucket))
        assert pyarrow.parquet.read_table(f"{bucket}/table.parquet", filesystem=filesystem).equals(table)
        reads = origin.object_reads(bucket)[before:]
        ids = pyarrow.parquet.read_table(f"{bucket}/table.parquet", filesystem=filesystem, columns=["id"])
        assert ids.equals(table.select(["id"]))
    assert reads == []


def test_a_partitioned_data_set(filesystem: Any, bucket: str) -> None:
    """Writing, discovering by LIST and reading a partitioned data set gives every row back."""
    import pyarrow
    import pyarrow.dataset

    table = pyarrow.table({"part": [row % 3 for row in range(3000)], "value": list(range(3000))})
    pyarrow.dataset.write_dataset(
        table,
        f"{bucket}/set",
        filesystem=filesystem,
        format="parquet",
        partitioning=["part"],
        partitioning_flavor="hive",
    )
    read_back = pyarrow.dataset.dataset(f"{bucket}/set", filesystem=filesystem, partitioning="hive").to_table()
    assert sorted(read_back["value"].to_pylist()) == list(range(3000))


def test_listing_moving_and_deleting(filesystem: Any, direct: Any, bucket: str) -> None:
    """File infos, move (a copy and a delete) and delete_dir mean the same objects as at the origin."""
    from pyarrow import fs

    for key in ("d/one", "d/two words", "d/sub/three"):
        direct.put_object(Bucket=bucket, Key=key, Body=key.encode())
    infos = filesystem.get_file_info(fs.FileSelector(f"{bucket}/d", recursive=True))
    assert {(info.path, info.size) for info in infos if info.is_file} == {
        (f"{bucket}/{key}", len(key)) for key in ("d/one", "d/two words", "d/sub/three")
    }
    filesystem.move(f"{bucket}/d/two words", f"{bucket}/moved")
    assert read(direct, bucket, "moved") == b"d/two words"
    filesystem.delete_dir(f"{bucket}/d")
    assert [one["Key"] for one in direct.list_objects_v2(Bucket=bucket)["Contents"]] == ["moved"]


def test_the_environment_is_heard_by_uri(
    http_endpoint: Endpoint, direct: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What README says of s3:// URIs: AWS_ENDPOINT_URL_S3 and keys from the environment are enough."""
    import pyarrow
    import pyarrow.parquet

    for name, value in client_environment(http_endpoint.url, None, Path("/nonexistent")).items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    table = pyarrow.table({"id": [1, 2, 3]})
    pyarrow.parquet.write_table(table, f"s3://{bucket}/table.parquet")
    assert pyarrow.parquet.read_table(f"s3://{bucket}/table.parquet").equals(table)
    assert direct.head_object(Bucket=bucket, Key="table.parquet")["ContentLength"] > 0


def test_a_missing_object_is_a_file_not_found_error(filesystem: Any, bucket: str) -> None:
    """The error that Python code expects, for reads and for infos."""
    from pyarrow import fs

    with pytest.raises(FileNotFoundError):
        filesystem.open_input_stream(f"{bucket}/missing")
    assert filesystem.get_file_info(f"{bucket}/missing").type == fs.FileType.NotFound
