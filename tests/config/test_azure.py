"""Origins that are Azure Blob: what `azure://` may name, and what makes no sense beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.fields import azure_url
from gateway.config.loading import load_settings
from gateway.config.problems import SettingsError

KEY = 'access_key_id = "account"\nsecret_access_key = "YWJjZA=="'
ORIGIN = f'[origin]\nendpoint_url = "azure://account.blob.core.windows.net"\n{KEY}'
NAMED = f'[[origin_credentials]]\nname = "az"\n{KEY}\n'
BUCKET = (
    '[[buckets]]\nname = "b"\nendpoint_url = "azure+http://127.0.0.1:10000/devstoreaccount1"\norigin_credentials = "az"'
)


def load(tmp_path: Path, text: str) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(f'[cache]\ndirectory = "{tmp_path}/cache"\ncapacity = "1GiB"\n{text}')
    load_settings(file, {})


@pytest.mark.parametrize("text", [ORIGIN, NAMED + BUCKET])
def test_azure_can_be_an_origin(tmp_path: Path, text: str) -> None:
    """The one of all buckets, or that of one."""
    load(tmp_path, text)


def test_where_it_answers() -> None:
    assert azure_url("azure://account.blob.core.windows.net") == "https://account.blob.core.windows.net"
    assert azure_url("azure+http://[::1]:10000/name") == "http://[::1]:10000/name"
    assert azure_url("https://account.blob.core.windows.net") is None


@pytest.mark.parametrize(
    "url",
    [
        "azure:account",
        "azure://",
        "azure://user@host",
        "azure://host/a/b",
        "azure://host?x",
        "azure+https://host",
        "azure://host:0",
        "azure://host:99999",
    ],
)
def test_another_address_is_refused_with_what_is_allowed(tmp_path: Path, url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, f'[origin]\nendpoint_url = "{url}"\n{KEY}')
    [problem] = refused.value.problems
    assert problem.key == "origin.endpoint_url"
    assert "azure+http://127.0.0.1:10000/devstoreaccount1" in str(problem)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (ORIGIN.replace("YWJjZA==", "no base64"), "origin.secret_access_key"),
        (ORIGIN.replace(KEY, ""), "origin.access_key_id"),
        (f'{ORIGIN}\nsession_token = "x"', "origin.session_token"),
        (f'{ORIGIN}\ndialect = "gcs"', "origin.dialect"),
        (f'{ORIGIN}\naddressing_style = "virtual"', "origin.addressing_style"),
        (f'{NAMED}{BUCKET}\ndialect = "oss"', "buckets[0].dialect"),
        (f'{NAMED}{BUCKET}\n[[buckets.replicas]]\nname = "x"\nendpoint_url = "http://x"', "buckets[0].replicas[0]"),
        (
            f'{NAMED}{BUCKET}\n[[slots]]\nname = "x"\nprefix = "s3://b/"\nauthorization = "origin"',
            "slots[0].authorization",
        ),
        (BUCKET.replace("origin_cr", "#"), "origin.access_key_id"),
        (
            BUCKET + '\n[[origin_credentials]]\nname = "az"\nprofile = "x"',
            "origin_credentials[0].access_key_id",
        ),
    ],
)
def test_what_makes_no_sense_there_is_refused(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, text)
    assert key in [problem.key for problem in refused.value.problems]
