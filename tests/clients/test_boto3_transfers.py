"""boto3 moves whole objects through the gateway: upload_file, download_file, streams, ranges, over http and https."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig

from tests.clients.boto import cache_header, described, read
from tests.clients.content import MIB, ODD_KEYS, random_bytes
from tests.clients.origins import NODES, Origin

pytestmark = pytest.mark.clients

# The classic transfer manager: the CRT one is chosen on some instance types only, and needs https and AWS names.
CLASSIC = {"preferred_transfer_client": "classic"}


@pytest.mark.parametrize("size", [0, 1, 8 * MIB - 1, 8 * MIB, 20 * MIB + 7])
def test_upload_file_puts_the_same_object_as_a_direct_client(
    size: int, through: Any, direct: Any, bucket: str, tmp_path: Path
) -> None:
    """Bytes, size, content type, metadata and ETag at the origin are those of an upload that went straight there."""
    source = tmp_path / "source"
    source.write_bytes(random_bytes(size))
    extra = {"ContentType": "application/x-shard", "Metadata": {"step": "7"}}
    through.upload_file(str(source), bucket, "via", ExtraArgs=extra, Config=TransferConfig(**CLASSIC))
    direct.upload_file(str(source), bucket, "straight", ExtraArgs=extra, Config=TransferConfig(**CLASSIC))
    assert read(direct, bucket, "via") == source.read_bytes()
    via, straight = (direct.head_object(Bucket=bucket, Key=key) for key in ("via", "straight"))
    for response in (via, straight):
        del response["LastModified"]
    assert described(via) == described(straight)
    assert through.head_object(Bucket=bucket, Key="via")["ETag"] == via["ETag"]


@pytest.mark.parametrize("size", [0, 1, 8 * MIB, 20 * MIB + 7])
def test_the_second_download_file_reads_nothing_at_the_origin(
    size: int, through: Any, direct: Any, bucket: str, origin: Origin, tmp_path: Path
) -> None:
    """Both downloads give the origin's bytes; the second one moves none of them again."""
    content = random_bytes(size)
    direct.put_object(Bucket=bucket, Key="object", Body=content)
    for _ in range(2):
        before = len(origin.object_reads(bucket))
        through.download_file(bucket, "object", str(tmp_path / "target"), Config=TransferConfig(**CLASSIC))
        assert (tmp_path / "target").read_bytes() == content
        reads = origin.object_reads(bucket)[before:]
    assert reads == []


def test_the_answer_says_where_it_came_from(through: Any, direct: Any, bucket: str) -> None:
    """x-forebay-cache is miss on the first read of an object and hit on the second, of each node; or another has it."""
    direct.put_object(Bucket=bucket, Key="object", Body=random_bytes(3 * MIB))
    answers = []
    for _ in range(2 * NODES):
        response = through.get_object(Bucket=bucket, Key="object")
        assert response["Body"].read() == random_bytes(3 * MIB)
        answers.append(cache_header(response))
    assert (answers[0] == "peer" and NODES > 1) or answers[0] == "miss", answers
    assert answers[-1] == "hit", answers


@pytest.mark.parametrize(
    "byte_range", ["0-0", "5-", "-1", "-9000000", "8388600-8388615", "0-8388607", "9000000-99999999"]
)
def test_ranges_are_those_of_the_origin(byte_range: str, through: Any, direct: Any, bucket: str) -> None:
    """A range GET answers status, Content-Range, length and bytes as the origin does, cold and warm."""
    direct.put_object(Bucket=bucket, Key="object", Body=random_bytes(9 * MIB))
    expected = direct.get_object(Bucket=bucket, Key="object", Range=f"bytes={byte_range}")
    wanted = expected["Body"].read()
    for _ in range(2):
        got = through.get_object(Bucket=bucket, Key="object", Range=f"bytes={byte_range}")
        assert got["Body"].read() == wanted
        assert got["ContentRange"] == expected["ContentRange"]
        assert got["ContentLength"] == expected["ContentLength"]
        assert got["ResponseMetadata"]["HTTPStatusCode"] == 206


@pytest.mark.parametrize("key", ODD_KEYS, ids=[repr(key[:20]) for key in ODD_KEYS])
def test_odd_keys_name_the_same_object_on_both_sides(key: str, through: Any, direct: Any, bucket: str) -> None:
    """Written through the gateway, read at the origin, and the other way round; HEAD and DELETE mean the same."""
    through.put_object(Bucket=bucket, Key=key, Body=b"via " + key.encode())
    assert read(direct, bucket, key) == b"via " + key.encode()
    direct.put_object(Bucket=bucket, Key=key, Body=b"straight " + key.encode())
    for _ in range(2):
        assert read(through, bucket, key) == b"straight " + key.encode()
    assert through.head_object(Bucket=bucket, Key=key)["ContentLength"] == len(b"straight " + key.encode())
    through.delete_object(Bucket=bucket, Key=key)
    assert "Contents" not in direct.list_objects_v2(Bucket=bucket)


def test_what_was_overwritten_at_the_origin_is_seen_at_once(through: Any, direct: Any, bucket: str) -> None:
    """A cached object that somebody replaces at the origin is never served again."""
    for version in range(5):
        content = random_bytes(2 * MIB, seed=version)
        direct.put_object(Bucket=bucket, Key="object", Body=content)
        assert read(through, bucket, "object") == content
        assert read(through, bucket, "object") == content


def test_what_was_overwritten_through_the_gateway_is_seen_at_once(through: Any, direct: Any, bucket: str) -> None:
    """Read-your-writes: PUT, GET, PUT, GET gives each time what was put last, and so does the origin."""
    for version in range(5):
        content = random_bytes(2 * MIB, seed=version)
        through.put_object(Bucket=bucket, Key="object", Body=content)
        assert read(through, bucket, "object") == content
        assert read(direct, bucket, "object") == content


def test_upload_and_download_of_streams(through: Any, direct: Any, bucket: str) -> None:
    """Objects without a file behind them: upload_fileobj in parts, download_fileobj in ranges."""
    content = random_bytes(17 * MIB + 3)
    through.upload_fileobj(io.BytesIO(content), bucket, "stream", Config=TransferConfig(**CLASSIC))
    assert direct.head_object(Bucket=bucket, Key="stream")["ETag"].endswith('-3"')
    target = io.BytesIO()
    through.download_fileobj(bucket, "stream", target, Config=TransferConfig(**CLASSIC))
    assert target.getvalue() == content == read(direct, bucket, "stream")


def test_missing_objects_and_buckets_are_the_errors_that_boto3_knows(through: Any, bucket: str) -> None:
    """404 with NoSuchKey and NoSuchBucket, so that `except client.exceptions.NoSuchKey` works."""
    with pytest.raises(through.exceptions.NoSuchKey):
        through.get_object(Bucket=bucket, Key="missing")
    with pytest.raises(through.exceptions.NoSuchBucket):
        through.list_objects_v2(Bucket=bucket + "-missing")
    with pytest.raises(through.exceptions.ClientError) as failure:
        through.head_object(Bucket=bucket, Key="missing")
    assert failure.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404


def test_conditional_reads_answer_as_the_origin_does(through: Any, direct: Any, bucket: str) -> None:
    """If-None-Match of the current ETag is 304, If-Match of another is 412, cold and warm."""
    etag = direct.put_object(Bucket=bucket, Key="object", Body=b"content")["ETag"]
    for _ in range(2):
        assert _status(through, bucket, IfNoneMatch=etag) == 304
        assert _status(through, bucket, IfMatch='"0123456789abcdef0123456789abcdef"') == 412
        assert read(through, bucket, "object", IfMatch=etag) == b"content"


def _status(client: Any, bucket: str, **condition: str) -> int:
    with pytest.raises(client.exceptions.ClientError) as failure:
        client.get_object(Bucket=bucket, Key="object", **condition)
    status: int = failure.value.response["ResponseMetadata"]["HTTPStatusCode"]
    return status
