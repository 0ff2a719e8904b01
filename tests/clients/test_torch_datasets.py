"""The PyTorch S3 connector's data sets, map-style and iterable, as a data loader uses them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, random_bytes
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin, Seen

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

SIZES = [0, 1, 114_660, 8 * MIB, 8 * MIB + 1, 20 * MIB + 3]


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connector takes its keys from the environment alone."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)


@pytest.fixture
def objects(direct: Any, bucket: str) -> dict[str, bytes]:
    """Objects of many sizes at the origin, odd names among them."""
    content = {f"data/{size} bytes+é.bin": random_bytes(size) for size in SIZES}
    for key, data in content.items():
        direct.put_object(Bucket=bucket, Key=key, Body=data)
    return content


def _reads_of_bytes(origin: Origin, bucket: str, objects: dict[str, bytes]) -> list[Seen]:
    """GETs but those of the empty object: it is asked for by part number, which only the origin can answer."""
    return [one for one in origin.object_reads(bucket) if objects[one.key]]


def _pair(item: Any) -> tuple[str, bytes]:
    """A sample a worker process can send home: S3Readers cannot be pickled."""
    return item.key, item.read()


def test_map_dataset_reads_every_object(
    http_endpoint: Endpoint, bucket: str, objects: dict[str, bytes], origin: Origin
) -> None:
    """Two epochs by index give the origin's bytes; the second one moves none of them again."""
    from s3torchconnector import S3MapDataset

    for _ in range(2):
        dataset = S3MapDataset.from_prefix(f"s3://{bucket}/data/", region=REGION, endpoint=http_endpoint.url)
        before = len(_reads_of_bytes(origin, bucket, objects))
        assert {dataset[index].key: dataset[index].read() for index in range(len(dataset))} == objects
        reads = _reads_of_bytes(origin, bucket, objects)[before:]
    assert reads == []


@pytest.mark.timeout(400)  # four processes import PyTorch
@pytest.mark.parametrize(
    ("workers", "origin"), [(0, "moto"), (0, "strict"), (2, "strict")], indirect=["origin"], scope="session"
)
def test_iterable_dataset_in_a_data_loader(
    workers: int, http_endpoint: Endpoint, bucket: str, objects: dict[str, bytes], origin: Origin
) -> None:
    """Two epochs through a DataLoader, with and without worker processes; the second comes from cache."""
    from s3torchconnector import S3IterableDataset
    from torch.utils.data import DataLoader

    dataset = S3IterableDataset.from_prefix(
        f"s3://{bucket}/data/", region=REGION, endpoint=http_endpoint.url, transform=_pair, enable_sharding=True
    )
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=_spawned(workers))
    for _ in range(2):
        before = len(_reads_of_bytes(origin, bucket, objects))
        assert dict(loader) == objects
        reads = _reads_of_bytes(origin, bucket, objects)[before:]
    assert reads == []


def _spawned(workers: int) -> str | None:
    return "spawn" if workers else None  # the CRT client does not survive a fork


def test_range_based_readers(http_endpoint: Endpoint, bucket: str, objects: dict[str, bytes]) -> None:
    """Reads at offsets, as indexed formats make them, are the object's bytes."""
    from s3torchconnector import S3MapDataset, S3ReaderConstructor

    dataset = S3MapDataset.from_prefix(
        f"s3://{bucket}/data/",
        region=REGION,
        endpoint=http_endpoint.url,
        reader_constructor=S3ReaderConstructor.range_based(),
    )
    by_key = {dataset[index].key: dataset[index] for index in range(len(dataset))}
    for key, content in objects.items():
        reader = by_key[key]
        for offset in (0, len(content) // 2, max(0, len(content) - 5)):
            reader.seek(offset)
            assert reader.read(MIB) == content[offset : offset + MIB]


def test_a_missing_object_is_the_connectors_own_error(http_endpoint: Endpoint, bucket: str) -> None:
    """The connector knows NoSuchKey from the XML of the answer."""
    from s3torchconnector import S3MapDataset
    from s3torchconnectorclient import S3Exception

    dataset = S3MapDataset.from_objects([f"s3://{bucket}/missing"], region=REGION, endpoint=http_endpoint.url)
    with pytest.raises(S3Exception, match=r"key does not exist|NoSuchKey"):
        dataset[0].read()
