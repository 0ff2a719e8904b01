"""The AWS CLI, as people use it for data sets, over http and https."""

from __future__ import annotations

import ssl
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.clients.boto import read
from tests.clients.commands import Command, client_environment
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, random_bytes
from tests.clients.origins import Origin
from tests.clients.trees import make_tree, read_bucket, read_tree

pytestmark = pytest.mark.clients


@pytest.fixture
def aws(endpoint: Endpoint, tmp_path: Path) -> Command:
    """The command in the environment that README tells people to set."""
    return Command("aws", client_environment(endpoint.url, endpoint.ca_file, tmp_path))


def test_sync_up_and_down(aws: Command, direct: Any, bucket: str, origin: Origin, tmp_path: Path) -> None:
    """A folder arrives at the origin and comes back equal; the second download reads no byte at the origin."""
    content = make_tree(tmp_path / "source")
    aws("s3", "sync", tmp_path / "source", f"s3://{bucket}/data")
    assert read_bucket(direct, bucket, "data/") == content
    for target in ("first", "second"):
        before = len(origin.object_reads(bucket))
        aws("s3", "sync", f"s3://{bucket}/data", tmp_path / target)
        assert read_tree(tmp_path / target) == content
        reads = origin.object_reads(bucket)[before:]
    assert reads == []


def test_an_empty_file_before_others_on_one_connection(aws: Command, direct: Any, bucket: str, tmp_path: Path) -> None:
    """An empty PUT gets its 100 Continue like any other: without it, the CLI misreads the connection's next answer."""
    config = tmp_path / "config"
    config.write_text("[default]\ns3 =\n  max_concurrent_requests = 1\n")
    content = {"1-empty": b"", "2-small": random_bytes(4096), "3-empty": b"", "4-large": random_bytes(MIB)}
    (tmp_path / "source").mkdir()
    for name, data in content.items():
        (tmp_path / "source" / name).write_bytes(data)
    sequential = Command("aws", {**aws.environment, "AWS_CONFIG_FILE": str(config)})
    sequential("s3", "cp", "--recursive", tmp_path / "source", f"s3://{bucket}/")
    assert read_bucket(direct, bucket) == content


def test_sync_transfers_only_what_differs(aws: Command, direct: Any, bucket: str, tmp_path: Path) -> None:
    """Sizes and times that the gateway lists are right: a second sync has nothing to do, a deleted file goes."""
    content = make_tree(tmp_path / "source")
    aws("s3", "sync", tmp_path / "source", f"s3://{bucket}/")
    assert aws("s3", "sync", tmp_path / "source", f"s3://{bucket}/").stdout == b""
    (tmp_path / "source" / "empty").unlink()
    aws("s3", "sync", "--delete", tmp_path / "source", f"s3://{bucket}/")
    del content["empty"]
    assert read_bucket(direct, bucket) == content


def test_cp_streams_both_ways(aws: Command, direct: Any, bucket: str) -> None:
    """`aws s3 cp - s3://…` and back: how WebDataset reads shards."""
    content = random_bytes(18 * MIB + 1)
    aws("s3", "cp", "-", f"s3://{bucket}/piped", stdin=content)
    assert read(direct, bucket, "piped") == content
    for _ in range(2):
        assert aws("s3", "cp", f"s3://{bucket}/piped", "-").stdout == content


def test_ls_shows_what_the_origin_has(aws: Command, origin: Origin, direct: Any, bucket: str, tmp_path: Path) -> None:
    """Recursive and by folder, the listing is the one that the CLI prints for the origin itself."""
    for name in ("a/1", "a/2", "b c", "d+e/ünï", "top"):
        direct.put_object(Bucket=bucket, Key=name, Body=name.encode())
    straight = Command("aws", client_environment(origin.url, None, tmp_path))
    for arguments in (("s3", "ls", f"s3://{bucket}"), ("s3", "ls", "--recursive", f"s3://{bucket}/"), ("s3", "ls")):
        listed = aws(*arguments).stdout
        assert listed == straight(*arguments).stdout
        assert listed


def test_cp_and_mv_within_the_bucket_and_rm(aws: Command, direct: Any, bucket: str) -> None:
    """Server-side copy, move and recursive delete end in the state that the commands name."""
    direct.put_object(Bucket=bucket, Key="a/one", Body=b"one")
    direct.put_object(Bucket=bucket, Key="a/two", Body=b"two")
    aws("s3", "cp", f"s3://{bucket}/a/one", f"s3://{bucket}/b/one")
    aws("s3", "mv", f"s3://{bucket}/a/two", f"s3://{bucket}/b/two")
    assert read_bucket(direct, bucket) == {"a/one": b"one", "b/one": b"one", "b/two": b"two"}
    aws("s3", "rm", "--recursive", f"s3://{bucket}/b")
    assert read_bucket(direct, bucket) == {"a/one": b"one"}


def test_presign(aws: Command, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """The URL that `aws s3 presign` prints gives the object to anybody."""
    direct.put_object(Bucket=bucket, Key="with space+plus", Body=b"content")
    url = aws("s3", "presign", f"s3://{bucket}/with space+plus").stdout.decode().strip()
    assert url.startswith(endpoint.url)
    context = ssl.create_default_context(cafile=endpoint.ca_file)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    for _ in range(2):
        with opener.open(url, timeout=30) as response:
            assert response.read() == b"content"


def test_what_is_missing_fails_as_it_does_at_the_origin(
    aws: Command, origin: Origin, bucket: str, tmp_path: Path
) -> None:
    """The exit code is the origin's, and so is what the CLI says."""
    straight = Command("aws", client_environment(origin.url, None, tmp_path))
    for arguments in (("s3", "cp", f"s3://{bucket}/missing", "-"), ("s3", "ls", f"s3://{bucket}-missing")):
        result, expected = aws(*arguments, check=False), straight(*arguments, check=False)
        assert result.returncode == expected.returncode != 0
        assert result.stderr == expected.stderr
