"""Snapshots over the admin port: what is answered, what is refused, and that the description is true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.admin.app import control_app, describe
from gateway.admin.backends import Backends, StateHolder
from gateway.api import LINES_TYPE
from gateway.config import OriginSettings, Settings
from gateway.config.live import LiveSettings
from gateway.policy.slots import Prefix
from tests.support.blocks import BUCKET, make_origin, stored
from tests.support.jobs import JobBench, job_bench
from tests.support.slots import Slot

PREFIX = f"s3://{BUCKET}/data/"
PATH = "/api/v1/snapshots"
FROZEN = Slot("f", Prefix.parse(PREFIX), "read-only", "snapshot", snapshot="v1")
LINES = {"content-type": LINES_TYPE}
Scenario = Callable[[httpx.AsyncClient, JobBench], Awaitable[None]]


def play(tmp_path: Path, scenario: Scenario, *, host: str = "127.0.0.1:9001", is_open: bool = True) -> None:
    async def run() -> None:
        origin = make_origin()
        for n in range(5):
            stored(origin, f"data/{n}", 1000)
        settings = Settings(origin=OriginSettings(endpoint_url="http://127.0.0.1:1"))
        async with job_bench(tmp_path, origin, slots=[FROZEN]) as bench:
            lent = Backends(snapshots=bench.service if is_open else None)
            app = control_app(LiveSettings(settings), StateHolder(), tmp_path, lent)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
                await scenario(client, bench)

    asyncio.run(run())


async def made(client: httpx.AsyncClient, bench: JobBench, name: str = "v1") -> None:
    begun = await client.post(PATH, json={"name": name, "prefix": PREFIX})
    assert (begun.status_code, begun.json()["kind"], begun.json()["name"]) == (202, "snapshot", name)
    described = describe()["paths"][PATH]["post"]["responses"]["202"]["content"]["application/json"]["schema"]
    assert set(begun.json()) == set(described["properties"])
    job = bench.jobs.get(begun.json()["id"])
    assert job is not None
    await bench.ended(job)


def _schema(path: str, method: str = "get") -> dict[str, Any]:
    content = describe()["paths"][path][method]["responses"]["200"]["content"]
    found: dict[str, Any] = content["application/json"]["schema"]
    return found


def test_a_snapshot_is_made_shown_and_deleted(tmp_path: Path) -> None:
    """As it is described."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        await made(client, bench)
        shown = (await client.get(f"{PATH}/v1")).json()
        assert (shown["objects"], shown["bytes"], shown["prefix"], shown["slots"]) == (5, 5000, PREFIX, ["f"])
        assert (await client.get(PATH)).json() == {"snapshots": [shown]}
        assert set(shown) == set(_schema(f"{PATH}/{{name}}")["properties"])
        status = (await client.get("/api/v1/status")).json()
        assert status["frozen"] == [{"slot": "f", "snapshot": "v1", "problem": None}]
        assert (await client.get("/readyz")).json()["frozen_slots_missing"] == []
        assert (await client.delete(f"{PATH}/v1")).status_code == 409
        assert (await client.delete(f"{PATH}/v1?force=true")).json() == {"name": "v1"}
        assert (await client.get("/readyz")).json()["frozen_slots_missing"] == ["f"]
        assert "create v1" in (await client.get("/api/v1/status")).json()["frozen"][0]["problem"]

    play(tmp_path, scenario)


def test_objects_and_differences_come_as_lines(tmp_path: Path) -> None:
    """And the lines make a snapshot again."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        await made(client, bench)
        lines = await client.get(f"{PATH}/v1/objects")
        assert lines.headers["content-type"] == LINES_TYPE
        assert len(lines.content.splitlines()) == 6
        put = await client.put(f"{PATH}/v2", content=lines.content, headers=LINES)
        assert (put.status_code, put.json()["objects"]) == (201, 5)
        stored(bench.origin, "data/5", 1)
        for query, added in (("", 1), ("?with=v2", 0)):
            *_, counts = (await client.get(f"{PATH}/v1/diff{query}")).content.splitlines()
            assert orjson.loads(counts) == {"added": added, "removed": 0, "changed": 0, "same": 5}

    play(tmp_path, scenario)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    """With the status that fits, and a message."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        await made(client, bench)
        asked = client.build_request
        json = {"content-type": "application/json"}
        for request, status in (
            (asked("POST", PATH, json={"name": "v1", "prefix": PREFIX}), 409),
            (asked("POST", PATH, json={"name": "a/b", "prefix": PREFIX}), 400),
            (asked("POST", PATH, json={"name": "v2", "prefix": "s3://"}), 400),
            (asked("POST", PATH, json={"name": "v2"}), 400),
            (asked("POST", PATH, content=b"{", headers=json), 400),
            (asked("POST", PATH, content=b"[]", headers=json), 400),
            (asked("POST", PATH, content=b" " * 70_000, headers=json), 400),
            (asked("POST", PATH, content=b"{}", headers={"content-type": "text/plain"}), 415),
            (asked("PUT", f"{PATH}/v2", content=b"{}", headers=json), 415),
            (asked("PUT", f"{PATH}/v2", content=b"{}", headers=LINES), 400),
            (asked("PUT", f"{PATH}/v1", content=b"{}", headers=LINES), 409),
            (asked("PUT", f"{PATH}/%2E%2E", content=b"{}", headers=LINES), 400),
            (asked("GET", f"{PATH}/v2"), 404),
            (asked("GET", f"{PATH}/-"), 400),
            (asked("GET", f"{PATH}/v2/objects"), 404),
            (asked("GET", f"{PATH}/v1/diff?with=v2"), 404),
            (asked("DELETE", f"{PATH}/v2"), 404),
            (asked("DELETE", f"{PATH}/.new-1"), 400),
        ):
            answer = await client.send(request)
            assert answer.status_code == status, (request.method, request.url)
            assert answer.json()["error"]
        assert [one["name"] for one in (await client.get(PATH)).json()["snapshots"]] == ["v1"]

    play(tmp_path, scenario)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_web_pages_change_nothing(tmp_path: Path, method: str) -> None:
    """Under a name that was made to point here."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        path = PATH if method == "POST" else f"{PATH}/v1"
        assert (await client.request(method, path)).status_code == 403

    play(tmp_path, scenario, host="evil.example")


def test_before_the_directory_is_open_there_is_nothing_to_say(tmp_path: Path) -> None:
    """503, on every path."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        for path in (PATH, f"{PATH}/v1", f"{PATH}/v1/objects", f"{PATH}/v1/diff"):
            assert (await client.get(path)).status_code == 503
        assert (await client.get("/readyz")).json()["frozen_slots_missing"] == []

    play(tmp_path, scenario, is_open=False)
