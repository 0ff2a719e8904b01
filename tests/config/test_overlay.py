"""Slots that were set over the admin port, beside the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.config import settings_from_json, settings_to_json
from gateway.config.loading import load_settings
from gateway.config.overlay import (
    NAME,
    changed_keys,
    load_with_overlay,
    read_overlay,
    restart_needed,
    with_overlay,
    write_overlay,
)
from gateway.config.problems import SettingsError
from tests.support.cache_directory import begun

CONFIGURATION = """
[cache]
directory = "{directory}"
capacity = "1GiB"

[[slots]]
name = "a"
prefix = "s3://b/a/"
capacity = "600MiB"
"""


def configured(tmp_path: Path, text: str = CONFIGURATION) -> Path:
    begun(tmp_path / "cache")
    path = tmp_path / "forebay.toml"
    path.write_text(text.format(directory=tmp_path / "cache"))
    return path


def slot(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "prefix": f"s3://b/{name}/", **more}


def test_slots_are_read_as_they_were_written(tmp_path: Path) -> None:
    """They come behind those of the configuration."""
    path = configured(tmp_path)
    write_overlay(tmp_path / "cache", [slot("c", weight=3), slot("d")])
    loaded = load_with_overlay(path, {})
    assert [one.name for one in loaded.settings.slots] == ["a", "c", "d"]
    assert loaded.settings.slots[1].weight == 3
    assert (tmp_path / "cache" / NAME).stat().st_mode & 0o777 == 0o600
    write_overlay(tmp_path / "cache", [])
    assert not (tmp_path / "cache" / NAME).exists()


@pytest.mark.parametrize("one", [slot("a", weight=9), {"name": "z", "prefix": "s3://b/a/"}])
def test_the_configuration_wins(tmp_path: Path, one: dict[str, Any]) -> None:
    """Of two that say something of the same slot or prefix, and it is told."""
    path = configured(tmp_path)
    write_overlay(tmp_path / "cache", [one, slot("c")])
    loaded = load_with_overlay(path, {})
    assert [(one.name, one.weight) for one in loaded.settings.slots] == [("a", 1), ("c", 1)]
    assert any(one["name"] in warning and "in force" in warning for warning in loaded.warnings)


def test_what_cannot_be_beside_the_configuration_is_left_out(tmp_path: Path) -> None:
    """Each by itself, with why; the others are in force."""
    path = configured(tmp_path)
    write_overlay(tmp_path / "cache", [slot("c", capacity="700MiB"), slot("d"), slot("e", colour="red")])
    loaded = load_with_overlay(path, {})
    assert [one.name for one in loaded.settings.slots] == ["a", "d"]
    told = "\n".join(loaded.warnings)
    assert "'c'" in told
    assert "cache.capacity" in told
    assert "colour" in told


@pytest.mark.parametrize(
    "more",
    [
        {"mode": "read-only"},
        {"authorization": "origin"},
        {"consistency": "snapshot", "snapshot": "s"},
        {"origin_credentials": "gone"},
    ],
)
@pytest.mark.parametrize("conflict", [{"capacity": "700MiB"}, {"name": "a"}, {"origin_credentials": "gone"}])
def test_what_keeps_callers_from_something_is_not_left_out(
    tmp_path: Path, more: dict[str, Any], conflict: dict[str, Any]
) -> None:
    """Its prefix would be open to them, or the origin be asked with another key: both together are refused. Where the
    configuration says what holds for the prefix, that is in force."""
    path = configured(tmp_path)
    write_overlay(tmp_path / "cache", [slot("d"), slot("c") | more | conflict])
    with pytest.raises(SettingsError, match=r"open to more callers .*slots\.json"):
        load_with_overlay(path, {})
    write_overlay(tmp_path / "cache", [slot("d"), slot("c") | more | conflict | {"prefix": "s3://b/a/"}])
    assert [one.name for one in load_with_overlay(path, {}).settings.slots] == ["a", "d"]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"format": "forebay slots 1", "slots": [], "checksum": ""}', b"\xff"]
)
def test_one_that_is_damaged_is_refused(tmp_path: Path, content: bytes) -> None:
    """With its path, and what to do."""
    path = configured(tmp_path)
    (tmp_path / "cache" / NAME).write_bytes(content)
    with pytest.raises(SettingsError, match=r"slots\.json.*move it away"):
        load_with_overlay(path, {})


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    """Wherever it is."""
    write_overlay(tmp_path, [slot("c", weight=3)])
    whole = (tmp_path / NAME).read_bytes()
    for at in range(len(whole)):
        damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        (tmp_path / NAME).write_bytes(damaged)
        try:
            assert read_overlay(tmp_path) == [slot("c", weight=3)]  # white space
        except SettingsError:
            continue


def test_a_disk_that_fails_leaves_the_configuration(tmp_path: Path) -> None:
    """The gateway goes on without the cache directory then, and says what is not in force."""
    path = configured(tmp_path)
    (tmp_path / "cache" / NAME).mkdir()
    loaded = load_with_overlay(path, {})
    assert [one.name for one in loaded.settings.slots] == ["a"]
    assert any("not in force" in warning for warning in loaded.warnings)


def test_what_needs_a_restart(tmp_path: Path) -> None:
    """Everything that the running gateway cannot follow, by its key."""
    path = configured(tmp_path)
    before = load_settings(path, {}).settings
    assert restart_needed(before, load_settings(path, {}, running=before).settings) == []
    text = CONFIGURATION.replace('"1GiB"', '"2GiB"') + 'block_size = "1MiB"\n[server]\nworkers = 3\nport = 0\n'
    after = load_settings(configured(tmp_path, text), {}).settings
    assert restart_needed(before, after) == ["server.workers", "block_size of the slot 'a'"]
    first = text + '[[credentials]]\naccess_key_id = "k"\nsecret_access_key = "s"\nallow = ["s3://"]\n'
    assert "the first or the last of credentials" in restart_needed(
        before, load_settings(configured(tmp_path, first), {}).settings
    )


def test_what_was_changed_is_told_by_its_key(tmp_path: Path) -> None:
    """Entries of lists by their names; no value, since some are secret; and not more than anybody reads."""
    key = '[[credentials]]\naccess_key_id = "k"\nsecret_access_key = "hidden"\nallow = ["s3://"]\n'
    before = load_settings(configured(tmp_path, CONFIGURATION + key), {}).settings
    text = (
        CONFIGURATION.replace('"1GiB"', '"2GiB"')
        + key.replace("hidden", "other")
        + '[admin]\ntoken = "0123456789abcdef"\n'
    )
    after = load_settings(configured(tmp_path, text), {}).settings
    assert changed_keys(before, before) == []
    assert changed_keys(before, after) == ["admin.token", "cache.capacity", "credentials 'k'"]
    many = "".join(f'[[slots]]\nname = "n{number}"\nprefix = "s3://n{number}/"\n' for number in range(200))
    told = changed_keys(before, load_settings(configured(tmp_path, CONFIGURATION + key + many), {}).settings)
    assert (told[0], told[-1], len(told)) == ("slots 'n0'", "150 more", 51)


def test_buckets_stay_where_they_are_while_it_runs(tmp_path: Path) -> None:
    """Their keys may change, and whatever says nothing new."""
    far = '[[buckets]]\nname = "far"\nendpoint_url = "http://far.example"\n'
    named = '[[origin_credentials]]\nname = "k"\nprofile = "p"\n'
    before = load_settings(configured(tmp_path, CONFIGURATION + far), {}).settings
    for text, keys in (
        (far, []),
        (named + far + 'origin_credentials = "k"\n', []),
        (far + '[[buckets]]\nname = "near"\n', []),
        (far.replace("far.example", "further.example"), ["where the bucket 'far' is"]),
        (far + 'region = "auto"\n', ["where the bucket 'far' is"]),
        ("", ["where the bucket 'far' is"]),
        (far + far.replace('"far"', '"next"'), ["where the bucket 'next' is"]),
    ):
        after = load_settings(configured(tmp_path, CONFIGURATION + text), {}, running=before).settings
        assert restart_needed(before, after) == keys


def test_an_omitted_capacity_stays_what_it_was(tmp_path: Path) -> None:
    """Though the disk has filled meanwhile."""
    path = configured(tmp_path, '[cache]\ndirectory = "{directory}"\n')
    before = load_settings(path, {}).settings
    smaller = before.model_copy(update={"cache": before.cache.model_copy(update={"capacity_bytes": 2**29})})
    assert load_settings(path, {}, running=smaller).settings.cache.capacity_bytes == 2**29
    found = with_overlay(path, {}, load_settings(path, {}, running=smaller), [slot("c")])
    assert found.settings.cache.capacity_bytes == 2**29


@pytest.mark.parametrize("is_first", [True, False])
def test_a_key_pair_from_or_to_the_usual_chain_needs_a_restart(tmp_path: Path, is_first: bool) -> None:
    """One that is replaced by another in the same place does not."""
    tables = [
        '[origin]\naccess_key_id = "one"\nsecret_access_key = "a-secret"\n',
        '[origin]\naccess_key_id = "two"\nsecret_access_key = "b-secret"\n',
        "",
    ]
    one, other, none = (load_settings(configured(tmp_path, CONFIGURATION + table), {}).settings for table in tables)
    assert restart_needed(one, other) == []
    assert restart_needed(*((one, none) if is_first else (none, one))) == [
        "origin.access_key_id, from or to the usual AWS chain"
    ]


def test_whom_the_gateway_trusts_stays_as_it_was_read(tmp_path: Path) -> None:
    """The system may renew that file at any time, and every change of settings reads all of them anew."""
    path = configured(tmp_path, CONFIGURATION + f'[origin]\nca_bundle = "{tmp_path}/trusted.pem"\n')
    trustme.CA().cert_pem.write_to_path(tmp_path / "trusted.pem")
    before = load_settings(path, {}).settings
    for spoil in (lambda file: file.write_text("nonsense"), Path.unlink):
        spoil(tmp_path / "trusted.pem")
        after = load_settings(path, {}, running=before).settings
        assert restart_needed(before, after) == []
        assert after == settings_from_json(settings_to_json(before))
