"""Checkpoints of which training jobs know when the bucket has them, by S3 alone (examples/wait_until_durable.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.wait_until_durable import NotDurable, is_durable, wait_until_durable
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY
from tests.clients.saving import BUCKET, Saving, saving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saving]:
    with saving(tmp_path_factory.mktemp("durable") / "cache") as one:
        yield one


def save(saved: Saving, step: str) -> str:
    """What this node writes of a checkpoint: its manifest names a file of another node's, too."""
    manifest = f"{step}/model.safetensors.index.json"
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    saved.through.put_object(Bucket=BUCKET, Key=f"{step}/model-00001-of-00002.safetensors", Body=b"mine" * 1000)
    saved.through.put_object(Bucket=BUCKET, Key=manifest, Body=json.dumps(index).encode())
    return manifest


def flush_other_node(saved: Saving, step: str) -> None:
    saved.direct.put_object(Bucket=BUCKET, Key=f"{step}/model-00002-of-00002.safetensors", Body=b"theirs" * 1000)


@pytest.mark.slow
def test_the_example_waits_until_all_of_a_checkpoint_is_at_the_bucket(saved: Saving) -> None:
    """As a function, in a training job."""
    manifest = save(saved, "step-1")
    assert not is_durable(saved.through, BUCKET, manifest)
    with pytest.raises(NotDurable):
        wait_until_durable(saved.through, BUCKET, manifest, timeout_seconds=0.5, poll_seconds=0.1)
    listed = saved.direct.list_objects_v2(Bucket=BUCKET, Prefix="step-1/")
    assert manifest not in [one["Key"] for one in listed.get("Contents", [])]
    later = threading.Timer(0.5, flush_other_node, (saved, "step-1"))
    later.start()
    wait_until_durable(saved.through, BUCKET, manifest, timeout_seconds=60, poll_seconds=0.1)
    later.join()
    saved.direct.head_object(Bucket=BUCKET, Key=manifest)
    with pytest.raises(NotDurable):
        is_durable(saved.through, BUCKET, "step-1/model-00001-of-00002.safetensors")


@pytest.mark.slow
def test_the_example_waits_as_a_command(saved: Saving) -> None:
    """In a script."""
    manifest = save(saved, "step-2")
    environment = os.environ | {
        "AWS_ENDPOINT_URL": saved.gateway.s3_url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "AWS_DEFAULT_REGION": REGION,
    }
    command = [sys.executable, "examples/wait_until_durable.py", f"s3://{BUCKET}/{manifest}", "--poll", "0.1"]
    late = subprocess.run([*command, "--timeout", "0.2"], env=environment, cwd=ROOT, check=False, capture_output=True)
    assert late.returncode == 1
    assert b"is not at the bucket" in late.stderr
    flush_other_node(saved, "step-2")
    subprocess.run([*command, "--timeout", "60"], env=environment, cwd=ROOT, check=True)
    saved.direct.head_object(Bucket=BUCKET, Key=manifest)


@pytest.mark.slow
def test_a_flush_waits_for_the_checkpoint_that_is_named(saved: Saving) -> None:
    """It ends soon after the last file has come from another node, while a checkpoint of a longer name waits still."""
    manifest, longer = save(saved, "step-3"), save(saved, "step-30")
    command = ("flush", f"s3://{BUCKET}/step-3", "--wait", "--json")
    late = saved.gateway.command(*command, "--timeout", "1s")
    assert late.returncode == 1
    left = json.loads(late.stdout)
    assert (left["outcome"], left["is_name"], left["awaiting_files"]) == ("timeout", True, 1)
    later = threading.Timer(1.0, flush_other_node, (saved, "step-3"))
    later.start()
    saved.gateway.command(*command, "--timeout", "60s").check_returncode()
    later.join()
    saved.direct.head_object(Bucket=BUCKET, Key=manifest)
    assert not is_durable(saved.through, BUCKET, longer)
    flush_other_node(saved, "step-30")
    wait_until_durable(saved.through, BUCKET, longer, timeout_seconds=60)
