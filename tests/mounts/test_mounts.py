"""File systems over the gateway, mounted by the examples: the work of data preparation, what they lack, and what is
where after fsync and close. docs/files.md tells users what is asserted here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.boto import boto3_client, read
from tests.mounts import work
from tests.support.gateway_process import GatewayProcess
from tests.support.mounts import KINDS, Mount
from tests.support.processes import children_of
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

BUCKET = "train"
WORK_SECONDS = 60.0
_KEYS = (ACCESS_KEY_ID, SECRET_ACCESS_KEY)
_BACK = {"mode": "read-write", "write": "back"}
_SLOTS: list[dict[str, Any]] = [
    {"name": kind, "prefix": f"s3://{BUCKET}/{kind}/", "consistency": "ttl", "negative_ttl": "60s", "index": True}
    for kind in ("s3fs", "rclone")
] + [{"name": "juicefs", "prefix": f"s3://{BUCKET}/juicefs/", "consistency": "immutable"}]

plain = pytest.mark.parametrize("mount", ["s3fs", "rclone"], indirect=True, scope="module")
"""Those whose files are objects of the same name."""


@pytest.fixture(scope="module")
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as running:
        running.model.create_bucket(BUCKET)
        yield running


@pytest.fixture(scope="module")
def gateway(origin: StrictOrigin) -> Iterator[GatewayProcess]:
    config: dict[str, Any] = {
        "origin": {
            "endpoint_url": origin.endpoint_url,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        },
        "cache": {"capacity": "1GiB", "persistent": True},
        "slots": [slot | _BACK for slot in _SLOTS],
    }
    with GatewayProcess(config) as running:
        yield running


@pytest.fixture(scope="module", params=KINDS)
def mount(request: pytest.FixtureRequest, gateway: GatewayProcess) -> Iterator[Mount]:
    with Mount(request.param, gateway.s3_url, f"{BUCKET}/{request.param}", _KEYS) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def direct(origin: StrictOrigin) -> Iterator[Any]:
    client = boto3_client(origin.endpoint_url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def through(gateway: GatewayProcess) -> Iterator[Any]:
    client = boto3_client(gateway.s3_url)
    yield client
    client.close()


def _do(mount: Mount, name: str, *arguments: str) -> str:
    """Let another process do a piece of work in a directory of its own."""
    words: list[str | Path] = ["-m", "tests.mounts.work", name, mount.where / name, *arguments]
    return mount.run("python", *words, timeout_seconds=WORK_SECONDS)


def _keys(client: Any, prefix: str) -> set[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    return {one["Key"] for page in pages for one in page.get("Contents", [])}


def _wait_for(client: Any, key: str) -> None:
    eventually(lambda: key in _keys(client, key), f"{key} never came")


@pytest.mark.parametrize("name", [one.__name__ for one in work.WORK if one is not work.git])
def test_work_of_data_preparation(mount: Mount, name: str) -> None:
    """Each mount does all of it, and reads back what it wrote."""
    _do(mount, name)


@pytest.mark.slow
def test_git(mount: Mount) -> None:
    """Slow through s3fs: git writes and renames many files, each of which takes s3fs several requests."""
    _do(mount, "git")


@plain
def test_a_file_is_an_object_and_an_object_is_a_file(mount: Mount, through: Any, direct: Any) -> None:
    """What is written appears under its own key, at Forebay and then at the bucket; what others put there is read."""
    prefix = f"{mount.kind}/read_of_others/"
    through.put_object(Bucket=BUCKET, Key=f"{prefix}of-others", Body=work.content("of-others", 100_000))
    _do(mount, "read_of_others")
    _do(mount, "write_and_read")
    key, data = f"{mount.kind}/write_and_read/large", work.content("large", 3 * work.MIB + 17)
    for client in (through, direct):
        _wait_for(client, key)
        assert read(client, BUCKET, key) == data


@pytest.mark.parametrize("mount", ["juicefs"], indirect=True, scope="module")
def test_juicefs_keeps_contents_in_objects_of_its_own(mount: Mount, through: Any, direct: Any) -> None:
    """After fsync the bytes are at Forebay, and then at the bucket; no object bears a file's name."""
    _do(mount, "write_synced")
    data = work.content("synced", 10_000)
    assert data in _contents(through, "juicefs/chunks/")
    eventually(lambda: data in _contents(direct, "juicefs/chunks/"), "the bucket never got it")
    assert not any("synced" in key for key in _keys(direct, "juicefs/"))


def _contents(client: Any, prefix: str) -> list[bytes]:
    """Of small objects; JuiceFS removes some meanwhile."""
    found = []
    for key in _keys(client, prefix):
        try:
            found.append(read(client, BUCKET, key))
        except client.exceptions.NoSuchKey:
            continue
    return found


@pytest.mark.parametrize("mount", ["s3fs"], indirect=True, scope="module")
def test_s3fs_has_sent_a_file_when_fsync_returns(mount: Mount, through: Any, direct: Any) -> None:
    """Forebay has acknowledged it: it is on the node's disk, synced. The bucket gets it by itself."""
    _do(mount, "write_synced")
    for client in (through, direct):
        if client is direct:
            _wait_for(direct, "s3fs/write_synced/synced")
        assert read(client, BUCKET, "s3fs/write_synced/synced") == work.content("synced", 10_000)


@pytest.mark.parametrize("mount", ["rclone"], indirect=True, scope="module")
def test_rclone_sends_a_file_after_fsync_has_returned(
    mount: Mount, gateway: GatewayProcess, through: Any, direct: Any
) -> None:
    """fsync and close succeed while the gateway stands still, so they promise nothing; rclone sends it later."""
    pids = [gateway.pid, *children_of(gateway.pid)]
    try:
        _do(mount, "write_synced", *map(str, pids))
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
    for client in (through, direct):
        _wait_for(client, "rclone/write_synced/synced")
        assert read(client, BUCKET, "rclone/write_synced/synced") == work.content("synced", 10_000)


_LACKS = {
    "s3fs": {"hard link": "ENOTSUP", "extended attribute": "ENOTSUP", "truncate by path": "fails silently"},
    "rclone": {
        "hard link": "EPERM",
        "chmod": "fails silently",
        "extended attribute": "ENOTSUP",
        "FIFO": "EIO",
        "truncate by path": "EIO",
        "unlink of an open file": "fails silently",
    },
    "juicefs": {"extended attribute": "ENOTSUP"},
}
"""docs/files.md says so."""

_OF_SOME_VERSIONS = {"s3fs": {"truncate by path": "fails silently"}}
"""Debian 12's 1.90 leaves zeros."""


def test_what_a_mount_lacks(mount: Mount) -> None:
    """A symbolic link, a hard link, a mode, … works, is refused, or silently does something else: as is documented."""
    outcomes = json.loads(_do(mount, "limits"))
    found = {name: outcome for name, outcome in outcomes.items() if outcome != "works"}
    assert found | _OF_SOME_VERSIONS.get(mount.kind, {}) == _LACKS[mount.kind]


def test_what_was_written_is_there_after_it_is_mounted_anew(mount: Mount, through: Any) -> None:
    """Nothing depends on caches of the process that wrote it, once it has sent everything."""
    _do(mount, "checkpoint")
    if mount.kind == "rclone":
        _wait_for(through, "rclone/checkpoint/step-1.pt")
    before = mount.run("sha256sum", mount.where / "checkpoint" / "step-1.pt", timeout_seconds=WORK_SECONDS)
    mount.unmount()
    mount.forget()
    mount.mount()
    assert before == mount.run("sha256sum", mount.where / "checkpoint" / "step-1.pt", timeout_seconds=WORK_SECONDS)


def test_a_mount_that_hangs_holds_nobody(origin: StrictOrigin) -> None:
    """What works in it is ended after its time, and the mount is taken away, though its daemon stands still."""
    with Mount("s3fs", origin.endpoint_url, f"{BUCKET}/hanging", _KEYS) as mount:
        for pid in mount.daemons():
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            mount.run("ls", mount.where, timeout_seconds=1)
    assert mount.daemons() == []
