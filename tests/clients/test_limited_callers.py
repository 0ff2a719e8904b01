"""Clients beyond their limits, in front of real workers: back-off ends every request well, and nothing is lost."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config

from tests.clients.commands import Command
from tests.clients.crt import CrtClient
from tests.clients.trees import make_tree, read_tree
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

pytestmark = pytest.mark.clients

MIB = 2**20
BUCKET = "bucket"
KEYS = {"job": "job-secret-0123456789", "fast": "fast-secret-0123456789", "slow": "slow-secret-0123456789"}
LIMITS: dict[str, dict[str, Any]] = {
    "job": {"max_concurrent_requests": 4, "requests_per_second": 60},
    "fast": {},
    "slow": {"read_bandwidth": "4MiB/s", "write_bandwidth": "4MiB/s"},
}
OBJECTS = 60


@pytest.fixture(scope="module")
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        for number in range(OBJECTS):
            one.model.put_generated(BUCKET, f"small/{number}", 100_000, seed=number)
        one.model.put_generated(BUCKET, "large", 12 * MIB, seed=99)
        yield one


@pytest.fixture(scope="module")
def gateway(origin: StrictOrigin) -> Iterator[GatewayProcess]:
    credentials = [
        {"access_key_id": key, "secret_access_key": secret, "allow": ["s3://"], **LIMITS[key]}
        for key, secret in KEYS.items()
    ]
    config: dict[str, Any] = {
        "server": {"workers": 2, "caller_wait": "2s"},
        "origin": {
            "endpoint_url": origin.endpoint_url,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        },
        "credentials": credentials,
        "caller_classes": [{"name": "batch", "app": "batch", "max_concurrent_requests": 2}],
    }
    with GatewayProcess(config) as one:
        yield one


def client(gateway: GatewayProcess, key: str, connections: int = 12, app: str | None = None) -> Any:
    config = Config(
        max_pool_connections=connections,
        retries={"mode": "standard", "max_attempts": 12},
        s3={"addressing_style": "path"},
        user_agent_appid=app,
    )
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=key,
        aws_secret_access_key=KEYS[key],
        region_name="us-east-1",
        config=config,
    )


def metric(gateway: GatewayProcess, beginning: str) -> float:
    """The sum of all lines that begin so."""
    lines = httpx.get(f"{gateway.admin_url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginning))


@pytest.mark.parametrize("app", [None, "batch"])
def test_boto3_at_three_times_the_limit_ends_every_request_well(
    gateway: GatewayProcess, origin: StrictOrigin, app: str | None
) -> None:
    """Reads, and writes, which say `Expect: 100-continue`."""
    s3, name = client(gateway, "job", app=app), app or "none"
    expected = {number: s3.get_object(Bucket=BUCKET, Key=f"small/{number}")["Body"].read() for number in range(3)}

    def work(number: int) -> None:
        assert s3.get_object(Bucket=BUCKET, Key=f"small/{number % 3}")["Body"].read() == expected[number % 3]
        s3.put_object(Bucket=BUCKET, Key=f"{name}/{number}", Body=b"%d" % number * 50_000)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(48)))
    for number in range(48):
        assert s3.get_object(Bucket=BUCKET, Key=f"{name}/{number}")["Body"].read() == b"%d" % number * 50_000
    assert metric(gateway, "forebay_caller_waits_total{") > 0
    assert metric(gateway, "forebay_caller_running{") == 0
    assert metric(gateway, "forebay_caller_waiting{") == 0
    assert metric(gateway, 'forebay_caller_requests_total{credential="job"}') >= 144


def test_one_long_body_does_not_pass_at_once(gateway: GatewayProcess) -> None:
    """Cached or not; and the upload of one neither."""
    s3 = client(gateway, "slow")
    for _ in range(2):
        began = time.monotonic()
        body = s3.get_object(Bucket=BUCKET, Key="large")["Body"].read()
        assert len(body) == 12 * MIB
        assert 2.0 < time.monotonic() - began < 20
    began = time.monotonic()
    s3.put_object(Bucket=BUCKET, Key="large-copy", Body=body)
    assert 2.0 < time.monotonic() - began < 20
    assert client(gateway, "fast").get_object(Bucket=BUCKET, Key="large-copy")["Body"].read() == body


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_is_stopped_or_killed_while_it_holds_all_costs_its_share_for_a_second(
    gateway: GatewayProcess, number: signal.Signals
) -> None:
    """Uploads whose bodies do not come hold all four places in one worker; then that is gone."""
    s3 = client(gateway, "job")
    target = httpx.URL(s3.generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": "held"}))
    small = s3.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "small/1"})
    line = f"PUT {target.raw_path.decode()} HTTP/1.1"
    head = f"{line}\r\nHost: {target.netloc.decode()}\r\nContent-Length: 9\r\n\r\n"
    other, holder = (pid for pid in gateway.worker_pids() if pid is not None)
    held = []
    try:
        with stopped(other):  # so the holder has all of them
            for _ in range(4):
                held.append(socket.create_connection((target.host, target.port or 80)))
                held[-1].sendall(head.encode())
            deadline = time.monotonic() + 30
            while metric(gateway, RUNNING) < 4:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        answer = httpx.get(small, trust_env=False)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        with stopped(holder) if number is signal.SIGSTOP else killed(holder):
            began = time.monotonic()
            assert s3.get_object(Bucket=BUCKET, Key="small/1")["Body"].read()
            assert time.monotonic() - began < 10  # far less than the minute that a body may take
    finally:
        for connection in held:
            connection.close()
    deadline = time.monotonic() + 30
    while metric(gateway, RUNNING) > 0 or None in gateway.worker_pids():
        assert time.monotonic() < deadline
        time.sleep(0.05)


RUNNING = 'forebay_caller_running{name="job"'


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def killed(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGKILL)
    yield


def test_rclone_at_three_times_the_limit(gateway: GatewayProcess, tmp_path: Path) -> None:
    """A folder goes up and comes back, twelve transfers at a time for four places."""
    config = tmp_path / "rclone.conf"
    config.write_text(
        f"[forebay]\ntype = s3\nprovider = Other\naccess_key_id = job\nsecret_access_key = {KEYS['job']}\n"
        f"region = us-east-1\nendpoint = {gateway.s3_url}\nforce_path_style = true\n"
    )
    rclone = Command("rclone", {"HOME": str(tmp_path), "RCLONE_CONFIG": str(config), "PATH": "/usr/bin:/bin"})
    content = make_tree(tmp_path / "source")
    waits = metric(gateway, "forebay_caller_waits_total{")
    rclone("copy", "--transfers", "12", "--checkers", "12", tmp_path / "source", f"forebay:{BUCKET}/tree")
    rclone("copy", "--transfers", "12", "--checkers", "12", f"forebay:{BUCKET}/tree", tmp_path / "target")
    assert read_tree(tmp_path / "target") == content
    assert metric(gateway, "forebay_caller_waits_total{") > waits
    assert metric(gateway, "forebay_caller_running{") == 0


def test_the_crt_at_three_times_the_limit(gateway: GatewayProcess) -> None:
    """Twelve objects at a time for four places, by the CRT's own S3 client and its own back-off, over plain HTTP."""
    from awscrt import auth, s3

    keys = auth.AwsCredentialsProvider.new_static("job", KEYS["job"])
    crt = CrtClient.__new__(CrtClient)
    crt._host, crt._bucket = httpx.URL(gateway.s3_url).netloc.decode(), BUCKET
    crt._client = s3.S3Client(
        region="us-east-1",
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        signing_config=s3.create_default_s3_signing_config(region="us-east-1", credential_provider=keys),
        part_size=5 * MIB,
    )
    waits = metric(gateway, "forebay_caller_waits_total{")

    def work(number: int) -> None:
        content = b"%d" % number * 40_000
        assert crt.put(f"crt/{number}", content).status == 200
        answer = crt.get(f"crt/{number}")
        assert (answer.status in (200, 206), answer.body == content) == (True, True)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(48)))
    assert metric(gateway, "forebay_caller_waits_total{") > waits
    assert metric(gateway, "forebay_caller_running{") == 0
