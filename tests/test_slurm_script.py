"""The batch script of docs/slurm-and-bare-metal.md, run as Slurm would."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

PAGE = Path(__file__).resolve().parents[1] / "docs" / "slurm-and-bare-metal.md"
PATIENCE_SECONDS = 120.0

CONFIGURATION = """
[cache]
capacity = "128MiB"
persistent = true

[[slots]]
name = "checkpoints"
prefix = "s3://bucket/"
write = "back"
consistency = "ttl"
buffer = "64MiB"
"""

TRAIN = """
import os, signal, sys, time
import boto3

s3 = boto3.client("s3", region_name="us-east-1")
s3.put_object(Bucket="bucket", Key="step-1", Body=b"one")
if {waits}:
    def save(*_):
        s3.put_object(Bucket="bucket", Key="step-2", Body=b"two")
        sys.exit(1)
    signal.signal(signal.SIGTERM, save)
    print("training", flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        yield origin


@contextmanager
def batch(
    tmp_path: Path, origin: StrictOrigin, *, waits: bool, more: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """The page's script at work, in a session of its own, with an `srun` that runs its command here."""
    [script] = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert "/mnt/nvme/" in script
    (tmp_path / "job.sh").write_text(script.replace("/mnt/nvme/", f"{tmp_path}/nvme/"))
    (tmp_path / "forebay.toml").write_text(CONFIGURATION)
    (tmp_path / "train.py").write_text(TRAIN.format(waits=waits))
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (commands / "srun").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FOREBAY_"))}
    environment |= {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "FOREBAY_CONFIG": str(tmp_path / "forebay.toml"),
        "FOREBAY_ORIGIN__ENDPOINT_URL": origin.endpoint_url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
    }
    job = subprocess.Popen(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env=environment | dict(more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        job.communicate(timeout=PATIENCE_SECONDS)


@pytest.mark.slow
def test_a_job_ends_with_everything_in_the_bucket(tmp_path: Path, origin: StrictOrigin) -> None:
    """And with the code of the training; gateway and directory are gone."""
    with batch(tmp_path, origin, waits=False, more={}) as job:
        _, err = job.communicate(timeout=PATIENCE_SECONDS)
    assert job.returncode == 0, err
    assert origin.model.data("bucket", "step-1") == b"one"
    assert list((tmp_path / "nvme").iterdir()) == []


@pytest.mark.slow
def test_a_job_that_slurm_ends_saves_its_last_checkpoint(tmp_path: Path, origin: StrictOrigin) -> None:
    """SIGTERM comes to the script alone (`--signal=B:TERM`)."""
    with batch(tmp_path, origin, waits=True, more={}) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "training\n"
        job.send_signal(signal.SIGTERM)
        _, err = job.communicate(timeout=PATIENCE_SECONDS)
    assert job.returncode == 143, err
    assert origin.model.data("bucket", "step-2") == b"two"
    assert list((tmp_path / "nvme").iterdir()) == []


@pytest.mark.slow
def test_a_gateway_that_cannot_start_ends_the_job_at_once(tmp_path: Path, origin: StrictOrigin) -> None:
    """With what it says; nothing is trained."""
    with batch(tmp_path, origin, waits=True, more={"FOREBAY_SERVER__WORKERS": "none"}) as job:
        out, err = job.communicate(timeout=PATIENCE_SECONDS)
    assert (job.returncode, out) == (1, "")
    assert "forebay: server.workers = 'none'" in err
