"""Draws the dashboard of a gateway under load into docs/images/: `python -m tools.dashboard_pictures`.

Two jobs read, one saves checkpoints, one reads what is not there and writes where it may not; the bucket is the tests'
own, 20 ms away. After LOAD_SECONDS of that Debian's chromium takes a picture of the page: wide in both colour schemes,
and as a phone shows it. Look at them before you commit them.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDE, PHONE = 1200, 390
PICTURES = {
    "dashboard-light.png": (WIDE, "light"),
    "dashboard-dark.png": (WIDE, "dark"),
    "dashboard-phone.png": (PHONE, "light"),
}
_LAST_SHOWN = {WIDE: "#recent", PHONE: "#latency"}
"""The card that a picture ends with."""

_BELOW_PIXELS = 24
LOAD_SECONDS = 120.0

_BUCKET = "train"
_MIB = 2**20
_SLOTS: list[dict[str, Any]] = [
    {
        "name": "imagenet",
        "prefix": "s3://train/imagenet/",
        "mode": "read-only",
        "consistency": "immutable",
        "weight": 3,
        "capacity": "300MiB",
        "read_guarantee": "100MB/s",
    },
    {
        "name": "tokens",
        "prefix": "s3://train/tokens/",
        "consistency": "immutable",
        "capacity_limit": "120MiB",
        "read_bandwidth": "20MB/s",
    },
    {"name": "checkpoints", "prefix": "s3://train/ckpt/", "write": "back", "consistency": "ttl", "buffer": "500MiB"},
]


@contextmanager
def _staged() -> Iterator[GatewayProcess]:
    """A bucket at some distance, and a gateway before it."""
    with StrictOrigin() as origin, tempfile.TemporaryDirectory(prefix="forebay-pictures-") as directory:
        origin.model.create_bucket(_BUCKET)
        for number in range(60):
            origin.model.put_generated(_BUCKET, f"imagenet/shard-{number:04}.tar", 2 * _MIB, number)
        for number in range(120):
            origin.model.put_generated(_BUCKET, f"tokens/part-{number:04}.bin", 2 * _MIB, number)
        origin.latency_seconds = 0.02
        keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        config: dict[str, Any] = {
            "server": {"workers": 2},
            "origin": {"endpoint_url": origin.endpoint_url, "read_bandwidth": "400MB/s", **keys},
            "cache": {"capacity": "2GiB", "persistent": True},
            "slots": _SLOTS,
        }
        with GatewayProcess(config, directory=Path(directory) / "cache") as gateway:
            yield gateway


def _client(gateway: GatewayProcess) -> Any:
    return boto3.session.Session().client(
        "s3",
        endpoint_url=gateway.s3_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=Config(retries={"total_max_attempts": 1}),
    )


def _reads(client: Any, key: Callable[[], str], pause_seconds: float) -> Iterator[None]:
    while True:
        client.get_object(Bucket=_BUCKET, Key=key())["Body"].read()
        time.sleep(pause_seconds)
        yield


def _saves(client: Any) -> Iterator[None]:
    for step in itertools.count(100, 100):
        for rank in range(4):
            client.put_object(Bucket=_BUCKET, Key=f"ckpt/step-{step}/__{rank}_0.distcp", Body=bytes(3 * _MIB))
            yield
        client.put_object(Bucket=_BUCKET, Key=f"ckpt/step-{step}/.metadata", Body=bytes(1000))
        for _ in range(40):
            time.sleep(0.2)
            yield


def _fails(client: Any) -> Iterator[None]:
    for number in itertools.count():
        with suppress(ClientError):
            if number % 3:
                client.get_object(Bucket=_BUCKET, Key=f"imagenet/missing-{number:04}.tar")
            else:
                client.put_object(Bucket=_BUCKET, Key="imagenet/shard-0000.tar", Body=b"x")
        for _ in range(20):
            time.sleep(0.3)
            yield


@contextmanager
def _loaded(gateway: GatewayProcess) -> Iterator[None]:
    """While this lasts, jobs are at work."""
    dice, over = random.Random(1), threading.Event()
    jobs = [
        _reads(_client(gateway), lambda: f"imagenet/shard-{dice.randrange(60):04}.tar", 0.08),
        _reads(_client(gateway), lambda: f"imagenet/shard-{dice.randrange(60):04}.tar", 0.11),
        _reads(_client(gateway), lambda: f"tokens/part-{dice.randrange(120):04}.bin", 0.15),
        _saves(_client(gateway)),
        _fails(_client(gateway)),
    ]

    def work(job: Iterator[None]) -> None:
        while not over.is_set():
            next(job)

    threads = [threading.Thread(target=work, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def main() -> int:
    """The exit code."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        sys.stderr.write("there is no chromium on this machine (Debian: apt-get install chromium)\n")
        return 1
    with _staged() as gateway, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        pages = [
            (name, width, browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme))
            for name, (width, scheme) in PICTURES.items()
        ]
        watching = pages[0][2]
        watching.goto(gateway.admin_url)  # the gateway counts for charts while somebody looks
        with _loaded(gateway):
            watching.wait_for_timeout(LOAD_SECONDS * 1000)
            for name, width, page in pages:
                page.goto(gateway.admin_url)
                page.wait_for_selector("#throughput svg")
                page.wait_for_selector("#recent >> text=Slowest")
                page.wait_for_timeout(3000)
                card = page.locator("section", has=page.locator(_LAST_SHOWN[width])).bounding_box()
                shown = {"x": 0, "y": 0, "width": width, "height": card["y"] + card["height"] + _BELOW_PIXELS}
                page.screenshot(path=IMAGES / name, full_page=True, clip=shown)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
