"""The disk dies or fills up under a running gateway: every byte arrives, from the origin (docs/semantics.md, 8.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.serve.claim import closed_mark
from tests.support.cache_label import cache_label
from tests.support.disks import fill_up, kill_disk, mortal_disk, remount_read_only, remount_writable, small_disk
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

BUCKET = "bucket"
WORKERS = 2
ATTEMPTS = 4
"""What SDKs do about a broken answer; the first that meets a dead disk may be one."""

OBJECTS = {f"object/{number}": 1_500_000 + 4097 * number for number in range(8)}


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        for seed, (key, size_bytes) in enumerate(OBJECTS.items()):
            origin.model.put_generated(BUCKET, key, size_bytes, seed)
        yield origin


@contextmanager
def gateway_on(
    directory: Path, origin: StrictOrigin, cache: Mapping[str, Any], slots: list[Mapping[str, Any]] | None = None
) -> Iterator[GatewayProcess]:
    config: dict[str, Any] = {
        "server": {"workers": WORKERS, "allow_unsigned": True},
        "origin": origin.settings,
        "cache": {"directory": str(directory), "block_size": "256KiB", **cache},
        "slots": slots or [],
    }
    try:
        with GatewayProcess(config, directory=directory) as gateway:
            yield gateway
    finally:
        closed_mark(directory).unlink(missing_ok=True)


def content_of(origin: StrictOrigin, key: str) -> bytes:
    return origin.model.buckets[BUCKET].objects[key].content.read(0, OBJECTS[key])


def get(client: httpx.Client, key: str) -> bytes:
    """A whole answer; one that breaks off is asked for again, as clients do. A wrong one is nowhere hidden by that."""
    for attempt in range(ATTEMPTS):
        try:
            answer = client.get(f"/{BUCKET}/{key}")
        except httpx.RemoteProtocolError:
            assert attempt + 1 < ATTEMPTS, "broken off again and again"
            continue
        assert answer.status_code == 200, answer.text
        return answer.content
    raise AssertionError


def read_all(gateway: GatewayProcess, origin: StrictOrigin) -> None:
    """By new connections, so that every worker comes to it."""
    for key in OBJECTS:
        for _ in range(WORKERS):
            with httpx.Client(base_url=gateway.s3_url, trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
                assert get(client, key) == content_of(origin, key)


def wait_for_state(gateway: GatewayProcess, state: str) -> None:
    eventually(lambda: gateway.status()["cache"]["disk"]["state"] == state, f"the disk is never {state}")


def wait_for_hits(gateway: GatewayProcess) -> None:
    """Each worker finds out by itself that the disk is well again, and a fill may end after its reader's last byte."""
    with httpx.Client(base_url=gateway.s3_url, trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
        eventually(lambda: {outcome(client, key) for key in OBJECTS} == {"hit"})


def outcome(client: httpx.Client, key: str) -> str:
    return cache_label(client.get(f"/{BUCKET}/{key}"))


@pytest.mark.root
def test_8_2_a_disk_that_dies_under_the_gateway(tmp_path: Path, origin: StrictOrigin) -> None:
    """The file system answers everything with EIO: clients get every byte, the status says so, the end is orderly."""
    with (
        mortal_disk(tmp_path / "disk", tmp_path / "image") as disk,
        gateway_on(disk / "cache", origin, {"capacity": "64MiB"}) as gateway,
    ):
        read_all(gateway, origin)
        assert gateway.status()["cache"]["disk"]["state"] == "well"
        kill_disk(disk)
        for _ in range(3):
            read_all(gateway, origin)
        wait_for_state(gateway, "failing")
        asked = len(origin.request_lines)
        read_all(gateway, origin)
        assert len(origin.request_lines) - asked >= 2 * WORKERS * len(OBJECTS), "a HEAD and a GET each"
        assert gateway.log.count("is not used for now") <= WORKERS + 1


@pytest.mark.root
@pytest.mark.slow
def test_8_2_a_disk_that_somebody_else_fills_under_the_gateway(tmp_path: Path, origin: StrictOrigin) -> None:
    """No space: hits stay hits, the rest comes from the origin; when there is room again, everything is as it was."""
    with (
        small_disk(tmp_path / "disk", 64 * 1024**2) as disk,
        gateway_on(disk / "cache", origin, {"capacity": "40MiB"}) as gateway,
    ):
        kept = list(OBJECTS)[:4]
        with httpx.Client(base_url=gateway.s3_url, trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
            for key in kept:
                get(client, key)
        others = fill_up(disk)
        read_all(gateway, origin)
        others.unlink()
        wait_for_state(gateway, "well")
        read_all(gateway, origin)
        wait_for_hits(gateway)


@pytest.mark.root
def test_8_2_a_worker_that_cannot_come_back_to_a_dead_disk_works_without(tmp_path: Path, origin: StrictOrigin) -> None:
    """A worker killed after the disk died is replaced, and from then on no worker uses the directory."""
    with (
        mortal_disk(tmp_path / "disk", tmp_path / "image") as disk,
        gateway_on(disk / "cache", origin, {"capacity": "64MiB"}) as gateway,
    ):
        read_all(gateway, origin)
        kill_disk(disk)
        gateway.wait_for_worker(0, other_than=gateway.kill_worker(0))
        wait_for_state(gateway, "closed")
        read_all(gateway, origin)
        status = gateway.status()
        assert "Input/output error" in status["gateway"]["closed"]
        assert status["cache"]["disk"]["processes"].get("closed", 0) >= 1
        assert gateway.log.count("THERE IS NO CACHE") == 1


@pytest.mark.root
@pytest.mark.parametrize("what", ["dead", "full", "read-only"])
def test_8_2_a_start_on_a_bad_disk(tmp_path: Path, origin: StrictOrigin, what: str) -> None:
    """The gateway starts, serves, writes, and says loudly that there is no cache."""
    with ExitStack() as stack:
        if what == "dead":
            disk = stack.enter_context(mortal_disk(tmp_path / "disk", tmp_path / "image"))
            kill_disk(disk)
        else:
            disk = stack.enter_context(small_disk(tmp_path / "disk", 4 * 1024**2))
            fill_up(disk) if what == "full" else remount_read_only(disk)
        with gateway_on(disk / "cache", origin, {"capacity": "64MiB"}) as gateway:
            wait_for_state(gateway, "closed")
            read_all(gateway, origin)
            with httpx.Client(base_url=gateway.s3_url, trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
                assert client.put(f"/{BUCKET}/new", content=b"new").status_code == 200
                assert client.get(f"/{BUCKET}/new").content == b"new"
                assert client.get(f"{gateway.admin_url}/readyz").json()["cache_disk"] == "closed"
            assert gateway.log.count("THERE IS NO CACHE") == 1


@pytest.mark.root
@pytest.mark.slow
def test_2_3_what_was_written_without_the_directory_is_not_forgotten_with_it(
    tmp_path: Path, origin: StrictOrigin
) -> None:
    """An immutable slot remembers an object; it is written while the disk is read-only; afterwards it is seen."""
    slot = {"name": "still", "prefix": f"s3://{BUCKET}/", "consistency": "immutable"}
    with (
        small_disk(tmp_path / "disk", 64 * 1024**2) as disk,
        gateway_on(disk / "cache", origin, {"capacity": "32MiB"}, [slot]) as gateway,
    ):
        first = next(iter(OBJECTS))
        read_all(gateway, origin)
        gateway.terminate()
        remount_read_only(disk)
        gateway.start()
        with httpx.Client(base_url=gateway.s3_url, trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
            assert client.put(f"/{BUCKET}/{first}", content=b"another").status_code == 200
            assert client.get(f"/{BUCKET}/{first}").content == b"another"
        gateway.terminate()
        remount_writable(disk)
        gateway.start()
        assert gateway.status()["cache"]["disk"]["state"] == "well"
        with httpx.Client(base_url=gateway.s3_url, trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
            assert client.get(f"/{BUCKET}/{first}").content == b"another"
            assert client.get(f"/{BUCKET}/{list(OBJECTS)[1]}").headers["x-forebay-cache"] == "hit"


def test_a_mistake_ends_the_start(tmp_path: Path, origin: StrictOrigin) -> None:
    """A file in the place of the directory is nothing that a disk comes to by itself."""
    (tmp_path / "file").write_text("")
    expected = pytest.raises(AssertionError, match=r"cache\.directory .*file.* cannot be used")
    with expected, gateway_on(tmp_path / "file", origin, {"capacity": "64MiB"}):
        pass
