"""Buckets with homes and keys of their own, through a running gateway: each request gets to its bucket's home, signed
with the key that is meant for it, and nothing of one home is ever taken for another's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from tests.support.changing_slots import Admin, client_of, refused
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.prepared_process import run_prepared
from tests.support.strict_origin import StrictOrigin
from tests.support.sts import LentByMoto, moto_sts
from tests.support.waiting import eventually

MAIN, FAR, INNER = ("AKMAIN", "main-secret-00"), ("AKFAR", "far-secret-000"), ("AKINNER", "inner-secret-0")
PART_BYTES = 5 * 1024 * 1024


@contextmanager
def origin_with(bucket: str, *keys: tuple[str, str]) -> Iterator[StrictOrigin]:
    """It has this bucket, and knows these keys alone."""
    with StrictOrigin() as origin:
        origin.credentials = {key: Credentials(key, secret) for key, secret in keys}
        origin.model.create_bucket(bucket)
        yield origin


@pytest.fixture
def main() -> Iterator[StrictOrigin]:
    with origin_with("near", MAIN) as origin:
        yield origin


@pytest.fixture
def far() -> Iterator[StrictOrigin]:
    with origin_with("far", FAR, INNER) as origin:
        yield origin


def config_of(main: StrictOrigin, far: StrictOrigin, *slots: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "origin": {"endpoint_url": main.endpoint_url, "access_key_id": MAIN[0], "secret_access_key": MAIN[1]},
        "server": {"workers": 2},
        "cache": {"persistent": True, "capacity": "64MiB", "block_size": "64KiB"},
        "origin_credentials": [
            {"name": "far", "access_key_id": FAR[0], "secret_access_key": FAR[1]},
            {"name": "inner", "access_key_id": INNER[0], "secret_access_key": INNER[1]},
        ],
        "buckets": [{"name": "far", "endpoint_url": far.endpoint_url, "origin_credentials": "far"}],
        "slots": list(slots),
        **more,
    }


def lines(origin: StrictOrigin, what: str) -> list[tuple[str, str]]:
    """Requests whose target has this in it, and the key that signed each."""
    found = []
    for line, headers in zip(origin.request_lines, origin.request_headers, strict=True):
        given = {name.decode().lower(): value.decode() for name, value in headers}
        if what in line.decode():
            signer = given.get("authorization", "").partition("Credential=")[2].partition("/")[0]
            found.append((line.decode(), signer))
    return found


def keys_of(client: Any, bucket: str, prefix: str = "") -> list[str]:
    return [one["Key"] for one in client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())]


def everything(client: Any, bucket: str, name: str) -> None:
    """A life of an object and of an upload, read and written in most of the ways there are."""
    client.put_object(Bucket=bucket, Key=f"{name}/a", Body=b"a" * 100_000)
    assert client.get_object(Bucket=bucket, Key=f"{name}/a")["Body"].read() == b"a" * 100_000
    assert client.get_object(Bucket=bucket, Key=f"{name}/a", Range="bytes=70000-70009")["Body"].read() == b"a" * 10
    client.head_object(Bucket=bucket, Key=f"{name}/a")
    client.copy_object(Bucket=bucket, Key=f"{name}/b", CopySource={"Bucket": bucket, "Key": f"{name}/a"})
    upload = client.create_multipart_upload(Bucket=bucket, Key=f"{name}/c")["UploadId"]
    parts = []
    for number, body in enumerate((b"x" * PART_BYTES, b"y"), 1):
        sent = client.upload_part(Bucket=bucket, Key=f"{name}/c", PartNumber=number, UploadId=upload, Body=body)
        parts.append({"PartNumber": number, "ETag": sent["ETag"]})
    client.list_parts(Bucket=bucket, Key=f"{name}/c", UploadId=upload)
    client.list_multipart_uploads(Bucket=bucket, Prefix=f"{name}/")
    client.complete_multipart_upload(Bucket=bucket, Key=f"{name}/c", UploadId=upload, MultipartUpload={"Parts": parts})
    assert keys_of(client, bucket, f"{name}/") == [f"{name}/{one}" for one in "abc"]
    client.delete_object(Bucket=bucket, Key=f"{name}/b")
    client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": f"{name}/c"}]})
    assert keys_of(client, bucket, f"{name}/") == [f"{name}/a"]


@pytest.mark.slow
def test_7_10_each_bucket_is_read_and_written_at_its_home(main: StrictOrigin, far: StrictOrigin) -> None:
    """Both refuse the other's key, and never hear of the other's bucket. Within a slot its own key signs all that names
    its keys or lists them; what is about the bucket, the bucket's."""
    slot = {"name": "inner", "prefix": "s3://far/inner/", "origin_credentials": "inner"}
    with GatewayProcess(config_of(main, far, slot)) as gateway:
        client = client_of(gateway.s3_url, MAIN)
        for bucket, name in (("near", "n"), ("far", "outer"), ("far", "inner")):
            everything(client, bucket, name)
        client.head_bucket(Bucket="far")
        client.get_bucket_location(Bucket="far")
        client.delete_objects(Bucket="far", Delete={"Objects": [{"Key": "inner/a"}, {"Key": "outer/a"}]})
    assert lines(main, "/far") == []
    assert lines(far, "/near") == []
    assert {signer for _, signer in lines(main, "/near")} == {MAIN[0]}
    of_slot = [*lines(far, "/far/inner/"), *lines(far, "prefix=inner%2F")]
    assert len(of_slot) > 12
    assert {signer for _, signer in of_slot} == {INNER[0]}
    assert {signer for _, signer in lines(far, "/far/outer/")} == {FAR[0]}
    assert {signer for _, signer in lines(far, "HEAD /far?") + lines(far, "HEAD /far ") + lines(far, "?location")} == {
        FAR[0]
    }
    assert [signer for _, signer in lines(far, "POST /far?delete")] == [FAR[0], INNER[0], FAR[0]]


@pytest.mark.slow
def test_7_10_a_wrong_key_is_told_and_no_other_is_tried(main: StrictOrigin, far: StrictOrigin) -> None:
    """Its bucket fails, and no other key is tried in its place; status and /readyz name the bucket, and no secret is
    anywhere."""
    config = config_of(main, far)
    config["origin_credentials"][0]["secret_access_key"] = "wrong-secret-777"
    with GatewayProcess(config) as gateway:
        client = client_of(gateway.s3_url, MAIN)
        client.put_object(Bucket="near", Key="a", Body=b"x")
        with pytest.raises(ClientError, match="The origin refuses the key of this gateway"):
            client.put_object(Bucket="far", Key="a", Body=b"x")
        assert {signer for _, signer in lines(far, "/far/a")} == {FAR[0]}
        document = gateway.status()
        assert document["origin"]["problem"] is None
        (one,) = document["origin"]["differing"]
        assert (one["prefix"], one["endpoint_url"], one["state"]) == ("s3://far/", far.endpoint_url, "refused")
        assert one["credentials"] == f"far (key {FAR[0]})"
        ready = httpx.get(f"{gateway.admin_url}/readyz", timeout=ANSWER_SECONDS_MAX)
        assert ready.status_code == 200
        assert "s3://far/" in ready.json()["origin_problem"]
        assert "SignatureDoesNotMatch" in ready.json()["origin_problem"]
        shown = gateway.command("status").stdout
        assert f"s3://far/ at {far.endpoint_url}, signed by far (key {FAR[0]}): reachable: " in shown
        assert f"signed by far (key {FAR[0]})" in gateway.log
        for secret in ("wrong-secret-777", MAIN[1], INNER[1]):
            assert secret not in gateway.log + shown + str(document) + ready.text


@pytest.mark.slow
def test_7_12_only_the_origins_own_key_lets_callers_in(main: StrictOrigin, far: StrictOrigin) -> None:
    """Without [[credentials]]: the keys of buckets are the gateway's alone. The log says what this means."""
    with GatewayProcess(config_of(main, far)) as gateway:
        client_of(gateway.s3_url, MAIN).list_objects_v2(Bucket="far")
        assert refused(client_of(gateway.s3_url, FAR).list_objects_v2, Bucket="far") == "InvalidAccessKeyId"
        assert "there are no [[credentials]]: whoever signs with the key of [origin] acts with all of" in gateway.log


@pytest.mark.slow
def test_9_6_buckets_are_in_one_list(main: StrictOrigin, far: StrictOrigin) -> None:
    """What the origin has, and the buckets that the configuration has elsewhere; those once that are in both."""
    far.model.create_bucket("unknown-here")
    with GatewayProcess(config_of(main, far)) as gateway:
        client = client_of(gateway.s3_url, MAIN)
        assert [one["Name"] for one in client.list_buckets()["Buckets"]] == ["near", "far"]
        assert client.list_buckets()["Buckets"][1]["CreationDate"].year == 1970
        main.model.create_bucket("far")
        assert sorted(one["Name"] for one in client.list_buckets()["Buckets"]) == ["far", "near"]
    assert lines(far, "GET / ") == []


@pytest.mark.slow
def test_7_11_copies_between_homes_are_refused(main: StrictOrigin, far: StrictOrigin) -> None:
    """Neither origin has both; and the target's may have another bucket of the source's name, whose bytes would come.
    Whether the source is pending makes no difference."""
    far.model.create_bucket("near")
    far.model.put("near", "a", b"somebody else's")
    slot = {"name": "back", "prefix": "s3://near/back/", "write": "back", "buffer": "16MiB"}
    with GatewayProcess(config_of(main, far, slot)) as gateway:
        client = client_of(gateway.s3_url, MAIN)
        client.put_object(Bucket="near", Key="a", Body=b"mine")
        client.put_object(Bucket="near", Key="back/a", Body=b"mine")
        upload = client.create_multipart_upload(Bucket="far", Key="c")["UploadId"]
        for key in ("a", "back/a"):
            source = {"Bucket": "near", "Key": key}
            with pytest.raises(ClientError, match="at different origins") as caught:
                client.copy_object(Bucket="far", Key="b", CopySource=source)
            assert caught.value.response["Error"]["Code"] == "NotImplemented"
            part = {"PartNumber": 1, "UploadId": upload}
            assert (
                refused(client.upload_part_copy, Bucket="far", Key="c", CopySource=source, **part) == "NotImplemented"
            )
        client.meta.events.register("before-sign.s3.PutObject", _with_foreign_source)
        assert refused(client.put_object, Bucket="far", Key="d", Body=b"") == "NotImplemented"
        assert keys_of(client, "far") == []
    assert lines(far, "/near") == []


def _with_foreign_source(request: Any, **_: Any) -> None:
    request.headers["x-goog-copy-source"] = "near/a"


def _has(origin: StrictOrigin, key: str) -> bool:
    try:
        origin.model.data("far", key)
    except KeyError:
        return False
    return True


@pytest.mark.slow
def test_8_7_what_was_written_back_is_flushed_to_its_home(
    main: StrictOrigin, far: StrictOrigin, tmp_path: Path
) -> None:
    """With the slot's key, its probes too, while the other origin is away. With what is pending, no start sends it
    anywhere else; once its home has it, the bucket may move, and nothing of before is taken for what is there."""
    slot = {
        "name": "ckpt",
        "prefix": "s3://far/ckpt/",
        "write": "back",
        "buffer": "32MiB",
        "origin_credentials": "inner",
    }
    reading = {"name": "read", "prefix": "s3://far/data/", "mode": "read-only", "consistency": "immutable"}
    with ExitStack() as stack:
        elsewhere = stack.enter_context(origin_with("far", FAR, INNER))
        far.model.put("far", "data/a", b"first")
        elsewhere.model.put("far", "data/a", b"other")
        gateway = stack.enter_context(GatewayProcess(config_of(main, far, slot, reading), directory=tmp_path / "cache"))
        client = client_of(gateway.s3_url, MAIN)
        assert client.get_object(Bucket="far", Key="data/a")["Body"].read() == b"first"
        client.put_object(Bucket="far", Key="ckpt/learned", Body=b"x")  # the first write of a bucket goes through
        main.is_out_of_reach = True
        eventually(lambda: client.put_object(Bucket="far", Key="ckpt/more", Body=b"y") is not None, "a write")
        client.put_object(Bucket="far", Key="ckpt/back", Body=b"z" * 100_000)
        eventually(lambda: _has(far, "ckpt/back"), "it was not flushed")
        main.is_out_of_reach = False
        assert {signer for _, signer in lines(far, "/far/ckpt/")} == {INNER[0]}
        far.is_out_of_reach = True
        client.put_object(Bucket="far", Key="ckpt/pending", Body=b"only here")
        client.put_object(Bucket="near", Key="still", Body=b"served")
        assert client.get_object(Bucket="far", Key="ckpt/pending")["Body"].read() == b"only here"
        assert gateway.terminate() == 0
        moved = config_of(main, elsewhere, slot, reading)
        command = ("gateway", "serve", "--config", _written(tmp_path, moved))
        refused_start = run_prepared(*command, timeout=60, env=os.environ | {"AWS_EC2_METADATA_DISABLED": "true"})
        assert refused_start.returncode == 1
        for said in (far.endpoint_url, elsewhere.endpoint_url, "'far'", "1 objects", "nothing was changed"):
            assert said in refused_start.stderr
        far.is_out_of_reach = False
        gateway.start()
        eventually(lambda: _has(far, "ckpt/pending"), "it was not flushed")
        client = client_of(gateway.s3_url, MAIN)
        eventually(lambda: _nothing_left(gateway), "something is left in the buffer")
        assert gateway.terminate() == 0
        asked = len(elsewhere.request_lines)
        assert asked == 0
        with GatewayProcess(moved, directory=tmp_path / "cache") as there:
            client = client_of(there.s3_url, MAIN)
            assert client.get_object(Bucket="far", Key="data/a")["Body"].read() == b"other"
            assert refused(client.get_object, Bucket="far", Key="ckpt/pending") == "NoSuchKey"
            assert keys_of(client, "far") == ["data/a"]


def _nothing_left(gateway: GatewayProcess) -> bool:
    with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
        found = client.get(f"{gateway.admin_url}/api/v1/writeback").json()
    return all(one["objects"] == 0 and one["open_uploads"] == 0 for one in found["slots"])


def _written(tmp_path: Path, config: dict[str, Any]) -> Path:
    from tests.support.gateway_process import _with_defaults, to_toml

    path = tmp_path / "moved.toml"
    path.write_text(to_toml(_with_defaults(config, tmp_path / "cache")))
    return path


@pytest.mark.slow
def test_8_8_a_home_that_is_away_holds_up_no_other(main: StrictOrigin, far: StrictOrigin) -> None:
    """Its bucket is answered 503, and what is cached of it; the others are served."""
    slot = {"name": "far", "prefix": "s3://far/", "mode": "read-only", "consistency": "immutable"}
    with GatewayProcess(config_of(main, far, slot)) as gateway:
        far.model.put("far", "a", b"a")
        client = client_of(gateway.s3_url, MAIN)
        client.put_object(Bucket="near", Key="n", Body=b"n")
        client.get_object(Bucket="far", Key="a")["Body"].read()
        far.is_out_of_reach = True
        for _ in range(10):
            assert refused(client.get_object, Bucket="far", Key="b") in ("ServiceUnavailable", "SlowDown")
            assert client.get_object(Bucket="near", Key="n")["Body"].read() == b"n"
        assert client.get_object(Bucket="far", Key="a")["Body"].read() == b"a"


@pytest.mark.slow
def test_keys_change_while_it_runs_and_homes_do_not(main: StrictOrigin, far: StrictOrigin, tmp_path: Path) -> None:
    """By SIGHUP: another secret, another name, another way. Where a bucket is needs a restart, and this is told."""
    config = config_of(main, far)
    with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
        admin, client = Admin(gateway), client_of(gateway.s3_url, MAIN)
        client.put_object(Bucket="far", Key="a", Body=b"x")
        far.credentials = {"AKNEXT": Credentials("AKNEXT", "next-secret-00"), INNER[0]: Credentials(*INNER)}
        assert refused(client.head_object, Bucket="far", Key="a") == "403"
        far_key, inner = config["origin_credentials"]
        admin.reload(
            {
                "origin_credentials": [
                    {**far_key, "access_key_id": "AKNEXT", "secret_access_key": "next-secret-00"},
                    inner,
                ]
            },
            gateway,
        )
        client.head_object(Bucket="far", Key="a")
        assert lines(far, "HEAD /far/a")[-1][1] == "AKNEXT"
        admin.reload({"buckets": [{**config["buckets"][0], "origin_credentials": "inner"}]}, gateway)
        client.head_object(Bucket="far", Key="a")
        assert lines(far, "HEAD /far/a")[-1][1] == INNER[0]
        assert admin.get("/api/v1/status")["origin"]["differing"][0]["credentials"] == f"inner (key {INNER[0]})"
        assert admin.put("y", {"prefix": "s3://far/y/", "origin_credentials": "far"}).status_code == 200
        client.put_object(Bucket="far", Key="y/a", Body=b"x")
        assert lines(far, "/far/y/a")[-1][1] == "AKNEXT"
        slot = {"prefix": "s3://near/x/", "origin_credentials": "nobody"}
        answer = admin.put("x", slot)
        assert answer.status_code == 409
        assert "no [[origin_credentials]] have this name" in answer.text
        admin.reload({"buckets": [{"name": "far", "endpoint_url": main.endpoint_url}]}, gateway)
        assert "where the bucket 'far' is" in admin.gateway["settings_problem"]
        client.head_object(Bucket="far", Key="a")


@pytest.mark.slow
def test_7_10_what_nobody_asks_for_goes_there_too(main: StrictOrigin, far: StrictOrigin) -> None:
    """Crawls of an index, warming and snapshots: at the bucket's home, signed with the slot's key. A snapshot says
    where its objects are."""
    slot = {
        "name": "data",
        "prefix": "s3://far/data/",
        "mode": "read-only",
        "metadata_ttl": "1h",
        "index": True,
        "origin_credentials": "inner",
    }
    for number in range(20):
        far.model.put("far", f"data/{number:02}", b"%d" % number)
    with GatewayProcess(config_of(main, far, slot)) as gateway, httpx.Client(base_url=gateway.admin_url) as admin:

        def is_done(path: str, prefix: str, **more: str) -> None:
            begun = admin.post(path, json={"prefix": prefix, **more})
            assert begun.status_code == 202, begun.text
            one = f"/api/v1/jobs/{begun.json()['id']}"
            eventually(lambda: admin.get(one).json()["state"] not in ("waiting", "running"), "the job does not end")
            assert admin.get(one).json()["state"] == "done", admin.get(one).text

        eventually(lambda: admin.get("/api/v1/indexes").json()["indexes"][0]["complete"], "the index is not complete")
        is_done("/api/v1/warm", "s3://far/data/")
        is_done("/api/v1/snapshots", "s3://far/data/", name="v1")
        assert admin.get("/api/v1/snapshots/v1").json()["origin"] == far.endpoint_url
        asked = len(far.request_lines)
        assert client_of(gateway.s3_url, MAIN).get_object(Bucket="far", Key="data/07")["Body"].read() == b"7"
        assert len(keys_of(client_of(gateway.s3_url, MAIN), "far", "data/")) == 20
        assert len(far.request_lines) == asked
    assert {signer for _, signer in lines(far, "data")} == {INNER[0]}
    assert lines(main, "far") == []


@pytest.mark.slow
def test_roles_sign_for_their_buckets(main: StrictOrigin, far: StrictOrigin, tmp_path: Path) -> None:
    """What moto's STS lends is what the home knows, and nothing else: by AssumeRole for the bucket, by a web identity
    for a slot. AWS_ENDPOINT_URL sends clients to the gateway, and no question about roles."""
    bucket_role, slot_role = (f"arn:aws:iam::123456789012:role/{name}" for name in ("bucket", "slot"))
    token = tmp_path / "token"
    token.write_text("a.b.c")
    with moto_sts() as sts:
        config = config_of(main, far, {"name": "s", "prefix": "s3://far/s/", "origin_credentials": "web"})
        config["origin_credentials"] = [
            {"name": "far", "role_arn": bucket_role, "external_id": "an-external-id"},
            {"name": "web", "role_arn": slot_role, "web_identity_token_file": str(token)},
        ]
        far.credentials = lent = LentByMoto()
        with GatewayProcess(
            config, environment={"AWS_ENDPOINT_URL_STS": sts, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
        ) as gateway:
            client = client_of(gateway.s3_url, MAIN)
            everything(client, "far", "r")
            everything(client, "far", "s")
            found = gateway.status()["origin"]["differing"]
            assert [one["credentials"] for one in found] == [f"far (role {bucket_role})", f"web (role {slot_role})"]
            assert [one["problem"] for one in found] == [None, None]
            assert "an-external-id" not in gateway.log + str(gateway.status())
        for prefix, role in (("/far/r/", bucket_role), ("/far/s/", slot_role)):
            lent.role = role
            signers = {signer for _, signer in lines(far, prefix)}
            assert signers
            assert all(lent.get(signer) is not None for signer in signers)


@pytest.mark.slow
def test_8_8_an_sts_that_lends_nothing_is_told(main: StrictOrigin, far: StrictOrigin) -> None:
    """It starts, serves the others, and says in words what is missing; requests of that bucket are 503 at once."""
    config = config_of(main, far)
    config["origin_credentials"] = [
        {"name": "far", "role_arn": "arn:aws:iam::123456789012:role/x", "sts_endpoint_url": "http://127.0.0.1:9"}
    ]
    with GatewayProcess(config) as gateway:
        client = client_of(gateway.s3_url, MAIN)
        client.put_object(Bucket="near", Key="a", Body=b"x")
        assert refused(client.get_object, Bucket="far", Key="a") == "ServiceUnavailable"
        (one,) = gateway.status()["origin"]["differing"]
        assert one["problem"].startswith("no key pair for the role arn:aws:iam::123456789012:role/x")
        assert "STS lends no key pair" in gateway.log
    assert lines(far, "/far") == []
