"""`forebay serve` with `write = "back"`, short of room: as much as was said, over all workers, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.test_writeback import Client, at_origin, gateway_of
from tests.support.disks import fill_up, kill_disk, mortal_disk, mounted, small_disk
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually
from tests.support.writeback import body_bytes

MIB = 1024 * 1024
BUFFER_BYTES = 64 * MIB
BODY_BYTES = 6 * MIB


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        one.model.create_bucket("bucket")
        yield one


def gateway_with(origin: StrictOrigin, directory: Path, **slot: str) -> GatewayProcess:
    back = {"name": "back", "prefix": "s3://bucket/back/", "write": "back", "buffer": "64MiB", **slot}
    cache = {"persistent": True, "capacity": "72MiB"}
    return gateway_of(origin, directory, slots=[back], cache=cache)


def metric(gateway: GatewayProcess, name: str) -> float:
    text = httpx.get(f"{gateway.admin_url}/metrics", trust_env=False, timeout=ANSWER_SECONDS_MAX).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


@pytest.mark.slow
def test_all_workers_together_take_no_more_than_the_buffer(origin: StrictOrigin, tmp_path: Path) -> None:
    """Sixteen bodies at once, with the origin away: ten fit. Metrics say so; later all of them are at the origin."""
    bodies = {f"k{number}": os.urandom(BODY_BYTES) for number in range(16)}
    with gateway_with(origin, tmp_path / "cache") as gateway, ThreadPoolExecutor(16) as threads:
        client = Client(gateway)
        client.put("first", b"x")
        origin.stop()
        asked = threads.map(lambda name: client.ask("PUT", f"back/{name}", bodies[name]), bodies)
        answers = dict(zip(bodies, asked, strict=True))
        absorbed = [name for name, answer in answers.items() if answer.status_code == 200]
        assert len(absorbed) == BUFFER_BYTES // BODY_BYTES
        assert {answer.status_code for answer in answers.values()} == {200, 503}
        staged = body_bytes(tmp_path / "cache" / "writeback" / "staged")
        assert staged == len(absorbed) * BODY_BYTES
        eventually(lambda: metric(gateway, "forebay_writeback_pending_bytes") == staged)
        assert metric(gateway, "forebay_writeback_buffer_bytes") == BUFFER_BYTES
        assert metric(gateway, "forebay_writeback_pending_objects") == len(absorbed)
        assert metric(gateway, "forebay_writeback_oldest_age_seconds") > 0
        first = 1  # whose answer told what the bucket is like
        assert metric(gateway, "forebay_writeback_written_through_total") == first + len(bodies) - len(absorbed)
        origin.start()
        for name in bodies.keys() - absorbed:  # sent away until there is room, or the origin is known to be back
            eventually(lambda: client.ask("PUT", f"back/{name}", bodies[name]).status_code == 200)  # noqa: B023
        for name, body in bodies.items():
            eventually(lambda: (found := at_origin(origin, name)) is not None and found[1] == body)  # noqa: B023
        eventually(lambda: metric(gateway, "forebay_writeback_pending_bytes") == 0)


@pytest.mark.slow
def test_an_upload_larger_than_the_buffer(origin: StrictOrigin, tmp_path: Path) -> None:
    """By any worker, part by part, what does not fit goes straight to the origin; byte-equal there in the end."""
    parts = [os.urandom(BODY_BYTES) for _ in range(13)] + [b"end"]
    with gateway_with(origin, tmp_path / "cache") as gateway:
        client = Client(gateway)
        client.put("first", b"x")
        etag = client.upload("large", parts)
        eventually(lambda: at_origin(origin, "large") == (etag, b"".join(parts)))
        assert client.ask("GET", "back/large").content == b"".join(parts)


@pytest.mark.root
@pytest.mark.slow
def test_a_disk_that_dies_acknowledges_nothing_false(origin: StrictOrigin, tmp_path: Path) -> None:
    """It answers everything with EIO: no write is acknowledged by it. Mounted again, it has what was acknowledged."""
    mount_point, image = tmp_path / "disk", tmp_path / "image"
    kept = os.urandom(100_000)
    with mortal_disk(mount_point, image, 512 * MIB) as disk, gateway_with(origin, disk / "cache") as gateway:
        client = Client(gateway)
        client.put("first", b"x")
        origin.stop()
        assert client.put("kept", kept).headers["x-forebay-cache"] == "absorbed"
        kill_disk(disk)
        for number in range(6):
            assert client.ask("PUT", f"back/lost{number}", b"x").status_code == 503
    with mounted(mount_point, image), gateway_with(origin, mount_point / "cache") as gateway:
        client = Client(gateway)
        assert client.ask("GET", "back/kept").content == kept
        origin.start()
        eventually(lambda: (found := at_origin(origin, "kept")) is not None and found[1] == kept)
        assert client.ask("GET", "back/lost0").status_code == 404


@pytest.mark.root
@pytest.mark.parametrize("end", ["in order", "killed"])
def test_a_start_on_a_full_disk_goes_on_with_the_buffer(origin: StrictOrigin, tmp_path: Path, end: str) -> None:
    """By what was set aside: what was acknowledged is read, and flushed, while nobody makes room (5.6, 2.4)."""
    with (
        small_disk(tmp_path / "disk", 256 * MIB) as disk,
        gateway_with(origin, disk / "cache") as gateway,
    ):
        bodies = acknowledge_past_the_origin(origin, Client(gateway), disk)
        gateway.terminate() if end == "in order" else gateway.kill()
        fill_up(disk)
        gateway.start()
        client = Client(gateway)
        assert "THERE IS NO CACHE" not in gateway.log
        for name, body in bodies.items():
            assert client.ask("GET", f"back/{name}").content == body
        origin.start()
        for name, body in bodies.items():
            eventually(lambda: (found := at_origin(origin, name)) is not None and found[1] == body)  # noqa: B023


@pytest.mark.root
def test_a_start_without_any_room_is_refused(origin: StrictOrigin, tmp_path: Path) -> None:
    """Rather than that acknowledged objects are not there; and with some room again they all are."""
    with (
        small_disk(tmp_path / "disk", 256 * MIB) as disk,
        gateway_with(origin, disk / "cache") as gateway,
    ):
        bodies = acknowledge_past_the_origin(origin, Client(gateway), disk)
        gateway.terminate()
        (disk / "cache" / "writeback" / "ballast").unlink()
        others = fill_up(disk)
        for _ in range(2):
            with pytest.raises(AssertionError, match=r"cache\.directory .* is full .* make 4 MiB of room"):
                gateway.start()
            assert gateway.wait() == 1
        assert "THERE IS NO CACHE" not in gateway.log
        others.unlink()
        gateway.start()
        client = Client(gateway)
        for name, body in bodies.items():
            assert client.ask("GET", f"back/{name}").content == body


@pytest.mark.root
def test_a_worker_that_finds_no_room_does_not_end_the_buffer(origin: StrictOrigin, tmp_path: Path) -> None:
    """Killed on a disk that is full to the last byte: the others go on with what was acknowledged, until it is back."""
    with (
        small_disk(tmp_path / "disk", 256 * MIB) as disk,
        gateway_with(origin, disk / "cache") as gateway,
    ):
        client = Client(gateway)
        bodies = acknowledge_past_the_origin(origin, client, disk)
        buffer = disk / "cache" / "writeback"
        (buffer / "ballast").unlink()
        others = fill_up(disk)
        (buffer / "arriving").unlink()  # its room is freed when nobody has it mapped any more: none for another
        killed = gateway.kill_worker(0)
        eventually(lambda: "a process could not be started again" in gateway.log)
        for name, body in bodies.items():
            assert client.ask("GET", f"back/{name}").content == body
        others.unlink()
        gateway.wait_for_worker(0, other_than=killed)
        for name, body in bodies.items():
            assert client.ask("GET", f"back/{name}").content == body
        assert "THERE IS NO CACHE" not in gateway.log


def acknowledge_past_the_origin(origin: StrictOrigin, client: Client, disk: Path) -> dict[str, bytes]:
    """Writes that this node alone has: names and bodies. The room for the journal is set aside."""
    client.put("first", b"x")
    client.put("k0", b"older")
    eventually(lambda: (found := at_origin(origin, "k0")) is not None and found[1] == b"older")
    eventually((disk / "cache" / "writeback" / "ballast").exists)
    origin.stop()
    bodies = {f"k{number}": os.urandom(100_000) for number in range(10)}
    for name, body in bodies.items():
        assert client.put(name, body).headers["x-forebay-cache"] == "absorbed"
    return bodies
