"""polars reading and writing Parquet and CSV in a bucket."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.boto import read
from tests.clients.conftest import Endpoint
from tests.clients.content import random_bytes
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin
from tests.clients.warmth import reads_at

pytestmark = pytest.mark.clients


@pytest.fixture
def options(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As people give them; one attempt only. The certificate to trust comes from the environment."""
    options: dict[str, Any] = {
        "endpoint_url": endpoint.url,
        "aws_access_key_id": ACCESS_KEY_ID,
        "aws_secret_access_key": SECRET_ACCESS_KEY,
        "aws_region": REGION,
        "max_retries": 0,
    }
    if endpoint.ca_file is None:
        return options | {"allow_http": "true"}
    monkeypatch.setenv("SSL_CERT_FILE", str(endpoint.ca_file))
    return options


def _frame(rows: int = 100_000) -> Any:
    import polars

    return polars.DataFrame(
        {
            "id": range(rows),
            "part": [row % 3 for row in range(rows)],
            "payload": [random_bytes(20, seed=row) for row in range(rows)],
        }
    )


def test_parquet_round_trip(options: dict[str, Any], direct: Any, bucket: str, origin: Origin) -> None:
    """A frame written through the gateway is read back equal, the second time from cache."""
    import polars

    frame, url = _frame(), f"s3://{bucket}/folder/table+é.parquet"
    frame.write_parquet(url, storage_options=options, row_group_size=20_000)
    assert polars.read_parquet(read(direct, bucket, "folder/table+é.parquet")).equals(frame)
    for _ in range(2):
        with reads_at(origin, bucket) as reads:
            assert polars.read_parquet(url, storage_options=options).equals(frame)
    assert reads == []


def test_lazy_scans(options: dict[str, Any], direct: Any, bucket: str, origin: Origin) -> None:
    """Columns, filters and slices read ranges of the file; the answers are those of the frame in memory."""
    import polars

    frame, url = _frame(), f"s3://{bucket}/table.parquet"
    frame.write_parquet(url, storage_options=options, row_group_size=10_000)
    scan = polars.scan_parquet(url, storage_options=options)
    for _ in range(2):
        with reads_at(origin, bucket) as reads:
            assert scan.select("id").collect().equals(frame.select("id"))
            late = scan.filter(polars.col("id") >= 95_000).collect()
            assert late.equals(frame.filter(polars.col("id") >= 95_000))
            assert scan.slice(50_000, 10).collect().equals(frame.slice(50_000, 10))
    assert reads == []


def test_a_partitioned_data_set(options: dict[str, Any], direct: Any, bucket: str) -> None:
    """Found by LIST and by wildcard, every file's rows are there once."""
    import polars

    frame = _frame(3000)
    for part in range(3):
        rows = frame.filter(polars.col("part") == part)
        rows.drop("part").write_parquet(f"s3://{bucket}/set/part={part}/data.parquet", storage_options=options)
    for path in ("set/", "set/**/*.parquet"):
        scan = polars.scan_parquet(f"s3://{bucket}/{path}", storage_options=options, hive_partitioning=True)
        assert sorted(scan.collect()["id"]) == list(range(3000))
        assert scan.filter(polars.col("part") == 1).select(polars.len()).collect().item() == 1000
    keys = {one["Key"] for one in direct.list_objects_v2(Bucket=bucket)["Contents"]}
    assert keys == {f"set/part={part}/data.parquet" for part in range(3)}


def test_a_sink_in_parts(options: dict[str, Any], direct: Any, bucket: str) -> None:
    """A streamed result larger than one part is a multipart upload of the same rows."""
    import polars

    content = random_bytes(40_000_000)
    frame = polars.DataFrame({"payload": [content[start : start + 1000] for start in range(0, len(content), 1000)]})
    frame.lazy().sink_parquet(f"s3://{bucket}/large.parquet", storage_options=options, compression="uncompressed")
    assert "-" in direct.head_object(Bucket=bucket, Key="large.parquet")["ETag"]
    assert polars.read_parquet(read(direct, bucket, "large.parquet")).equals(frame)
    assert polars.read_parquet(f"s3://{bucket}/large.parquet", storage_options=options).equals(frame)


def test_an_overwritten_file_is_read_anew(options: dict[str, Any], bucket: str) -> None:
    """The cached footer and pages of the file before are not mixed into the new one."""
    import polars

    for rows in (5000, 3000):
        frame = _frame(rows)
        frame.write_parquet(f"s3://{bucket}/table.parquet", storage_options=options)
        for _ in range(2):
            assert polars.read_parquet(f"s3://{bucket}/table.parquet", storage_options=options).equals(frame)


def test_csv(options: dict[str, Any], direct: Any, bucket: str) -> None:
    """Text formats go the same way."""
    import polars

    frame = _frame(2000).drop("payload")
    frame.write_csv(f"s3://{bucket}/table.csv", storage_options=options)
    assert read(direct, bucket, "table.csv") == frame.write_csv().encode()
    assert polars.scan_csv(f"s3://{bucket}/table.csv", storage_options=options).collect().equals(frame)


def test_the_environment_is_heard(
    http_endpoint: Endpoint, direct: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What README says: AWS_ENDPOINT_URL and AWS_ALLOW_HTTP."""
    import polars

    monkeypatch.setenv("AWS_ENDPOINT_URL", http_endpoint.url)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    monkeypatch.setenv("AWS_REGION", REGION)
    polars.DataFrame({"id": [1, 2]}).write_parquet(f"s3://{bucket}/table.parquet")
    assert polars.read_parquet(read(direct, bucket, "table.parquet"))["id"].to_list() == [1, 2]


def test_a_missing_file_is_a_file_not_found_error(options: dict[str, Any], bucket: str) -> None:
    """The error that Python code expects."""
    import polars

    with pytest.raises(FileNotFoundError):
        polars.read_parquet(f"s3://{bucket}/missing.parquet", storage_options=options)
