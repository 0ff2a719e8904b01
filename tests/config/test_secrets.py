"""Secrets in the configuration: where they come from, and that they show nowhere."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from gateway.config import Settings, public_settings, settings_from_json, settings_to_json
from gateway.config.loading import load_settings
from gateway.config.problems import SettingsError
from tests.support.settings import SECRET, load, problems


def test_secrets_are_read_from_files(tmp_path: Path) -> None:
    """Without the newline that editors leave; one that is missing or empty is refused."""
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "empty").write_text("\n")
    entry = '[[credentials]]\naccess_key_id = "k"\nallow = ["s3://"]\nsecret_access_key_file = "{}"\n'
    loaded = load(tmp_path, entry.format(tmp_path / "secret") + f'[admin]\ntoken_file = "{tmp_path / "secret"}"\n')
    assert loaded.settings.credentials[0].secret == SECRET
    assert loaded.settings.admin.token is not None
    assert loaded.settings.admin.token.get_secret_value() == SECRET
    named = '[[origin_credentials]]\nname = "n"\naccess_key_id = "k"\nsecret_access_key_file = "{}"\n'
    (found,) = load(tmp_path, named.format(tmp_path / "secret")).settings.origin_credentials
    assert found.secret_access_key is not None
    assert found.secret_access_key.get_secret_value() == SECRET
    key = "origin_credentials[0].secret_access_key_file"
    assert key in problems(tmp_path, named.format(tmp_path / "missing"))
    key = "credentials[0].secret_access_key_file"
    assert list(problems(tmp_path, entry.format(tmp_path / "empty"))) == [key]
    assert list(problems(tmp_path, entry.format(tmp_path / "missing"))) == [key]
    assert list(problems(tmp_path, entry.format(tmp_path / "secret") + f'secret_access_key = "{SECRET}"\n')) == [key]


LONG_ENOUGH = "sixteen-or-more-!"


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (LONG_ENOUGH.encode(), None),
        (f"  {LONG_ENOUGH}\r\n\n".encode(), None),
        (b"x" * 16, None),
        (b"x" * 15 + b"\n", "at least 16 printable ASCII characters"),
        ("\u00e4".encode() * 16, "at least 16 printable ASCII characters"),
        (b"words with spaces between", None),
        (b"fourteen-of-it", "at least 16 printable ASCII characters"),
        (f"{LONG_ENOUGH}\n{LONG_ENOUGH}\n".encode(), "this file must hold one line of text"),
        (b"\xef\xbb\xbf" + LONG_ENOUGH.encode(), "it begins with a byte order mark (BOM)"),
        (LONG_ENOUGH.encode() + b"\0", "this file must hold one line of text"),
        (b"\xff" * 20, "this file is not text in UTF-8"),
        (b"\n \n", "this file is empty"),
        (b"", "this file is empty"),
        (b"x" * 100_000, "this file cannot be used: it has more than 65536 bytes"),
    ],
)
def test_a_token_from_a_file_keeps_to_the_rule_of_one_that_is_given(
    tmp_path: Path, token: bytes, says: str | None
) -> None:
    """The error names file and rule, never what is in the file."""
    file = tmp_path / "token"
    file.write_bytes(token)
    from_file = f'[admin]\ntoken_file = "{file}"\n'
    if says is None:
        loaded = load(tmp_path, from_file).settings.admin.token
        assert loaded is not None
        assert loaded.get_secret_value() == token.decode().strip()
        return
    [(key, told)] = problems(tmp_path, from_file).items()
    assert key == "admin.token_file"
    assert str(file) in told
    assert says in told
    text = token.decode("latin-1").strip()
    assert not text or text not in told
    if "16" in says:
        written = token.decode().strip()
        assert says in problems(tmp_path, f'[admin]\ntoken = "{written}"\n')["admin.token"]
        assert says in problems(tmp_path, "", FOREBAY_ADMIN__TOKEN=written)["admin.token"]


SECRET_FILES = {
    "admin.token_file": '[admin]\ntoken_file = "{}"\n',
    "origin.secret_access_key_file": '[origin]\naccess_key_id = "k"\nsecret_access_key_file = "{}"\n',
    "credentials[0].secret_access_key_file": (
        '[[credentials]]\naccess_key_id = "k"\nallow = ["s3://"]\nsecret_access_key_file = "{}"\n'
    ),
    "origin_credentials[0].secret_access_key_file": (
        '[[origin_credentials]]\nname = "n"\naccess_key_id = "k"\nsecret_access_key_file = "{}"\n'
    ),
}


@pytest.mark.parametrize("key", SECRET_FILES)
def test_a_file_of_a_secret_that_others_may_read_is_told_of(tmp_path: Path, key: str) -> None:
    """With what to do; a group may, as in a pod. And none holds more than a line."""
    file = tmp_path / "secret"
    file.write_text(SECRET)
    for mode, is_told in ((0o600, False), (0o440, False), (0o644, True), (0o620, True), (0o602, True)):
        file.chmod(mode)
        told = [one for one in load(tmp_path, SECRET_FILES[key].format(file)).warnings if one.startswith(f"{key}: ")]
        assert len(told) == is_told, oct(mode)
        assert not is_told or f"{file} (mode {mode:04o}): chmod go-w,o-r {file}" in told[0]
    file.write_text(f"{SECRET}\nand more")
    [(refused, why)] = problems(tmp_path, SECRET_FILES[key].format(file)).items()
    assert (refused, SECRET in why) == (key, False)


def full_of_secrets(tmp_path: Path) -> Settings:
    text = (
        f'[admin]\ntoken = "{SECRET}"\n[origin]\naccess_key_id = "id"\nsecret_access_key = "{SECRET}"\n'
        f'session_token = "{SECRET}"\nproxy = "http://user:{SECRET}@proxy:1"\n'
        f'[[credentials]]\naccess_key_id = "k"\nsecret_access_key = "{SECRET}"\nallow = ["s3://"]\n'
        f'[[origin_credentials]]\nname = "pair"\naccess_key_id = "k"\nsecret_access_key = "{SECRET}"\n'
        f'session_token = "{SECRET}"\n'
        f'[[origin_credentials]]\nname = "role"\nrole_arn = "arn:aws:iam::1:role/x"\nexternal_id = "{SECRET}"\n'
    )
    return load(tmp_path, text).settings


def test_secrets_show_nowhere_but_in_the_pipe_to_a_child(tmp_path: Path) -> None:
    """Not in reprs, not in what check-config prints."""
    settings = full_of_secrets(tmp_path)
    assert SECRET not in repr(settings) + str(settings)
    assert SECRET not in orjson.dumps(public_settings(settings)).decode()
    assert settings_to_json(settings).count(SECRET.encode()) == 8


def test_a_child_process_gets_the_very_same_settings(tmp_path: Path) -> None:
    """What goes through the pipe comes out equal, secrets and paths included."""
    settings = full_of_secrets(tmp_path)
    assert settings_from_json(settings_to_json(settings)) == settings


@pytest.mark.parametrize(
    "text",
    [
        f'[origin]\nsecret_acces_key = "{SECRET}"\n',
        f'[origin]\nendpoint_url = "http://user:{SECRET}@host"\n',
        f'[origin]\nproxy = "ftp://user:{SECRET}@host"\n',
        f'[admin]\ntoken = ["{SECRET}"]\n',
        f'credentials = "{SECRET}"\n',
        f'[credentials]\nsecret_access_key = "{SECRET}"\n',
        f'[[credentials]]\nsecret_access_key = {{ value = "{SECRET}" }}\n',
        f'origin = ["{SECRET}"]\n',
        f'[[origin_credentials]]\nname = "a"\nsecret_acces_key = "{SECRET}"\n',
        f'[[origin_credentials]]\nname = "a"\nprofile = "p"\nexternal_id = "{SECRET}"\n',
        f'[[origin_credentials]]\nname = "a"\nprofile = "p"\nsession_token = "{SECRET}"\n',
        f'[[buckets]]\nname = "b"\norigin_credentials = {{ secret_access_key = "{SECRET}" }}\n',
        f'["{SECRET[:6]}]\nsecret_access_key = "{SECRET}"\n',
    ],
)
def test_errors_never_show_a_secret(tmp_path: Path, text: str) -> None:
    """Misspelt keys, wrong types and broken files included."""
    assert SECRET not in "".join(problems(tmp_path, text).values())


def test_errors_about_variables_never_show_a_secret() -> None:
    """They come from the same places as secrets do."""
    variables = {"FOREBAY_ORIGIN__SECRET_ACCES_KEY": SECRET, "FOREBAY_CREDENTIALS": f'["{SECRET}"'}
    for name, value in variables.items():
        with pytest.raises(SettingsError) as refused:
            load_settings(None, {name: value})
        assert SECRET not in str(refused.value)
