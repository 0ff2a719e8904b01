"""What the audit log of a real gateway says: each change, each refusal, what operators do; while it is rotated."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import boto3
import httpx
import orjson
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

KEYS = {"writer": "writer-secret-0123", "reader": "reader-secret-0123"}


def config_of(origin: StrictOrigin, audit: Path) -> dict[str, Any]:
    rights = {"writer": "read-write", "reader": "read-only"}
    return {
        "server": {"workers": 2},
        "origin": origin.settings,
        "logging": {"audit_file": str(audit)},
        "credentials": [
            {"access_key_id": key, "secret_access_key": secret, "allow": ["s3://"], "operations": rights[key]}
            for key, secret in KEYS.items()
        ],
    }


def client(gateway: GatewayProcess, key: str, secret: str = "") -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=key,
        aws_secret_access_key=secret or KEYS[key],
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


def refused(call: Callable[..., Any], **arguments: Any) -> None:
    with pytest.raises(ClientError):
        call(**arguments)


def lines(*paths: Path) -> list[dict[str, Any]]:
    """Of all files: what is written a moment after the answer is waited for."""
    time.sleep(0.3)
    return [orjson.loads(line) for path in paths for line in path.read_bytes().splitlines()]


@pytest.mark.slow
def test_each_change_and_each_refusal_is_there(tmp_path: Path) -> None:
    """And no read; no secret, and nothing of a body."""
    audit = tmp_path / "audit.jsonl"
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        with GatewayProcess(config_of(origin, audit)) as gateway:
            s3 = client(gateway, "writer")
            etag = s3.put_object(Bucket="bucket", Key="a", Body=b"the body")["ETag"]
            s3.get_object(Bucket="bucket", Key="a")["Body"].read()
            s3.list_objects_v2(Bucket="bucket")
            s3.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": "a"}, {"Key": "b"}]})
            s3.delete_object(Bucket="bucket", Key="c")
            refused(client(gateway, "reader").put_object, Bucket="bucket", Key="d", Body=b"x")
            refused(client(gateway, "writer", "wrong").put_object, Bucket="bucket", Key="e", Body=b"x")
            httpx.put(f"{gateway.admin_url}/api/v1/slots/s", json={"prefix": "s3://bucket/s/"}, timeout=60)
            eventually(lambda: sum(one["event"] != "change" for one in lines(audit)) >= 7)
            found, text = [one for one in lines(audit) if one["event"] != "change"], audit.read_text()
    found.sort(key=lambda one: (one.get("key") or "~", one["operation"] != "PutObject"))  # two workers write it
    told = [(one["caller"], one["operation"], one.get("key"), one["status"]) for one in found]
    assert told == [
        ("writer", "PutObject", "a", "200"),
        ("writer", "DeleteObjects", "a", "200"),
        ("writer", "DeleteObjects", "b", "200"),
        ("writer", "DeleteObject", "c", "204"),
        ("reader", "PutObject", "d", "403"),
        ("none", "PutObject", "e", "403"),
        ("admin", "PUT /api/v1/slots/s", None, "200"),
    ]
    assert found[0]["etag"] == etag
    assert found[0]["remote"] == "127.0.0.1"
    assert found[0]["bucket"] == "bucket"
    assert found[1]["request_id"] == found[2]["request_id"]
    for hidden in (*KEYS.values(), SECRET_ACCESS_KEY, "the body", "Signature"):
        assert hidden not in text


@pytest.mark.slow
def test_who_changes_settings_is_told_whatever_becomes_of_the_admin_port(tmp_path: Path) -> None:
    """By the supervisor, which makes the change: by port and by signal, made and refused; the background process is
    killed before it has answered."""
    audit = tmp_path / "audit.jsonl"
    with StrictOrigin() as origin, GatewayProcess(config_of(origin, audit)) as gateway:

        def changes() -> list[tuple[Any, ...]]:
            found = [one for one in lines(audit) if one["event"] == "change"] if audit.exists() else []
            return [(one["process"], one["caller"], one["remote"], one["operation"], one["status"]) for one in found]

        slots = f"{gateway.admin_url}/api/v1/slots"
        assert httpx.put(f"{slots}/a%0ab", json={"prefix": "s3://bucket/a/"}, timeout=60).status_code == 400
        slot = {"prefix": "s3://bucket/a/", "keep_last": 2}
        assert httpx.put(f"{slots}/refused", json=slot, timeout=60).status_code == 409
        admin = [one["operation"] for one in lines(audit) if one["event"] == "admin"]
        assert admin == ["PUT /api/v1/slots/(no name)", "PUT /api/v1/slots/refused"]
        os.kill(gateway.pid, signal.SIGHUP)
        eventually(lambda: len(changes()) == 2)
        gateway.config_file.write_text(gateway.config_file.read_text() + "\n[nonsense]\n")
        os.kill(gateway.pid, signal.SIGHUP)
        eventually(lambda: len(changes()) == 3)
        gateway.config_file.write_text(gateway.config_file.read_text().replace("[nonsense]", ""))
        worker, background = process_id(gateway, "worker0"), process_id(gateway, "background")
        os.kill(worker, signal.SIGSTOP)  # the answer waits for it
        try:
            with closing(socket.create_connection((httpx.URL(slots).host, httpx.URL(slots).port or 0))) as connection:
                body = b'{"prefix": "s3://bucket/k/"}'
                head = f"PUT /api/v1/slots/k HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)
                eventually(lambda: len(changes()) == 4)
                os.kill(background, signal.SIGKILL)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert changes() == [
            ("supervisor", "admin", "127.0.0.1", "PUT /api/v1/slots/refused", "refused"),
            ("supervisor", "signal", None, "SIGHUP", "applied"),
            ("supervisor", "signal", None, "SIGHUP", "refused"),
            ("supervisor", "admin", "127.0.0.1", "PUT /api/v1/slots/k", "applied"),
        ]
        refusals = [one for one in lines(audit) if one["event"] == "change" and one["status"] == "refused"]
        assert all(one["problem"] for one in refusals)
        assert "nonsense" in refusals[1]["problem"]


def process_id(gateway: GatewayProcess, name: str) -> int:
    processes = httpx.get(f"{gateway.admin_url}/api/v1/status", timeout=60).json()["gateway"]["processes"]
    return int(next(one["process_id"] for one in processes if one["name"] == name))


@pytest.mark.slow
def test_no_line_is_lost_while_it_is_rotated(tmp_path: Path) -> None:
    """By renaming, as logrotate does, and while a worker is killed: what was answered is there."""
    audit, count = tmp_path / "audit.jsonl", 120
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        with GatewayProcess(config_of(origin, audit)) as gateway:
            ids, old = set[str](), list[Path]()
            for number in range(count):
                answer = client(gateway, "writer").put_object(Bucket="bucket", Key=str(number), Body=b"x")
                ids.add(answer["ResponseMetadata"]["RequestId"])
                if number % 30 == 29:
                    old.append(tmp_path / f"audit.{number}")
                    audit.rename(old[-1])
                    time.sleep(1.1)
                if number == 50:
                    time.sleep(0.3)
                    gateway.wait_for_worker(0, other_than=gateway.kill_worker(0))
            client(gateway, "writer").put_object(Bucket="bucket", Key="last", Body=b"x")
            found = lines(*old, audit)
    assert ids <= {one["request_id"] for one in found}
    assert len(found) == count + 1


QUERIES = (
    "token=visible",
    "prefix=visible&max-keys=visible",
    "list-type=2&continuation-token=visible&encoding-type=visible",
    "uploadId=visible&partNumber=visible",
    "versionId=visible",
    "acl&visible",
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=visible%2F1%2Fa%2Fs3%2Faws4_request&X-Amz-Signature=visible",
    "AWSAccessKeyId=visible&Signature=visible&Expires=visible",
    "response-content-type=visible%0d%0a",
    "visible#visible",
)


def say(port: int, method: str, target: str, host: str) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
        fields = "Content-Type: application/json\r\nContent-Length: 0\r\nConnection: close"
        wire.sendall(f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n\r\n".encode())
        while wire.recv(65536):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("is_origin_there", [True, False])
def test_no_log_has_a_query_string(tmp_path: Path, is_origin_there: bool) -> None:
    """They carry tokens and signatures: neither port's go into the audit log, the access log, the log, or the lists of
    requests of late, whatever becomes of the request."""
    audit, access = tmp_path / "audit.jsonl", tmp_path / "access.jsonl"
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        config = config_of(origin, audit)
        del config["credentials"]
        config["server"] = {"allow_unsigned": True}
        config["logging"] = {"audit_file": str(audit), "access_file": str(access), "level": "debug"}
        with GatewayProcess(config) as gateway:
            s3, admin = (int(url.rpartition(":")[2]) for url in (gateway.s3_url, gateway.admin_url))
            if not is_origin_there:
                origin.stop()
            for query in QUERIES:
                for method in ("GET", "HEAD", "PUT", "POST", "DELETE", "PATCH"):
                    for path in ("/bucket", "/bucket/key"):
                        say(s3, method, f"{path}?{query}", "127.0.0.1")
                    for path in ("/api/v1/flush", "/api/v1/slots/s", "/api/v1/snapshots", "/nothing"):
                        say(admin, method, f"{path}?{query}", "127.0.0.1")
                    say(admin, method, f"/api/v1/slots/{quote(query, safe='')}", "127.0.0.1")
            shown = httpx.get(f"{gateway.admin_url}/api/v1/requests?limit=1000", timeout=60).text
            said = lines(audit, access)
            assert len(said) > 100
            assert "visible" not in f"{said}{shown}{gateway.log}"
            if not is_origin_there:
                origin.start()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "default", "(gone)"])
def test_no_slot_has_the_name_of_what_is_in_none(name: str, tmp_path: Path) -> None:
    """Metrics and logs could not tell it from requests without a slot, and from slots that are gone."""
    with StrictOrigin() as origin, GatewayProcess(config_of(origin, tmp_path / "audit.jsonl")) as gateway:
        document, url = {"prefix": "s3://bucket/s/"}, f"{gateway.admin_url}/api/v1/slots/{name}"
        assert httpx.put(url, json=document, timeout=60).status_code in (400, 409)
