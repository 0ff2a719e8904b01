"""The admin port's application."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

import httpx
import pytest
from pydantic import SecretStr

from gateway import __version__
from gateway.admin import overview
from gateway.admin.app import control_app, describe, set_process_metrics
from gateway.admin.backends import GatewayState, StateHolder
from gateway.admin.jobs import SNAPSHOT_NAME as NAME_DESCRIBED
from gateway.admin.origin_check import OriginState
from gateway.admin.overview import CountsHistory
from gateway.api.documents import Process
from gateway.config import AdminSettings, CacheSettings, OriginSettings, Settings
from gateway.config.entries import SlotSettings
from gateway.config.live import LiveSettings
from gateway.core.prefixes import Prefix
from gateway.jobs.indexing.crawl import State
from gateway.jobs.job import JobKind, JobState
from gateway.metadata.snapshots.store import SNAPSHOT_NAME
from gateway.shared.recent_requests import RecentRequests
from gateway.telemetry import metric_kinds, metric_reading, metrics
from gateway.telemetry.metric_kinds import Known
from gateway.telemetry.metric_reading import MetricReading
from gateway.writeback.checkpoints.state import CheckpointState
from tests.admin.test_troubles import EVERYTHING_WRONG
from tests.support.admin_documents import filled
from tests.support.counting import exposition
from tests.support.finished import finished
from tests.support.growth import python_steps

T = TypeVar("T")
TOKEN = "a-token-of-sixteen-characters-or-more"
STATE = filled(
    GatewayState,
    version="1.2.3",
    processes=[
        {"name": "worker0", "ready": True},
        {"name": "background", "process_id": 3, "ready": True, "restarts": 1},
    ],
).changed()


@pytest.fixture(autouse=True)
def _metrics(tmp_path: Path) -> Iterator[None]:
    metric_kinds.share(tmp_path, "worker0")
    yield
    metric_kinds.unshare()


def settings(token: str | None = None) -> Settings:
    return Settings(
        admin=AdminSettings(token=SecretStr(token) if token else None),
        origin=OriginSettings(endpoint_url="http://127.0.0.1:1"),
        cache=CacheSettings(capacity_bytes=2**30),
        slots=[SlotSettings(name="train", prefix=Prefix("train"))],
    )


def ask(
    tmp_path: Path, path: str, state: GatewayState | None = STATE, token: str | None = None, **headers: str
) -> httpx.Response:
    holder = StateHolder()
    if state is not None:
        holder.take(state.to_line())

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(control_app(LiveSettings(settings(token)), holder, tmp_path))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def test_a_state_survives_the_pipe() -> None:
    """What the supervisor sends is what the admin port tells."""
    assert GatewayState.model_validate_json(STATE.to_line()) == STATE


DOWN = STATE.changed(processes=[filled(Process, name="worker0", restarts=1), STATE.processes[1]])


@pytest.mark.parametrize(
    ("state", "status"), [(STATE, 200), (DOWN, 503), (STATE.changed(draining=True), 503), (None, 503)]
)
def test_readiness_is_that_of_the_workers(tmp_path: Path, state: GatewayState | None, status: int) -> None:
    """Not ready while one is down, while draining, and before the supervisor has spoken; whatever the origin does."""
    answer = ask(tmp_path, "/readyz", state)
    assert answer.status_code == status
    assert answer.json()["ready"] is (status == 200)
    assert answer.json()["origin_reachable"] is False


def test_health_needs_nothing(tmp_path: Path) -> None:
    """The process answers: that is all it says."""
    assert ask(tmp_path, "/healthz", None).status_code == 200


def test_status_tells_processes_origin_cache_and_slots(tmp_path: Path) -> None:
    """The document that `forebay status` shows."""
    document = ask(tmp_path, "/api/v1/status").json()
    assert document["gateway"]["processes"][1] == {
        "name": "background",
        "process_id": 3,
        "ready": True,
        "restarts": 1,
        "generation": 0,
        "hangs": False,
        "last_end": None,
        "last_end_at": None,
    }
    assert document["origin"]["endpoint_url"] == "http://127.0.0.1:1"
    assert document["slots"][0]["prefix"] == "s3://train/"


def test_a_disk_without_room_for_a_write_is_full_though_blocks_replace_each_other(tmp_path: Path) -> None:
    """Else nobody would be told why nothing is acknowledged here."""
    for is_full, state in ((1, "full"), (0, "well")):
        metrics.WRITEBACK_DISK_FULL.set(is_full)
        assert ask(tmp_path, "/readyz").json()["cache_disk"] == state
        assert ask(tmp_path, "/api/v1/status").json()["cache"]["disk"]["state"] == state


def test_metrics_are_those_of_all_processes(tmp_path: Path) -> None:
    """In Prometheus' text format."""
    metrics.CACHE_HIT_BYTES.add(7, "default")
    answer = ask(tmp_path, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'forebay_cache_hit_bytes_total{slot="default"} 7.0' in answer.text


OF_TRAIN = 'origin="127.0.0.1:1",purpose="live",slot="train"'


def test_counters_stand_at_zero_before_anything_was_counted(tmp_path: Path) -> None:
    """`increase()` does not see the event by which a counter appears; what was counted stays what it is."""
    metrics.CACHE_DISK_ERRORS.add(2, "full")
    metrics.ORIGIN_REQUEST_SECONDS.observe(0.2, "live", "127.0.0.1:1")
    told = ask(tmp_path, "/metrics").text
    for line in (
        'forebay_writeback_conflicts_total{slot="default"} 0.0',
        'forebay_misses_total{operation="GetObject",reason="evicted",slot="default"} 0.0',
        'forebay_request_duration_seconds_bucket{le="+Inf",operation="GetObject"} 0.0',
        'forebay_worker_restarts_total{process="worker0"} 0.0',
        'forebay_cache_disk_errors_total{trouble="full"} 2.0',
        'forebay_cache_disk_errors_total{trouble="failing"} 0.0',
        'forebay_origin_request_duration_seconds_count{origin="127.0.0.1:1",purpose="live"} 1.0',
        'forebay_origin_request_duration_seconds_count{origin="127.0.0.1:1",purpose="flush"} 0.0',
        'forebay_requests_total{cache="hit",operation="GetObject",slot="train",status="200"} 0.0',
        'forebay_requests_total{cache="none",operation="PutObject",slot="train",status="503"} 0.0',
        f'forebay_origin_requests_total{{method="GET",{OF_TRAIN},status="unreachable"}} 0.0',
        'forebay_writeback_flush_failures_total{reason="credentials",slot="train"} 0.0',
        'forebay_writeback_flush_duration_seconds_bucket{le="14400.0",slot="train"} 0.0',
    ):
        assert told.count(f"\n{line}\n") == 1, line


def test_scrapes_that_come_together_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, and none begins before who gets it has asked; one that fails harms no other."""
    made: list[int] = []
    may_go_on, begun = threading.Event(), threading.Event()

    def exposition(*_: object) -> list[bytes]:
        made.append(len(made))
        begun.set()
        assert may_go_on.wait(60)
        if len(made) == 3:
            raise OSError("no descriptors")
        return [b"%d" % made[-1]]

    monkeypatch.setattr(metric_reading, "exposition_parts", exposition)
    app = control_app(LiveSettings(settings(None)), StateHolder(), tmp_path)

    async def scenario() -> list[str]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as client:

            async def ask() -> str:
                return (await client.get("/metrics")).text

            first = asyncio.create_task(ask())
            await asyncio.to_thread(begun.wait, 60)
            others = [asyncio.create_task(ask()) for _ in range(20)]
            gone = asyncio.create_task(ask())
            await asyncio.sleep(0)
            gone.cancel()
            may_go_on.set()
            return [await first, *await asyncio.gather(*others), *[await ask() for _ in range(2)]]

    assert asyncio.run(scenario()) == ["0", *["1"] * 20, "Internal Server Error", "3"]


def test_a_scrape_costs_in_proportion_to_the_slots(tmp_path: Path) -> None:
    """Four times as many take four times the steps, and not sixteen: Prometheus gives up after ten seconds."""
    metrics.CACHE_HIT_BYTES.add(7, "default")

    def steps(slots: int) -> int:
        known = Known({"slot": [f"slot{number}" for number in range(slots)], "process": []})
        return python_steps(lambda _: exposition(tmp_path, known), b"")

    assert steps(40) < 5 * steps(10)


def test_metrics_tell_version_and_processes(tmp_path: Path) -> None:
    """Of each process by its name; whose id is nobody's stands at 0."""
    told = ask(tmp_path, "/metrics").text
    assert f'forebay_build_info{{python="{platform.python_version()}",version="{__version__}"}} 1.0' in told
    assert '\nforebay_origin_up{origin="127.0.0.1:1",used_by="default"} 0.0\n' in told
    assert 'forebay_origin_state{origin="127.0.0.1:1",state="unreachable",used_by="default"} 1.0' in told
    assert 'forebay_origin_state{origin="127.0.0.1:1",state="no-credentials",used_by="default"} 0.0' in told
    assert 'forebay_origin_state{origin="127.0.0.1:1",state="wrong-clock",used_by="default"} 0.0' in told
    set_process_metrics({"background": os.getpid(), "worker0": 2**31 - 1, "worker1": None})
    assert metrics.PROCESS_MEMORY.value("background") > 10_000_000
    assert metrics.PROCESS_DESCRIPTORS.value("background") >= 3
    assert 0 < metrics.PROCESS_START.value("background") <= time.time() + 1
    assert metrics.PROCESS_MEMORY.value("worker0") == metrics.PROCESS_MEMORY.value("worker1") == 0


def test_no_figure_of_another_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc is of another PID namespace, ids there are those of others; where nobody has mounted it, of none."""
    monkeypatch.setattr(os, "readlink", lambda _: "123456")
    set_process_metrics({"background": os.getpid()})
    assert metrics.PROCESS_MEMORY.value("background") == 0


def test_status_tells_what_the_cache_gives(tmp_path: Path) -> None:
    """The share of bytes that came from disk, and none before anything was read."""
    assert ask(tmp_path, "/api/v1/status").json()["cache"]["hit_ratio"] is None
    metrics.CACHE_HIT_BYTES.add(30, "default")
    metrics.CACHE_MISS_BYTES.add(10, "a")
    metrics.CACHE_USAGE_BYTES.set(4096, "default")
    cache = ask(tmp_path, "/api/v1/status").json()["cache"]
    assert (cache["usage_bytes"], cache["hit_bytes"], cache["miss_bytes"], cache["hit_ratio"]) == (4096, 30, 10, 0.75)


def test_status_tells_what_each_slot_has(tmp_path: Path) -> None:
    """Its share of the disk, what it takes of it, and what it was given from there."""
    metrics.CACHE_HIT_BYTES.add(30, "train")
    metrics.CACHE_MISS_BYTES.add(90, "train")
    metrics.CACHE_HIT_BYTES.add(1000, "default")
    metrics.CACHE_USAGE_BYTES.set(4096, "train")
    [slot] = ask(tmp_path, "/api/v1/status").json()["slots"]
    assert (slot["usage_bytes"], slot["hit_ratio"], slot["capacity_bytes"]) == (4096, 0.25, 0)
    assert slot["capacity_limit_bytes"] == 2**30


PAGE_FILES = ["/", "/dashboard.css", "/dashboard.js", "/icon.svg"]


@pytest.mark.parametrize("path", PAGE_FILES)
def test_the_files_of_the_dashboard_need_no_token_and_load_nothing_from_elsewhere(tmp_path: Path, path: str) -> None:
    """The page asks for the token. The policy allows this host's files only, and no script within the page."""
    answer = ask(tmp_path, path, token=TOKEN)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert not re.search(r"(src|href)=\"\w*:?//|@import|url\(", answer.text)
    assert ask(tmp_path, path, STATE, None, **{"if-none-match": answer.headers["etag"]}).status_code == 304


def test_the_overview_counts_what_all_slots_have_done(tmp_path: Path) -> None:
    """Sums over operations and slots; latencies by bucket, flushes apart from the origin's other requests."""
    for slot, status in (("train", "200"), ("default", "503")):
        metrics.REQUESTS.add(2, "GetObject", slot, status, "hit")
    metrics.SENT_BYTES.add(7, "GetObject", "train")
    metrics.MISSES.add(3, "GetObject", "train", "evicted")
    metrics.ORIGIN_BYTES.add(5, "read", "live", "train")
    metrics.ORIGIN_BYTES.add(6, "write", "flush", "train")
    metrics.REQUEST_SECONDS.observe(0.002, "GetObject")
    metrics.REQUEST_SECONDS.observe(100, "PutObject")
    metrics.ORIGIN_REQUEST_SECONDS.observe(0.0005, "live", "127.0.0.1:1")
    metrics.ORIGIN_REQUEST_SECONDS.observe(0.2, "flush", "127.0.0.1:1")
    document = ask(tmp_path, "/api/v1/overview", host="127.0.0.1:9001").json()
    counts = document["counts"]
    assert (counts["requests"], counts["failed"], counts["sent_bytes"], counts["misses"]) == (4, 2, 7, {"evicted": 3})
    assert (counts["origin_read_bytes"], counts["flush_bytes"]) == (5, 6)
    assert [place for place, count in enumerate(counts["served_latencies"]) if count] == [1, 15]
    assert (counts["origin_latencies"][0], sum(counts["origin_latencies"])) == (1, 1)
    assert sum(counts["flush_latencies"]) == 1
    assert document["history"] == []


def test_the_counts_are_kept_while_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 15 minutes, the newest last; a sample that cannot be taken is left out, and ends nothing."""
    kept, kept_max = CountsHistory(tmp_path), overview.HISTORY_SECONDS // overview.SAMPLE_SECONDS + 1
    assert overview.HISTORY_SECONDS == 15 * 60
    taken, over = list[None](), threading.Event()

    def reading(directory: Path) -> MetricReading:
        taken.append(None)
        if len(taken) == 1:
            raise OSError(f"{directory} cannot be read")
        metrics.REQUESTS.add(1, "GetObject", "train", "200", "hit")
        if len(taken) == kept_max + 5:
            over.set()
        return MetricReading(directory)

    monkeypatch.setattr(overview, "SAMPLE_SECONDS", 0)
    monkeypatch.setattr(overview, "MetricReading", reading)

    async def run() -> httpx.Response:
        keeping = asyncio.create_task(kept.keep())
        await asyncio.to_thread(over.wait)
        keeping.cancel()
        await asyncio.wait([keeping])
        holder = StateHolder()
        holder.take(STATE.to_line())
        app = control_app(LiveSettings(settings()), holder, tmp_path, history=kept)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9001") as client:
            return await client.get("/api/v1/overview?history=true")

    samples = asyncio.run(run()).json()["history"]
    requests = [one["requests"] for one in samples]
    assert (len(samples), requests) == (kept_max, sorted(requests))
    assert requests[0] > 1  # the oldest went


def test_the_settings_in_force_are_shown_without_secrets(tmp_path: Path) -> None:
    """Under their names in the file, beside the defaults; for those who may ask only."""
    answer = ask(tmp_path, "/api/v1/settings", token=TOKEN, authorization=f"Bearer {TOKEN}")
    assert TOKEN not in answer.text
    document = answer.json()
    assert document["settings"]["cache"]["capacity"] == 2**30
    assert document["settings"]["slots"][0]["prefix"] == "s3://train/"
    assert document["defaults"]["server"]["port"] == 9000
    assert ask(tmp_path, "/api/v1/settings", token=TOKEN).status_code == 401


def test_the_documentation_is_served_and_nothing_else(tmp_path: Path) -> None:
    """Every page that a trouble or the dashboard names is there; no other file is."""
    index = ask(tmp_path, "/").text
    pages = {trouble.page for trouble in EVERYTHING_WRONG} | set(re.findall(r'href="docs/(\w[\w-]*)"', index))
    assert {"incidents", "README", "dashboard", "configuration"} <= pages
    for page in pages:
        answer = ask(tmp_path, f"/docs/{page}", token=TOKEN)
        assert (answer.status_code, answer.text[:2]) == (200, "# "), page
        assert answer.headers["content-type"].startswith("text/plain")
    for name in ("nothing", "..%2fREADME", "%2e%2e%2fREADME", "decisions", "images", "README.md", "dashboard%00"):
        assert ask(tmp_path, f"/docs/{name}").status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:9001"}, 200),
        ({"host": "localhost:9001", "sec-fetch-site": "same-origin", "origin": "http://localhost:9001"}, 200),
        ({"host": "evil.example:9001"}, 403),
        ({"host": "127.0.0.1:9001", "sec-fetch-site": "cross-site"}, 403),
        ({"host": "127.0.0.1:9001", "sec-fetch-site": "same-site"}, 403),
        ({"host": "127.0.0.1:9001", "origin": "http://127.0.0.1:3000"}, 403),
        ({"host": "127.0.0.1:9001", "origin": "null"}, 403),
    ],
)
def test_other_sites_do_not_read_the_overview(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    """Neither by a name that points here, nor from a page of another port."""
    assert ask(tmp_path, "/api/v1/overview", STATE, None, **headers).status_code == status


@pytest.mark.parametrize(
    ("query", "shown"), [("", 20), ("?limit=3", 3), ("?limit=0", None), ("?limit=x", None), ("?limit=1001", None)]
)
def test_slow_and_failed_requests_are_shown(tmp_path: Path, query: str, shown: int | None) -> None:
    """So many of each kind; keys are for those on this machine only."""
    recent = RecentRequests(tmp_path, 3)
    for number in range(30):
        recent.add(finished(1.0 + number, "500"))
        recent.add(finished(0.0, "403"))
        recent.origin_failed("GET", "bucket", "key", "default", "live", "unreachable", 1.0)
    answer = ask(tmp_path, f"/api/v1/requests{query}", host="127.0.0.1:9001")
    if shown is None:
        assert answer.status_code == 400
        return
    document = answer.json()
    described = describe()["paths"]["/api/v1/requests"]["get"]["responses"]["200"]["content"]
    assert_described(document, described["application/json"]["schema"])
    assert [len(document[kind]) for kind in ("errors", "refusals", "origin_failures")] == [shown, min(shown, 24), shown]
    assert document["slowest"][0]["seconds"] == 30.0
    assert ask(tmp_path, f"/api/v1/requests{query}", host="evil.example:9001").status_code == 403


GUARDED = [
    "/metrics",
    "/api/v1/overview",
    "/api/v1/settings",
    "/api/v1/requests",
    "/api/v1/status",
    "/api/openapi.json",
]


@pytest.mark.parametrize("path", GUARDED)
def test_with_a_token_nothing_is_told_without_it(tmp_path: Path, path: str) -> None:
    """401 with what is missing (RFC 6750); the right token opens."""
    for given in ("", "Bearer wrong", f"Basic {TOKEN}"):
        refused = ask(tmp_path, path, token=TOKEN, authorization=given)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Bearer")
    assert ask(tmp_path, path, token=TOKEN, authorization=f"Bearer {TOKEN}").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_need_no_token(tmp_path: Path, path: str) -> None:
    """Kubernetes cannot keep one secret in a probe."""
    assert ask(tmp_path, path, token=TOKEN).status_code == 200


ELSEWHERE = (
    "/cluster",
    "/checkpoints",
    "/explain",
    "/callers",
    "/slots",
    "/jobs",
    "/pins",
    "/snapshots",
    "/indexes",
    "/flush",
    "/writeback",
)
"""These are held to their descriptions in tests of their own."""


def test_the_openapi_document_describes_what_exists(tmp_path: Path) -> None:
    """Every path in it answers, and every answer has the members it names."""
    document = ask(tmp_path, "/api/openapi.json").json()
    assert document == describe()
    for path, item in document["paths"].items():
        if "get" not in item or any(part in path for part in ELSEWHERE):
            continue
        answer = ask(tmp_path, path, host="127.0.0.1:9001")
        assert answer.status_code == 200
        (media_type, content), *_ = item["get"]["responses"]["200"]["content"].items()
        assert answer.headers["content-type"].startswith(media_type)
        if media_type == "application/json":
            assert_described(answer.json(), content["schema"])


def test_a_method_that_a_path_does_not_know_is_told_which_it_knows(tmp_path: Path) -> None:
    """All of them (RFC 9110, 15.5.6), not those of the first of several routes."""

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(control_app(LiveSettings(settings()), StateHolder(), tmp_path))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9001") as client:
            paths = ("/api/v1/snapshots/v1", "/api/v1/flush", "/api/v1/jobs/1")
            return [await client.request("PATCH", path) for path in paths]

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [405] * 3
    allowed = [set(answer.headers["allow"].split(", ")) for answer in answers]
    assert allowed == [{"GET", "HEAD", "PUT", "DELETE"}, {"GET", "HEAD", "POST"}, {"GET", "HEAD", "DELETE"}]


def test_what_is_neither_true_nor_false_is_refused(tmp_path: Path) -> None:
    """It was taken for false."""
    answer = ask(tmp_path, "/api/v1/overview?history=yes", host="127.0.0.1:9001")
    assert (answer.status_code, answer.json()) == (400, {"error": "history must be true or false"})


def test_answers_have_what_is_described_of_them() -> None:
    """Every member, but where the document names those that are always there; and names of snapshots are the same
    everywhere."""
    paths = describe()["paths"]
    status = paths["/api/v1/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert status["required"] == list(status["properties"])
    assert status["properties"]["gateway"]["required"] == list(status["properties"]["gateway"]["properties"])
    events = paths["/api/v1/events"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert events["properties"]["results"]["items"]["required"] == ["place", "outcome"]
    assert NAME_DESCRIBED == SNAPSHOT_NAME


def test_the_values_that_are_described_are_those_of_the_gateway() -> None:
    """So that the description of a state or a kind does not stay behind."""
    paths = describe()["paths"]

    def schema(path: str) -> Any:
        return paths[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]["properties"]

    status, job = schema("/api/v1/status"), schema("/api/v1/jobs/{job_id}")
    assert job["kind"]["enum"] == [*JobKind]
    assert job["state"]["enum"] == [*JobState]
    assert status["origin"]["properties"]["state"]["enum"] == [*get_args(OriginState)]
    assert status["cache"]["properties"]["disk"]["properties"]["state"]["enum"] == [*metrics.DISK_STATES]
    assert status["indexes"]["items"]["properties"]["state"]["enum"] == [*get_args(State)]
    assert {*schema("/api/v1/checkpoints")["checkpoints"]["items"]["properties"]["state"]["enum"]} == {*CheckpointState}


def assert_described(value: Any, schema: dict[str, Any]) -> None:
    if "properties" in schema and value is not None:
        assert set(value) == set(schema["properties"])
        for name, inner in schema["properties"].items():
            assert_described(value[name], inner)
    for item in value if "items" in schema else []:
        assert_described(item, schema["items"])
