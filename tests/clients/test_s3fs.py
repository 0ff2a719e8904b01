"""s3fs, the file system of fsspec, over http and https."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.anybody import fetch
from tests.clients.boto import read
from tests.clients.commands import client_environment
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, ODD_KEYS, random_bytes
from tests.clients.filesystems import closed, s3_filesystem
from tests.clients.origins import Origin
from tests.clients.trees import make_tree, read_bucket, read_tree
from tests.clients.warmth import put_all, reads_at

pytestmark = pytest.mark.clients


@pytest.fixture
def filesystem(endpoint: Endpoint) -> Iterator[Any]:
    with closed(s3_filesystem(endpoint)) as found:
        yield found


def test_files_round_trip(filesystem: Any, direct: Any, bucket: str, origin: Origin) -> None:
    """Written as one PUT or as parts, a file is at the origin; read again it comes from cache."""
    for size in (0, 1, 114_660, 23 * MIB + 11):
        content = random_bytes(size)
        path = f"{bucket}/folder/file+{size} é"
        with filesystem.open(path, "wb", block_size=5 * MIB) as file:
            file.write(content)
        assert read(direct, bucket, f"folder/file+{size} é") == content
        for _ in range(2):
            with reads_at(origin, bucket) as reads, filesystem.open(path, "rb", block_size=5 * MIB) as file:
                assert file.read() == content
        assert reads == []


def test_random_access(filesystem: Any, direct: Any, bucket: str) -> None:
    """Seeks and ranges, over block boundaries, from the end and past it, are the object's bytes."""
    content = random_bytes(17 * MIB)
    direct.put_object(Bucket=bucket, Key="object", Body=content)
    with filesystem.open(f"{bucket}/object", "rb", cache_type="none") as file:
        for offset, size in ((0, 1), (8 * MIB - 3, 7), (16 * MIB, MIB), (17 * MIB - 5, 100)):
            file.seek(offset)
            assert file.read(size) == content[offset : offset + size]
    assert filesystem.cat_file(f"{bucket}/object", start=-9) == content[-9:]
    ranges = [(0, 10), (8 * MIB - 1, 8 * MIB + 1), (5, 9 * MIB)]
    paths = [f"{bucket}/object"] * len(ranges)
    found = filesystem.cat_ranges(paths, [start for start, _ in ranges], [end for _, end in ranges])
    assert found == [content[start:end] for start, end in ranges]


def test_odd_keys(filesystem: Any, direct: Any, bucket: str) -> None:
    """Each key that s3fs can name is read as that key, and written as that key."""
    keys = [key for key in ODD_KEYS if not key.endswith("/")]  # s3fs strips the slash at a path's end
    content = put_all(direct, bucket, {key: key.encode() for key in keys})
    assert {key: filesystem.cat_file(f"{bucket}/{key}") for key in keys} == content
    for key in keys:
        filesystem.pipe_file(f"{bucket}/{key}", key.encode() * 2)
    assert read_bucket(direct, bucket) == {key: data * 2 for key, data in content.items()}


def test_trees_up_and_down(filesystem: Any, direct: Any, bucket: str, origin: Origin, tmp_path: Path) -> None:
    """put and get of a folder; the second get reads no byte at the origin."""
    content = make_tree(tmp_path / "source")
    filesystem.put(f"{tmp_path}/source/", f"{bucket}/data/", recursive=True)
    assert read_bucket(direct, bucket, "data/") == content
    for target in ("first", "second"):
        with reads_at(origin, bucket) as reads:
            filesystem.get(f"{bucket}/data/", f"{tmp_path}/{target}/", recursive=True)
            assert read_tree(tmp_path / target) == content
    assert reads == []


def test_listing_info_and_glob(filesystem: Any, direct: Any, bucket: str) -> None:
    """ls, find, glob, info and exists know the objects that the origin has."""
    content = put_all(direct, bucket, {name: name.encode() for name in ("a/1", "a/b/2", "a/two words", "top")})
    assert {path.removeprefix(f"{bucket}/") for path in filesystem.find(bucket)} == set(content)
    assert set(filesystem.ls(f"{bucket}/a")) == {f"{bucket}/a/1", f"{bucket}/a/b", f"{bucket}/a/two words"}
    assert filesystem.glob(f"{bucket}/a/*/2") == [f"{bucket}/a/b/2"]
    head = direct.head_object(Bucket=bucket, Key="a/b/2")
    info = filesystem.info(f"{bucket}/a/b/2", refresh=True)
    assert (info["ETag"], info["size"], info["LastModified"]) == (head["ETag"], 5, head["LastModified"])
    assert filesystem.isdir(f"{bucket}/a")
    assert not filesystem.exists(f"{bucket}/missing")


def test_copies_moves_and_deletes(filesystem: Any, direct: Any, bucket: str) -> None:
    """Each ends in the state it names, and the next read through the gateway sees it."""
    put_all(direct, bucket, {"a/one": b"one", "a/two": b"two", "a/three": b"three"})
    filesystem.copy(f"{bucket}/a/one", f"{bucket}/b/one+é")
    filesystem.mv(f"{bucket}/a/two", f"{bucket}/b/two")
    assert filesystem.cat_file(f"{bucket}/b/two") == b"two"
    assert read_bucket(direct, bucket, "b/") == {"one+é": b"one", "two": b"two"}
    filesystem.rm(f"{bucket}/a", recursive=True)
    assert set(read_bucket(direct, bucket)) == {"b/one+é", "b/two"}
    with pytest.raises(FileNotFoundError):
        filesystem.cat_file(f"{bucket}/a/one")


def test_a_file_that_must_be_new(filesystem: Any, bucket: str) -> None:
    """Mode "xb" and pipe_file's "create" are conditional PUTs: the second one fails, and the first one's bytes stay."""
    filesystem.pipe_file(f"{bucket}/new", b"first", mode="create")
    with pytest.raises(FileExistsError):
        filesystem.pipe_file(f"{bucket}/new", b"second", mode="create")
    assert filesystem.cat_file(f"{bucket}/new") == b"first"


def test_the_environment_is_enough(
    endpoint: Endpoint, direct: Any, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What README says: AWS_ENDPOINT_URL_S3 and keys from the environment."""
    import fsspec

    for name, value in client_environment(endpoint.url, endpoint.ca_file, tmp_path).items():
        if name.startswith("AWS_"):
            monkeypatch.setenv(name, value)
    with closed(fsspec.filesystem("s3", skip_instance_cache=True)) as filesystem:
        filesystem.pipe_file(f"s3://{bucket}/object", b"content")
        assert filesystem.cat_file(f"s3://{bucket}/object") == b"content" == read(direct, bucket, "object")


def test_a_url_for_others(filesystem: Any, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """The URL that s3fs signs is for the gateway and names the object."""
    direct.put_object(Bucket=bucket, Key="with space+plus", Body=b"content")
    url = filesystem.url(f"{bucket}/with space+plus")
    for _ in range(2):
        assert fetch(url, endpoint.ca_file) == b"content"
