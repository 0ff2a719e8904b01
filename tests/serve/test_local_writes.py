"""`forebay serve` with `write = "scratch"`, `flush` and `keep_last`: what stays here does so over a kill -9."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.s3.requests import Operation
from tests.serve.test_writeback import Client, at_origin, gateway_of
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.faults import Answer, on
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

SHARD_BYTES = 8 * 1024 * 1024


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        one.model.create_bucket("bucket")
        yield one


def with_slot(
    origin: StrictOrigin, directory: Path, cache: dict[str, Any] | None = None, **slot: Any
) -> GatewayProcess:
    slots = [{"name": "back", "prefix": "s3://bucket/back/", **slot}]
    return gateway_of(origin, directory, cache={"persistent": True, **(cache or {})}, slots=slots)


def checkpoints(gateway: GatewayProcess) -> dict[str, dict[str, Any]]:
    """Directory → what is shown of it."""
    answer = httpx.get(f"{gateway.admin_url}/api/v1/checkpoints", trust_env=False, timeout=30.0).raise_for_status()
    return {one["prefix"].removeprefix("back/run/").rstrip("/"): one for one in answer.json()["checkpoints"]}


def save(client: Client, step: int, content: bytes = b"shard") -> None:
    client.put(f"run/step-{step}/__0_0.distcp", content)
    client.put(f"run/step-{step}/.metadata", b"manifest")


@pytest.mark.slow
def test_scratch_survives_a_kill_and_never_reaches_the_bucket(origin: StrictOrigin, tmp_path: Path) -> None:
    """Acknowledged while the origin is away, there behind a kill -9, and named as what it is; `forebay flush` says
    that it is not durable."""
    parts = [os.urandom(5 * 1024 * 1024), os.urandom(1234)]
    with with_slot(origin, tmp_path / "cache", write="scratch") as gateway:
        client = Client(gateway)
        origin.stop()
        save(client, 1)
        etag = client.upload("large", parts)
        gateway.kill()
        gateway.start()
        origin.start()
        head = client.ask("HEAD", "back/large")
        assert (head.headers["etag"], head.headers["x-forebay-durable"]) == (etag, "false")
        assert client.ask("GET", "back/large").content == b"".join(parts)
        [one] = checkpoints(gateway).values()
        assert (one["state"], one["bytes_local"], one["exposed_seconds"]) == ("local", one["bytes"], None)
        flushed = gateway.command("flush", "s3://bucket/back/run/step-1", "--wait")
        assert (flushed.returncode, "not durable" in flushed.stderr) == (1, True)
        assert client.ask("DELETE", "back/large").status_code == 204
        assert client.ask("GET", "back/large").status_code == 404
    assert not [key for key in origin.model.buckets["bucket"].objects if key.startswith("back/")]


@pytest.mark.slow
def test_the_latest_is_sent_and_what_it_supersedes_is_not(origin: StrictOrigin, tmp_path: Path) -> None:
    """Nothing is left out before a newer one is durable; what is left out is read here, also behind a kill -9."""
    with with_slot(origin, tmp_path / "cache", write="back", flush="latest") as gateway:
        client = Client(gateway)
        client.put("first", b"x")
        held = on(Operation.PUT_OBJECT, key="back/run/step-1/__0_0.distcp")
        fault = origin.run_inside(lambda: origin.model.inject(held, Answer(403, "AccessDenied"), times=None))
        save(client, 1)
        save(client, 2)
        eventually(lambda: checkpoints(gateway)["step-2"]["state"] == "durable")
        eventually(lambda: checkpoints(gateway)["step-1"]["state"] == "local")
        gateway.kill()
        gateway.start()
        fault.times = 0
        assert client.ask("GET", "back/run/step-1/__0_0.distcp").content == b"shard"
        save(client, 3)
        eventually(lambda: checkpoints(gateway)["step-3"]["state"] == "durable")
        assert checkpoints(gateway)["step-1"]["state"] == "local"
    assert at_origin(origin, "run/step-1/.metadata") is None


@pytest.mark.slow
def test_the_newest_checkpoints_stay_in_the_cache_whatever_is_read(origin: StrictOrigin, tmp_path: Path) -> None:
    """`keep_last = 2`: the last two are read without the origin, behind a restart, after more was read than there is
    room for; the one before has given way, and so has one that was deleted."""
    kept = {step: os.urandom(SHARD_BYTES) for step in (1, 2, 3)}
    for number in range(8):
        origin.model.put("bucket", f"back/data/{number}", bytes(SHARD_BYTES))
    with with_slot(
        origin, tmp_path / "cache", {"capacity": "48MiB", "block_size": "1MiB"}, write="back", keep_last=2
    ) as gateway:
        client = Client(gateway)
        client.put("first", b"x")
        for step, content in kept.items():
            save(client, step, content)
            eventually(lambda: checkpoints(gateway)[f"step-{step}"]["state"] == "durable")  # noqa: B023
        eventually(lambda: [one["kept"] for one in checkpoints(gateway).values()] == [False, True, True])
        assert gateway.status()["pins"] == []
        gateway.kill()
        gateway.start()
        eventually(lambda: [one["kept"] for one in checkpoints(gateway).values()] == [False, True, True])
        for number in range(8):
            assert client.ask("GET", f"back/data/{number}").status_code == 200
        for step in (2, 3):
            answer = client.ask("GET", f"back/run/step-{step}/__0_0.distcp")
            assert answer.content == kept[step]
            assert answer.headers["x-forebay-cache"].startswith("hit"), answer.headers
        answer = client.ask("GET", "back/run/step-1/__0_0.distcp")
        assert not answer.headers["x-forebay-cache"].startswith("hit")
        for name in ("__0_0.distcp", ".metadata"):
            assert client.ask("DELETE", f"back/run/step-3/{name}").status_code == 204

        def is_kept_again() -> bool:  # what is read comes into the cache, and stays once all of it is there
            for name in ("__0_0.distcp", ".metadata"):
                assert client.ask("GET", f"back/run/step-1/{name}").status_code == 200
            return [one["kept"] for one in checkpoints(gateway).values()] == [True, True]

        eventually(is_kept_again)


@pytest.mark.slow
def test_what_a_slot_says_of_its_checkpoints_changes_while_it_runs(origin: StrictOrigin, tmp_path: Path) -> None:
    """`keep_last` is in force for what is in the cache already, and no more when it is gone; scratch that is made a
    slot that writes back sends what it has."""
    slots: list[dict[str, Any]] = []
    with gateway_of(origin, tmp_path / "cache", cache={"persistent": True}, slots=slots) as gateway:

        def say(**slot: Any) -> None:
            url, document = f"{gateway.admin_url}/api/v1/slots/back", {"prefix": "s3://bucket/back/", **slot}
            httpx.put(url, json=document, trust_env=False, timeout=30.0).raise_for_status()

        client = Client(gateway)
        say(write="scratch")
        save(client, 1)
        say(write="back")
        eventually(lambda: checkpoints(gateway)["step-1"]["state"] == "durable")
        client.put("first", b"x")  # the first write to a bucket goes through, and past the cache
        save(client, 2)
        eventually(lambda: checkpoints(gateway)["step-2"]["state"] == "durable")
        say(write="back", keep_last=1)
        eventually(lambda: [one["kept"] for one in checkpoints(gateway).values()] == [False, True])
        say(write="back")
        eventually(lambda: [one["kept"] for one in checkpoints(gateway).values()] == [False, False])


@pytest.mark.slow
def test_what_a_scratch_slot_leaves_is_told_as_what_it_is(origin: StrictOrigin, tmp_path: Path) -> None:
    """The slot is gone with a restart: the log, `forebay status` and the metrics say that its objects are here and not
    to be sent, and nobody says that Forebay sends them."""
    with with_slot(origin, tmp_path / "cache", write="scratch") as gateway:
        Client(gateway).put("left", b"x" * 1000)
    with gateway_of(origin, tmp_path / "cache", cache={"persistent": True}, slots=[]) as gateway:
        [told] = [line for line in gateway.log.splitlines() if "a slot that is gone" in line]
        assert '"slot":"back","objects":1' in told
        assert "the origin does not have yet" not in gateway.log
        assert "flushes what it acknowledged" not in gateway.log
        status = gateway.command("status")
        assert "not at the origin yet" not in status.stdout
        assert "back: nothing to send; not to be sent: 1 object, 1000 B" in status.stdout
        for name, value in (("local_bytes", 1000), ("local_objects", 1), ("pending_objects", 0)):
            line = f'forebay_writeback_{name}{{slot="(gone)"}} {value}.0'
            eventually(lambda: line in httpx.get(f"{gateway.admin_url}/metrics", timeout=30).text)  # noqa: B023
