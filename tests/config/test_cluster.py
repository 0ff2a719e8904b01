"""The settings of a cluster: what is filled in, what is refused, and in which words."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from gateway.config import defaults, settings_from_json, settings_to_json
from gateway.config.cluster_checks import RedisUrl, redis_url
from gateway.config.loading import load_settings
from gateway.config.overlay import changed_keys, restart_needed
from gateway.config.settings import ClusterSettings, Settings, public_settings
from tests.support.settings import load, problems

LINE = "0123456789abcdef-0123456789abcdef"
_FIND_ADDRESS = defaults._address_of_default_route
TWO = '"10.0.3.17:9002", "10.0.3.18:9002"'


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-017")
    monkeypatch.setattr(defaults, "_address_of_default_route", lambda: "10.0.3.17")


def text_of(tmp_path: Path, members: str = TWO, secret: str | None = f"{LINE}\n", **keys: Any) -> str:
    """A configuration with a cluster; `keys` are of `[cluster]`, in TOML."""
    file = tmp_path / "cluster-secret"
    if secret is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(secret)
        file.chmod(0o600)
    given = {"name": '"train"', "secret_file": f'"{file}"', "members": f"[{members}]", **keys}
    return "[cluster]\n" + "".join(f"{key} = {value}\n" for key, value in given.items())


def cluster_of(settings: Settings) -> ClusterSettings:
    assert settings.cluster is not None
    return settings.cluster


def test_what_is_omitted_is_filled_in(tmp_path: Path) -> None:
    """The host's name, the address of the default route with the peer port, the capacity in GiB to two digits."""
    loaded = load(tmp_path, text_of(tmp_path) + '[cache]\ncapacity = "1234GiB"\n')
    cluster = cluster_of(loaded.settings)
    assert (cluster.node, cluster.advertise, cluster.weight) == ("gpu-017", "10.0.3.17:9002", 1200)
    assert cluster.secrets == (LINE.encode(),)
    given = cluster_of(load(tmp_path, text_of(tmp_path, node='"n"', advertise='"10.0.3.18:9002"', weight="3")).settings)
    assert (given.node, given.advertise, given.weight) == ("n", "10.0.3.18:9002", 3)


@pytest.mark.parametrize(
    ("listen", "members", "advertise"),
    [
        ("10.0.3.18:9002", TWO, "10.0.3.18:9002"),
        ("0.0.0.0:9003", '"gpu-016:9003", "gpu-017:9003"', "gpu-017:9003"),
        ("0.0.0.0:9003", '"127.0.0.1:9002", "127.0.0.1:9003"', "127.0.0.1:9003"),
        ("[::]:9002", '"dns://peers:9002"', "10.0.3.17:9002"),
        ("0.0.0.0:9002", '"10.0.3.18:9002"', "10.0.3.17:9002"),
    ],
)
def test_the_own_address_follows_from_listen_and_members(
    tmp_path: Path, listen: str, members: str, advertise: str
) -> None:
    """One configuration can serve all nodes: each finds itself in the list."""
    assert cluster_of(load(tmp_path, text_of(tmp_path, members, listen=f'"{listen}"')).settings).advertise == advertise


def test_the_address_of_the_default_route_may_be_of_version_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "_address_of_default_route", lambda: "fd00::1")
    text = text_of(tmp_path, '"[fd00::1]:9002", "[fd00::2]:9002"', listen='"[::]:9002"')
    assert cluster_of(load(tmp_path, text).settings).advertise == "[fd00::1]:9002"
    monkeypatch.setattr(defaults, "_address_of_default_route", lambda: "")
    assert problems(tmp_path, text_of(tmp_path, '"dns://peers:9002"')) == {
        "cluster.advertise": "cluster.advertise is missing: give it: this machine has no default route"
    }


def test_a_running_gateway_stays_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that gets another name or address is still this member until the gateway is started again."""
    before = load(tmp_path, text_of(tmp_path)).settings
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    monkeypatch.setattr(defaults, "_address_of_default_route", lambda: "10.9.9.9")
    after = load_settings(tmp_path / "forebay.toml", {}, running=before).settings
    assert after.cluster == before.cluster


def test_the_environment_gives_all_of_it(tmp_path: Path) -> None:
    text_of(tmp_path)
    loaded = load(
        tmp_path,
        "",
        FOREBAY_CLUSTER__NAME="train",
        FOREBAY_CLUSTER__SECRET_FILE=str(tmp_path / "cluster-secret"),
        FOREBAY_CLUSTER__MEMBERS="10.0.3.17:9002, 10.0.3.18:9002",
        FOREBAY_CLUSTER__TLS="false",
        FOREBAY_CLUSTER__WEIGHT="5",
    )
    cluster = cluster_of(loaded.settings)
    assert cluster.members == ["10.0.3.17:9002", "10.0.3.18:9002"]
    assert cluster.weight == 5


def test_the_secret_reaches_the_processes_and_nobody_else(tmp_path: Path) -> None:
    settings = load(tmp_path, text_of(tmp_path, secret=f" {LINE}\r\n\n{LINE}2\n")).settings
    child = settings_from_json(settings_to_json(settings))
    assert child == settings
    assert cluster_of(child).secrets == (LINE.encode(), f"{LINE}2".encode())
    assert LINE not in f"{public_settings(settings)} {settings!r}"


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        (None, "this file cannot be read (No such file or directory)"),
        ("", "this file is empty"),
        ("\n \n", "this file is empty"),
        (f"{LINE}\n" * 3, "this file has 3 lines: it must have one or two"),
        ("short\n", "each line of this file must have at least 32 printable ASCII characters"),
        (f"{LINE}\nshort\n", "each line of this file must have at least 32 printable ASCII characters"),
        ("ä" * 40, "each line of this file must have at least 32 printable ASCII characters"),
        (f"{LINE}\0", "each line of this file must have at least 32 printable ASCII characters"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused_and_not_shown(tmp_path: Path, secret: str | None, says: str) -> None:
    found = problems(tmp_path, text_of(tmp_path, secret=secret))
    assert found == {"cluster.secret_file": f"cluster.secret_file = '{tmp_path / 'cluster-secret'}': {says}"}


def test_a_secret_that_others_may_read_is_warned_about(tmp_path: Path) -> None:
    text = text_of(tmp_path)
    (tmp_path / "cluster-secret").chmod(0o644)
    (warning,) = load(tmp_path, text).warnings
    assert warning.startswith("cluster.secret_file: others may read or change")


def test_a_node_that_is_not_in_the_list_is_warned_about(tmp_path: Path) -> None:
    (warning,) = load(tmp_path, text_of(tmp_path, '"10.0.3.18:9002"')).warnings
    assert warning.startswith("cluster.advertise = '10.0.3.17:9002' is not among cluster.members")
    assert load(tmp_path, text_of(tmp_path, '"dns://peers:9002"')).warnings == ()


_PLACE = "host:port, [address]:port or dns://name:port; ports are 1 to 65535"


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        (
            {"name": '""'},
            "cluster.name",
            "= '': letters, digits, `-`, `_`, `.`; at most 64, the first a letter or a digit",
        ),
        ({"name": '"-a"'}, "cluster.name", "= '-a': letters, digits, `-`, `_`, `.`; at most 64, the first a letter"),
        ({"name": "1"}, "cluster.name", "= 1: letters, digits"),
        ({"name": '"a b"'}, "cluster.name", "= 'a b': letters, digits"),
        ({"members": ""}, "cluster.members", "by cluster.members or by cluster.redis: give one of the two"),
        ({"redis": '"redis://h"'}, "cluster.members", "by cluster.members or by cluster.redis: give one of the two"),
        ({"members": "", "redis": '"http://h"'}, "cluster.redis", "= 'http://h': redis://host[:port]"),
        ({"members": "", "redis": '"redis://h:70000"'}, "cluster.redis", "= 'redis://h:70000': redis://host[:port]"),
        ({"members": "", "redis": '"redis://h,i"'}, "cluster.redis", "redis://host[:port]"),
        ({"members": "", "redis": '"redis://h/x"'}, "cluster.redis", "redis://host[:port]"),
        ({"members": "", "redis": '"sentinel://h"'}, "cluster.redis", "sentinel://host[:port],…/name"),
        ({"sentinel_password": '"p"'}, "cluster.sentinel_password", "remove it, or give cluster.redis"),
        (
            {"members": "", "redis": '"redis://h"', "sentinel_password": '"p"'},
            "cluster.sentinel_password",
            "name Sentinels in cluster.redis",
        ),
        ({"redis_user": '"u"'}, "cluster.redis_user", "remove it, or give cluster.redis"),
        ({"redis_password_file": '"/no/such/file"'}, "cluster.redis_password_file", "this file cannot be read"),
        ({"members": '"10.0.3.17:9002", "gpu"'}, "cluster.members[1]", f"= 'gpu': {_PLACE}"),
        ({"members": '"10.0.3.17:9002", "gpu:0"'}, "cluster.members[1]", f"= 'gpu:0': {_PLACE}"),
        ({"members": '"10.0.3.17:9002", "gpu:70000"'}, "cluster.members[1]", f"= 'gpu:70000': {_PLACE}"),
        ({"members": '"10.0.3.17:9002", "fd00::1:9002"'}, "cluster.members[1]", _PLACE),
        ({"members": '"10.0.3.17:9002", "http://gpu:9002"'}, "cluster.members[1]", _PLACE),
        ({"members": '"10.0.3.17:9002", "dns://peers"'}, "cluster.members[1]", f"= 'dns://peers': {_PLACE}"),
        ({"members": '"10.0.3.17:9002", "dns://peers:9/x"'}, "cluster.members[1]", _PLACE),
        ({"members": '"10.0.3.17:9002", "10.0.3.17:9002"'}, "cluster.members[1]", "this is a member already"),
        ({"members": '"10.0.3.17:9002", 7'}, "cluster.members[1]", "= 7: a list such as"),
        ({"members": '"10.0.3.17:9002", "0.0.0.0:9002"'}, "cluster.members[1]", f"= '0.0.0.0:9002': {_PLACE}"),
        ({"members": '"10.0.3.17:9002", "256.0.3.18:9002"'}, "cluster.members[1]", f"= '256.0.3.18:9002': {_PLACE}"),
        ({"members": '"10.0.3.17:9002", "gpu:9002", "GPU:9002"'}, "cluster.members[2]", "this is a member already"),
        ({"listen": '"9002"'}, "cluster.listen", "= '9002': host:port, or [address]:port; ports are 1 to 65535"),
        ({"listen": '"0.0.0.0:0"', "advertise": '""'}, "cluster.listen", "= '0.0.0.0:0': host:port"),
        ({"listen": '""', "advertise": '""'}, "cluster.listen", "= '': host:port"),
        ({"listen": "9002"}, "cluster.listen", "= 9002: host:port"),
        ({"listen": '"0.0.0.0:9000"'}, "cluster.listen", "server.port has this port already: choose another"),
        ({"listen": '"127.0.0.1:9001"'}, "cluster.listen", "admin.port has this port already: choose another"),
        ({"advertise": '"gpu"'}, "cluster.advertise", "= 'gpu': host:port, or [address]:port; no 0.0.0.0"),
        ({"advertise": '"gpu:0"'}, "cluster.advertise", "= 'gpu:0': host:port"),
        ({"advertise": '"0:9002"'}, "cluster.advertise", "= '0:9002': host:port"),
        ({"advertise": '"0.0.0.0:9002"'}, "cluster.advertise", "= '0.0.0.0:9002': host:port"),
        ({"advertise": '"127.0.0.1:9002"'}, "cluster.advertise", "a loopback address only if all members have one"),
        ({"node": '"a\\nb"'}, "cluster.node", "a name: at most 256 printable characters, no spaces around it"),
        ({"node": '" a"'}, "cluster.node", "= ' a': a name"),
        ({"zone": f'"{"z" * 65}"'}, "cluster.zone", "a name: at most 64 printable characters, no spaces around it"),
        ({"zone": '" "'}, "cluster.zone", "= ' ': a name"),
        ({"weight": "1.5"}, "cluster.weight", "= 1.5: 1 to 1000000"),
        ({"weight": '"x"'}, "cluster.weight", "= 'x': 1 to 1000000"),
        ({"tls": "1"}, "cluster.tls", "= 1: true or false"),
        ({"member": "1"}, "cluster.member", "is not a setting: did you mean members?"),
        ({"weight": "0"}, "cluster.weight", "= 0: 1 to 1000000"),
        ({"fallback_requests": "0"}, "cluster.fallback_requests", "= 0: 1 to 1000"),
        ({"tls": "true"}, "cluster.tls", "= True: true or false; true needs server.certificate_file"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, keys: dict[str, str], key: str, message: str) -> None:
    """Key, value, and what is allowed."""
    given = {"advertise": '"10.0.3.17:9002"', **keys}
    found = problems(tmp_path, text_of(tmp_path, **given))
    assert list(found) == [key]
    assert message in found[key]


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("redis://h", RedisUrl((("h", 6379),), None, 0, False)),
        ("rediss://10.0.0.1:6380/3", RedisUrl((("10.0.0.1", 6380),), None, 3, True)),
        ("redis://[fd00::1]", RedisUrl((("fd00::1", 6379),), None, 0, False)),
        ("sentinel://a,b:5000/ours", RedisUrl((("a", 26379), ("b", 5000)), "ours", 0, False)),
        ("sentinels://a/ours", RedisUrl((("a", 26379),), "ours", 0, True)),
        ("sentinel://[fd00::1]:5/my.master/2", RedisUrl((("fd00::1", 5),), "my.master", 2, False)),
    ],
)
def test_the_parts_of_a_url_of_redis(url: str, parts: RedisUrl) -> None:
    assert redis_url(url) == parts


def test_a_password_of_redis_comes_from_a_file_and_is_shown_nowhere(tmp_path: Path) -> None:
    """One in the URL is refused, as the URL is shown."""
    file = tmp_path / "password"
    file.write_text("secret-word\n")
    text = text_of(tmp_path, "", redis='"redis://h"', redis_user='"u"', redis_password_file=f'"{file}"')
    settings = load(tmp_path, text).settings
    password = cluster_of(settings_from_json(settings_to_json(settings))).redis_password
    assert password is not None
    assert password.get_secret_value() == "secret-word"
    assert "secret-word" not in f"{public_settings(settings)} {settings!r}"
    found = problems(tmp_path, text_of(tmp_path, "", redis='"redis://u:secret-word@h"'))
    assert list(found) == ["cluster.redis"]
    assert "redis_password_file" in found["cluster.redis"]
    assert "secret-word" not in found["cluster.redis"]


@pytest.mark.parametrize("missing", ["redis", "hiredis"])
def test_redis_needs_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else object())
    found = problems(tmp_path, text_of(tmp_path, "", redis='"redis://h"'))
    assert "pip install 'forebay[cluster]'" in found["cluster.redis"]


def test_what_may_change_while_the_gateway_runs(tmp_path: Path) -> None:
    """Secret, weight and fallback_requests; all else needs a restart, also a cluster that comes or goes."""
    before = load(tmp_path, text_of(tmp_path, weight="1")).settings
    live = load(tmp_path, text_of(tmp_path, secret=f"{LINE}new\n{LINE}\n", weight="2", fallback_requests="3")).settings
    changed = [key for key in changed_keys(before, live) if key.startswith("cluster.")]  # not the disk's free room
    assert changed == ["cluster.secret_file", "cluster.weight", "cluster.fallback_requests"]
    assert restart_needed(before, live) == []
    moved = load(tmp_path, text_of(tmp_path, weight="1", zone='"b"', node='"other"')).settings
    assert restart_needed(before, moved) == ["cluster.node", "cluster.zone"]
    alone = load(tmp_path, "").settings
    assert restart_needed(before, alone) == restart_needed(alone, before) == ["cluster"]


def test_members_on_one_machine_may_all_have_loopback_addresses(tmp_path: Path) -> None:
    text = text_of(tmp_path, '"127.0.0.1:9002", "[::1]:9003", "localhost:9004"', listen='"127.0.0.1:9002"')
    assert cluster_of(load(tmp_path, text).settings).advertise == "127.0.0.1:9002"


def test_the_address_of_the_default_route_is_one_of_this_machine() -> None:
    """A socket can listen there; or there is none, on a machine without a network."""
    address = _FIND_ADDRESS()
    if address:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
