"""What people see and do about what is not at the origin yet, with a real gateway, boto3 and the command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
import orjson
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.cli import flush
from gateway.s3.requests import Operation
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.memory_origin.faults import Answer
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        one.model.create_bucket("bucket")
        yield one


class Running:
    """A gateway with a slot that writes back, a client of it, and its commands."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.s3 = boto3.client(
            "s3",
            endpoint_url=gateway.s3_url,
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
            region_name="us-east-1",
            # An origin that was away is tried again after a moment: until then clients get 503, and try again, too.
            config=Config(s3={"addressing_style": "path"}, retries={"mode": "standard", "total_max_attempts": 8}),
        )

    def put(self, name: str, content: bytes) -> None:
        self.s3.put_object(Bucket="bucket", Key=f"back/{name}", Body=content)

    def get(self, name: str) -> bytes:
        content: bytes = self.s3.get_object(Bucket="bucket", Key=f"back/{name}")["Body"].read()
        return content

    def run(self, *arguments: str) -> Result:
        return forebay(*arguments, "--admin-url", self.gateway.admin_url)

    def listed(self, *arguments: str) -> list[dict[str, Any]]:
        result = self.run("writeback", "list", "--json", *arguments)
        assert result.exit_code == 0, result.output
        return [orjson.loads(line) for line in result.stdout.splitlines()]


def forebay(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"FOREBAY_CONFIG": None})


@contextmanager
def running(origin: StrictOrigin, directory: Path) -> Iterator[Running]:
    config: dict[str, Any] = {
        "origin": origin.settings,
        "cache": {"persistent": True},
        "slots": [{"name": "back", "prefix": "s3://bucket/back/", "write": "back"}],
    }
    with GatewayProcess(config, directory=directory) as gateway:
        one = Running(gateway)
        one.put("first", b"makes the bucket known")
        yield one


def at_origin(origin: StrictOrigin, name: str) -> bytes | None:
    found = origin.model.buckets["bucket"].objects.get(f"back/{name}")
    return None if found is None else found.content.read(0, found.content.size_bytes)


@pytest.mark.slow
def test_what_is_acknowledged_is_shown_and_flushed_on_demand(origin: StrictOrigin, tmp_path: Path) -> None:
    """Waiting ends when the origin has it, whatever pauses its failures have led to, or when the time is over."""
    with running(origin, tmp_path / "cache") as one:
        assert one.run("flush", "s3://", "--wait").exit_code == 0
        origin.stop()
        one.put("a", b"1" * 1000)
        one.put("b", b"2" * 2000)
        assert [(item["key"], item["bytes"], item["deleted"]) for item in one.listed()] == [
            ("back/a", 1000, False),
            ("back/b", 2000, False),
        ]
        assert one.listed("s3://bucket/back/b")[0]["key"] == "back/b"
        late = one.run("flush", "s3://bucket/back/", "--wait", "--timeout", "1s", "--json")
        assert (late.exit_code, orjson.loads(late.stdout)["objects"]) == (1, 2)
        eventually(lambda: {item["state"] for item in one.listed()} == {"waiting for the bucket"})
        assert one.listed("--problems") == []
        begun = one.run("flush", "s3://bucket/back/")
        assert (begun.exit_code, begun.stdout) == (0, "2 objects, 2.9 KiB, are on the way to the origin\n")
        assert begun.stderr.splitlines()[1].startswith("waiting for the bucket ")
        assert "s3://bucket/back/a  " in begun.stderr
        [problem, _] = one.listed()
        assert problem["failures"] > 0
        assert problem["reason"]
        with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
            status = client.get(f"{one.gateway.admin_url}/api/v1/status").json()
            overview = client.get(f"{one.gateway.admin_url}/api/v1/overview").json()
            assert client.get(f"{one.gateway.admin_url}/readyz").status_code == 200
        assert (status["writeback"]["objects"], status["writeback"]["bytes"]) == (2, 3000)
        shown = overview["status"]["writeback"]["slots"]
        counts = {slot["slot"]: (slot["failing"], slot["waiting_for_bucket"]) for slot in shown}
        assert (counts, overview["problems"]) == ({"back": (0, 2)}, [])
        told = one.run("status").output
        assert "; 2 waiting for the bucket (" in told
        assert "failing" not in told
        assert "--problems" not in told
        origin.start()
        assert one.run("flush", "s3://bucket/back/", "--wait").exit_code == 0
        assert (at_origin(origin, "a"), at_origin(origin, "b")) == (b"1" * 1000, b"2" * 2000)
        assert one.listed() == []


@pytest.mark.slow
def test_a_bucket_that_refuses_ends_a_flush(
    origin: StrictOrigin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, with what is left and why, long before the time is over; what the bucket takes is there."""
    monkeypatch.setattr(flush, "_REFUSED_SECONDS", 2.0)
    with running(origin, tmp_path / "cache") as one:
        assert one.run("flush", "--wait").exit_code == 0
        origin.model.inject(
            lambda call: call.operation is Operation.PUT_OBJECT and call.key == "back/refused",
            Answer(403, "AccessDenied"),
            times=None,
        )
        one.put("refused", b"r")
        one.put("taken", b"t")
        one.s3.create_multipart_upload(Bucket="bucket", Key="back/open")
        result = one.run("flush", "--wait", "--timeout", "10m")
        assert (result.exit_code, result.stdout) == (
            1,
            "1 object, 1 B, is not at the origin: nothing gets there; the gateway goes on trying\n",
        )
        head, row, *_, uploads = result.stderr.splitlines()
        assert head.split() == ["state", "failures", "since", "object", "reason"]
        state, failures, _, *rest = row.split()
        assert (state, int(failures) > 1, rest) == ("failed", True, ["s3://bucket/back/refused", "AccessDenied"])
        assert uploads == "1 open upload with 0 B is no object yet: forebay writeback list --uploads"
        assert at_origin(origin, "taken") == b"t"


@pytest.mark.slow
def test_a_conflict_is_named_and_decided_either_way(origin: StrictOrigin, tmp_path: Path) -> None:
    """The write of this node takes the place of the other, or is given up, and everybody sees which."""
    with running(origin, tmp_path / "cache") as one:
        origin.stop()
        for name in ("ours", "theirs"):
            one.put(name, b"ours")
            origin.model.put("bucket", f"back/{name}", b"theirs")
        origin.start()
        result = one.run("flush", "s3://bucket/back/", "--wait")
        assert result.exit_code == 1
        assert [line.split()[0] for line in result.stderr.splitlines()[1:3]] == ["conflict", "conflict"]
        assert [item["state"] for item in one.listed("--problems")] == ["conflict", "conflict"]
        kept = one.run("writeback", "resolve", "s3://bucket/back/ours", "keep-ours", "--json")
        theirs_etag = origin.model.buckets["bucket"].objects["back/theirs"].etag
        assert (kept.exit_code, orjson.loads(kept.stdout)["etag_at_origin"]) == (0, theirs_etag)
        assert one.run("flush", "s3://bucket/back/ours", "--wait").exit_code == 0
        assert at_origin(origin, "ours") == b"ours"
        assert one.get("theirs") == b"ours"
        assert one.run("writeback", "resolve", "s3://bucket/back/theirs", "keep-theirs").exit_code == 2
        assert one.run("writeback", "resolve", "s3://bucket/back/theirs", "keep-theirs", "--yes").exit_code == 0
        assert one.get("theirs") == b"theirs"
        assert one.run("flush", "s3://", "--wait").exit_code == 0
        again = one.run("writeback", "resolve", "s3://bucket/back/theirs", "keep-theirs", "--yes")
        assert (again.exit_code, "nothing is pending" in again.stderr) == (1, True)


@pytest.mark.slow
def test_a_killed_gateway_leaves_everything_to_be_exported(origin: StrictOrigin, tmp_path: Path) -> None:
    """Out of the directory alone; while a gateway runs only when told so; and it goes on afterwards."""
    directory, content = tmp_path / "cache", os.urandom(300_000)
    with running(origin, directory) as one:
        origin.stop()
        one.put("model", content)
        arguments = ("writeback", "export", "--directory", str(directory), "--json")
        refused = forebay(*arguments, str(tmp_path / "refused"))
        assert (refused.exit_code, "a gateway is at work" in refused.stderr) == (1, True)
        live = forebay(*arguments, str(tmp_path / "live"), "--while-running")
        assert (live.exit_code, orjson.loads(live.stdout)["objects"]) == (0, 1)
        one.gateway.kill()
        export = forebay("writeback", "export", str(tmp_path / "out"), "--config", str(one.gateway.config_file))
        assert export.exit_code == 0, export.output
        for target in ("live", "out"):
            [file] = (tmp_path / target / "objects").iterdir()
            assert file.read_bytes() == content
        origin.start()
        one.gateway.start()
        assert one.run("flush", "s3://", "--wait").exit_code == 0
        assert at_origin(origin, "model") == content


@pytest.mark.slow
def test_an_aborted_upload_is_gone_for_its_client(origin: StrictOrigin, tmp_path: Path) -> None:
    """Who goes on with it is told NoSuchUpload; its bytes are free, and the origin's upload is aborted."""
    with running(origin, tmp_path / "cache") as one:
        uploads = [one.s3.create_multipart_upload(Bucket="bucket", Key=f"back/{name}")["UploadId"] for name in "ab"]
        for name, upload_id in zip("ab", uploads, strict=True):
            one.s3.upload_part(
                Bucket="bucket", Key=f"back/{name}", UploadId=upload_id, PartNumber=1, Body=b"x" * 5 * 2**20
            )
        at_the_origin = origin.model.buckets["bucket"].uploads
        eventually(lambda: len(at_the_origin) == 2)
        assert one.run("writeback", "abort", "s3://bucket/back/", "--prefix").exit_code == 2
        result = one.run("writeback", "abort", "s3://bucket/back/a", "--yes")
        assert (result.exit_code, result.stdout) == (0, "1 upload aborted\n")
        upload = {"Bucket": "bucket", "Key": "back/a", "UploadId": uploads[0]}
        parts = {"Parts": [{"PartNumber": 1, "ETag": '"x"'}]}
        with pytest.raises(ClientError, match="NoSuchUpload"):
            one.s3.upload_part(**upload, PartNumber=2, Body=b"y")
        with pytest.raises(ClientError, match="NoSuchUpload"):
            one.s3.complete_multipart_upload(**upload, MultipartUpload=parts)
        eventually(lambda: len(at_the_origin) == 1)
        [left] = one.listed("--uploads")
        assert (left["upload_id"], left["bytes"]) == (uploads[1], 5 * 2**20)
        assert one.run("writeback", "abort", "--upload-id", uploads[1], "--json").exit_code == 0
        eventually(lambda: not at_the_origin)
        eventually(lambda: not [file for file in (tmp_path / "cache/writeback/staged").rglob("*") if file.is_file()])
        assert one.gateway.log.count("an open upload was aborted by an operator") == 2
