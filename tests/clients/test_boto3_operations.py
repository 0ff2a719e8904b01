"""The rest of what boto3 users call: multipart by hand, copies, deletes, listings, buckets."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.clients.boto import described, read
from tests.clients.conftest import WRITTEN_BACK
from tests.clients.content import MIB, ODD_KEYS, random_bytes

pytestmark = pytest.mark.clients

# The strict origin knows neither tags nor versions.
only_moto = pytest.mark.parametrize("origin", ["moto"], indirect=True, scope="session")


def test_an_aborted_upload_leaves_nothing(through: Any, direct: Any, bucket: str) -> None:
    """After AbortMultipartUpload the origin has neither upload, nor parts, nor object.

    The id is the origin's; with write-back it is Forebay's own (4.8).
    """
    upload = through.create_multipart_upload(Bucket=bucket, Key="object")["UploadId"]
    through.upload_part(Bucket=bucket, Key="object", UploadId=upload, PartNumber=1, Body=random_bytes(5 * MIB))
    assert [part["PartNumber"] for part in _parts(through, bucket, upload)] == [1]
    [begun] = direct.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert (begun["UploadId"] == upload) is not WRITTEN_BACK
    through.abort_multipart_upload(Bucket=bucket, Key="object", UploadId=upload)
    assert not direct.list_multipart_uploads(Bucket=bucket).get("Uploads")
    assert "Contents" not in direct.list_objects_v2(Bucket=bucket)
    with pytest.raises(through.exceptions.ClientError, match="NoSuchUpload"):
        _parts(through, bucket, upload)


def _parts(client: Any, bucket: str, upload: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = client.list_parts(Bucket=bucket, Key="object", UploadId=upload).get("Parts", [])
    return parts


def test_parts_may_come_in_any_order_and_be_replaced(through: Any, direct: Any, bucket: str) -> None:
    """Parts 3, 1, 2, and 1 once more: the object is the last of each number, in number order."""
    upload = through.create_multipart_upload(Bucket=bucket, Key="object")["UploadId"]
    content: dict[int, bytes] = {}
    etags: dict[int, str] = {}
    for seed, number in enumerate((3, 1, 2, 1)):
        content[number] = random_bytes(5 * MIB, seed=seed)
        answer = through.upload_part(
            Bucket=bucket, Key="object", UploadId=upload, PartNumber=number, Body=content[number]
        )
        etags[number] = answer["ETag"]
    through.complete_multipart_upload(
        Bucket=bucket,
        Key="object",
        UploadId=upload,
        MultipartUpload={"Parts": [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]},
    )
    expected = b"".join(content[number] for number in sorted(content))
    assert read(direct, bucket, "object") == expected == read(through, bucket, "object")


@pytest.mark.parametrize("key", ODD_KEYS, ids=[repr(key[:20]) for key in ODD_KEYS])
def test_copy_from_and_to_odd_keys(key: str, through: Any, direct: Any, bucket: str) -> None:
    """CopyObject reads the source that its header names and is visible at once under the new key."""
    direct.put_object(Bucket=bucket, Key=key, Body=key.encode())
    through.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": key})
    assert read(through, bucket, "copy") == key.encode() == read(direct, bucket, "copy")
    through.copy_object(Bucket=bucket, Key=key + "2" if len(key) < 512 else "long", CopySource=f"{bucket}/copy")


def test_a_copy_over_a_cached_object_is_seen_at_once(through: Any, direct: Any, bucket: str) -> None:
    """The target's cached bytes are those of the copy from the moment it is answered."""
    for name in ("one", "two"):
        direct.put_object(Bucket=bucket, Key=name, Body=name.encode() * 1000)
        assert read(through, bucket, name) == name.encode() * 1000
    through.copy_object(Bucket=bucket, Key="one", CopySource={"Bucket": bucket, "Key": "two"})
    assert read(through, bucket, "one") == b"two" * 1000


def test_copying_parts(through: Any, direct: Any, bucket: str) -> None:
    """UploadPartCopy with and without a range builds the object that the origin would build."""
    source = random_bytes(11 * MIB)
    direct.put_object(Bucket=bucket, Key="source", Body=source)
    upload = through.create_multipart_upload(Bucket=bucket, Key="object")["UploadId"]
    parts = []
    for number, byte_range in ((1, f"bytes=0-{5 * MIB - 1}"), (2, f"bytes={5 * MIB}-{11 * MIB - 1}")):
        answer = through.upload_part_copy(
            Bucket=bucket,
            Key="object",
            UploadId=upload,
            PartNumber=number,
            CopySource={"Bucket": bucket, "Key": "source"},
            CopySourceRange=byte_range,
        )
        parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})
    through.complete_multipart_upload(Bucket=bucket, Key="object", UploadId=upload, MultipartUpload={"Parts": parts})
    assert read(direct, bucket, "object") == source == read(through, bucket, "object")


def test_copying_parts_of_what_was_just_written(through: Any, direct: Any, bucket: str) -> None:
    """Pending or not: a range, and a condition that holds, are of what was acknowledged last."""
    through.put_object(Bucket=bucket, Key="source", Body=b"before")
    source = random_bytes(6 * MIB)
    etag = through.put_object(Bucket=bucket, Key="source", Body=source)["ETag"]
    upload = through.create_multipart_upload(Bucket=bucket, Key="object")["UploadId"]
    named = {"Bucket": bucket, "Key": "object", "UploadId": upload, "CopySource": {"Bucket": bucket, "Key": "source"}}
    parts = []
    for number, asked in ((1, {"CopySourceIfMatch": etag}), (2, {"CopySourceRange": "bytes=5-104"})):
        answer = through.upload_part_copy(**named, PartNumber=number, **asked)["CopyPartResult"]
        parts.append({"PartNumber": number, "ETag": answer["ETag"]})
    through.complete_multipart_upload(Bucket=bucket, Key="object", UploadId=upload, MultipartUpload={"Parts": parts})
    assert read(through, bucket, "object") == source + source[5:105] == read(direct, bucket, "object")


def test_an_object_that_was_just_written_is_not_written_again(through: Any, direct: Any, bucket: str) -> None:
    """`If-None-Match: *`, `If-Match`: 412, whoever judges it, also for bodies that wait for `100 Continue`."""
    for body in (b"before", b"there"):
        etag = through.put_object(Bucket=bucket, Key="object", Body=body)["ETag"]
    for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"0123456789abcdef0123456789abcdef"'}):
        with pytest.raises(ClientError, match="PreconditionFailed"):
            through.put_object(Bucket=bucket, Key="object", Body=random_bytes(6 * MIB), **condition)
    assert read(through, bucket, "object") == b"there" == read(direct, bucket, "object")
    through.put_object(Bucket=bucket, Key="object", Body=b"after", IfMatch=etag)
    assert read(direct, bucket, "object") == b"after"


def test_delete_objects_removes_exactly_the_named_ones(through: Any, direct: Any, bucket: str) -> None:
    """Every odd key of one DeleteObjects request goes, and its cached bytes with it; the others stay."""
    for key in [*ODD_KEYS, "stays"]:
        direct.put_object(Bucket=bucket, Key=key, Body=b"x")
        assert read(through, bucket, key) == b"x"
    answer = through.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in ODD_KEYS]})
    assert {one["Key"] for one in answer["Deleted"]} == set(ODD_KEYS)
    assert [one["Key"] for one in direct.list_objects_v2(Bucket=bucket)["Contents"]] == ["stays"]
    for key in ODD_KEYS:
        with pytest.raises(through.exceptions.NoSuchKey):
            through.get_object(Bucket=bucket, Key=key)


@pytest.mark.parametrize("operation", ["list_objects_v2", "list_objects"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"Prefix": "x"}, {"Delimiter": "/"}, {"Prefix": "a/", "Delimiter": "/"}, {"EncodingType": "url"}],
    ids=str,
)
def test_paginators_list_what_a_direct_client_lists(
    operation: str, arguments: dict[str, str], through: Any, direct: Any, bucket: str
) -> None:
    """Page by page, every key, prefix, size and ETag of the origin, odd keys included.

    With write-back, the origin is asked for both versions as ListObjectsV2 (9.5), and moto's two differ. (botocore
    gives markers back encoded where a user asks for it, so that the pages of its first version differ, too.)
    """
    for key in ODD_KEYS:
        direct.put_object(Bucket=bucket, Key=key, Body=key.encode())

    as_second = operation == "list_objects" and WRITTEN_BACK
    size = 1000 if as_second and "EncodingType" in arguments else 4

    def listing(client: Any, operation: str, **more: Any) -> list[tuple[list[Any], list[Any]]]:
        paginator = client.get_paginator(operation)
        pages = paginator.paginate(Bucket=bucket, PaginationConfig={"PageSize": size}, **arguments, **more)
        return [(page.get("Contents", []), page.get("CommonPrefixes", [])) for page in pages]

    if as_second:
        assert listing(through, operation) == listing(direct, "list_objects_v2", FetchOwner=True)
    else:
        assert listing(through, operation) == listing(direct, operation)


def test_buckets(through: Any, direct: Any, bucket: str) -> None:
    """ListBuckets, HeadBucket and GetBucketLocation answer as the origin does; a new bucket exists there."""
    through.create_bucket(Bucket=bucket + "-new")
    names = {one["Name"] for one in direct.list_buckets()["Buckets"]}
    assert {one["Name"] for one in through.list_buckets()["Buckets"]} == names
    assert bucket + "-new" in names
    through.head_bucket(Bucket=bucket)
    assert described(through.get_bucket_location(Bucket=bucket)) == described(direct.get_bucket_location(Bucket=bucket))
    through.delete_bucket(Bucket=bucket + "-new")
    with pytest.raises(direct.exceptions.ClientError):
        direct.head_bucket(Bucket=bucket + "-new")


@only_moto
def test_what_the_gateway_does_not_handle_itself_is_forwarded(through: Any, direct: Any, bucket: str) -> None:
    """Tags, bucket policy and versioning set through the gateway are those that the origin shows."""
    through.put_object(Bucket=bucket, Key="object", Body=b"x")
    tags = [{"Key": "team", "Value": "vision / speech"}]
    through.put_object_tagging(Bucket=bucket, Key="object", Tagging={"TagSet": tags})
    assert direct.get_object_tagging(Bucket=bucket, Key="object")["TagSet"] == tags
    assert through.get_object_tagging(Bucket=bucket, Key="object")["TagSet"] == tags
    through.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    assert direct.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"


@only_moto
def test_old_versions_are_read_from_the_origin(through: Any, direct: Any, bucket: str) -> None:
    """GetObject with a version id gives that version's bytes, not the cached current ones.

    With write-back a PUT is answered without it (9.4): the origin gives it when it gets the object.
    """
    direct.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    versions = {}
    for content in (b"first", b"second"):
        answer = through.put_object(Bucket=bucket, Key="object", Body=content)
        versions[content] = direct.head_object(Bucket=bucket, Key="object")["VersionId"]
        assert answer.get("VersionId") in ((None, versions[content]) if WRITTEN_BACK else (versions[content],))
    assert read(through, bucket, "object") == b"second"
    for content, version in versions.items():
        assert read(through, bucket, "object", VersionId=version) == content
    listed = {one["VersionId"] for one in through.list_object_versions(Bucket=bucket)["Versions"]}
    assert listed == set(versions.values())
