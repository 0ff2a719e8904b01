"""Who may reach the gateway, and what it may be pointed at: addresses, credentials, tokens, its own origin."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from gateway.config.loading import load_settings
from gateway.config.problems import SettingsError
from tests.support.settings import SECRET, load, problems

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
    with pytest.raises(SettingsError, match=r"\(from AWS_ENDPOINT_URL\).*Set origin\.endpoint_url"):
        load_settings(None, {"AWS_ENDPOINT_URL": "http://localhost:9000/"})


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
