"""Configuration: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import trustme
from pydantic import BaseModel

from gateway.config import Settings, public_settings, settings_from_json, settings_to_json
from gateway.config.loading import LoadedSettings, load_settings
from gateway.config.problems import SettingsError, table_of
from tests.support.gateway_process import to_toml

SECRET = "s3cr3t-never-to-be-seen"


def load(tmp_path: Path, text: str, **environment: str) -> LoadedSettings:
    file = tmp_path / "forebay.toml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, environment)


def problems(tmp_path: Path, text: str, **environment: str) -> dict[str, str]:
    """Key -> message of everything that is refused."""
    with pytest.raises(SettingsError) as refused:
        load(tmp_path, text, **environment)
    return {problem.key: str(problem) for problem in refused.value.problems}


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
    assert settings.credentials[1].allow == ["s3://b/"]
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


def test_all_errors_are_reported_at_once_with_key_value_and_what_is_allowed(tmp_path: Path) -> None:
    """Nobody should have to start five times to find five mistakes."""
    found = problems(
        tmp_path,
        '[server]\nport = 70000\nworkers = 0\nhead_timeout = "soon"\nprot = 1\n'
        '[cache]\nblock_size = "3MiB"\n'
        '[[slots]]\nname = "a"\nprefix = "s3://b/"\n[[slots]]\nname = "b"\nprefix = "train/"\n',
    )
    assert found["server.port"] == "server.port = 70000: a whole number 0 to 65535; 0 picks a free port"
    assert found["server.workers"] == "server.workers = 0: 1 to 256"
    assert found["server.head_timeout"] == "server.head_timeout = 'soon': 1s to 1h"
    assert "did you mean port?" in found["server.prot"]
    assert found["cache.block_size"] == "cache.block_size = '3MiB': a power of two, 64KiB to 64MiB"
    assert found["slots[1].prefix"].startswith("slots[1].prefix = 'train/': s3://")
    assert len(found) == 6


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[server]\nhost = ""\n', "server.host"),
        ('[server]\nbase_domains = ["S3.Local:9000"]\n', "server.base_domains[0]"),
        ("[server]\nhead_timeout = 0\n", "server.head_timeout"),
        ('[server]\nhead_timeout_seconds = "5s"\n', "server.head_timeout_seconds"),
        ('[server]\ncertificate_file = "/nowhere.pem"\n', "server.key_file"),
        ('[server]\ncertificate_file = "/dev/null"\nkey_file = "/nowhere.key"\n', "server.key_file"),
        ('[origin]\nendpoint_url = "s3.example"\n', "origin.endpoint_url"),
        ('[origin]\nendpoint_url = "http://h/path"\n', "origin.endpoint_url"),
        ('[origin]\nendpoint_url = "http://h:99999"\n', "origin.endpoint_url"),
        ('[origin]\naccess_key_id = "a"\n', "origin.secret_access_key"),
        ('[origin]\nsession_token = "t"\n', "origin.session_token"),
        ('[origin]\naccess_key_id = "a"\nsecret_access_key = "b"\nprofile = "p"\n', "origin.profile"),
        ('[origin]\nca_bundle = "/nowhere.pem"\n', "origin.ca_bundle"),
        ('[origin]\nproxy = "socks://h"\n', "origin.proxy"),
        ('[origin]\nread_bandwidth = "0B/s"\n', "origin.read_bandwidth"),
        ('[cache]\nblock_size = "32KiB"\n', "cache.block_size"),
        ('[cache]\nblock_size = "128MiB"\n', "cache.block_size"),
        ('[cache]\ncapacity = "16MiB"\n', "cache.capacity"),
        ('[logging]\nlevel = "loud"\n', "logging.level"),
        ('[admin]\ntoken = "short"\n', "admin.token"),
        ("[admin]\nport = 9000\n", "admin.port"),
        ('[[credentials]]\naccess_key_id = "a"\nsecret_access_key = "b"\n', "credentials[0].allow"),
        ('[[credentials]]\naccess_key_id = "a"\nsecret_access_key = "b"\nallow = []\n', "credentials[0].allow"),
        ('[[credentials]]\naccess_key_id = "a"\nallow = ["s3://"]\n', "credentials[0].secret_access_key"),
        ('[[slots]]\nname = "default"\nprefix = "s3://b/"\n', "slots[0].name"),
        ('[[slots]]\nname = "a b"\nprefix = "s3://b/"\n', "slots[0].name"),
        ('[[slots]]\nname = "a"\nprefix = "s3://b/"\nmode = "rw"\n', "slots[0].mode"),
        ('[[slots]]\nname = "a"\nprefix = "s3://b/"\nweight = 0\n', "slots[0].weight"),
        (
            '[cache]\ncapacity = "1GiB"\n[[slots]]\nname = "a"\nprefix = "s3://b/"\ncapacity = "2GiB"\n',
            "slots[].capacity",
        ),
        (
            '[cache]\ncapacity = "4GiB"\n'
            '[[slots]]\nname = "a"\nprefix = "s3://b/"\ncapacity = "2GiB"\ncapacity_limit = "1GiB"\n',
            "slots[0].capacity_limit",
        ),
        (
            '[cache]\ncapacity = "4GiB"\nblock_size = "8MiB"\n'
            '[[slots]]\nname = "a"\nprefix = "s3://b/"\ncapacity_limit = "60MiB"\n',
            "slots[0].capacity_limit",
        ),
        (
            '[cache]\ncapacity = "256MiB"\n[[slots]]\nname = "a"\nprefix = "s3://b/"\nblock_size = "64MiB"\n',
            "cache.capacity",
        ),
        ('[[slots]]\nname = "a"\nprefix = "s3://b/"\nblock_size = "3MiB"\n', "slots[0].block_size"),
        ('[[slots]]\nname = "a"\nprefix = "s3://b/"\nblock_size = "32KiB"\n', "slots[0].block_size"),
        ('[cache]\npacked_size = "2MiB"\n', "cache.packed_size"),
        ("server = 5\n", "server"),
        ("[slots]\n", "slots"),
        ("not toml", "config"),
    ],
)
def test_what_cannot_be_is_refused_under_its_own_key(tmp_path: Path, text: str, key: str) -> None:
    """One mistake, one error, naming the key as it stands in the file."""
    assert list(problems(tmp_path, text)) == [key]


def test_names_prefixes_and_key_ids_are_unique(tmp_path: Path) -> None:
    """Two entries that claim the same are a mistake, not a preference."""
    slot = '[[slots]]\nname = "a"\nprefix = "s3://b/"\n'
    credential = '[[credentials]]\naccess_key_id = "k"\nsecret_access_key = "x"\nallow = ["s3://"]\n'
    found = problems(tmp_path, slot + slot + credential + credential)
    assert set(found) == {"slots[1].name", "slots[1].prefix", "credentials[1].access_key_id"}


def test_write_back_is_refused_until_it_is_there(tmp_path: Path) -> None:
    """Acknowledging from this disk what is not journaled would lose data; the message says what to use."""
    found = problems(tmp_path, '[[slots]]\nname = "a"\nprefix = "s3://b/"\nwrite = "back"\n')
    assert 'use "through"' in found["slots[0].write"]


def test_snapshots_are_refused_until_they_are_there(tmp_path: Path) -> None:
    """Whoever froze a prefix must not be served what changes."""
    found = problems(tmp_path, '[[slots]]\nname = "a"\nprefix = "s3://b/"\nconsistency = "snapshot"\n')
    assert 'use "immutable"' in found["slots[0].consistency"]


def test_read_only_slots_are_ttl_where_nothing_is_said(tmp_path: Path) -> None:
    """And all others strict: what may be written by others at any time is asked for each time."""
    text = '[[slots]]\nname = "a"\nprefix = "s3://b/"\n'
    ways = {"": "strict", 'mode = "read-only"\n': "ttl", 'mode = "read-only"\nconsistency = "immutable"\n': "immutable"}
    for more, expected in ways.items():
        assert load(tmp_path, text + more).settings.slots[0].consistency_in_force == expected


def test_settings_that_are_not_in_force_are_each_warned_of(tmp_path: Path) -> None:
    """Nothing is silently ignored; what says the same as this version does needs no warning."""
    text = to_toml(
        {
            "origin": {"read_bandwidth": "1GiB/s"},
            "cache": {"capacity": "1GiB"},
            "slots": [
                {
                    "name": "a",
                    "prefix": "s3://a/",
                    "consistency": "immutable",
                    "metadata_ttl": "60s",
                    "negative_ttl": "5s",
                    "capacity": "100MiB",
                    "capacity_limit": "200MiB",
                    "eviction": "epoch",
                    "read_bandwidth": "1GiB/s",
                    "write_bandwidth": "1GiB/s",
                    "weight": 4,
                    "keep_last": 3,
                },
                {
                    "name": "b",
                    "prefix": "s3://b/",
                    "mode": "read-only",
                    "consistency": "strict",
                    "write": "through",
                    "weight": 1,
                    "negative_ttl": "0s",
                },
            ],
        }
    )
    warned = [warning.split(" ")[0] for warning in load(tmp_path, text).warnings]
    assert warned == ["slots[0].weight", "slots[0].keep_last"]


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_ceiling_too_low_to_work_under_is_refused(tmp_path: Path, direction: str) -> None:
    """Of the link or of a slot: with its key, its value and what is allowed."""
    key = f"{direction}_bandwidth"
    text = f'[origin]\n{key} = "63KiB/s"\n[[slots]]\nname = "a"\nprefix = "s3://a/"\n{key} = 65535\n'
    found = problems(tmp_path, text)
    assert found[f"origin.{key}"].startswith(f"origin.{key} = '63KiB/s': at least 64KiB/s")
    assert found[f"slots[0].{key}"].startswith(f"slots[0].{key} = 65535: at least 64KiB/s")
    assert load(tmp_path, f'[origin]\n{key} = "64KiB/s"\n').warnings == ()


CREDENTIAL = '[[credentials]]\naccess_key_id = "k"\nsecret_access_key = "x"\nallow = ["s3://"]\n'


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example"])
def test_an_address_that_others_reach_needs_credentials(tmp_path: Path, host: str) -> None:
    """Unless the operator says `insecure = true`, and then every start says it loudly."""
    text = f'[server]\nhost = "{host}"\n'
    assert "server.insecure = true" in problems(tmp_path, text)["server.host"]
    assert load(tmp_path, text + CREDENTIAL).warnings == ()
    assert "INSECURE" in load(tmp_path, text + "insecure = true\n").warnings[0]


def test_unsigned_callers_never_have_more_rights_than_signed_ones(tmp_path: Path) -> None:
    """Whoever left the signature away would escape the prefixes of every credential."""
    text = "[server]\nallow_unsigned = true\n"
    assert "more rights" in problems(tmp_path, text + CREDENTIAL)["server.allow_unsigned"]
    assert load(tmp_path, text).settings.server.allow_unsigned


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_a_loopback_address_needs_none(tmp_path: Path, host: str) -> None:
    """The sidecar's case."""
    assert load(tmp_path, f'[server]\nhost = "{host}"\n').warnings == ()


def test_the_admin_port_on_an_address_that_others_reach_needs_a_token(tmp_path: Path) -> None:
    """Or `insecure = true`, said loudly."""
    text = '[admin]\nhost = "0.0.0.0"\n'
    assert "admin.token" in problems(tmp_path, text)["admin.host"]
    assert load(tmp_path, text + f'token = "{SECRET}"\n').warnings == ()
    assert "INSECURE" in load(tmp_path, text + "insecure = true\n").warnings[0]


@pytest.mark.parametrize(
    ("endpoint_url", "host"),
    [
        ("http://127.0.0.1:9000", "127.0.0.1"),
        ("http://localhost:9000", "127.0.0.1"),
        ("http://0.0.0.0:9000", "127.0.0.1"),
        ("http://127.0.0.1:9000", "localhost"),
        ("http://127.0.0.1:9000", "0.0.0.0"),
        ("http://127.0.0.7:9000", "0.0.0.0"),
        ("http://127.0.0.1:9001", "127.0.0.1"),
    ],
)
def test_the_gateway_is_never_its_own_origin(tmp_path: Path, endpoint_url: str, host: str) -> None:
    """By whatever name, and the admin port no more than the S3 port."""
    text = f'[server]\nhost = "{host}"\ninsecure = true\n[origin]\nendpoint_url = "{endpoint_url}"\n'
    assert list(problems(tmp_path, text)) == ["origin.endpoint_url"]


@pytest.mark.parametrize(
    "endpoint_url",
    ["http://127.0.0.1:9002", "http://127.0.0.2:9000", "http://192.0.2.1:9000", "http://nowhere.invalid:9000"],
)
def test_another_address_is_an_origin(tmp_path: Path, endpoint_url: str) -> None:
    """Another port, another loopback address, another machine, a name that does not resolve yet."""
    load(tmp_path, f'[origin]\nendpoint_url = "{endpoint_url}"\n')


def test_an_aws_variable_that_names_the_gateway_is_explained() -> None:
    """The variable that sends clients to the gateway is easily set for the gateway too."""
    with pytest.raises(SettingsError, match=r"set origin\.endpoint_url"):
        load_settings(None, {"AWS_ENDPOINT_URL": "http://localhost:9000/"})


def test_secrets_are_read_from_files(tmp_path: Path) -> None:
    """Without the newline that editors leave; one that is missing or empty is refused."""
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    (tmp_path / "empty").write_text("\n")
    entry = '[[credentials]]\naccess_key_id = "k"\nallow = ["s3://"]\nsecret_access_key_file = "{}"\n'
    loaded = load(tmp_path, entry.format(tmp_path / "secret") + f'[admin]\ntoken_file = "{tmp_path / "secret"}"\n')
    assert loaded.settings.credentials[0].secret == SECRET
    assert loaded.settings.admin.token is not None
    assert loaded.settings.admin.token.get_secret_value() == SECRET
    key = "credentials[0].secret_access_key_file"
    assert list(problems(tmp_path, entry.format(tmp_path / "empty"))) == [key]
    assert list(problems(tmp_path, entry.format(tmp_path / "missing"))) == [key]
    assert list(problems(tmp_path, entry.format(tmp_path / "secret") + f'secret_access_key = "{SECRET}"\n')) == [key]


def full_of_secrets(tmp_path: Path) -> Settings:
    text = (
        f'[admin]\ntoken = "{SECRET}"\n[origin]\naccess_key_id = "id"\nsecret_access_key = "{SECRET}"\n'
        f'session_token = "{SECRET}"\nproxy = "http://user:{SECRET}@proxy:1"\n'
        f'[[credentials]]\naccess_key_id = "k"\nsecret_access_key = "{SECRET}"\nallow = ["s3://"]\n'
    )
    return load(tmp_path, text).settings


def test_secrets_show_nowhere_but_in_the_pipe_to_a_child(tmp_path: Path) -> None:
    """Not in reprs, not in what check-config prints."""
    settings = full_of_secrets(tmp_path)
    assert SECRET not in repr(settings) + str(settings)
    assert SECRET not in orjson.dumps(public_settings(settings)).decode()
    assert settings_to_json(settings).count(SECRET.encode()) == 5


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


def test_a_certificate_must_fit_its_key(tmp_path: Path) -> None:
    """Found out at the start, not by the first client."""
    authority = trustme.CA()
    for name in ("a", "b"):
        pair = authority.issue_cert("localhost")
        pair.private_key_pem.write_to_path(str(tmp_path / f"{name}.key"))
        pair.cert_chain_pems[0].write_to_path(str(tmp_path / f"{name}.pem"))
    text = f'[server]\ncertificate_file = "{tmp_path}/a.pem"\nkey_file = "{tmp_path}/{{}}.key"\n'
    load(tmp_path, text.format("a"))
    assert list(problems(tmp_path, text.format("b"))) == ["server.certificate_file"]


def test_the_default_capacity_counts_what_the_cache_holds(tmp_path: Path) -> None:
    """A full cache is not given half of what is left at the next start."""
    directory = tmp_path / "cache"
    text = f'[cache]\ndirectory = "{directory}"\n'
    before = load(tmp_path, text).settings.cache.capacity_bytes
    directory.mkdir()
    (directory / "block").write_bytes(b"x" * 2**25)
    # Others use this disk too: what they write meanwhile is far less than the 32 MiB that would be missing twice.
    assert abs(load(tmp_path, text).settings.cache.capacity_bytes - before) < 2**23


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
