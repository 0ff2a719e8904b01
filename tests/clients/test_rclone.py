"""rclone with provider Other, as it is used to fill buckets and to check them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.clients.boto import boto3_client, read
from tests.clients.commands import Command
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, random_bytes
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin
from tests.clients.trees import make_tree, read_bucket, read_tree
from tests.support.gateway_process import GatewayProcess

pytestmark = pytest.mark.clients


@pytest.fixture
def rclone(endpoint: Endpoint, origin: Origin, tmp_path: Path) -> Command:
    """rclone with two remotes: `forebay:` through the gateway, `direct:` straight to the origin."""
    config = tmp_path / "rclone.conf"
    config.write_text(_remote("forebay", endpoint.url) + _remote("direct", origin.url))
    environment = {"HOME": str(tmp_path), "RCLONE_CONFIG": str(config), "RCLONE_RETRIES": "1", "PATH": "/usr/bin:/bin"}
    if endpoint.ca_file is not None:
        environment["RCLONE_CA_CERT"] = str(endpoint.ca_file)
    return Command("rclone", environment)


def _remote(name: str, url: str) -> str:
    return f"""\
[{name}]
type = s3
provider = Other
access_key_id = {ACCESS_KEY_ID}
secret_access_key = {SECRET_ACCESS_KEY}
region = {REGION}
endpoint = {url}
force_path_style = true
"""


def test_a_bucket_with_a_read_only_slot_and_much_pending_takes_files(
    origin: Origin, direct: Any, bucket: str, tmp_path: Path
) -> None:
    """README's slots with README's remote: rclone asks for the bucket first, which is there."""
    settings: Mapping[str, Mapping[str, Any] | list[Mapping[str, Any]]] = {
        "slots": [
            {"name": "data", "prefix": f"s3://{bucket}/data/", "mode": "read-only", "consistency": "immutable"},
            {"name": "checkpoints", "prefix": f"s3://{bucket}/checkpoints/", "write": "back", "consistency": "ttl"},
            {"name": "slow", "prefix": f"s3://{bucket}/slow/", "write": "back", "write_bandwidth": "64KiB/s"},
        ],
        "origin": {
            "endpoint_url": origin.url,
            "region": REGION,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        },
        "cache": {"capacity": "2GiB", "persistent": True},
    }
    content = make_tree(tmp_path / "source")
    with GatewayProcess(settings) as gateway:
        config = tmp_path / "rclone.conf"
        keys = f"access_key_id = {ACCESS_KEY_ID}\nsecret_access_key = {SECRET_ACCESS_KEY}\n"
        config.write_text(f"[forebay]\ntype = s3\nprovider = Other\nendpoint = {gateway.s3_url}\n{keys}")
        rclone = Command("rclone", {"HOME": str(tmp_path), "RCLONE_CONFIG": str(config), "PATH": "/usr/bin:/bin"})
        through = boto3_client(gateway.s3_url)
        for name in ("slow/first", "slow/pending"):  # of the second, little is sent before the test is over
            through.put_object(Bucket=bucket, Key=name, Body=random_bytes(8 * MIB if name == "slow/pending" else 1))
        rclone("copy", tmp_path / "source", f"forebay:{bucket}/checkpoints/run")
        rclone("copyto", tmp_path / "source" / "empty", f"forebay:{bucket}/elsewhere")
        rclone("copy", f"forebay:{bucket}/checkpoints/run", tmp_path / "back")
        assert read_tree(tmp_path / "back") == content
        refused = rclone("copyto", tmp_path / "source" / "empty", f"forebay:{bucket}/data/new", check=False)
        assert refused.returncode != 0
        assert b"read-only" in refused.stderr
        through.close()
    assert "elsewhere" in read_bucket(direct, bucket)


def test_copy_up_and_down(rclone: Command, direct: Any, bucket: str, origin: Origin, tmp_path: Path) -> None:
    """A folder arrives at the origin and comes back equal; the second download reads no byte at the origin."""
    content = make_tree(tmp_path / "source")
    rclone("copy", tmp_path / "source", f"forebay:{bucket}/data")
    assert read_bucket(direct, bucket, "data/") == content
    for target in ("first", "second"):
        before = len(origin.object_reads(bucket))
        rclone("copy", f"forebay:{bucket}/data", tmp_path / target)
        assert read_tree(tmp_path / target) == content
        reads = origin.object_reads(bucket)[before:]
    assert reads == []


def test_sync_removes_what_is_gone(rclone: Command, direct: Any, bucket: str, tmp_path: Path) -> None:
    """After sync the bucket holds exactly the folder, times kept in metadata: a second sync transfers nothing."""
    content = make_tree(tmp_path / "source")
    direct.put_object(Bucket=bucket, Key="old", Body=b"old")
    rclone("sync", tmp_path / "source", f"forebay:{bucket}")
    assert read_bucket(direct, bucket) == content
    again = rclone("sync", "-v", tmp_path / "source", f"forebay:{bucket}").stderr.decode()
    assert "There was nothing to transfer" in again


def test_check_finds_both_sides_equal(rclone: Command, direct: Any, bucket: str, tmp_path: Path) -> None:
    """`rclone check --download` compares every byte through the gateway with the origin, and notices a difference."""
    make_tree(tmp_path / "source")
    rclone("copy", tmp_path / "source", f"direct:{bucket}")
    rclone("check", "--download", f"forebay:{bucket}", f"direct:{bucket}")
    rclone("check", f"forebay:{bucket}", f"direct:{bucket}")
    (tmp_path / "source" / "empty").write_bytes(b"not empty any more")
    assert rclone("check", tmp_path / "source", f"forebay:{bucket}", check=False).returncode == 1


def test_cat_with_offset(rclone: Command, direct: Any, bucket: str) -> None:
    """`rclone cat` gives whole objects and ranges."""
    content = random_bytes(9 * MIB)
    direct.put_object(Bucket=bucket, Key="object", Body=content)
    for _ in range(2):
        assert rclone("cat", f"forebay:{bucket}/object").stdout == content
        assert (
            rclone("cat", "--offset", "8388600", "--count", "20", f"forebay:{bucket}/object").stdout
            == (content[8388600:8388620])
        )


def test_a_multipart_upload(rclone: Command, direct: Any, bucket: str, tmp_path: Path) -> None:
    """Above the cut-off rclone uploads parts; the origin has the same bytes and a multipart ETag."""
    content = random_bytes(12 * MIB + 3)
    (tmp_path / "large").write_bytes(content)
    rclone(
        "copyto", "--s3-upload-cutoff", "5Mi", "--s3-chunk-size", "5Mi", tmp_path / "large", f"forebay:{bucket}/large"
    )
    assert direct.head_object(Bucket=bucket, Key="large")["ETag"].endswith('-3"')
    assert read(direct, bucket, "large") == content


def test_move_and_delete(rclone: Command, direct: Any, bucket: str) -> None:
    """Server-side move and delete end in the state that the commands name."""
    direct.put_object(Bucket=bucket, Key="a/one", Body=b"one")
    direct.put_object(Bucket=bucket, Key="a/two", Body=b"two")
    rclone("moveto", f"forebay:{bucket}/a/one", f"forebay:{bucket}/b/one")
    rclone("deletefile", f"forebay:{bucket}/a/two")
    assert read_bucket(direct, bucket) == {"b/one": b"one"}
