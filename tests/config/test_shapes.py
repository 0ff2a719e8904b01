"""A file of another shape than it should have: each error names the key, shows the value, and says what is allowed."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import Settings
from gateway.config.fields import _numbers
from gateway.config.loading import load_settings
from gateway.config.problems import SettingsError, table_of

SLOT = 'name = "a"\nprefix = "s3://b/"\n'
PLACES = ("slots", "buckets", "credentials", "caller_classes", "origin_credentials")
TABLES = ("server", "admin", "origin", "cache", "logging", "tracing")


def problems(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "forebay.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_settings(file, {"HOME": str(tmp_path)})
    assert all(one.source == str(file) for one in caught.value.problems)
    told = [str(one).replace(f" (from {file})", "") for one in caught.value.problems]
    assert not any("Input should" in one or "instance of" in one or "Value error" in one for one in told)
    assert "geheim" not in "".join(told)
    return told


@pytest.mark.parametrize("name", PLACES)
def test_one_table_where_there_may_be_several(tmp_path: Path, name: str) -> None:
    """The commonest slip: one pair of brackets."""
    for text in (f"[{name}]", f'[{name}]\nname = "geheim"', f"[{name}.x]", f"{name} = 3"):
        [told] = problems(tmp_path, text)
        assert told.startswith(f"{name} = ")
        assert told.endswith(f": a list of tables: write [[{name}]], with both brackets, before each")
    [told] = problems(tmp_path, f"{name} = [[1]]")
    assert told == f"{name}[0] = (a list): a table: write [[{name}]], and its keys below"


@pytest.mark.parametrize("name", TABLES)
def test_several_tables_or_a_value_where_there_is_one(tmp_path: Path, name: str) -> None:
    """The other way round."""
    for text in (f"[[{name}]]", f"{name} = true", f'{name} = "x:9000"', f"{name} = 2026-01-01"):
        [told] = problems(tmp_path, text)
        assert told.startswith(f"{name} = ")
        assert told.endswith(f": one table: write [{name}], and its keys below")


@pytest.mark.parametrize(
    ("value", "shown"),
    [("true", "True"), ("[1]", "(a list)"), ("2026-01-01", "(a date or time)"), ('"x"', "'x'"), ("9.5", "9.5")],
)
def test_a_number_of_another_kind(tmp_path: Path, value: str, shown: str) -> None:
    """What was written is shown, in kind where it may hold more than a plain value; true is not 1."""
    allowed = "a whole number 0 to 65535; 0 picks a free port"
    assert problems(tmp_path, f"[server]\nport = {value}") == [f"server.port = {shown}: {allowed}"]
    [told] = problems(tmp_path, f"[server]\nworkers = {value}")
    assert told == f"server.workers = {shown}: 1 to 256"


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ('[[credentials]]\nsecret = "geheim"', "credentials[0].secret", "secret_access_key"),
        ('[[credentials]]\nkey = "geheim"', "credentials[0].key", "access_key_id"),
        ("port = 9000", "port", "server.port"),
        ('endpoint_url = "http://geheim"', "endpoint_url", "origin.endpoint_url"),
        ("[server]\ncapacity = 1", "server.capacity", "cache.capacity"),
        ("[slot]", "slot", "slots"),
        ("[Server]", "Server", "server"),
    ],
)
def test_a_key_that_is_none_comes_with_the_one_that_is_meant(tmp_path: Path, text: str, key: str, meant: str) -> None:
    """Close in spelling, a part of its name, or a key of another table."""
    told = next(one for one in problems(tmp_path, text) if one.startswith(f"{key} is not a setting"))
    assert f": did you mean {meant}? known here: " in told


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ('buffer = "10GiB"', "'10GiB'"),
        ('max_unflushed_bytes = "1GiB"', "'1GiB'"),
        ('max_unflushed_age = "1h"', "'1h'"),
        ("keep_last = 3", "3"),
        ("markers = ['a', 'b']", "['a', 'b']"),
        ("checkpoints = ['built-in']", "['built-in']"),
    ],
)
def test_a_setting_of_a_slot_is_shown_as_it_is_written(tmp_path: Path, line: str, shown: str) -> None:
    """And the slot is named."""
    [told] = problems(tmp_path, f"[[slots]]\n{SLOT}{line}")
    key = line.partition(" ")[0]
    assert told.startswith(f"slots[0].{key} = {shown}: needs write = back")
    assert told.endswith(", in slot a")


def test_buffers_that_no_disk_could_hold_name_the_largest(tmp_path: Path) -> None:
    """As it was written."""
    text = f'[cache]\ndirectory = "{tmp_path}"\npersistent = true\ncapacity = "1GiB"\n'
    for name, buffer in (("small", "1GiB"), ("large", "90TiB")):
        text += f'[[slots]]\nname = "{name}"\nprefix = "s3://b/{name}/"\nwrite = "back"\nbuffer = "{buffer}"\n'
    [told] = problems(tmp_path, text)
    assert told.startswith(
        "slots[1].buffer = '90TiB': of slot large: together with cache.capacity, 1GiB, and the other "
    )


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE])
def test_a_byte_order_mark_is_named(tmp_path: Path, mark: bytes) -> None:
    """An editor has put it there, and shows it to nobody."""
    file = tmp_path / "forebay.toml"
    file.write_bytes(mark + b"[server]")
    with pytest.raises(SettingsError, match="begins with a byte order mark \\(BOM\\): save it as UTF-8 without one"):
        load_settings(file, {})


_ODD = (
    "true",
    "8.0",
    "1e0",
    "nan",
    "inf",
    '"1_000"',
    '"+8"',
    '"-0"',
    '" 8"',
    '"8\\n"',
    '"\u0663"',
    '"8.0"',
    '"\uff18"',
    '"nan"',
)
"""Values that every setting of a whole number refuses."""


def _whole_numbers() -> Iterator[tuple[str, str]]:
    for table, field in Settings.model_fields.items():
        section = table_of(field.annotation)
        assert section is not None
        for name, one in section.model_fields.items():
            if _numbers(section, name) == {"int"}:
                header = f"[[{table}]]" if str(field.annotation).startswith("list[") else f"[{table}]"
                yield header, one.alias or name


@pytest.mark.parametrize(("header", "name"), [*_whole_numbers()])
def test_only_plain_digits_are_a_whole_number(tmp_path: Path, header: str, name: str) -> None:
    """Each such setting names itself; a duration or a rate takes a fraction, and no more than that."""
    file = tmp_path / "forebay.toml"
    for odd in _ODD:
        file.write_text(f"{header}\n{name} = {odd}\n", encoding="utf-8")
        with pytest.raises(SettingsError) as caught:
            load_settings(file, {"HOME": str(tmp_path)})
        assert any(f"{name} = " in str(one) for one in caught.value.problems), odd


def test_a_place_in_a_list_is_plain_digits(tmp_path: Path) -> None:
    """In a variable's name; other digits, and more than any list has, are refused and do not end the command."""
    for place in ("\u0663", "9" * 5000, "-1"):
        with pytest.raises(SettingsError):
            load_settings(None, {"HOME": str(tmp_path), f"FOREBAY_SLOTS__{place}__NAME": "a"})
