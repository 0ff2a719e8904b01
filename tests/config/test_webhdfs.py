"""Origins that are HDFS: what `webhdfs://` may name, and what makes no sense beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config.loading import load_settings
from gateway.config.problems import SettingsError
from tests.config.test_directories import CALLERS

BUCKET = '[[buckets]]\nname = "hdfs"\nendpoint_url = "webhdfs://alice@nn.example:9870/data"\n'


def load(tmp_path: Path, text: str) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(f'[cache]\ndirectory = "{tmp_path}/cache"\ncapacity = "1GiB"\n{text}')
    load_settings(file, {})


@pytest.mark.parametrize(
    "text",
    [
        BUCKET,
        f'{BUCKET}datanodes = ["*.dn.example", "10.0.0.7"]\n',
        f'[origin]\nendpoint_url = "swebhdfs://nn:9871"\n{CALLERS}',
        f'{BUCKET}[[slots]]\nname = "a"\nprefix = "s3://hdfs/"\nmode = "read-only"\nconsistency = "ttl"\n',
    ],
)
def test_hdfs_can_be_an_origin(tmp_path: Path, text: str) -> None:
    """The one of all buckets, or that of one; nobody has to have a key for it."""
    load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[origin]\nendpoint_url = "webhdfs://nn:9870"', "credentials"),
        (f'[origin]\nendpoint_url = "webhdfs://nn"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "webhdfs://nn:9870/a?b"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "webhdfs://u:p@nn:9870"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "webhdfs://nn:9870/../a"\n{CALLERS}', "origin.endpoint_url"),
        (f'[origin]\nendpoint_url = "webhdfs://nn:9870"\nprofile = "x"\n{CALLERS}', "origin.profile"),
        (f'{BUCKET}addressing_style = "path"', "buckets[0].addressing_style"),
        (f'{BUCKET}dialect = "gcs"', "buckets[0].dialect"),
        (f'{BUCKET}datanodes = ["http://dn"]', "buckets[0].datanodes"),
        ('[[buckets]]\nname = "a"\ndatanodes = ["dn"]', "buckets[0].datanodes"),
        (f'{BUCKET}[[slots]]\nname = "a"\nprefix = "s3://hdfs/"\nwrite = "back"\n', "slots[0].write"),
        (f'{BUCKET}[[buckets.replicas]]\nendpoint_url = "http://x"', "buckets[0].replicas[0]"),
        (
            f'{BUCKET}[[slots]]\nname = "a"\nprefix = "s3://hdfs/"\nauthorization = "origin"\n{CALLERS}',
            "slots[0].authorization",
        ),
    ],
)
def test_what_makes_no_sense_with_hdfs_is_refused(tmp_path: Path, text: str, key: str) -> None:
    """A place that is none, keys and settings of S3, writes that are acknowledged here."""
    with pytest.raises(SettingsError) as raised:
        load(tmp_path, text)
    assert key in str(raised.value)
