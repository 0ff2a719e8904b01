"""Jobs over the admin port: who may, what is refused, and that the description is true."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from gateway.admin.app import control_app, describe
from gateway.admin.backends import Backends, StateHolder
from gateway.api import MANIFEST_TYPE
from gateway.config import AdminSettings, OriginSettings, Settings
from gateway.config.live import LiveSettings
from gateway.jobs.job import JobState
from tests.support.blocks import BUCKET, make_origin, stored
from tests.support.jobs import JobBench, job_bench

TOKEN = "a-token-of-sixteen-characters-or-more"
JSON = {"content-type": "application/json"}
Scenario = Callable[[httpx.AsyncClient, JobBench], Awaitable[None]]


def play(tmp_path: Path, scenario: Scenario, *, token: str | None = None, host: str = "127.0.0.1:9001") -> None:
    async def run() -> None:
        origin = make_origin()
        for n in range(5):
            stored(origin, f"data/{n}", 1000)
        settings = Settings(
            admin=AdminSettings(token=SecretStr(token) if token else None),
            origin=OriginSettings(endpoint_url="http://127.0.0.1:1"),
        )
        async with job_bench(tmp_path, origin) as bench:
            transport = httpx.ASGITransport(
                control_app(LiveSettings(settings), StateHolder(), tmp_path, Backends(jobs=bench.jobs))
            )
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
                await scenario(client, bench)

    asyncio.run(run())


def test_a_prefix_is_warmed_and_the_job_can_be_looked_at(tmp_path: Path) -> None:
    """202 with the job; it is listed, shown, and ends."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        begun = await client.post("/api/v1/warm", json={"prefix": f"s3://{BUCKET}/data/"})
        assert begun.status_code == 202
        job = bench.jobs.get(begun.json()["id"])
        assert job is not None
        assert (await bench.ended(job)).state is JobState.DONE
        shown = (await client.get(f"/api/v1/jobs/{job.id}")).json()
        assert (shown["objects_done"], shown["bytes_done"], shown["state"]) == (5, 5000, "done")
        assert (await client.get("/api/v1/jobs")).json() == {"jobs": [shown]}
        assert set(shown) == set(describe()["paths"]["/api/v1/jobs"]["get"]["responses"]["200"]["content"][
            "application/json"]["schema"]["properties"]["jobs"]["items"]["properties"])  # fmt: skip
        assert (await client.delete(f"/api/v1/jobs/{job.id}")).json() == shown

    play(tmp_path, scenario)


def test_a_manifest_can_be_sent(tmp_path: Path) -> None:
    """As it comes from the file."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        manifest = f"s3://{BUCKET}/data/3\ns3://{BUCKET}/data/1".encode()
        begun = await client.post("/api/v1/warm", content=manifest, headers={"content-type": MANIFEST_TYPE})
        job = bench.jobs.get(begun.json()["id"])
        assert job is not None
        assert (await bench.ended(job)).objects_done == 2
        refused = await client.post("/api/v1/warm", content=b"what?", headers={"content-type": MANIFEST_TYPE})
        assert (refused.status_code, refused.json()["error"]) == (400, "line 1: 'what?' does not begin with s3://")

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"prefix": "data/"}', 400),
        (b'{"prefix": "s3://"}', 400),
        (b'{"prefix": 5}', 400),
        (b"[]", 400),
        (b"{", 400),
        (b" " * 70_000, 400),
    ],
)
def test_what_names_no_prefix_is_refused(tmp_path: Path, content: bytes, status: int) -> None:
    """With a message; nothing begins."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        answer = await client.post("/api/v1/evict", content=content, headers=JSON)
        assert answer.status_code == status
        assert answer.json()["error"]
        assert bench.jobs.all() == []

    play(tmp_path, scenario)


def test_web_pages_see_and_start_nothing(tmp_path: Path) -> None:
    """Neither with a form's content type, nor under a name that was made to point here, which reads no keys either."""

    async def form(client: httpx.AsyncClient, bench: JobBench) -> None:
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            answer = await client.post(
                "/api/v1/warm", content=b'{"prefix": "s3://b/"}', headers={"content-type": content_type}
            )
            assert answer.status_code == 415

    async def rebound(client: httpx.AsyncClient, bench: JobBench) -> None:
        answer = await client.post("/api/v1/warm", json={"prefix": "s3://b/"})
        assert answer.status_code == 403
        assert (await client.get("/api/v1/jobs")).status_code == 403
        assert bench.jobs.all() == []

    play(tmp_path / "form", form)
    play(tmp_path / "rebound", rebound, host="attacker.example:9001")


def test_the_token_is_asked_for(tmp_path: Path) -> None:
    """For starting, looking and ending alike; with it any host name will do."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        for method, path in (("POST", "/api/v1/warm"), ("GET", "/api/v1/jobs"), ("DELETE", "/api/v1/jobs/x")):
            assert (await client.request(method, path)).status_code == 401
        allowed = {"authorization": f"Bearer {TOKEN}"}
        assert (await client.get("/api/v1/jobs/x", headers=allowed)).status_code == 404
        assert (await client.delete("/api/v1/jobs/x", headers=allowed)).status_code == 404
        begun = await client.post("/api/v1/warm", json={"prefix": f"s3://{BUCKET}/none/"}, headers=allowed)
        assert begun.status_code == 202

    play(tmp_path, scenario, token=TOKEN, host="gateway.example:9001")


def test_before_the_directory_is_open_jobs_must_wait(tmp_path: Path) -> None:
    """503, as nothing is known of them."""

    async def run() -> None:
        settings = Settings(origin=OriginSettings(endpoint_url="http://127.0.0.1:1"))
        transport = httpx.ASGITransport(control_app(LiveSettings(settings), StateHolder(), tmp_path))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for method, path in (("POST", "/api/v1/warm"), ("GET", "/api/v1/jobs"), ("GET", "/api/v1/jobs/x")):
                assert (await client.request(method, path)).status_code == 503
            assert (await client.delete("/api/v1/jobs/x")).status_code == 503

    asyncio.run(run())


def test_a_prefix_is_pinned_listed_and_unpinned(tmp_path: Path) -> None:
    """202 with the job, then it is among the pins and in the status; unpinning what is not pinned is 404."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        prefix = f"s3://{BUCKET}/data/"
        begun = await client.post("/api/v1/pin", json={"prefix": prefix})
        assert begun.status_code == 202
        job = bench.jobs.get(begun.json()["id"])
        assert job is not None
        assert (await bench.ended(job)).state is JobState.DONE
        listed = (await client.get("/api/v1/pins")).json()
        assert listed == {"pins": [prefix]}
        described = describe()["paths"]["/api/v1/pins"]["get"]["responses"]["200"]["content"]["application/json"]
        assert set(listed) == set(described["schema"]["properties"])
        assert (await client.get("/api/v1/status")).json()["pins"] == [prefix]
        refused = await client.post("/api/v1/pin", json={"prefix": f"s3://{BUCKET}/"})
        assert (refused.status_code, prefix in refused.text) == (409, True)
        unpinned = await client.post("/api/v1/unpin", json={"prefix": prefix})
        assert unpinned.json() == {"prefix": prefix, "not_told": []}
        assert (await client.post("/api/v1/unpin", json={"prefix": prefix})).status_code == 404
        assert (await client.get("/api/v1/pins")).json() == {"pins": []}

    play(tmp_path, scenario)


def test_pins_are_by_prefix_in_json(tmp_path: Path) -> None:
    """A manifest is refused; so is what a page of another site may send."""

    async def scenario(client: httpx.AsyncClient, bench: JobBench) -> None:
        manifest = {"content-type": MANIFEST_TYPE}
        line = f"s3://{BUCKET}/data/1".encode()
        assert (await client.post("/api/v1/pin", content=line, headers=manifest)).status_code == 415
        plain = {"content-type": "text/plain"}
        document = b'{"prefix": "s3://train/data/"}'
        assert (await client.post("/api/v1/unpin", content=document, headers=plain)).status_code == 415
        assert (await client.post("/api/v1/unpin", content=b"{}", headers=JSON)).status_code == 400
        assert bench.jobs.all() == []

    play(tmp_path, scenario)
