"""The write-back buffer over the admin port: what is answered, what is refused, and that the description is true."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest

from gateway.admin.app import control_app, describe
from gateway.admin.backends import Backends, StateHolder
from gateway.api.documents import PendingObjects, Resolved, Writeback
from gateway.config import OriginSettings, Settings
from gateway.config.live import LiveSettings
from gateway.core.errors import BufferUnavailable, NothingPending, NotToBeDecided, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoints import STATES
from gateway.writeback.admin.writeback_admin import NoWriteback, WritebackAdmin
from gateway.writeback.order import with_order
from tests.support.admin_documents import filled
from tests.support.writeback import key, pending
from tests.support.writeback_admin import AdminHarness

CHECKPOINTS = "/api/v1/checkpoints"
OBJECTS, VERSIONS, RESOLVE, ABORT = (
    f"/api/v1/writeback/{name}" for name in ("objects", "versions", "resolve", "abort")
)
Admin: TypeAlias = WritebackAdmin | NoWriteback
Scenario = Callable[[httpx.AsyncClient], Awaitable[None]]


def play(tmp_path: Path, scenario: Scenario, admin: Admin | None, *, host: str = "127.0.0.1:9001") -> None:
    asyncio.run(_play(tmp_path, scenario, admin, host))


async def _play(tmp_path: Path, scenario: Scenario, admin: Admin | None, host: str = "127.0.0.1:9001") -> None:
    settings = Settings(origin=OriginSettings(endpoint_url="http://127.0.0.1:1"))
    app = control_app(LiveSettings(settings), StateHolder(), tmp_path, Backends(writeback=admin))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
        await scenario(client)


def described(path: str, method: str = "get", status: str = "200") -> dict[str, Any]:
    content = describe()["paths"][path][method]["responses"][status]["content"]
    found: dict[str, Any] = content["application/json"]["schema"]
    return found


def test_answers_are_as_they_are_described(tmp_path: Path) -> None:
    """Every field of every document, of objects, uploads and slots."""

    async def run() -> None:
        harness = AdminHarness(tmp_path)
        try:
            await harness.conflict("k")
            await harness.open_upload("o", "u")
            await _play(tmp_path, scenario, harness.admin)
        finally:
            await harness.close()

    async def scenario(client: httpx.AsyncClient) -> None:
        posted = await client.post("/api/v1/flush", json={"prefix": "s3://bucket/"})
        assert posted.status_code == 202
        progress = described("/api/v1/flush", "post", "202")["properties"]
        assert (posted.json().keys(), posted.json()["stuck"]) == (progress.keys(), 1)
        asked = await client.get(
            "/api/v1/flush", params={"prefix": "s3://bucket/", "through": posted.json()["through"]}
        )
        assert asked.json() == posted.json()
        page = (await client.get(OBJECTS, params={"problems": "true", "limit": "1", "prefix": "s3://bucket/k"})).json()
        schema = described(OBJECTS)["properties"]
        assert page.keys() == schema.keys()
        assert page["objects"][0].keys() == schema["objects"]["items"]["properties"].keys()
        assert (await client.get(OBJECTS, params={"after": page["next"], "problems": "true"})).json()["objects"] == []
        assert (await client.get(OBJECTS)).json()["objects"] == page["objects"]
        uploads = (await client.get("/api/v1/writeback/uploads")).json()
        upload = described("/api/v1/writeback/uploads")["properties"]["uploads"]["items"]["properties"]
        assert uploads["uploads"][0].keys() == upload.keys()
        summary = (await client.get("/api/v1/writeback")).json()
        schema = described("/api/v1/writeback")["properties"]
        assert (summary.keys(), summary["conflicts"]) == (schema.keys(), 1)
        assert summary["slots"][0].keys() == schema["slots"]["items"]["properties"].keys()
        assert (await client.get("/api/v1/status")).json()["writeback"] == summary
        versions = (await client.get(VERSIONS, params={"object": "s3://bucket/k"})).json()
        schema = described(VERSIONS)["properties"]
        assert (versions.keys(), versions["object"]) == (schema.keys(), page["objects"][0])
        assert versions["at_origin"].keys() == schema["at_origin"]["properties"].keys()
        assert versions["at_origin"]["bytes"] == len(b"theirs")
        assert versions["at_origin"]["etag"] == f'"{hashlib.md5(b"theirs").hexdigest()}"'
        assert versions["at_origin"]["modified_at"] is not None
        resolved = await client.post(RESOLVE, json={"object": "s3://bucket/k", "decision": "keep-ours"})
        assert resolved.json().keys() == described(RESOLVE, "post")["properties"].keys()
        aborted = await client.post(ABORT, json={"upload_ids": ["u", "x"]})
        assert aborted.json() == {"aborted": ["u"], "not_open": ["x"]}
        assert aborted.json().keys() == described(ABORT, "post")["properties"].keys()

    asyncio.run(run())


def test_checkpoints_are_as_they_are_described(tmp_path: Path) -> None:
    """Every field, and every state there may be; under a prefix, and in some states only."""

    async def run() -> None:
        harness = AdminHarness(tmp_path)
        write = with_order(pending(key("run/step-1/x"), "f"), None)
        try:
            await harness.buffer.journal.change(lambda tx: tx.writes.acknowledge(write))
            await _play(tmp_path, scenario, harness.admin)
        finally:
            await harness.close()

    async def scenario(client: httpx.AsyncClient) -> None:
        asked = {"prefix": "s3://bucket/run/", "state": "acknowledged,failed"}
        found = (await client.get(CHECKPOINTS, params=asked)).json()
        schema = described(CHECKPOINTS)["properties"]
        checkpoint = schema["checkpoints"]["items"]["properties"]
        assert (found.keys(), found["checkpoints"][0].keys()) == (schema.keys(), checkpoint.keys())
        assert found["checkpoints"][0]["missing"].keys() == checkpoint["missing"]["properties"].keys()
        assert set(checkpoint["state"]["enum"]) == set(STATES)
        assert (await client.get(CHECKPOINTS, params={"state": "durable"})).json()["checkpoints"] == []
        assert (await client.get(CHECKPOINTS, params={"prefix": "s3://other/"})).json()["checkpoints"] == []
        for wrong in ({"state": "lost"}, {"after": "x"}):
            assert (await client.get(CHECKPOINTS, params=wrong)).status_code == 400

    asyncio.run(run())


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """With the status that fits, and a message."""

    async def scenario(client: httpx.AsyncClient) -> None:
        asked = client.build_request
        json = {"content-type": "application/json"}
        for request, status in (
            (asked("POST", "/api/v1/flush", json={"prefix": "bucket/"}), 400),
            (asked("POST", "/api/v1/flush", json={"prefix": 3}), 400),
            (asked("POST", "/api/v1/flush", json=["s3://"]), 400),
            (asked("POST", "/api/v1/flush", content=b"{", headers=json), 400),
            (asked("POST", "/api/v1/flush", content=b" " * 70_000, headers=json), 400),
            (asked("POST", "/api/v1/flush", content=b"{}", headers={"content-type": "text/plain"}), 415),
            (asked("GET", "/api/v1/flush"), 400),
            (asked("GET", "/api/v1/flush?through=x"), 400),
            (asked("GET", f"/api/v1/flush?through={'9' * 30}"), 400),
            (asked("GET", f"{OBJECTS}?limit=0"), 400),
            (asked("GET", f"{OBJECTS}?limit=1001"), 400),
            (asked("GET", f"{OBJECTS}?limit={'9' * 5000}"), 400),
            (asked("GET", f"{OBJECTS}?prefix=x"), 400),
            (asked("GET", f"{CHECKPOINTS}?limit=0"), 400),
            (asked("GET", f"{CHECKPOINTS}?prefix=x"), 400),
            (asked("GET", VERSIONS), 400),
            (asked("GET", f"{VERSIONS}?object=s3://bucket"), 400),
            (asked("GET", f"{VERSIONS}?object=s3://b/k"), 404),
            (asked("POST", RESOLVE, json={"object": "s3://bucket", "decision": "discard"}), 400),
            (asked("POST", RESOLVE, json={"object": "s3://b/k"}), 400),
            (asked("POST", RESOLVE, json={"object": "s3://b/k", "decision": "discard", "sequence": "1"}), 400),
            (asked("POST", RESOLVE, json={"object": "s3://b/k", "decision": "discard"}), 404),
            (asked("POST", RESOLVE, content=b"{}", headers={"content-type": "text/plain"}), 415),
            (asked("POST", ABORT, json={}), 400),
            (asked("POST", ABORT, json={"upload_ids": "u"}), 400),
            (asked("POST", ABORT, json={"upload_ids": [1]}), 400),
            (asked("POST", ABORT, json={"upload_ids": []}), 400),
            (asked("POST", ABORT, json={"upload_ids": ["u"] * 101}), 400),
            (asked("POST", ABORT, content=b"{}", headers={"content-type": "text/plain"}), 415),
        ):
            answer = await client.send(request)
            assert (answer.status_code, bool(answer.json()["error"])) == (status, True), request.url

    play(tmp_path, scenario, NoWriteback())


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NothingPending("x"), 404),
        (NotToBeDecided("x"), 409),
        (OriginUnreachable("x"), 502),
        (BufferUnavailable("x"), 503),
    ],
)
def test_what_the_desk_cannot_do_has_its_status(tmp_path: Path, error: Exception, status: int) -> None:
    """And neither status nor readiness fail with it."""

    class Failing(NoWriteback):
        async def summary(self) -> Writeback:
            raise BufferUnavailable("x")

        async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> Resolved:
            raise error

    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post(RESOLVE, json={"object": "s3://b/k", "decision": "discard"})
        assert (answer.status_code, answer.json()) == (status, {"error": "x"})
        assert (await client.get("/api/v1/writeback")).status_code == 503
        assert (await client.get("/api/v1/status")).json()["writeback"] is None

    play(tmp_path, scenario, Failing())


def test_nothing_is_told_while_the_directory_is_closed(tmp_path: Path) -> None:
    """Nobody may take that for an empty buffer."""

    async def scenario(client: httpx.AsyncClient) -> None:
        assert (await client.post("/api/v1/flush", json={"prefix": "s3://"})).status_code == 503
        assert (await client.get(OBJECTS)).status_code == 503
        assert (await client.get("/api/v1/status")).json()["writeback"] is None

    play(tmp_path, scenario, None)


def test_a_page_of_another_site_decides_nothing(tmp_path: Path) -> None:
    """Without a token, the Host header must name this machine."""

    async def scenario(client: httpx.AsyncClient) -> None:
        for path in ("/api/v1/flush", RESOLVE, ABORT):
            assert (await client.post(path, json={})).status_code == 403

    play(tmp_path, scenario, NoWriteback(), host="rebound.example")


def test_the_desk_is_asked_what_the_request_says(tmp_path: Path) -> None:
    """Keys as they are, whatever is in them."""
    told: list[Any] = []

    class Listening(NoWriteback):
        async def resolve(self, key: ObjectKey, decision: str, sequence: int | None) -> Resolved:
            told.append((key, decision, sequence))
            return filled(Resolved)

        async def objects(self, prefix: Prefix, after: str, count: int) -> PendingObjects:
            told.append((prefix, after, count))
            return filled(PendingObjects)

    async def scenario(client: httpx.AsyncClient) -> None:
        await client.post(RESOLVE, json={"object": "s3://b/é//a b%2F?", "decision": "discard", "sequence": 7})
        await client.get(OBJECTS, params={"prefix": "s3://b/é&", "after": "t", "limit": "5"})
        assert told == [(ObjectKey("b", "é//a b%2F?"), "discard", 7), (Prefix("b", "é&"), "t", 5)]

    play(tmp_path, scenario, Listening())
