"""Every number and every truth value that the admin port's own description names: what is none is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from gateway.admin.app import describe
from gateway.config import SlotSettings
from gateway.config.fields import _numbers
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess

NO_NUMBERS = ("", "-1", "+1", " 1", "1 ", "1_0", "1.0", "1e1", "1e400", "NaN", "Infinity", "0x1", "true", "9" * 400)
IN_OTHER_DIGITS = ("\u0663", "\uff11", "\u0e53", "1\u0663", "\u00b2")
NO_TRUTHS = ("", "1", "0", "yes", "True", "TRUE", " true", "\uff54rue", "null")
IN_DOCUMENTS = (
    "true",
    "1.0",
    "1.5",
    "1e1",
    "1e400",
    "NaN",
    "-Infinity",
    "-1",
    '"1"',
    '"1_0"',
    '"\u0663"',
    "[]",
    "1" * 400,
)
NO_TRUTHS_IN_DOCUMENTS = ("0", "1", "1.0", '"true"', '"yes"', "null", "[]", "{}")

METHODS = ("get", "put", "post", "delete")


def _parameters(kind: str) -> Iterator[tuple[str, str, str]]:
    for path, item in describe()["paths"].items():
        for method in METHODS:
            named = [*item.get("parameters", []), *item.get(method, {}).get("parameters", [])]
            for one in named if method in item else ():
                if one["in"] == "query" and one["schema"].get("type") == kind:
                    yield method, path, one["name"]


def _members(kind: str) -> Iterator[tuple[str, str, dict[str, Any], str]]:
    for path, item in describe()["paths"].items():
        for method in METHODS:
            content = item.get(method, {}).get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            for name, one in schema.get("properties", {}).items():
                if kind in (one.get("type"), *(one["type"] if isinstance(one.get("type"), list) else ())):
                    yield method, path, schema, name


VALUES = {
    "prefix": "s3://bucket/data/",
    "object": "s3://bucket/back/k",
    "decision": "keep-ours",
    "name": "v2",
    "node": "n",
}
"""Of what else a document needs."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    """With a slot that writes back; nothing answers at its origin."""
    slot = {"name": "back", "prefix": "s3://bucket/back/", "write": "back"}
    config: dict[str, Any] = {
        "origin": {"endpoint_url": "http://127.0.0.1:1", "access_key_id": "a", "secret_access_key": "b"},
        "cache": {"persistent": True},
        "slots": [slot],
    }
    with GatewayProcess(config) as gateway, gateway.explaining():
        yield gateway


def refused(gateway: GatewayProcess, method: str, path: str, name: str, **options: Any) -> None:
    """By name, but where the document is no JSON: then by its place."""
    answer = httpx.request(method.upper(), gateway.admin_url + path, timeout=ANSWER_SECONDS_MAX, **options)
    assert answer.status_code == 400, (method, path, name, options, answer.text)
    assert name in answer.json()["error"] or "column" in answer.json()["error"], answer.text


@pytest.mark.parametrize(("method", "path", "name"), [*_parameters("integer"), *_parameters("number")])
def test_a_parameter_is_a_number_in_plain_digits(gateway: GatewayProcess, method: str, path: str, name: str) -> None:
    """Everything else is refused, whatever a programming language takes it for."""
    for given in (*NO_NUMBERS, *IN_OTHER_DIGITS):
        refused(gateway, method, f"{path}?{name}={quote(given)}", name)


@pytest.mark.parametrize(("method", "path", "name"), [*_parameters("boolean")])
def test_a_parameter_is_true_or_false(gateway: GatewayProcess, method: str, path: str, name: str) -> None:
    """In these words."""
    for given in NO_TRUTHS:
        more = "&through=0" if path == "/api/v1/flush" else ""
        refused(gateway, method, f"{path.replace('{name}', 'v1')}?{name}={quote(given)}{more}", name)


@pytest.mark.parametrize(
    ("method", "path", "schema", "name", "given"),
    [(*one, given) for one in (*_members("integer"), *_members("number")) for given in IN_DOCUMENTS]
    + [(*one, given) for one in _members("boolean") for given in NO_TRUTHS_IN_DOCUMENTS],
)
def test_a_member_of_a_document_is_what_it_is_described_as(
    gateway: GatewayProcess, method: str, path: str, schema: dict[str, Any], name: str, given: str
) -> None:
    """A text is no number, `true` is not 1, and 1.0 is none that is whole."""
    others = "".join(f'"{one}": "{VALUES[one]}", ' for one in schema["required"])
    content = f'{{{others}"{name}": {given}}}'.encode()
    refused(gateway, method, path, name, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("name", [one for one in SlotSettings.model_fields if "int" in _numbers(SlotSettings, one)])
def test_a_number_of_a_slot_is_whole_and_plain(gateway: GatewayProcess, name: str) -> None:
    """Also one that is a size: `"8MiB"`, or a number of bytes."""
    key = SlotSettings.model_fields[name].alias or name
    for given in ("true", "1.0", "1.5", "1e1", "-1", '"1_0"', '"+1"', '" 1"', '"1.0"', '"\u0663"', '"NaN"', "1e400"):
        content = f'{{"prefix": "s3://bucket/x/", "{key}": {given}}}'.encode()
        refused(gateway, "put", "/api/v1/slots/x", key, content=content)


def test_a_name_that_no_slot_can_have_gets_into_no_log(gateway: GatewayProcess) -> None:
    """It may be a URL with its token; the settings are not read anew for it."""
    for name in ("q?token=geheim", "geheim geheim", "http://u:geheim@h/", "geheim" * 20, "\u0663geheim"):
        url = f"{gateway.admin_url}/api/v1/slots/{quote(name, safe='')}"
        put = httpx.put(url, json={"prefix": "s3://bucket/x/"}, timeout=ANSWER_SECONDS_MAX)
        assert put.status_code in (400, 404)
        assert httpx.delete(url, timeout=ANSWER_SECONDS_MAX).status_code in (404, 409)
    assert "geheim" not in gateway.log
