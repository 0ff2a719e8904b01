"""How much of what real clients read again and again takes the short way (docs/decisions/0029-prepared-requests.md).

What a client changes in its heads from one request to the next is known for these; where a new version of one changes
more, it is slow again, and this says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.edge.prepared import LAID_SECONDS
from tests.clients.boto import boto3_client, read
from tests.clients.commands import Command, client_environment
from tests.clients.conftest import Endpoint
from tests.clients.content import MIB, random_bytes
from tests.clients.filesystems import closed, s3_filesystem
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

pytestmark = pytest.mark.clients

SHARE_MIN = 0.9
BUCKET, COUNT, SIZE_BYTES = "bucket", 6, 100_000
KEYS = [f"d/{number}.bin" for number in range(COUNT)]
WARM_UP_ROUNDS, ROUNDS = 3, 12

Reads = Callable[[], object]


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    """One worker: each has to see a head, and an object, before it has them prepared."""
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        for key in KEYS:
            origin.run_inside(partial(origin.model.put, BUCKET, key, random_bytes(SIZE_BYTES)))
        config: dict[str, Any] = {
            "origin": {
                "endpoint_url": origin.endpoint_url,
                "region": REGION,
                "access_key_id": ACCESS_KEY_ID,
                "secret_access_key": SECRET_ACCESS_KEY,
            },
            "slots": [{"name": "data", "prefix": f"s3://{BUCKET}/d/", "consistency": "immutable"}],
            "server": {"workers": 1},
        }
        with GatewayProcess(config) as running:
            yield running


def counted(gateway: GatewayProcess) -> tuple[float, float]:
    """Prepared answers so far, and hits of GetObject and HeadObject."""
    prepared = hits = 0.0
    for line in httpx.get(f"{gateway.admin_url}/metrics", trust_env=False).text.splitlines():
        if line.startswith("forebay_prepared_requests_total{"):
            prepared += float(line.rsplit(" ", 1)[1])
        elif line.startswith("forebay_requests_total{") and 'cache="hit"' in line and 'Object"' in line:
            hits += float(line.rsplit(" ", 1)[1])
    return prepared, hits


def share_of(gateway: GatewayProcess, reads: Reads) -> float:
    for _ in range(WARM_UP_ROUNDS):
        reads()
    before = settled(gateway)
    for _ in range(ROUNDS):
        reads()
    prepared, hits = (now - then for now, then in zip(settled(gateway), before, strict=True))
    assert hits >= ROUNDS * COUNT
    return prepared / hits


def settled(gateway: GatewayProcess) -> tuple[float, float]:
    """When nothing is kept back any more: prepared answers are laid to the others four times a second."""
    last, now = (-1.0, -1.0), counted(gateway)
    while now != last:
        time.sleep(2 * LAID_SECONDS)
        last, now = now, counted(gateway)
    return now


def by_boto3(gateway: GatewayProcess, _: Path) -> Iterator[Reads]:
    client = boto3_client(gateway.s3_url)

    def reads() -> None:
        for key in KEYS:
            client.head_object(Bucket=BUCKET, Key=key)
            assert len(read(client, BUCKET, key)) == SIZE_BYTES
            assert len(read(client, BUCKET, key, Range="bytes=100-999")) == 900

    yield reads


def by_s3fs(gateway: GatewayProcess, _: Path) -> Iterator[Reads]:
    with closed(s3_filesystem(Endpoint(gateway.s3_url, None, [gateway.directory]))) as filesystem:

        def reads() -> None:
            for key in KEYS:
                assert len(filesystem.cat_file(f"{BUCKET}/{key}", start=10, end=50_000)) == 49_990
                with filesystem.open(f"{BUCKET}/{key}", block_size=64 * 1024) as file:
                    assert len(file.read()) == SIZE_BYTES

        yield reads


def by_crt(gateway: GatewayProcess, _: Path) -> Iterator[Reads]:
    from awscrt import auth, s3
    from awscrt.http import HttpHeaders, HttpRequest

    keys = auth.AwsCredentialsProvider.new_static(ACCESS_KEY_ID, SECRET_ACCESS_KEY)
    client = s3.S3Client(
        region=REGION,
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        signing_config=s3.create_default_s3_signing_config(region=REGION, credential_provider=keys),
        part_size=5 * MIB,
    )
    host = urlsplit(gateway.s3_url).netloc

    def reads() -> None:
        for key in KEYS:
            request = HttpRequest("GET", f"/{BUCKET}/{key}", HttpHeaders([("Host", host)]))
            sent = client.make_request(type=s3.S3RequestType.GET_OBJECT, request=request, on_body=lambda **_: None)
            sent.finished_future.result(60)

    yield reads


def by_s5cmd(gateway: GatewayProcess, home: Path) -> Iterator[Reads]:
    environment = client_environment(gateway.s3_url, None, home)
    s5cmd = Command("s5cmd", environment | {"S3_ENDPOINT_URL": gateway.s3_url, "NO_PROXY": "*"})
    yield lambda: s5cmd("cp", f"s3://{BUCKET}/d/*", f"{home}/s5cmd/")


def by_rclone(gateway: GatewayProcess, home: Path) -> Iterator[Reads]:
    remote = (
        f":s3,provider=Other,access_key_id={ACCESS_KEY_ID},secret_access_key={SECRET_ACCESS_KEY},region={REGION},"
        f"endpoint='{gateway.s3_url}',force_path_style=true:{BUCKET}/d"
    )
    rclone = Command("rclone", client_environment(gateway.s3_url, None, home) | {"NO_PROXY": "*"})
    yield lambda: rclone("copy", "--ignore-times", remote, home / "rclone")


def by_obstore(gateway: GatewayProcess, _: Path) -> Iterator[Reads]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=gateway.s3_url,
        access_key_id=ACCESS_KEY_ID,
        secret_access_key=SECRET_ACCESS_KEY,
        region=REGION,
        client_options={"allow_http": True},
    )

    def reads() -> None:
        for key in KEYS:
            assert len(obstore.get(store, key).bytes()) == SIZE_BYTES
            assert len(obstore.get_range(store, key, start=5, end=500)) == 495
            obstore.head(store, key)

    yield reads


def by_pyarrow(gateway: GatewayProcess, _: Path) -> Iterator[Reads]:
    from pyarrow import fs

    filesystem = fs.S3FileSystem(
        access_key=ACCESS_KEY_ID,
        secret_key=SECRET_ACCESS_KEY,
        region=REGION,
        scheme="http",
        endpoint_override=urlsplit(gateway.s3_url).netloc,
    )

    def reads() -> None:
        for key in KEYS:
            with filesystem.open_input_file(f"{BUCKET}/{key}") as file:
                assert len(file.read()) == SIZE_BYTES

    yield reads


def by_minio(gateway: GatewayProcess, _: Path) -> Iterator[Reads]:
    from minio import Minio

    client = Minio(
        endpoint=urlsplit(gateway.s3_url).netloc,
        access_key=ACCESS_KEY_ID,
        secret_key=SECRET_ACCESS_KEY,
        region=REGION,
        secure=False,
    )

    def reads() -> None:
        for key in KEYS:
            client.stat_object(bucket_name=BUCKET, object_name=key)
            answer = client.get_object(bucket_name=BUCKET, object_name=key)
            assert len(answer.read()) == SIZE_BYTES
            answer.release_conn()

    yield reads


CLIENTS = {
    "boto3": by_boto3,
    "s3fs": by_s3fs,
    "crt": by_crt,
    "s5cmd": by_s5cmd,
    "rclone": by_rclone,
    "obstore": by_obstore,
    "pyarrow": by_pyarrow,
    "minio": by_minio,
}


@pytest.mark.parametrize("name", CLIENTS)
def test_warm_reads_take_the_short_way(name: str, gateway: GatewayProcess, tmp_path: Path) -> None:
    using = CLIENTS[name](gateway, tmp_path)
    share = share_of(gateway, next(using))
    for _ in using:
        pass
    print(f"{name}: {share:.3f}")
    assert share >= SHARE_MIN
