"""Checkpoints saved into the write-back buffer, by boto3 and the AWS CLI, while the origin is away."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig

from tests.clients.boto import read
from tests.clients.commands import Command, client_environment
from tests.clients.content import MIB, random_bytes
from tests.clients.saving import BUCKET, Saving, saving

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saving]:
    with saving(tmp_path_factory.mktemp("saving") / "cache") as one:
        yield one


@pytest.mark.parametrize("size", [0, 1, 8 * MIB, 40 * MIB + 7])
def test_boto3_upload_file(saved: Saving, tmp_path: Path, size: int) -> None:
    """In one piece or in parts: readable at once, and at the origin as acknowledged, byte for byte, with its ETag."""
    content = random_bytes(size)
    (tmp_path / "state").write_bytes(content)
    key = f"saved/boto3-{size}"
    with saved.origin_away(key):
        saved.through.upload_file(str(tmp_path / "state"), BUCKET, key)
        assert read(saved.through, BUCKET, key) == content
        assert read(saved.through, BUCKET, key, Range="bytes=-1000") == content[-1000:] if size else True


def test_boto3_upload_of_a_stream_over_an_older_one(saved: Saving) -> None:
    """The second save of a key is what is read and what arrives; the first one never shows again."""
    config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB)
    contents = [random_bytes(17 * MIB), random_bytes(11 * MIB + 1)]
    with saved.origin_away("saved/latest"):
        for content in contents:
            saved.through.upload_fileobj(io.BytesIO(content), BUCKET, "saved/latest", Config=config)
            assert read(saved.through, BUCKET, "saved/latest") == content


def test_the_aws_cli(saved: Saving, tmp_path: Path) -> None:
    """`aws s3 cp` of a checkpoint to the bucket, within the bucket, and back, with nobody behind the gateway."""
    aws = Command("aws", client_environment(saved.gateway.s3_url, None, tmp_path))
    content = random_bytes(21 * MIB + 3)
    (tmp_path / "model.bin").write_bytes(content)
    first, second = "saved/step-1.tmp/model.bin", "saved/step-1/model.bin"
    with saved.origin_away(first, second):
        aws("s3", "cp", tmp_path / "model.bin", f"s3://{BUCKET}/{first}")
        saved.through.copy_object(Bucket=BUCKET, Key=second, CopySource={"Bucket": BUCKET, "Key": first})
        aws("s3", "cp", f"s3://{BUCKET}/{second}", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content


def test_the_aws_cli_syncs_a_folder(saved: Saving, tmp_path: Path) -> None:
    """Every file of a checkpoint folder is listed at once, comes back, and gets to the origin as it is."""
    aws = Command("aws", client_environment(saved.gateway.s3_url, None, tmp_path))
    folder = tmp_path / "step-2"
    folder.mkdir()
    for name, size in (("model.bin", 21 * MIB), ("optimizer.bin", 9 * MIB + 3), ("meta.json", 20)):
        (folder / name).write_bytes(random_bytes(size))
    aws("s3", "sync", folder, f"s3://{BUCKET}/saved/step-2")
    aws("s3", "sync", f"s3://{BUCKET}/saved/step-2", tmp_path / "back")
    for one in folder.iterdir():
        assert (tmp_path / "back" / one.name).read_bytes() == one.read_bytes()
    names = sorted(one.name for one in folder.iterdir())
    assert saved.arrived("saved/step-2/") == [f"saved/step-2/{name}" for name in names]
