"""Configuration: where values come from, and what they are when nobody says anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from gateway.config import Settings
from gateway.config.loading import load_settings
from gateway.config.problems import SettingsError, table_of
from gateway.core.prefixes import Prefix
from tests.support.cache_directory import begun
from tests.support.disks import small_disk
from tests.support.settings import SECRET, load


def test_without_file_and_variables_everything_has_a_value(tmp_path: Path) -> None:
    """`forebay serve` needs no file: AWS's own endpoint, the user's cache directory, a share of the disk."""
    settings = load_settings(None, {"XDG_CACHE_HOME": str(tmp_path)}).settings
    assert settings.origin.endpoint_url == "https://s3.us-east-1.amazonaws.com"
    assert settings.cache.directory == tmp_path / "forebay"
    assert settings.cache.capacity_bytes >= 8 * settings.cache.block_size_bytes
    assert (settings.server.host, settings.server.port, settings.admin.port) == ("127.0.0.1", 9000, 9001)


@pytest.mark.parametrize(
    ("variables", "endpoint_url", "region"),
    [
        ({"AWS_ENDPOINT_URL": "http://a:1"}, "http://a:1", "us-east-1"),
        ({"AWS_ENDPOINT_URL": "http://a:1", "AWS_ENDPOINT_URL_S3": "http://b:2"}, "http://b:2", "us-east-1"),
        ({"AWS_REGION": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com", "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "cn-north-1"}, "https://s3.cn-north-1.amazonaws.com.cn", "cn-north-1"),
        (
            {"AWS_ENDPOINT_URL": "http://a:1", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
            "https://s3.us-east-1.amazonaws.com",
            "us-east-1",
        ),
    ],
)
def test_the_usual_aws_variables_name_the_origin(variables: dict[str, str], endpoint_url: str, region: str) -> None:
    """AWS_ENDPOINT_URL_S3 before AWS_ENDPOINT_URL, AWS_REGION before AWS_DEFAULT_REGION, else AWS itself."""
    origin = load_settings(None, variables).settings.origin
    assert (origin.endpoint_url, origin.region) == (endpoint_url, region)


def test_file_values_arrive_in_their_units(tmp_path: Path) -> None:
    """TOML names carry no unit, attributes do."""
    settings = load(
        tmp_path,
        '[server]\nhead_timeout = "2m"\n[origin]\nread_bandwidth = "10GiB/s"\n'
        '[cache]\ncapacity = "1GiB"\nblock_size = "64KiB"\n',
    ).settings
    assert settings.server.head_timeout_seconds == 120.0
    assert settings.origin.read_bandwidth_bytes_per_second == 10 * 2**30
    assert (settings.cache.capacity_bytes, settings.cache.block_size_bytes) == (2**30, 2**16)


def test_the_environment_beats_the_file(tmp_path: Path) -> None:
    """Scalars, lists in both spellings, and keys within a list of tables."""
    settings = load(
        tmp_path,
        '[server]\nport = 1\n[[credentials]]\naccess_key_id = "a"\nallow = ["s3://"]\n',
        FOREBAY_SERVER__PORT="9100",
        FOREBAY_SERVER__INSECURE="true",
        FOREBAY_SERVER__BASE_DOMAINS="s3.local, s3.example",
        FOREBAY_CREDENTIALS__0__SECRET_ACCESS_KEY=SECRET,
        FOREBAY_CREDENTIALS__1__ACCESS_KEY_ID="b",
        FOREBAY_CREDENTIALS__1__SECRET_ACCESS_KEY="x",
        FOREBAY_CREDENTIALS__1__ALLOW='["s3://b/"]',
        FOREBAY_SLOTS='[{"name": "n", "prefix": "s3://b/"}]',
    ).settings
    assert settings.server.port == 9100
    assert settings.server.insecure
    assert settings.server.base_domains == ["s3.local", "s3.example"]
    assert [one.secret for one in settings.credentials] == [SECRET, "x"]
    assert settings.credentials[1].allow == [Prefix("b")]
    assert settings.slots[0].name == "n"


def test_variables_of_kubernetes_services_are_left_alone() -> None:
    """A Service named `forebay` must not keep the pods of its namespace from starting."""
    warnings = load_settings(
        None,
        {
            "FOREBAY_SERVICE_HOST": "10.0.0.1",
            "FOREBAY_SERVICE_PORT": "9000",
            "FOREBAY_SERVICE_PORT_S3": "9000",
            "FOREBAY_PORT": "tcp://10.0.0.1:9000",
            "FOREBAY_PORT_9000_TCP": "tcp://10.0.0.1:9000",
            "FOREBAY_PORT_9000_TCP_ADDR": "10.0.0.1",
            "FOREBAY_SERVER_PORT": "tcp://10.0.0.2:9000",
            "FOREBAY_CONFIG": "/etc/forebay.toml",
        },
    ).warnings
    assert warnings == ()


def test_a_variable_with_one_underscore_too_few_is_refused_with_the_right_spelling() -> None:
    """It is meant as a setting, and ignoring it would be silent."""
    with pytest.raises(SettingsError, match="FOREBAY_SERVER__PORT"):
        load_settings(None, {"FOREBAY_SERVER_PORT": "9000"})


def test_a_variable_that_resembles_no_setting_is_mentioned() -> None:
    """It is ignored, and not silently."""
    assert "FOREBAY_VERSION" in load_settings(None, {"FOREBAY_VERSION": "1"}).warnings[0]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FOREBAY_SERVER__PROT", "1"),
        ("FOREBAY_NOTHING__AT_ALL", "1"),
        ("FOREBAY_SLOTS__7__NAME", "n"),
        ("FOREBAY_SLOTS__0", "n"),
        ("FOREBAY_SLOTS", "[not json"),
        ("FOREBAY_SERVER__PORT__DEEP", "1"),
        ("FOREBAY_SERVER__HEAD_TIMEOUT_SECONDS", "1"),
    ],
)
def test_variables_that_lead_nowhere_are_refused(variable: str, value: str) -> None:
    """Unknown keys in the environment are errors like those in the file."""
    with pytest.raises(SettingsError):
        load_settings(None, {variable: value})


def test_read_only_slots_are_ttl_where_nothing_is_said(tmp_path: Path) -> None:
    """And all others strict: what may be written by others at any time is asked for each time."""
    text = '[[slots]]\nname = "a"\nprefix = "s3://b/"\n'
    ways = {"": "strict", 'mode = "read-only"\n': "ttl", 'mode = "read-only"\nconsistency = "immutable"\n': "immutable"}
    for more, expected in ways.items():
        assert load(tmp_path, text + more).settings.slots[0].consistency == expected


@pytest.mark.root
def test_the_default_capacity_counts_what_the_cache_holds(tmp_path: Path) -> None:
    """A full cache is not given half of what is left at the next start. On a disk that nobody else uses."""
    with small_disk(tmp_path / "disk", 2**30) as disk:
        text = f'[cache]\ndirectory = "{disk}/cache"\n'
        before = load(tmp_path, text).settings.cache.capacity_bytes
        begun(disk / "cache")
        (disk / "cache" / "block").write_bytes(b"x" * 2**25)
        assert abs(load(tmp_path, text).settings.cache.capacity_bytes - before) < 2**20


def tables(model: type[BaseModel], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, field in model.model_fields.items():
        table = table_of(field.annotation)
        found += tables(table, f"{path}{name}.") if table else [(path + (field.alias or name), field)]
    return found


@pytest.mark.parametrize(("key", "field"), tables(Settings))
def test_every_setting_says_what_it_does_and_what_is_allowed(key: str, field: Any) -> None:
    """The documentation and every error quote these."""
    assert re.fullmatch(r".+[.]", field.description, re.DOTALL), key
    assert field.json_schema_extra["allowed"], key
