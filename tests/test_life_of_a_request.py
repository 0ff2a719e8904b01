"""docs/life-of-a-request.md walks the way of a request; how many files that way leads through does not grow."""

from __future__ import annotations

import asyncio
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from gateway.app.node import background_services, s3_application
from gateway.config import Settings
from gateway.config.live import LiveSettings
from gateway.policy.slots import Prefix
from gateway.shared.recent_requests import MINUTE_SECONDS, RecentRequests
from tests.support.prepared_process import PreparedProcess
from tests.support.serving import serving
from tests.support.settings import load
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY
from tests.support.visited_files import Visits, Watch

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENT = REPOSITORY / "docs" / "life-of-a-request.md"
KEY = ("caller", "a-secret-of-the-caller")
BUCKET = "bucket"
OBJECT_BYTES = 3_000_000
WALK = DOCUMENT.read_text(encoding="utf-8")
BUDGETS = {name: int(count) for name, count in re.findall(r"^\| ([A-Za-z ]+) \| (\d+) \|$", WALK, re.MULTILINE)}
SAMPLES_MAX = 12

CONFIGURATION = """
[origin]
endpoint_url = "{origin}"
access_key_id = "{access_key_id}"
secret_access_key = "{secret}"
[cache]
directory = "{directory}/cache"
capacity = "1GiB"
persistent = true
[[slots]]
name = "data"
prefix = "s3://bucket/data/"
consistency = "immutable"
[[slots]]
name = "back"
prefix = "s3://bucket/back/"
write = "back"
buffer = "256MiB"
[[credentials]]
access_key_id = "caller"
secret_access_key = "a-secret-of-the-caller"
allow = ["s3://"]
"""


@dataclass(frozen=True)
class World:
    """A gateway in this process, its origin in another."""

    watch: Watch
    live: LiveSettings
    client: Any
    origin: Any
    recent: RecentRequests

    async def call(self, name: str, **parameters: Any) -> Any:
        return await asyncio.to_thread(lambda: getattr(self.client, name)(Bucket=BUCKET, **parameters))

    async def read(self, key: str, **parameters: Any) -> bytes:
        found = await self.call("get_object", Key=key, **parameters)
        content: bytes = await asyncio.to_thread(found["Body"].read)
        return content

    async def visits(self, ask: Callable[[], Any]) -> Visits:
        """What one request runs, less what runs anyhow."""
        with self.watch.visits() as idle:
            await asyncio.sleep(1.2)
        self.recent.minute, self.recent.slow_seconds = int(time.time()) // MINUTE_SECONDS, math.inf
        with self.watch.visits() as found:  # none is among the slowest of its minute, however long watching takes
            await ask()
            await asyncio.sleep(0.1)  # what goes on behind the answer
        found.functions -= idle.functions
        return found


@contextmanager
def an_origin() -> Iterator[str]:
    process = PreparedProcess(["tests.support.strict_origin", "--bucket", BUCKET], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]
    finally:
        process.kill()
        process.communicate()


def client_of(url: str, key: tuple[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        config=Config(retries={"max_attempts": 1}, request_checksum_calculation="when_required"),
    )


@contextmanager
def settings_before_an_origin(tmp_path: Path) -> Iterator[tuple[Settings, str]]:
    with an_origin() as url:
        filled = CONFIGURATION.format(
            origin=url, access_key_id=ACCESS_KEY_ID, secret=SECRET_ACCESS_KEY, directory=tmp_path
        )
        yield load(tmp_path, filled).settings, url


@contextmanager
def a_watch() -> Iterator[Watch]:
    watch = Watch()
    try:
        yield watch
    finally:
        watch.close()


@asynccontextmanager
async def a_world(settings: Settings, origin_url: str, watch: Watch) -> AsyncIterator[World]:
    live = LiveSettings(settings)
    async with (
        s3_application(live, worker=0, instance_id="0123456789abcdef") as app,
        serving(app) as running,
    ):
        client = client_of(f"http://127.0.0.1:{running.port}", KEY)
        yield World(watch, live, client, client_of(origin_url, (ACCESS_KEY_ID, SECRET_ACCESS_KEY)), app.recent)


async def flush_visits(settings: Settings, watch: Watch) -> Visits:
    """What the background process runs until nothing is pending, and a second longer."""
    async with background_services(LiveSettings(settings), instance_id="0123456789abcdef") as services:
        assert services.flushing is not None
        with watch.visits() as found:
            flushing = asyncio.create_task(services.flushing.run())
            try:
                for _ in range(600):
                    if (await services.writeback.progress(Prefix(BUCKET), 2**40)).objects == 0:
                        break
                    await asyncio.sleep(0.1)
                else:
                    raise AssertionError("not flushed in a minute")
                await asyncio.sleep(1.2)
            finally:
                flushing.cancel()
                await asyncio.gather(flushing, return_exceptions=True)
    return found


def start_visits(settings_text: str, directory: Path) -> list[str]:
    """What the supervisor runs from its command line to readiness, and until it has stopped."""
    config, visited = directory / "start.toml", directory / "visited"
    config.write_text(settings_text + "[server]\nport = 0\n[admin]\nport = 0\n", encoding="utf-8")
    command = [sys.executable, "-m", "tests.support.watched_start", "serve", "--config", str(config)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
        env=os.environ | {"VISITED": str(visited)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"forebay: S3 on ")
        process.terminate()
        assert process.wait(60) == 0
    return visited.read_text().split()


async def within(sample: Callable[[int], Awaitable[Visits]], way: str) -> int:
    """Return how many files all of some samples have been in: as few samples as show that the budget holds.

    What is done every few seconds falls into one sample, and what waits for a busy machine goes further in another.
    """
    files = set((await sample(0)).files)
    for number in range(1, SAMPLES_MAX):
        if len(files) <= BUDGETS[way]:
            break
        files &= set((await sample(number)).files)
    return len(files)


@pytest.mark.slow
def test_the_way_of_a_request_does_not_grow(tmp_path: Path) -> None:
    """In files below `gateway/`, with write-back configured; periodic work left aside."""

    async def scenario(settings: Settings, url: str, watch: Watch) -> dict[str, int]:
        async with a_world(settings, url, watch) as world:
            for number in range(2):
                content = bytes(OBJECT_BYTES)
                await asyncio.to_thread(world.origin.put_object, Bucket=BUCKET, Key=f"data/{number}", Body=content)
            for _ in range(3):
                assert len(await world.read("data/0")) == OBJECT_BYTES
                await world.call("list_objects_v2", Prefix="data/")
            await world.read("data/1", Range="bytes=10-1000000")  # what is imported at the first time
            seen = {"warm GET": await within(lambda _: world.visits(lambda: world.read("data/0")), "warm GET")}
            for number in range(2, 2 + SAMPLES_MAX):
                content = bytes(OBJECT_BYTES)
                await asyncio.to_thread(world.origin.put_object, Bucket=BUCKET, Key=f"data/{number}", Body=content)

            def cold(number: int) -> Awaitable[Visits]:
                return world.visits(partial(world.read, f"data/{2 + number}", Range="bytes=1000000-2000000"))

            seen["cold GET"] = await within(cold, "cold GET")
            for number in range(9 + SAMPLES_MAX):
                small = {"Key": f"data/s{number}", "Body": bytes(50_000)}
                await asyncio.to_thread(partial(world.origin.put_object, Bucket=BUCKET, **small))
            for number in range(9):  # so many sizes are seen before an unknown object is asked for as a whole
                await world.read(f"data/s{number}")
            seen["small cold GET"] = await within(
                lambda number: world.visits(partial(world.read, f"data/s{9 + number}")), "small cold GET"
            )
            listing = partial(world.call, "list_objects_v2", Prefix="data/")
            seen["LIST"] = await within(lambda _: world.visits(listing), "LIST")
            await world.call("put_object", Key="back/first", Body=b"1")
            uploads = [
                (await world.call("create_multipart_upload", Key=f"back/{n}"))["UploadId"]
                for n in range(1 + SAMPLES_MAX)
            ]

            async def part(number: int, upload: int) -> str:
                body = bytes(6_000_000)
                named = {"Key": f"back/{upload}", "UploadId": uploads[upload]}
                return str((await world.call("upload_part", PartNumber=number, Body=body, **named))["ETag"])

            async def complete(upload: int, etag: str) -> None:
                parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
                named = {"Key": f"back/{upload}", "UploadId": uploads[upload]}
                await world.call("complete_multipart_upload", MultipartUpload=parts, **named)

            async def completed(number: int) -> Visits:
                etag = await part(1, 1 + number)
                return await world.visits(lambda: complete(1 + number, etag))

            await complete(0, await part(1, 0))
            seen["part upload"] = await within(lambda number: world.visits(lambda: part(2 + number, 1)), "part upload")
            seen["Complete"] = await within(completed, "Complete")
            seen["slot change"] = await within(  # in a worker, whose parts follow
                lambda number: world.visits(partial(world.live.change, with_weight(settings, 2 + number))),
                "slot change",
            )
        pending = await flush_visits(settings, watch)
        idle = await flush_visits(settings, watch)
        pending.functions -= idle.functions
        return seen | {"flush": len(pending.files)}

    with settings_before_an_origin(tmp_path) as (settings, url), a_watch() as watch:
        visited = asyncio.run(scenario(settings, url, watch))
        visited["start"] = len(start_visits((tmp_path / "forebay.toml").read_text(), tmp_path))
    assert visited.keys() == BUDGETS.keys()
    print(visited)
    assert {name: count for name, count in visited.items() if count > BUDGETS[name]} == {}


def with_weight(settings: Settings, weight: int) -> Settings:
    """The same, but for the first slot's weight."""
    slots = [settings.slots[0].model_copy(update={"weight": weight}), *settings.slots[1:]]
    return settings.model_copy(update={"slots": slots})


def test_the_walk_names_files_that_are_there() -> None:
    """Every `path.py` in the document, below `gateway/`."""
    named = re.findall(r"`([a-z_0-9/]+\.py)`", WALK)
    assert len(named) > 25
    assert [name for name in named if not (REPOSITORY / "gateway" / name).exists()] == []
