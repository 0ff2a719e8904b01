"""Clause 13 of docs/semantics.md, through a running gateway; tests/origin/stores/ has the details."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError

from tests.support.changing_slots import client_of
from tests.support.gateway_process import ORIGIN_KEYS, GatewayProcess
from tests.support.waiting import eventually

PART_BYTES = 5 * 1024 * 1024
BUCKET, FOLLOWED = "nas", "followed"
PUTS = int(os.environ.get("FOREBAY_DIRECTORY_PUTS", "400"))
"""Conditional PUTs that race, in the long run of two gateways."""

_READS = 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mnt")
    for bucket in (BUCKET, FOLLOWED):
        (root / bucket).mkdir()
    return root


def bucket_of(root: Path) -> dict[str, Any]:
    return {"name": BUCKET, "endpoint_url": f"file://{root}"}


@pytest.fixture(scope="module")
def gateway(root: Path) -> Iterator[GatewayProcess]:
    config: dict[str, Any] = {
        "origin": {"endpoint_url": "http://127.0.0.1:1"},
        "server": {"workers": 2},
        "cache": {"persistent": True, "capacity": "256MiB", "block_size": "64KiB"},
        "buckets": [
            bucket_of(root),
            {**bucket_of(root), "name": FOLLOWED, "symlinks": "follow", "file_mode": "0640"},
        ],
        "slots": [
            {"name": "indexed", "prefix": f"s3://{BUCKET}/indexed/", "consistency": "ttl", "index": True},
            {"name": "back", "prefix": f"s3://{BUCKET}/back/", "write": "back"},
        ],
    }
    with GatewayProcess(config) as running:
        yield running


@pytest.fixture
def client(gateway: GatewayProcess) -> Any:
    return client_of(gateway.s3_url, ORIGIN_KEYS)


def until(holds: Callable[[], bool]) -> None:
    eventually(holds, "what the test waits for")


def md5_etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def refused(request: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as raised:
        request(Bucket=BUCKET, **arguments)
    return str(raised.value.response["Error"]["Code"])


def keys(client: Any, **how: str) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, PaginationConfig={"PageSize": 3}, **how)
    return [one["Key"] for page in pages for one in page.get("Contents", ())]


def old(path: Path, data: bytes) -> Path:
    """A file that others have written: its ctime settles within the seconds that the test takes to look at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.slow
def test_13_1_a_changed_file_is_another_version(client: Any, root: Path) -> None:
    """13.1 A file that others write is read, cached once it has settled, and read anew when it has changed."""
    data = os.urandom(3_000_000)
    path = old(root / BUCKET / "data" / "file", data)

    def answer() -> Any:
        return client.get_object(Bucket=BUCKET, Key="data/file")

    assert answer()["Body"].read() == data
    until(lambda: not answer()["ETag"].startswith("W/"))
    until(lambda: answer()["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"].startswith("hit"))
    times = path.stat()
    path.write_bytes(data[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert answer()["Body"].read() == data[::-1]


@pytest.mark.slow
def test_13_1_each_read_of_a_strict_slot_looks_at_the_file(gateway: GatewayProcess, client: Any, root: Path) -> None:
    """13.1 Also where the gateway answers it without a thread: each look counts as a HEAD, and a change is seen."""
    path = old(root / BUCKET / "looked" / "at", b"before")

    def read() -> tuple[bytes, str]:
        answer = client.get_object(Bucket=BUCKET, Key="looked/at")
        return answer["Body"].read(), answer["ETag"]

    until(lambda: not read()[1].startswith("W/"))
    looks = heads(gateway)
    assert {read()[0] for _ in range(_READS)} == {b"before"}
    until(lambda: heads(gateway) >= looks + _READS)
    before = path.stat()
    path.write_bytes(b"behind")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read()[0] == b"behind"


def heads(gateway: GatewayProcess) -> float:
    """Return how many HEADs the origin has got; workers tell a moment later."""
    lines = httpx.get(f"{gateway.admin_url}/metrics", timeout=60).text.splitlines()
    of_head = [one for one in lines if one.startswith("forebay_origin_requests_total") and 'method="HEAD"' in one]
    return sum(float(one.rpartition(" ")[2]) for one in of_head)


def test_13_2_what_is_written_here_has_its_md5_and_metadata(client: Any, root: Path) -> None:
    """13.2 As an object of S3 has, and in the directory an ordinary file lies."""
    client.put_object(Bucket=BUCKET, Key="made/here", Body=b"ours", ContentType="text/plain", Metadata={"step": "7"})
    head = client.head_object(Bucket=BUCKET, Key="made/here")
    assert (head["ETag"], head["ContentType"], head["Metadata"]) == (md5_etag(b"ours"), "text/plain", {"step": "7"})
    assert (root / BUCKET / "made" / "here").read_bytes() == b"ours"


def test_13_3_a_write_is_whole_and_its_conditions_hold(client: Any, root: Path) -> None:
    """13.3 Objects in one piece, of parts, and copies; under conditions."""
    client.put_object(Bucket=BUCKET, Key="once", Body=b"1", IfNoneMatch="*")
    assert refused(client.put_object, Key="once", Body=b"2", IfNoneMatch="*") == "PreconditionFailed"
    upload_id = client.create_multipart_upload(Bucket=BUCKET, Key="parts")["UploadId"]
    data = [os.urandom(PART_BYTES), os.urandom(PART_BYTES), b"end"]
    parts = []
    for number, body in enumerate(data, 1):
        of = {"Bucket": BUCKET, "Key": "parts", "UploadId": upload_id, "PartNumber": number}
        parts.append({"PartNumber": number, "ETag": client.upload_part(**of, Body=body)["ETag"]})
    client.complete_multipart_upload(Bucket=BUCKET, Key="parts", UploadId=upload_id, MultipartUpload={"Parts": parts})
    client.copy_object(Bucket=BUCKET, Key="copy", CopySource={"Bucket": BUCKET, "Key": "parts"})
    for name in ("parts", "copy"):
        assert client.get_object(Bucket=BUCKET, Key=name)["Body"].read() == b"".join(data)
        assert (root / BUCKET / name).read_bytes() == b"".join(data)


@pytest.mark.parametrize("count", [80, pytest.param(PUTS, marks=[pytest.mark.slow, pytest.mark.timeout(100 + PUTS)])])
def test_13_3_of_two_gateways_one_wins(gateway: GatewayProcess, root: Path, count: int) -> None:
    """13.3 Two gateways with the same directory: each version of a key is followed by one PUT, and each new key made by
    one. Half of the PUTs are to follow a version, which is that of a few keys; half are to make a key."""
    config: dict[str, Any] = {"origin": {"endpoint_url": "http://127.0.0.1:1"}, "buckets": [bucket_of(root)]}
    won: dict[tuple[str, str], list[str]] = defaultdict(list)

    def put(client: Any, key: str, body: str, **condition: str) -> None:
        try:
            etag = client.put_object(Bucket=BUCKET, Key=key, Body=body, **condition)["ETag"]
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise
        else:
            won[key, condition.get("IfMatch", "")].append(etag)

    def write(url: str, name: str) -> None:
        client = client_of(url, ORIGIN_KEYS)
        for number in range(count // 8):
            put(client, f"race-{count}/{number}", name, IfNoneMatch="*")
            key = f"race-{count}/again-{number % 7}"
            before = client.head_object(Bucket=BUCKET, Key=key)["ETag"]
            put(client, key, f"{name} {number}", IfMatch=before)

    first = client_of(gateway.s3_url, ORIGIN_KEYS)
    for number in range(7):
        put(first, f"race-{count}/again-{number}", "first", IfNoneMatch="*")
    with GatewayProcess(config) as other, ThreadPoolExecutor(4) as pool:
        urls = [gateway.s3_url, other.s3_url] * 2
        for writer in [pool.submit(write, url, f"writer {number}") for number, url in enumerate(urls)]:
            writer.result()
    assert {len(etags) for etags in won.values()} == {1}
    assert sum(not before for _, before in won) == count // 8 + 7
    for number in range(7):
        key, etag, steps = f"race-{count}/again-{number}", "", 0
        while (key, etag) in won:
            (etag,), steps = won[key, etag], steps + 1
        assert first.head_object(Bucket=BUCKET, Key=key)["ETag"] == etag == md5_etag((root / BUCKET / key).read_bytes())
        assert steps == sum(of == key for of, _ in won)


@pytest.mark.parametrize("slot", ["through/", "back/"])
def test_13_4_a_key_that_no_file_can_have_is_refused_before_it_is_acknowledged(
    client: Any, gateway: GatewayProcess, root: Path, slot: str
) -> None:
    """13.4 Written through or back: an acknowledged write can be flushed."""
    client.put_object(Bucket=BUCKET, Key=f"{slot}first", Body=b"1")
    for key, code in {"a//b": "InvalidArgument", "a/../b": "InvalidArgument", "n" * 256: "KeyTooLongError"}.items():
        assert refused(client.put_object, Key=slot + key, Body=b"1") == code
        assert refused(client.create_multipart_upload, Key=slot + key) == code
    client.put_object(Bucket=BUCKET, Key=f"{slot}file", Body=b"1")
    client.put_object(Bucket=BUCKET, Key=f"{slot}dir/file", Body=b"1")
    assert refused(client.put_object, Key=f"{slot}file/below", Body=b"1") == "ObjectParentIsFile"
    assert refused(client.put_object, Key=f"{slot}dir", Body=b"1") == "ExistingObjectIsDirectory"
    until(lambda: (root / BUCKET / slot / "dir" / "file").exists() and (root / BUCKET / slot / "file").exists())
    until(lambda: not gateway.command("writeback", "list", "--json").stdout.strip(" \n[]"))


def test_13_4_written_back_files_have_the_etag_that_was_answered(client: Any, root: Path) -> None:
    """Objects of one part and of several, flushed, are the same version as before the flush."""
    client.put_object(Bucket=BUCKET, Key="back/known", Body=b"x")
    answer = client.put_object(Bucket=BUCKET, Key="back/one", Body=b"later", Metadata={"step": "7"})
    assert answer["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"] == "absorbed"
    client.upload_fileobj(BytesIO(bytes(12_000_000)), BUCKET, "back/large")
    before = client.head_object(Bucket=BUCKET, Key="back/large")["ETag"]
    until(lambda: (root / BUCKET / "back/one").exists() and (root / BUCKET / "back/large").exists())
    until(
        lambda: (
            client.head_object(Bucket=BUCKET, Key="back/large")["ResponseMetadata"]["HTTPHeaders"].get(
                "x-forebay-durable", "true"
            )
            == "true"
        )
    )
    assert client.head_object(Bucket=BUCKET, Key="back/large")["ETag"] == before
    head = client.head_object(Bucket=BUCKET, Key="back/one")
    assert (head["ETag"], head["Metadata"]) == (answer["ETag"], {"step": "7"})


def test_13_5_links_lead_nowhere_outside(client: Any, root: Path) -> None:
    """13.5 What a link outside names is not there; a link within its bucket is read."""
    (root / "secret").write_bytes(b"hidden")
    old(root / BUCKET / "links" / "file", b"seen")
    (root / BUCKET / "links" / "out").symlink_to(root / "secret")
    (root / BUCKET / "links" / "in").symlink_to("file")
    assert refused(client.get_object, Key="links/out") == "NoSuchKey"
    assert client.get_object(Bucket=BUCKET, Key="links/in")["Body"].read() == b"seen"
    assert keys(client, Prefix="links/") == ["links/file", "links/in"]


def test_13_5_and_13_8_a_bucket_says_what_links_and_rights_are(client: Any, root: Path) -> None:
    """13.5, 13.8 Listings enter linked directories, and new files have the rights that are set."""
    old(root / FOLLOWED / "real" / "file", b"1")
    for name, target in (("link", "real"), ("own", ".forebay-origin"), ("real/up", "..")):
        (root / FOLLOWED / name).symlink_to(target)
    client.put_object(Bucket=FOLLOWED, Key="made/here", Body=b"2")
    assert {path.stat().st_mode & 0o777 for path in (root / FOLLOWED / "made").rglob("*")} == {0o640}
    assert (root / FOLLOWED / "made").stat().st_mode & 0o777 == 0o750
    listed = client.list_objects_v2(Bucket=FOLLOWED)["Contents"]
    assert [one["Key"] for one in listed] == ["link/file", "made/here", "real/file"]


@pytest.mark.slow
def test_13_6_listings_are_in_s3s_order(client: Any, root: Path) -> None:
    """13.6 With and without an index: a directory comes where its name with a slash behind it does."""
    names = ["a", "a-", "a-b", "a.c/x", "a0", "aa/b/c", "b/empty/", "z"]
    for slot in ("strict", "indexed"):
        for name in names:
            path = root / BUCKET / slot / name
            if name.endswith("/"):
                path.mkdir(parents=True)
            else:
                old(path, b"")
        until(lambda: keys(client, Prefix=f"{slot}/") == [f"{slot}/{name}" for name in names])  # noqa: B023
        page = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{slot}/", Delimiter="/")
        assert [one["Prefix"] for one in page["CommonPrefixes"]] == [f"{slot}/{one}/" for one in ("a.c", "aa", "b")]


def test_13_9_what_no_directory_has_is_refused(client: Any) -> None:
    """13.9 Tags, ACLs and versions are answered 501 rather than dropped."""
    client.put_object(Bucket=BUCKET, Key="plain", Body=b"1")
    assert refused(client.put_object, Key="tagged", Body=b"1", Tagging="a=b") == "NotImplemented"
    assert refused(client.put_object, Key="public", Body=b"1", ACL="public-read") == "NotImplemented"
    assert refused(client.get_object_tagging, Key="plain") == "NotImplemented"
    assert refused(client.get_bucket_versioning) == "NotImplemented"
