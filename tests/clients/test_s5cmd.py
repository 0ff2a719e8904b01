"""s5cmd, as people copy data sets with it, over http and https."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.clients.anybody import fetch
from tests.clients.boto import read
from tests.clients.commands import Command, client_environment
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, ODD_KEYS, random_bytes
from tests.clients.origins import Origin
from tests.clients.trees import make_tree, read_bucket, read_tree
from tests.clients.warmth import put_all, reads_at

pytestmark = pytest.mark.clients


Run = Callable[..., subprocess.CompletedProcess[bytes]]


def _s5cmd(url: str, ca_file: Path | None, home: Path) -> Run:
    """It hears of the endpoint by a variable of its own. No second attempt: it would hide an error of the gateway."""
    environment = client_environment(url, ca_file, home) | {"S3_ENDPOINT_URL": url, "NO_PROXY": "*"}
    return partial(Command("s5cmd", environment), "--retry-count", "0")


@pytest.fixture
def s5cmd(endpoint: Endpoint, tmp_path: Path) -> Run:
    return _s5cmd(endpoint.url, endpoint.ca_file, tmp_path)


def test_sync_up_and_down(s5cmd: Run, direct: Any, bucket: str, origin: Origin, tmp_path: Path) -> None:
    """A folder arrives at the origin and comes back equal; the second download reads no byte at the origin."""
    content = make_tree(tmp_path / "source")
    s5cmd("sync", f"{tmp_path}/source/", f"s3://{bucket}/data/")
    assert read_bucket(direct, bucket, "data/") == content
    for target in ("first", "second"):
        with reads_at(origin, bucket) as reads:
            s5cmd("cp", f"s3://{bucket}/data/*", f"{tmp_path}/{target}/")
            assert read_tree(tmp_path / target) == content
    assert {one.key for one in reads} <= {"data/empty"}  # a range of nothing, which only the origin can answer
    assert s5cmd("sync", f"s3://{bucket}/data/*", f"{tmp_path}/second/").stdout == b""


def test_a_multipart_upload_and_ranges(s5cmd: Run, direct: Any, bucket: str, tmp_path: Path) -> None:
    """Parts that s5cmd uploads and ranges that it downloads, several at once, are the file."""
    content = random_bytes(17 * MIB + 3)
    (tmp_path / "large").write_bytes(content)
    s5cmd("cp", "-p", "5", tmp_path / "large", f"s3://{bucket}/large")
    assert direct.head_object(Bucket=bucket, Key="large")["ETag"].endswith('-4"')
    assert read(direct, bucket, "large") == content
    for _ in range(2):
        s5cmd("cp", "-p", "3", "-c", "4", f"s3://{bucket}/large", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == content


def test_cat_and_pipe(s5cmd: Run, direct: Any, bucket: str, origin: Origin) -> None:
    """Through pipes in both directions; what was cat once comes from cache."""
    content = random_bytes(9 * MIB + 1)
    s5cmd("pipe", f"s3://{bucket}/piped", stdin=content)
    assert read(direct, bucket, "piped") == content
    s5cmd("cat", f"s3://{bucket}/piped")
    with reads_at(origin, bucket) as reads:
        assert s5cmd("cat", f"s3://{bucket}/piped").stdout == content
    assert reads == []


def test_odd_keys(s5cmd: Run, direct: Any, bucket: str) -> None:
    """Each key that s5cmd can be told is read as that key and no other."""
    keys = [key for key in ODD_KEYS if not key.endswith("/")]  # a slash at the end is a folder to s5cmd
    content = put_all(direct, bucket, {key: key.encode() for key in keys})
    found = {key: s5cmd("cat", "--raw", f"s3://{bucket}/{key}").stdout for key in keys}
    assert found == content


def test_listings_are_those_of_the_origin(s5cmd: Run, origin: Origin, direct: Any, bucket: str, tmp_path: Path) -> None:
    """ls by folder and by wildcard, V1 and V2, du and head say what they say at the origin itself."""
    put_all(direct, bucket, {name: name.encode() for name in ("a/1", "a/2", "b c", "d+e/ünï", "top")})
    straight = _s5cmd(origin.url, None, tmp_path)
    for arguments in (
        ("ls", f"s3://{bucket}"),
        ("ls", f"s3://{bucket}/*"),
        ("--use-list-objects-v1", "ls", f"s3://{bucket}/a/*"),
        ("du", f"s3://{bucket}/*"),
        ("head", f"s3://{bucket}/d+e/ünï"),
    ):
        listed = sorted(s5cmd(*arguments).stdout.splitlines())
        assert listed == sorted(straight(*arguments).stdout.splitlines())
        assert listed


def test_copies_moves_and_deletes(s5cmd: Run, direct: Any, bucket: str) -> None:
    """Server-side copy, move and delete by wildcard end in the state that the commands name."""
    put_all(direct, bucket, {"a/one": b"one", "a/two": b"two", "a/three": b"three"})
    s5cmd("cp", f"s3://{bucket}/a/one", f"s3://{bucket}/b/one copy+")
    s5cmd("mv", f"s3://{bucket}/a/two", f"s3://{bucket}/b/two")
    assert read_bucket(direct, bucket, "b/") == {"one copy+": b"one", "two": b"two"}
    s5cmd("rm", f"s3://{bucket}/a/*")
    assert set(read_bucket(direct, bucket)) == {"b/one copy+", "b/two"}


def test_what_is_overwritten_is_read_anew(s5cmd: Run, bucket: str) -> None:
    """A cached object that s5cmd writes over is the new one at once, metadata of its own included."""
    for content in (b"first", b"second"):
        s5cmd("pipe", "--content-type", "text/x-odd", f"s3://{bucket}/object", stdin=content)
        for _ in range(2):
            assert s5cmd("cat", f"s3://{bucket}/object").stdout == content
    head = json.loads(s5cmd("head", f"s3://{bucket}/object").stdout)
    assert (head["size"], head["content_type"]) == (len(b"second"), "text/x-odd")


def test_presign(s5cmd: Run, endpoint: Endpoint, direct: Any, bucket: str) -> None:
    """The URL that `s5cmd presign` prints gives the object to anybody."""
    direct.put_object(Bucket=bucket, Key="with space+plus", Body=b"content")
    url = s5cmd("presign", f"s3://{bucket}/with space+plus").stdout.decode().strip()
    assert url.startswith(endpoint.url)
    for _ in range(2):
        assert fetch(url, endpoint.ca_file) == b"content"


def test_what_is_missing_fails_as_it_does_at_the_origin(
    s5cmd: Run, origin: Origin, bucket: str, tmp_path: Path
) -> None:
    """The exit code is the origin's, and the error's code too."""
    straight = _s5cmd(origin.url, None, tmp_path)
    for arguments in (("cat", f"s3://{bucket}/missing"), ("ls", f"s3://{bucket}-missing")):
        result = s5cmd(*arguments, check=False)
        expected = straight(*arguments, check=False)
        assert result.returncode == expected.returncode != 0
        assert result.stderr.split(b":")[:2] == expected.stderr.split(b":")[:2]
