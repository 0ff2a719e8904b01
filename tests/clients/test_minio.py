"""minio-py, over http and https."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.clients.anybody import fetch
from tests.clients.boto import read
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, ODD_KEYS, random_bytes
from tests.clients.origins import ACCESS_KEY_ID, SECRET_ACCESS_KEY, Origin
from tests.clients.trees import read_bucket
from tests.clients.warmth import put_all, reads_at

pytestmark = pytest.mark.clients


@pytest.fixture
def minio(endpoint: Endpoint) -> Iterator[Any]:
    """With an endpoint and keys, one attempt, and no region: it asks for each bucket's location first."""
    import urllib3
    from minio import Minio

    certificates: dict[str, Any] = {"ca_certs": str(endpoint.ca_file)} if endpoint.ca_file else {}
    pool = urllib3.PoolManager(retries=False, **certificates)
    yield Minio(
        endpoint.url.partition("://")[2],
        access_key=ACCESS_KEY_ID,
        secret_key=SECRET_ACCESS_KEY,
        secure=endpoint.ca_file is not None,
        http_client=pool,
    )
    pool.clear()


def _get(client: Any, bucket: str, key: str, **arguments: Any) -> bytes:
    response = client.get_object(bucket, key, **arguments)
    try:
        content: bytes = response.read()
        return content
    finally:
        response.close()
        response.release_conn()


def test_objects_round_trip(minio: Any, direct: Any, bucket: str, origin: Origin) -> None:
    """Put whole or in parts, of known and of unknown length, an object is at the origin, and then in the cache."""
    for size, length in ((0, 0), (1, 1), (114_660, 114_660), (23 * MIB + 11, 23 * MIB + 11), (11 * MIB, -1)):
        content = random_bytes(size)
        minio.put_object(bucket, "object", io.BytesIO(content), length, part_size=5 * MIB)
        assert read(direct, bucket, "object") == content
        for _ in range(2):
            with reads_at(origin, bucket) as reads:
                assert _get(minio, bucket, "object") == content
        assert reads == []


def test_ranges(minio: Any, direct: Any, bucket: str) -> None:
    """Offset and length, over a block boundary and up to the end."""
    content = random_bytes(17 * MIB)
    direct.put_object(Bucket=bucket, Key="object", Body=content)
    for offset, length in ((0, 1), (8 * MIB - 3, 7), (16 * MIB, MIB), (5, 9 * MIB)):
        assert _get(minio, bucket, "object", offset=offset, length=length) == content[offset : offset + length]
    assert _get(minio, bucket, "object", offset=9 * MIB) == content[9 * MIB :]


def test_files(minio: Any, direct: Any, bucket: str, tmp_path: Path) -> None:
    """fput_object and fget_object, with metadata on the way."""
    content = random_bytes(6 * MIB)
    (tmp_path / "up").write_bytes(content)
    minio.fput_object(bucket, "file", tmp_path / "up", content_type="text/x-odd", metadata={"team": "vision"})
    head = direct.head_object(Bucket=bucket, Key="file")
    assert (head["ContentType"], head["Metadata"]) == ("text/x-odd", {"team": "vision"})
    minio.fget_object(bucket, "file", str(tmp_path / "down"))
    assert (tmp_path / "down").read_bytes() == content
    stat = minio.stat_object(bucket, "file")
    assert f'"{stat.etag}"' == head["ETag"]
    assert (stat.size, stat.content_type, stat.last_modified) == (6 * MIB, "text/x-odd", head["LastModified"])


def _sayable(key: str) -> bool:
    """minio-py refuses keys with `.` and `..` parts itself."""
    return all(part not in (".", "..") for part in key.split("/"))


def test_odd_keys(minio: Any, direct: Any, bucket: str) -> None:
    """Each key that minio-py lets through is written, listed, read and removed as that key."""
    keys = [key for key in ODD_KEYS if _sayable(key)]
    for key in keys:
        minio.put_object(bucket, key, io.BytesIO(key.encode()), len(key.encode()))
    assert read_bucket(direct, bucket) == {key: key.encode() for key in keys}
    assert {key: _get(minio, bucket, key) for key in keys} == {key: key.encode() for key in keys}
    assert {one.object_name for one in minio.list_objects(bucket, recursive=True)} == set(keys)
    for key in keys:
        minio.remove_object(bucket, key)
    assert read_bucket(direct, bucket) == {}


@pytest.mark.parametrize("use_v1", [False, True], ids=["V2", "V1"])
def test_listings(use_v1: bool, minio: Any, direct: Any, bucket: str) -> None:
    """By folder and recursive, in both versions of LIST."""
    content = put_all(direct, bucket, {name: name.encode() for name in ("a/1", "a/b/2", "a/two words", "é+top")})
    every = minio.list_objects(bucket, recursive=True, use_api_v1=use_v1)
    assert {(one.object_name, one.size) for one in every} == {(key, len(data)) for key, data in content.items()}
    folder = minio.list_objects(bucket, prefix="a/", use_api_v1=use_v1)
    assert {(one.object_name, one.is_dir) for one in folder} == {
        ("a/1", False),
        ("a/b/", True),
        ("a/two words", False),
    }


def test_copies_compositions_and_deletes(minio: Any, direct: Any, bucket: str) -> None:
    """CopyObject, UploadPartCopy and DeleteObjects end in the state they name."""
    from minio.commonconfig import ComposeSource, CopySource
    from minio.deleteobjects import DeleteObject

    content = {"a/one+é": random_bytes(5 * MIB), "a/two": random_bytes(1000), "a/three": b"three"}
    put_all(direct, bucket, content)
    minio.copy_object(bucket, "copy", CopySource(bucket, "a/one+é"))
    minio.compose_object(bucket, "joined", [ComposeSource(bucket, "a/one+é"), ComposeSource(bucket, "a/two")])
    assert _get(minio, bucket, "joined") == content["a/one+é"] + content["a/two"]
    assert list(minio.remove_objects(bucket, [DeleteObject(key) for key in content])) == []
    assert read_bucket(direct, bucket) == {
        "copy": content["a/one+é"],
        "joined": content["a/one+é"] + content["a/two"],
    }


def test_buckets(minio: Any, direct: Any, bucket: str) -> None:
    """Made, found, listed and removed at the origin."""
    minio.make_bucket(bucket + "-new")
    assert minio.bucket_exists(bucket + "-new")
    assert {one.name for one in minio.list_buckets()} == {one["Name"] for one in direct.list_buckets()["Buckets"]}
    minio.remove_bucket(bucket + "-new")
    assert not minio.bucket_exists(bucket + "-new")


def test_presigned_urls(minio: Any, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """The URL that minio-py signs gives the object to anybody."""
    direct.put_object(Bucket=bucket, Key="with space+plus", Body=b"content")
    url = minio.presigned_get_object(bucket, "with space+plus", expires=timedelta(minutes=5))
    for _ in range(2):
        assert fetch(url, endpoint.ca_file) == b"content"


def test_a_missing_object_is_no_such_key(minio: Any, bucket: str) -> None:
    """The error has S3's code, for GET and for HEAD."""
    from minio.error import S3Error

    with pytest.raises(S3Error) as got:
        _get(minio, bucket, "missing")
    with pytest.raises(S3Error) as asked:
        minio.stat_object(bucket, "missing")
    assert got.value.code == asked.value.code == "NoSuchKey"
