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

import httpx
import pytest

from tests.clients.commands import Command
from tests.clients.crt import CrtClient
from tests.clients.limited import (
    BUCKET,
    HEAVY_CLIENTS,
    KEYS,
    MIB,
    client,
    heavy_content,
    limited_gateway,
    limited_origin,
    metric,
    overloaded,
)
from tests.clients.trees import make_tree, read_tree
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def origin() -> Iterator[StrictOrigin]:
    with limited_origin() as one:
        yield one


@pytest.fixture(scope="module")
def gateway(origin: StrictOrigin) -> Iterator[GatewayProcess]:
    with limited_gateway(origin) as one:
        yield one


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


def rclone_of(gateway: GatewayProcess, key: str, home: Path) -> Command:
    config = home / "rclone.conf"
    config.write_text(
        f"[forebay]\ntype = s3\nprovider = Other\naccess_key_id = {key}\nsecret_access_key = {KEYS[key]}\n"
        f"region = us-east-1\nendpoint = {gateway.s3_url}\nforce_path_style = true\n"
    )
    return Command("rclone", {"HOME": str(home), "RCLONE_CONFIG": str(config), "PATH": "/usr/bin:/bin"})


def test_rclone_at_three_times_the_limit(gateway: GatewayProcess, tmp_path: Path) -> None:
    """A folder goes up and comes back, twelve transfers at a time for four places."""
    rclone = rclone_of(gateway, "job", tmp_path)
    content = make_tree(tmp_path / "source")
    waits = metric(gateway, "forebay_caller_waits_total{")
    rclone("copy", "--transfers", "12", "--checkers", "12", tmp_path / "source", f"forebay:{BUCKET}/tree")
    rclone("copy", "--transfers", "12", "--checkers", "12", f"forebay:{BUCKET}/tree", tmp_path / "target")
    assert read_tree(tmp_path / "target") == content
    assert metric(gateway, "forebay_caller_waits_total{") > waits
    assert metric(gateway, "forebay_caller_running{") == 0


def crt_of(gateway: GatewayProcess, key: str) -> CrtClient:
    """The CRT's own S3 client, with its own back-off, over plain HTTP."""
    from awscrt import auth, s3

    keys = auth.AwsCredentialsProvider.new_static(key, KEYS[key])
    crt = CrtClient.__new__(CrtClient)
    crt._host, crt._bucket = httpx.URL(gateway.s3_url).netloc.decode(), BUCKET
    crt._client = s3.S3Client(
        region="us-east-1",
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        signing_config=s3.create_default_s3_signing_config(region="us-east-1", credential_provider=keys),
        part_size=5 * MIB,
    )
    return crt


def test_the_crt_at_three_times_the_limit(gateway: GatewayProcess) -> None:
    """Twelve objects at a time for four places."""
    crt = crt_of(gateway, "job")
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


def test_boto3_is_refused_and_comes_again(gateway: GatewayProcess, origin: StrictOrigin) -> None:
    """Six clients for two places, with bodies that take seconds: every request ends in success by back-off, every byte
    is right, and no worker holds what waits."""
    s3, content = client(gateway, "heavy", attempts=30), heavy_content("boto3")

    def work(key: str) -> None:
        s3.put_object(Bucket=BUCKET, Key=key, Body=content[key])
        assert s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() == content[key]

    with overloaded(gateway, origin, content), ThreadPoolExecutor(HEAVY_CLIENTS) as pool:
        list(pool.map(work, content))


def test_rclone_is_refused_and_comes_again(gateway: GatewayProcess, origin: StrictOrigin, tmp_path: Path) -> None:
    """The same, by rclone's own back-off."""
    rclone, content = rclone_of(gateway, "heavy", tmp_path), heavy_content("rclone")
    for key, data in content.items():
        path = tmp_path / "source" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    many = "--transfers", str(HEAVY_CLIENTS), "--checkers", str(HEAVY_CLIENTS)
    with overloaded(gateway, origin, content):
        rclone("copy", *many, tmp_path / "source/rclone", f"forebay:{BUCKET}/rclone")
        rclone("copy", *many, f"forebay:{BUCKET}/rclone", tmp_path / "target/rclone")
    assert read_tree(tmp_path / "target") == content


def test_the_crt_is_refused_and_comes_again(gateway: GatewayProcess, origin: StrictOrigin) -> None:
    """The same, by the CRT's own back-off: in parts, and by ranges."""
    crt, content = crt_of(gateway, "heavy"), heavy_content("crt")

    def work(key: str) -> None:
        assert crt.put(key, content[key]).status == 200
        assert crt.get(key).body == content[key]

    with overloaded(gateway, origin, content), ThreadPoolExecutor(HEAVY_CLIENTS) as pool:
        list(pool.map(work, content))
