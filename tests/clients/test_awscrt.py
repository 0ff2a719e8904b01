"""awscrt's S3 client over https: ranges side by side, parts with checksums in trailers."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from awscrt.s3 import S3ResponseError

from tests.clients.boto import read
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, ODD_KEYS, random_bytes
from tests.clients.crt import CrtClient
from tests.clients.origins import Origin
from tests.clients.trees import read_bucket
from tests.clients.warmth import put_all, reads_at

pytestmark = pytest.mark.clients


@pytest.fixture
def crt(https_endpoint: Endpoint, bucket: str) -> CrtClient:
    return CrtClient(https_endpoint, bucket)


def test_objects_round_trip(crt: CrtClient, direct: Any, bucket: str, origin: Origin) -> None:
    """Put whole or in parts, an object is at the origin; got again in ranges side by side it comes from cache."""
    for size in (1, 114_660, 8 * MIB, 23 * MIB + 11):
        content = random_bytes(size)
        crt.put("object+é", content)
        assert read(direct, bucket, "object+é") == content
        for _ in range(2):
            with reads_at(origin, bucket) as reads:
                assert crt.get("object+é").body == content
        assert reads == []


# moto hears of a trailer's checksum by a header that only the SDKs add.
@pytest.mark.parametrize("origin", ["strict"], indirect=True, scope="session")
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_parts_with_trailers(algorithm: str, crt: CrtClient, direct: Any, bucket: str) -> None:
    """Every part's checksum in a trailer is good at the origin, for one PUT and for a multipart upload."""
    for size in (MIB, 11 * MIB + 3):
        content = random_bytes(size)
        crt.put("object", content, algorithm=algorithm)
        head = direct.head_object(Bucket=bucket, Key="object", ChecksumMode="ENABLED")
        assert f"Checksum{algorithm}" in head
        assert read(direct, bucket, "object", ChecksumMode="ENABLED") == content
        assert crt.get("object").body == content


def test_an_empty_object(crt: CrtClient, direct: Any, bucket: str) -> None:
    """Put empty, and got by a client that asks for a range of nothing first and by part number then."""
    crt.put("put empty", b"")
    direct.put_object(Bucket=bucket, Key="empty", Body=b"")
    assert read(direct, bucket, "put empty") == b""
    for key in ("put empty", "empty"):
        for _ in range(2):
            answer = crt.get(key)
            assert (answer.status, answer.body) in ((200, b""), (206, b""))


def test_a_range_of_an_empty_object(crt: CrtClient, direct: Any, bucket: str) -> None:
    """What the CRT asks where it knows no size: the range is refused as the origin refuses it, part 1 is empty."""
    direct.put_object(Bucket=bucket, Key="empty", Body=b"")
    with pytest.raises(direct.exceptions.ClientError) as expected:
        direct.get_object(Bucket=bucket, Key="empty", Range="bytes=0-8388607")
    for _ in range(2):
        with pytest.raises(S3ResponseError) as caught:
            crt.send("GetObject", "GET", "empty", range="bytes=0-8388607")
        assert caught.value.status_code == expected.value.response["ResponseMetadata"]["HTTPStatusCode"] == 416
        answer = crt.send("GetObject", "GET", "empty", query="partNumber=1")
        assert (answer.status, answer.body) in ((200, b""), (206, b""))


def test_ranges(crt: CrtClient, direct: Any, bucket: str) -> None:
    """A range that the caller names, split into parts or not, is the object's bytes."""
    content = random_bytes(23 * MIB)
    direct.put_object(Bucket=bucket, Key="object", Body=content)
    for first, last in ((0, 0), (8 * MIB - 3, 8 * MIB + 3), (5, 17 * MIB), (22 * MIB, 23 * MIB - 1)):
        answer = crt.get("object", range=f"bytes={first}-{last}")
        assert answer.status == 206
        assert answer.body == content[first : last + 1]
    assert crt.get("object", range=f"bytes={22 * MIB}-").body == content[22 * MIB :]
    assert crt.get("object", range="bytes=-9").body == content[-9:]


def test_odd_keys(crt: CrtClient, direct: Any, bucket: str) -> None:
    """Each key is put and got as that key."""
    for key in ODD_KEYS:
        crt.put(key, key.encode())
    assert read_bucket(direct, bucket) == {key: key.encode() for key in ODD_KEYS}
    assert {key: crt.get(key).body for key in ODD_KEYS} == {key: key.encode() for key in ODD_KEYS}


def test_heads_lists_and_deletes(crt: CrtClient, direct: Any, bucket: str) -> None:
    """Operations that the CRT only carries: HeadObject, ListObjectsV2, DeleteObject."""
    put_all(direct, bucket, {"a/one": b"one", "a/two": b"two", "b": b"three"})
    head = crt.send("HeadObject", "HEAD", "a/one")
    assert head.headers["etag"] == direct.head_object(Bucket=bucket, Key="a/one")["ETag"]
    assert head.headers["content-length"] == "3"
    listed = crt.send("ListObjectsV2", "GET", query="list-type=2&prefix=a%2F").body
    assert b"<Key>a/one</Key>" in listed
    assert b"<Key>b</Key>" not in listed
    assert crt.send("DeleteObject", "DELETE", "a/one").status == 204
    assert set(read_bucket(direct, bucket)) == {"a/two", "b"}


def test_copies(crt: CrtClient, direct: Any, bucket: str) -> None:
    """CopyObject through the CRT is at the origin, and is what the next GET gives."""
    content = put_all(direct, bucket, {"small+é": b"small", "large": random_bytes(11 * MIB)})
    for key, data in content.items():
        answer = crt.send("CopyObject", "PUT", "copy", x_amz_copy_source=f"/{bucket}/{quote(key)}")
        assert b"<CopyObjectResult" in answer.body
        assert read(direct, bucket, "copy") == data == crt.get("copy").body


def test_an_overwritten_object_is_read_anew(crt: CrtClient, bucket: str) -> None:
    """What the cache has of the version before is not given."""
    for seed in (1, 2):
        content = random_bytes(9 * MIB, seed)
        crt.put("object", content)
        for _ in range(2):
            assert crt.get("object").body == content


def test_a_missing_object_is_s3s_own_error(crt: CrtClient) -> None:
    """The CRT ends with S3's status, and with its error document where GET was the first thing it sent."""
    with pytest.raises(S3ResponseError) as caught:
        crt.get("missing")
    assert caught.value.status_code == 404
    with pytest.raises(S3ResponseError) as caught:
        crt.send("GetObject", "GET", "missing")
    assert caught.value.status_code == 404
    assert b"<Code>NoSuchKey</Code>" in caught.value.body
