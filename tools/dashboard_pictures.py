"""Draws the dashboard of a gateway under load into docs/images/: `python -m tools.dashboard_pictures`.

Two jobs read, one saves checkpoints, one reads what is not there and writes where it may not; the bucket is the tests'
own, 20 ms away. After LOAD_SECONDS of that Debian's chromium takes a picture of the page: wide in both colour schemes,
and as a phone shows it. Look at them before you commit them.

`python -m tools.dashboard_pictures DIRECTORY [STATE ...]` draws the whole page into a directory instead: in each of
STATES (idle, load, bucket-down, disk-full, conflict), at each of WIDTHS, in both colour schemes, and the dialogs. For
disk-full it mounts a small file system, which takes root.
"""

from __future__ import annotations

import itertools
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import boto3
import httpx
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.disks import small_disk
from tests.support.gateway_process import GatewayProcess
from tests.support.root import begin_test
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

WIDTHS = (1400, 800, 390)
STATE_SECONDS = 25.0
"""For which a state lasts before it is drawn."""

_DISK_BYTES = 160 * 2**20
_ROOM_BYTES = 2**20

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


_ON_SMALL_DISK = {"prefix": "s3://train/ckpt/", "write": "back", "consistency": "ttl", "buffer": "48MiB"}


@contextmanager
def _staged(disk: Path | None = None) -> Iterator[tuple[StrictOrigin, GatewayProcess]]:
    """A bucket at some distance, and a gateway before it, whose cache lies on `disk`."""
    with StrictOrigin() as origin, tempfile.TemporaryDirectory(prefix="forebay-pictures-") as directory:
        origin.model.create_bucket(_BUCKET)
        for number in range(60):
            origin.model.put_generated(_BUCKET, f"imagenet/shard-{number:04}.tar", 2 * _MIB, number)
        for number in range(120):
            origin.model.put_generated(_BUCKET, f"tokens/part-{number:04}.bin", 2 * _MIB, number)
        origin.latency_seconds = 0.02
        keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        job = {"access_key_id": "job-a", "secret_access_key": "a-secret-of-the-pictures", "allow": ["s3://"]}
        config: dict[str, Any] = {
            "server": {"workers": 2},
            "origin": {"endpoint_url": origin.endpoint_url, "read_bandwidth": "400MB/s", **keys},
            "cache": {"capacity": "2GiB" if disk is None else "64MiB", "persistent": True},
            "credentials": [
                {**keys, "allow": ["s3://"]},
                {**job, "max_concurrent_requests": 8, "read_bandwidth": "2GB/s"},
            ],
            "slots": _SLOTS if disk is None else [{"name": "checkpoints", **_ON_SMALL_DISK}],
        }
        with GatewayProcess(config, directory=(disk or Path(directory)) / "cache") as gateway:
            yield origin, gateway


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
        with suppress(BotoCoreError, ClientError):  # the bucket may be down
            client.get_object(Bucket=_BUCKET, Key=key())["Body"].read()
        time.sleep(pause_seconds)
        yield


def _saves(client: Any) -> Iterator[None]:
    for step in itertools.count(100, 100):
        for name, size in [*((f"__{rank}_0.distcp", 3 * _MIB) for rank in range(4)), (".metadata", 1000)]:
            with suppress(BotoCoreError, ClientError):
                client.put_object(Bucket=_BUCKET, Key=f"ckpt/step-{step}/{name}", Body=bytes(size))
            yield
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


def _idle(_origin: StrictOrigin, _gateway: GatewayProcess, _disk: Path | None) -> None:
    time.sleep(STATE_SECONDS)


def _load(_origin: StrictOrigin, gateway: GatewayProcess, _disk: Path | None) -> None:
    for number in range(24):
        httpx.post(f"{gateway.admin_url}/api/v1/warm", json={"prefix": f"s3://train/tokens/part-{number:03}"})
    time.sleep(2 * STATE_SECONDS)


def _bucket_down(origin: StrictOrigin, gateway: GatewayProcess, _disk: Path | None) -> None:
    time.sleep(STATE_SECONDS)
    origin.stop()
    client = _client(gateway)
    for number in range(30):
        with suppress(ClientError):
            client.put_object(Bucket=_BUCKET, Key=f"ckpt/step-9000/__{number}_0.distcp", Body=bytes(_MIB))
    time.sleep(STATE_SECONDS)


def _disk_full(_origin: StrictOrigin, gateway: GatewayProcess, disk: Path | None) -> None:
    client = _client(gateway)
    client.put_object(Bucket=_BUCKET, Key="ckpt/step-1/__0_0.distcp", Body=bytes(_MIB))
    with Path(disk or "", "of-somebody-else").open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(_ROOM_BYTES // 16))
            file.flush()
    for number in range(8):
        with suppress(ClientError):
            client.put_object(Bucket=_BUCKET, Key=f"ckpt/step-2/__{number}_0.distcp", Body=bytes(8 * _MIB))
    time.sleep(STATE_SECONDS)


def _conflict(origin: StrictOrigin, gateway: GatewayProcess, _disk: Path | None) -> None:
    client = _client(gateway)
    client.put_object(Bucket=_BUCKET, Key="ckpt/first", Body=b"tells what the bucket's ETags are")
    origin.stop()
    for name in ("step-100/.metadata", "step-100/a-rather-long-name-of-an-object-in-it/__0_0.distcp", "latest"):
        client.put_object(Bucket=_BUCKET, Key=f"ckpt/{name}", Body=bytes(200_000))
        origin.model.put(_BUCKET, f"ckpt/{name}", b"of somebody else")
    origin.start()
    time.sleep(STATE_SECONDS)


STATES: dict[str, Callable[[StrictOrigin, GatewayProcess, Path | None], None]] = {
    "idle": _idle,
    "load": _load,
    "bucket-down": _bucket_down,
    "disk-full": _disk_full,
    "conflict": _conflict,
}
_IN_LOAD = ("load", "bucket-down")
_DIALOGS = {"idle": "#start", "conflict": "[data-key^=resolve]", "load": "[data-key^='flush']"}
"""What is pressed for a dialog, which is drawn too."""


def _draw_states(browser: Any, into: Path, names: Sequence[str]) -> None:
    into.mkdir(parents=True, exist_ok=True)
    begin_test(is_marked=True)  # the tests' small disk is for those only that say that they need root
    for name in names:
        with (
            tempfile.TemporaryDirectory(prefix="forebay-disk-") as mounted,
            small_disk(Path(mounted), _DISK_BYTES) if name == "disk-full" else nullcontext(None) as disk,
        ):
            _draw_one(browser, into, name, disk)


def _draw_one(browser: Any, into: Path, name: str, disk: Path | None) -> None:
    with _staged(disk) as (origin, gateway), _loaded(gateway) if name in _IN_LOAD else nullcontext():
        STATES[name](origin, gateway, disk)
        for width, scheme in itertools.product(WIDTHS, ("light", "dark")):
            _draw_state(browser, gateway, into, name, width, scheme)
        if name == "bucket-down":
            origin.start()  # readers go on, and come to their end


def _draw_state(browser: Any, gateway: GatewayProcess, into: Path, name: str, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(gateway.admin_url)
    page.wait_for_selector("#throughput svg")
    page.wait_for_timeout(2500)
    if name == "load":
        page.hover("#throughput .plot", position={"x": 150, "y": 40})
    page.screenshot(path=into / f"{name}-{width}-{scheme}.png", full_page=True)
    if name in _DIALOGS and page.locator(_DIALOGS[name]).count():
        page.locator(_DIALOGS[name]).first.click()
        page.wait_for_timeout(1500)
        page.screenshot(path=into / f"{name}-dialog-{width}-{scheme}.png")
    page.close()


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    if program is None:
        sys.stderr.write("there is no chromium on this machine (Debian: apt-get install chromium)\n")
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        if arguments:
            _draw_states(browser, Path(arguments[0]), arguments[1:] or list(STATES))
        else:
            _draw_for_docs(browser)
        browser.close()
    return 0


def _draw_for_docs(browser: Any) -> None:
    with _staged() as (_, gateway), _loaded(gateway):
        time.sleep(LOAD_SECONDS)
        for name, (width, scheme) in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto(gateway.admin_url)
            page.wait_for_selector("#throughput svg")
            page.wait_for_selector("#recent >> text=Slowest")
            page.wait_for_timeout(3000)
            card = page.locator("section", has=page.locator(_LAST_SHOWN[width])).bounding_box()
            shown = {"x": 0, "y": 0, "width": width, "height": card["y"] + card["height"] + _BELOW_PIXELS}
            page.screenshot(path=IMAGES / name, full_page=True, clip=shown)
            page.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
