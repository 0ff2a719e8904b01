"""Origins that are directories: what `file://` may name, and what makes no sense beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.loading import load_settings
from gateway.config.problems import SettingsError

CALLERS = """
[[credentials]]
access_key_id = "job"
secret_access_key = "a-secret-of-a-job"
allow = ["s3://"]
"""


def load(tmp_path: Path, text: str) -> None:
    (tmp_path / "nas").mkdir(exist_ok=True)
    file = tmp_path / "forebay.toml"
    text = text.replace("NAS", str(tmp_path / "nas"))
    file.write_text(f'[cache]\ndirectory = "{tmp_path}/cache"\ncapacity = "1GiB"\n{text}')
    load_settings(file, {})


@pytest.mark.parametrize(
    "text",
    [
        f'[origin]\nendpoint_url = "file://NAS"\n{CALLERS}',
        f'[origin]\nendpoint_url = "file://NAS/"\n{CALLERS}',
        '[origin]\nendpoint_url = "file://NAS"\n[server]\nallow_unsigned = true',
        '[[buckets]]\nname = "nas"\nendpoint_url = "file://NAS"',
        '[[buckets]]\nname = "nas"\nendpoint_url = "file://NAS"\nsymlinks = "follow"\nfile_mode = "0640"',
        f'[origin]\nendpoint_url = "file://NAS"\nfile_mode = 0o640\n[[buckets]]\nname = "nas"\n{CALLERS}',
    ],
)
def test_a_directory_can_be_an_origin(tmp_path: Path, text: str) -> None:
    """The one of all buckets, or that of one."""
    load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[origin]\nendpoint_url = "file://NAS"', "credentials"),
        (f'[origin]\nendpoint_url = "file://nas/x"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "file:/nas"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "file://NAS/../nas"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "file://NAS/none"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "file://NAS/../"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "file:///"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "file://NAS"\nprofile = "x"\n{CALLERS}', "origin.profile"),
        (f'[origin]\nendpoint_url = "file://NAS"\nproxy = "http://x:1"\n{CALLERS}', "origin.proxy"),
        ('[[buckets]]\nname = "nas"\nendpoint_url = "file://NAS"\naddressing_style = "path"', "addressing_style"),
        (
            '[[origin_credentials]]\nname = "x"\nprofile = "x"\n[[buckets]]\nname = "nas"\n'
            'endpoint_url = "file://NAS"\norigin_credentials = "x"',
            "buckets[0].origin_credentials",
        ),
        (
            '[[buckets]]\nname = "nas"\nendpoint_url = "file://NAS"\n[[slots]]\nname = "nas"\n'
            f'prefix = "s3://nas/"\nauthorization = "origin"\n{CALLERS}',
            "slots[0].authorization",
        ),
        ('[[buckets]]\nname = "x"\nendpoint_url = "file://NAS"\nsymlinks = "all"', "buckets[0].symlinks"),
        ('[[buckets]]\nname = "x"\nendpoint_url = "file://NAS"\nfile_mode = "0440"', "buckets[0].file_mode"),
        ('[[buckets]]\nname = "x"\nendpoint_url = "file://NAS"\nfile_mode = 640', "buckets[0].file_mode"),
        ('[[buckets]]\nname = "x"\nendpoint_url = "http://x"\nfile_mode = "0640"', "buckets[0].file_mode"),
        ('[origin]\nsymlinks = "follow"', "origin.symlinks"),
        ('[[buckets]]\nname = "x"\nendpoint_url = "file://CACHE/forebay/sub"', "buckets[0].endpoint_url"),
        ('[[buckets]]\nname = "x"\nendpoint_url = "file://CACHE"', "buckets[0].endpoint_url"),
        (
            '[[buckets]]\nname = "nas"\nendpoint_url = "file://NAS"\n[[buckets.replicas]]\nendpoint_url = "http://x"',
            "buckets[0].replicas[0]",
        ),
    ],
)
def test_what_makes_no_sense_with_a_directory_is_refused(tmp_path: Path, text: str, key: str) -> None:
    """A path that is none, a place within the cache or around it, keys and settings of S3."""
    (tmp_path / "cache" / "forebay" / "sub").mkdir(parents=True)
    with pytest.raises(SettingsError) as raised:
        load(tmp_path, text.replace("CACHE", str(tmp_path / "cache")))
    assert key in str(raised.value)
