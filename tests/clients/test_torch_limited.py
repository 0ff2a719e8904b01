"""The PyTorch S3 connector beyond its limits: back-off ends every request well, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.clients.limited import (
    BUCKET,
    HEAVY_CLIENTS,
    KEYS,
    REGION,
    heavy_content,
    limited_gateway,
    limited_origin,
    overloaded,
)
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    with limited_origin() as origin, limited_gateway(origin) as gateway:
        monkeypatch.setenv("AWS_ENDPOINT_URL", gateway.s3_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "heavy")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["heavy"])
        yield gateway, origin


def test_the_connector_is_refused_and_comes_again(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """Six clients for two places save checkpoints and load them, then a data set reads all of them: every byte is
    right, and no worker holds what waits."""
    from s3torchconnector import S3Checkpoint, S3MapDataset

    gateway, origin = running
    content = heavy_content("torch")

    def work(key: str) -> None:
        checkpoint = S3Checkpoint(region=REGION)
        with checkpoint.writer(f"s3://{BUCKET}/{key}") as writer:
            writer.write(content[key])
        with checkpoint.reader(f"s3://{BUCKET}/{key}") as reader:
            assert reader.read() == content[key]

    with overloaded(gateway, origin, content), ThreadPoolExecutor(HEAVY_CLIENTS) as pool:
        list(pool.map(work, content))
        dataset = S3MapDataset.from_prefix(f"s3://{BUCKET}/torch/", region=REGION, endpoint=gateway.s3_url)
        found = dict(pool.map(lambda index: (dataset[index].key, dataset[index].read()), range(len(dataset))))
        assert found == content
