"""A real gateway whose origin judges callers: two key pairs, at an origin whose policies differ."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from gateway.cli import app
from tests.support.changing_slots import Admin
from tests.support.gateway_process import GatewayProcess, to_toml
from tests.support.policies import Policy
from tests.support.strict_origin import StrictOrigin

SECRETS = {"ALICE": "alice-secret-0123", "BOB": "bob-secret-01234567"}
SLOT = {"name": "judged", "prefix": "s3://bucket/data/", "consistency": "immutable", "authorization": "origin"}


@contextmanager
def an_origin() -> Iterator[StrictOrigin]:
    """Alice may do everything, Bob read and list one directory."""
    with StrictOrigin() as origin:
        for name, secret in SECRETS.items():
            origin.credentials[name] = Credentials(name, secret)
        origin.model.policies = {
            "ALICE": Policy(read=[""], write=[""], list=[""]),
            "BOB": Policy(read=["data/bob/"], list=["data/bob/"]),
        }
        for name in ("alice", "bob"):
            origin.model.put("bucket", f"data/{name}/k", name.encode() * 1000)
        yield origin


def config_of(origin: StrictOrigin, slot: dict[str, Any]) -> dict[str, Any]:
    return {
        "server": {"workers": 2},
        "origin": origin.settings,
        "credentials": [
            {"access_key_id": name, "secret_access_key": secret, "allow": ["s3://"]} for name, secret in SECRETS.items()
        ],
        "slots": [slot],
    }


def client(url: str, name: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=name,
        aws_secret_access_key=SECRETS[name],
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


def outcome(call: Any, **arguments: Any) -> str:
    """ "ok", or the code of the error; and that nothing else goes wrong."""
    try:
        answer = call(Bucket="bucket", **arguments)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    if "Body" in answer:
        answer["Body"].read()
    return "ok"


def outcomes(s3: Any) -> dict[str, str]:
    """What a client may do beside and in Alice's directory."""
    key = "data/alice/k"
    return {
        "get": outcome(s3.get_object, Key=key),
        "range": outcome(s3.get_object, Key=key, Range="bytes=0-9"),
        "head": outcome(s3.head_object, Key=key),
        "tags": outcome(s3.get_object_tagging, Key=key),
        "list": outcome(s3.list_objects_v2, Prefix="data/alice/"),
        "list all": outcome(s3.list_objects_v2),
        "put": outcome(s3.put_object, Key="data/alice/new", Body=b"x"),
        "copy": outcome(s3.copy_object, Key="elsewhere", CopySource={"Bucket": "bucket", "Key": key}),
        "delete": outcome(s3.delete_object, Key="data/alice/none"),
        "upload": outcome(s3.create_multipart_upload, Key="data/alice/upload"),
    }


DENIED = {
    "get": "AccessDenied",
    "range": "AccessDenied",
    "head": "403",
    "tags": "AccessDenied",
    "list": "AccessDenied",
    "list all": "AccessDenied",
    "put": "AccessDenied",
    "copy": "AccessDenied",
    "delete": "AccessDenied",
    "upload": "AccessDenied",
}


@pytest.mark.slow
def test_each_caller_has_its_own_rights(tmp_path: Path) -> None:
    """At the gateway as at the origin, warm or cold, on every worker."""
    with an_origin() as origin, GatewayProcess(config_of(origin, SLOT), directory=tmp_path / "cache") as gateway:
        for _ in range(4):
            alice, bob = client(gateway.s3_url, "ALICE"), client(gateway.s3_url, "BOB")
            for _ in range(3):
                assert set(outcomes(alice).values()) == {"ok"}
                assert outcomes(bob) == DENIED == outcomes(client(origin.endpoint_url, "BOB"))
                assert outcome(bob.get_object, Key="data/bob/k") == "ok"
                assert outcome(bob.list_objects_v2, Prefix="data/bob/") == "ok"
        document = Admin(gateway).get("/api/v1/explain?object=s3://bucket/data/alice/k")
        assert (document["slot"]["authorization"], document["slot"]["authorization_ttl_seconds"]) == ("origin", 60.0)
        explained = CliRunner().invoke(app, ["explain", "s3://bucket/data/alice/k", "--admin-url", gateway.admin_url])
        assert "its yes counts for 60 s" in explained.output
        assert "callers judged by the origin" in gateway.log
        told = httpx.get(f"{gateway.admin_url}/metrics").text
        assert 'forebay_authorizations_total{outcome="denied",slot="judged"}' in told
        assert 'forebay_authorizations_total{outcome="remembered",slot="judged"}' in told
        assert not any(secret in told + gateway.log for secret in SECRETS.values())


@pytest.mark.slow
def test_it_is_switched_on_while_clients_read(tmp_path: Path) -> None:
    """Over the admin port and by SIGHUP: what was answered from memory before is refused at once, on each worker."""
    open_slot = {**SLOT, "authorization": "gateway"}
    with an_origin() as origin:
        config = config_of(origin, {"name": "other", "prefix": "s3://bucket/other/"})
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            admin, clients = Admin(gateway), [client(gateway.s3_url, "BOB") for _ in range(8)]

            def all_may(code: str) -> None:
                for s3 in clients:
                    for _ in range(5):
                        assert outcome(s3.get_object, Key="data/alice/k") == code
                    assert outcome(s3.list_objects_v2, Prefix="data/alice/") == code

            def set_slot(slot: dict[str, Any]) -> int:
                return admin.put("judged", {name: value for name, value in slot.items() if name != "name"}).status_code

            assert set_slot(open_slot) == 200
            all_may("ok")
            assert set_slot(SLOT) == 200
            all_may("AccessDenied")
            assert set_slot(open_slot) == 200
            all_may("ok")
            assert set_slot({**SLOT, "write": "back"}) == 409
            assert set_slot({**SLOT, "authorization_ttl": "2h"}) == 400
            all_may("ok")
            assert admin.delete("judged").status_code == 200
            all_may("ok")
            admin.reload({"slots": [SLOT]}, gateway)
            all_may("AccessDenied")


@pytest.mark.slow
def test_what_was_acknowledged_before_is_flushed_first(tmp_path: Path) -> None:
    """A slot that wrote back and is to be judged now: reads and deletions wait until the origin has what is pending."""
    back = {"name": "judged", "prefix": "s3://bucket/data/", "write": "back", "buffer": "64MiB"}
    with an_origin() as origin:
        config = config_of(origin, back) | {"cache": {"persistent": True}}
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            alice, bob = client(gateway.s3_url, "ALICE"), client(gateway.s3_url, "BOB")
            for number in range(20):
                alice.put_object(Bucket="bucket", Key=f"data/alice/{number}", Body=b"x" * number)
            _reload(gateway, {**SLOT, "consistency": "strict"})
            for number in range(20):
                assert outcome(bob.get_object, Key=f"data/alice/{number}") == "AccessDenied"
                assert outcome(bob.delete_object, Key=f"data/alice/{number}") == "AccessDenied"
                got = alice.get_object(Bucket="bucket", Key=f"data/alice/{number}")["Body"].read()
                assert got == b"x" * number == origin.model.data("bucket", f"data/alice/{number}")


def _reload(gateway: GatewayProcess, slot: dict[str, Any]) -> None:
    Admin(gateway).reload({"slots": [slot]}, gateway)


@pytest.mark.slow
def test_a_restart_finds_what_is_pending(tmp_path: Path) -> None:
    """The same where the setting was changed while the gateway was down."""
    back = {"name": "judged", "prefix": "s3://bucket/data/", "write": "back", "buffer": "64MiB"}
    with an_origin() as origin:
        config = config_of(origin, back) | {"cache": {"persistent": True}}
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            alice = client(gateway.s3_url, "ALICE")
            alice.put_object(Bucket="bucket", Key="data/alice/first", Body=b"teaches what the bucket can")
            origin.is_out_of_reach = True
            alice.put_object(Bucket="bucket", Key="data/alice/pending", Body=b"acknowledged")
            gateway.terminate()
            document = tomllib.loads(gateway.config_file.read_text())
            gateway.config_file.write_text(to_toml({**document, "slots": [SLOT]}))
            gateway.start()
            alice, bob = client(gateway.s3_url, "ALICE"), client(gateway.s3_url, "BOB")
            origin.is_out_of_reach = False
            assert outcome(bob.get_object, Key="data/alice/pending") in ("AccessDenied", "ServiceUnavailable")
            assert alice.get_object(Bucket="bucket", Key="data/alice/pending")["Body"].read() == b"acknowledged"
            assert outcome(bob.get_object, Key="data/alice/pending") == "AccessDenied"
