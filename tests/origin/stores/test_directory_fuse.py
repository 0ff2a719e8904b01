"""A directory on a FUSE file system that can do little, lies about times, and hangs. Mounting takes root."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.origin.origins import ask, xml
from tests.origin.stores.asking import PART, begin, complete, litter, md5_etag, part, put
from tests.support.directory_origin import BUCKET, DirectoryOrigin
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.poor_file_system import PoorFileSystem, poor_file_system

pytestmark = pytest.mark.root

FIRST_BYTE_SECONDS = 1.0


@pytest.fixture
def poor(tmp_path: Path) -> Iterator[PoorFileSystem]:
    with poor_file_system(tmp_path / "source", tmp_path / "mount") as mounted:
        yield mounted


async def test_objects_are_written_without_attributes_and_links(poor: PoorFileSystem) -> None:
    """13.2, 13.3 With their MD5 and metadata, under conditions, and of parts."""
    nas = DirectoryOrigin(poor.mount_point)
    assert (await put(nas, "a/b", b"ours", if_none_match="*", x_amz_meta_step="7")).status == 200
    assert (await put(nas, "a/b", b"other", if_none_match="*")).status == 412
    head = await ask(nas, "HEAD", BUCKET, "a/b")
    assert (head.headers["etag"], head.headers["x-amz-meta-step"]) == (md5_etag(b"ours"), "7")
    parts = {1: os.urandom(PART), 2: os.urandom(PART), 3: os.urandom(10)}
    upload_id = await begin(nas, "a/c")
    etags = {one: (await part(nas, upload_id, one, data, "a/c")).headers["etag"] for one, data in parts.items()}
    assert (await complete(nas, upload_id, etags, "a/c")).status == 200
    assert (await ask(nas, "GET", BUCKET, "a/c")).body == b"".join(parts.values())
    listed = xml((await ask(nas, "GET", BUCKET, query=[("list-type", "2")])).body)
    assert [node.text for node in listed.findall("Contents/Key")] == ["a/b", "a/c"]
    for key in ("a/b", "a/c"):
        assert (await ask(nas, "DELETE", BUCKET, key)).status == 204
    assert [name for name in litter(nas) if not name.startswith("meta/")] == []
    await nas.aclose()


async def test_times_of_whole_seconds_name_no_version_before_they_have_settled(poor: PoorFileSystem) -> None:
    """13.1 A change within the second, of the same size, has the same token: so it has no strong ETag until then."""
    nas = DirectoryOrigin(poor.mount_point)
    (poor.source / BUCKET / "file").write_bytes(b"one")
    first = await ask(nas, "GET", BUCKET, "file")
    assert first.headers["etag"].startswith("W/")
    async with asyncio.timeout(ANSWER_SECONDS_MAX):
        while (settled := await ask(nas, "GET", BUCKET, "file")).headers["etag"].startswith("W/"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    (poor.source / BUCKET / "file").write_bytes(b"two")
    changed = await ask(nas, "GET", BUCKET, "file")
    assert changed.headers["etag"].removeprefix("W/") != settled.headers["etag"]
    await nas.aclose()


def test_13_7_a_file_server_that_hangs_harms_nobody_else(poor: PoorFileSystem, tmp_path: Path) -> None:
    """Its requests get 503 in time, and then at once; those of another directory are answered; when it answers again,
    so does the gateway. (No signal ends a thread whose request a FUSE server has: so the gateway cannot be stopped.)"""
    (poor.source / "hung").mkdir()
    (tmp_path / "sound").mkdir()
    (poor.source / "hung" / "file").write_bytes(b"there")
    (tmp_path / "sound" / "file").write_bytes(b"sound")
    config: dict[str, Any] = {
        "server": {"allow_unsigned": True},
        "origin": {"endpoint_url": "http://127.0.0.1:1", "first_byte_timeout": f"{FIRST_BYTE_SECONDS:g}s"},
        "buckets": [
            {"name": "hung", "endpoint_url": f"file://{poor.mount_point}"},
            {"name": "sound", "endpoint_url": f"file://{tmp_path}"},
        ],
    }
    with GatewayProcess(config) as gateway, httpx.Client(timeout=ANSWER_SECONDS_MAX) as client:

        def get(bucket: str, key: str) -> tuple[int, float]:
            started = time.monotonic()
            status = client.get(f"{gateway.s3_url}/{bucket}/{key}").status_code
            return status, time.monotonic() - started

        assert get("hung", "file")[0] == 200
        poor.hang()
        seen = [get("hung", f"file-{number}") for number in range(4)]
        assert [status for status, _ in seen] == [503] * 4
        assert {get("sound", "file")[0] for _ in range(20)} == {200}
        poor.go_on()
        deadline = time.monotonic() + ANSWER_SECONDS_MAX
        while get("hung", "file")[0] != 200:
            assert time.monotonic() < deadline
