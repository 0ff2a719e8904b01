"""What `forebay doctor` says of this machine, of clients in this shell, and of a gateway's figures."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from gateway import cli
from gateway.api.documents import SlotDocument
from gateway.config import Settings
from gateway.config.loading import load_settings
from gateway.doctor import Finding, Level, machine
from gateway.doctor.configuration import clients
from gateway.doctor.running import advised
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin


def settings(tmp_path: Path, **more: str) -> Settings:
    variables = {"FOREBAY_CACHE__DIRECTORY": str(tmp_path / "cache"), "FOREBAY_ORIGIN__ENDPOINT_URL": "http://h:1"}
    return load_settings(None, variables | more).settings


def worst(findings: list[Finding]) -> Finding:
    return max(findings, key=lambda one: list(Level).index(one.level))


@pytest.mark.parametrize(
    ("kind", "is_kept", "level", "words"),
    [
        ("ext4", True, Level.OK, "said to outlive restarts"),
        ("tmpfs", True, Level.ERROR, "cache.persistent is true, and"),
        ("tmpfs", False, Level.WARNING, "lies in memory"),
        ("overlay", False, Level.WARNING, "a container's own layer"),
        ("overlay", True, Level.ERROR, "it goes with the container"),
        ("nfs4", True, Level.ERROR, "need a local file system"),
        ("fuse.s3fs", False, Level.ERROR, "need a local file system"),
    ],
)
def test_the_file_system_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_kept: bool, level: Level, words: str
) -> None:
    """By what the cache needs of it, and by what is said of it."""
    monkeypatch.setattr(machine, "file_system_kind", lambda _: kind)
    monkeypatch.setattr(machine, "_SYNC_SECONDS", 0.01)
    given = settings(tmp_path, FOREBAY_CACHE__PERSISTENT=str(is_kept).lower())
    first = next(iter(machine.disk(given)))
    assert (first.level, words in first.found) == (level, True), first


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache directory need not be there, and is not made; one that cannot be written is an error."""
    monkeypatch.setattr(machine, "_SYNC_SECONDS", 0.01)
    told = list(machine.disk(settings(tmp_path)))
    assert "a sync takes" in told[-1].found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("os.access", lambda *_: False)
    assert worst(list(machine.disk(settings(tmp_path)))).found.startswith(f"{tmp_path} cannot be written by user ")


def test_slow_syncs_matter_where_writes_wait_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is with write = back alone."""
    monkeypatch.setattr(machine, "_SYNC_SECONDS", 0.01)
    monkeypatch.setattr(machine, "_SLOW_SYNC_SECONDS", 0.0)
    slots = '[{"name": "a", "prefix": "s3://a/", "write": "back"}]'
    back = settings(tmp_path, FOREBAY_CACHE__PERSISTENT="true", FOREBAY_SLOTS=slots)
    assert [one.level for one in machine.disk(back) if "a sync takes" in one.found] == [Level.WARNING]
    assert [one.level for one in machine.disk(settings(tmp_path)) if "a sync takes" in one.found] == [Level.OK]


@pytest.mark.parametrize(("hard", "level"), [(100, Level.ERROR), (1000, Level.WARNING), (100_000, Level.OK)])
def test_open_files_are_judged_as_the_start_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard: int, level: Level
) -> None:
    """Too few and it does not start."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    assert next(iter(machine.limits(settings(tmp_path)))).level is level


def test_limits_of_the_control_group_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container has them: less memory or fewer processors than the workers need."""
    (tmp_path / "memory.max").write_text("104857600\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path)
    found = {one.found.partition(" of ")[0].split(" processor")[0]: one for one in machine.limits(settings(tmp_path))}
    assert found["100.0 MiB"].level is Level.WARNING
    assert found["0.5"].level is Level.WARNING
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert worst(list(machine.limits(settings(tmp_path, FOREBAY_SERVER__WORKERS="1")))).level is Level.OK


@pytest.mark.parametrize(
    ("environment", "level", "words"),
    [
        ({}, Level.NOTE, "AWS_ENDPOINT_URL_S3 is not set"),
        ({"AWS_ENDPOINT_URL": "http://localhost:9000/"}, Level.OK, "names the gateway"),
        ({"AWS_ENDPOINT_URL_S3": "http://h:1"}, Level.NOTE, "AWS_ENDPOINT_URL_S3 names the origin"),
        ({"AWS_ENDPOINT_URL": "http://elsewhere:9000"}, Level.WARNING, "names http://elsewhere:9000"),
        ({"AWS_ENDPOINT_URL": "http://user:hush@elsewhere"}, Level.WARNING, "names (hidden)"),
        ({"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, Level.WARNING, "SDKs go past"),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "http_proxy": "http://user:hush@proxy:1"},
            Level.WARNING,
            "no_proxy does not spare 127.0.0.1",
        ),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000", "http_proxy": "http://p:1", "NO_PROXY": "a, localhost"},
            Level.OK,
            "names the gateway",
        ),
    ],
)
def test_clients_that_go_past_the_gateway_are_told_of(
    tmp_path: Path, environment: dict[str, str], level: Level, words: str
) -> None:
    """And nothing secret of a proxy or an address."""
    told = list(clients(settings(tmp_path), {"AWS_CONFIG_FILE": str(tmp_path / "none")} | environment))
    assert (worst(told).level, words in worst(told).found) == (level, True), told
    assert "hush" not in str(told)


@pytest.mark.parametrize(
    "text",
    [
        "[profile job]\nendpoint_url = http://127.0.0.1:9000\n",
        "[profile job]\nservices = here\n[services here]\ns3 =\n  endpoint_url = http://127.0.0.1:9000\n",
    ],
)
def test_the_configuration_of_sdks_is_looked_at(tmp_path: Path, text: str) -> None:
    """It may name the gateway, too, for all services or for S3."""
    (tmp_path / "config").write_text(text)
    environment = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_PROFILE": "job"}
    [told] = clients(settings(tmp_path), environment)
    assert (told.level, "(profile job) names the gateway" in told.found) == (Level.OK, True), told


def slot(name: str, consistency: str) -> SlotDocument:
    moved = {"bytes_per_second": 0, "guarantee": None, "ceiling": None, "share": None}
    capacity: dict[str, Any] = dict.fromkeys(("guaranteed_bytes", "used_bytes", "borrowed_bytes", "pinned_bytes"), 0)
    document: dict[str, Any] = {"name": name, "prefix": "s3://b/", "mode": "read-write", "consistency": consistency}
    document |= {"write": "through", "hit_ratio": 1.0, "misses": {}, "unflushed": None, "binds": []}
    document |= {"read_bandwidth": moved, "write_bandwidth": moved, "capacity": capacity | {"limit_bytes": None}}
    document["origin_requests"] = {"throttled": 0, "waited_seconds": 0.0, "in_vain": 0, "slow_down": 0}
    return SlotDocument.model_validate(document)


def test_small_files_that_are_asked_for_each_time_are_told_of() -> None:
    """Those of strict slots: a HEAD goes to the origin for each read from the disk."""
    exposition = "".join(
        f'forebay_requests_total{{cache="hit",operation="GetObject",slot="{name}",status="200"}} 1000\n'
        f'forebay_sent_bytes_total{{operation="GetObject",slot="{name}"}} {size * 1000}\n'
        f'forebay_origin_requests_total{{method="HEAD",purpose="live",slot="{name}",status="200"}} 990\n'
        for name, size in (("small", 110 * 1024), ("large", 64 * 2**20), ("calm", 10))
    )
    told = list(advised([slot("small", "strict"), slot("large", "strict"), slot("calm", "immutable")], exposition))
    assert [one.found for one in told] == [
        "slot small (strict): 990 HEADs to the origin for 1,000 GETs of 110.0 KiB on average"
    ]
    assert 'consistency = "immutable"' in told[0].advice


def test_a_gateway_that_has_read_nothing_is_told_as_one() -> None:
    """Its counters stand at zero from the start."""
    exposition = (
        'forebay_requests_total{cache="hit",operation="GetObject",slot="a",status="200"} 0.0\n'
        'forebay_origin_requests_total{method="HEAD",purpose="live",slot="a",status="200"} 0.0\n'
    )
    [told] = advised([slot("a", "strict")], exposition)
    assert told.found.startswith("nothing was read yet")


def doctor(file: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["doctor", "--config", str(file), *arguments], env=variables)
    return result.exit_code, result.output


@pytest.mark.slow
def test_the_origin_can_be_given_as_to_serve(tmp_path: Path) -> None:
    """It wins over the file; a mistake in it is told with the option's name."""
    with StrictOrigin() as home:
        file = tmp_path / "forebay.toml"
        file.write_text('[origin]\nendpoint_url = "http://127.0.0.1:1"\n', encoding="utf-8")
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY}
        at = ("--admin-url", "http://127.0.0.1:1", "--json")
        findings = orjson.loads(doctor(file, "--origin", home.endpoint_url, *at, **keys)[1])["findings"]
        of_origin = [one for one in findings if one["area"] == "origin"]
        assert of_origin
        assert not any(one["level"] == "error" for one in of_origin), of_origin
        refused = doctor(file, "--origin", "minio:9000", *at)[1]
        assert "origin.endpoint_url = 'minio:9000' (from --origin): " in refused


@pytest.mark.slow
def test_the_command_needs_no_gateway_and_says_more_with_one(tmp_path: Path) -> None:
    """As text and as JSON; exit code 1 for errors; no secret in either."""
    with StrictOrigin() as home:
        home.model.create_bucket("b")
        key = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        slots = [{"name": "data", "prefix": "s3://b/data/"}]
        config: dict[str, Any] = {"origin": {"endpoint_url": home.endpoint_url, **key}, "slots": slots}
        with GatewayProcess(config) as gateway:
            at = ("--admin-url", gateway.admin_url)
            code, text = doctor(gateway.config_file, *at, "--json", "--write-test", "s3://b/doctor/")
            document = orjson.loads(text)
            errors = [one for one in document["findings"] if one["level"] == "error"]
            assert (code, document["ok"], errors) == (0, True, []), text
            areas = {one["area"] for one in document["findings"]}
            assert areas >= {"configuration", "origin", "rights", "write test", "disk", "limits", "clients here"}
            assert any("ready, S3 on" in one["found"] for one in document["findings"])
            assert SECRET_ACCESS_KEY not in text
            home.stop()
            code, text = doctor(gateway.config_file, "--admin-url", "http://127.0.0.1:1")
        assert code == 1
        assert "  error   nobody listens at" in text
        assert "no gateway answers at http://127.0.0.1:1" in text
        assert SECRET_ACCESS_KEY not in text
        home.start()


def test_what_is_no_prefix_is_wrong_usage(tmp_path: Path) -> None:
    """Before anything is asked."""
    for name in ("b/x", "s3://"):
        assert doctor(tmp_path / "none.toml", "--write-test", name)[0] == 2


def test_a_configuration_that_cannot_be_used_is_what_is_found(tmp_path: Path) -> None:
    """Every mistake of it, with the variable."""
    code, text = doctor(tmp_path / "none.toml")
    assert (code, "none.toml cannot be read" in text) == (1, True)
    file = tmp_path / "forebay.toml"
    file.write_text("")
    code, text = doctor(file, FOREBAY_SERVER__PORT="x")
    assert (code, "server.port = 'x' (from FOREBAY_SERVER__PORT)" in text) == (1, True)
