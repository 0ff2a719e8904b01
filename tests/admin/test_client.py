"""The admin client understands what the admin port answers, and says in words what is wrong."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

import pytest

from gateway.admin import client as admin_client
from gateway.admin.client import AdminClient, Answer, Callers, CheckpointPage, Explanation, JobList, Slots, Status
from gateway.admin.openapi import describe
from gateway.core.errors import AdminPortError
from tests.support.admin_double import admin_double

DESCRIBED: dict[str, type[Answer]] = {
    "/api/v1/status": Status,
    "/api/v1/slots": Slots,
    "/api/v1/callers": Callers,
    "/api/v1/jobs": JobList,
    "/api/v1/snapshots": admin_client.SnapshotList,
    "/api/v1/snapshots/{name}": admin_client.Snapshot,
    "/api/v1/explain": Explanation,
    "/api/v1/flush": admin_client.FlushProgress,
    "/api/v1/checkpoints": CheckpointPage,
}


def schema_of(path: str) -> dict[str, Any]:
    answer = describe()["paths"][path]["get"]["responses"]["200"]
    schema: dict[str, Any] = answer["content"]["application/json"]["schema"]
    return schema


def models_in(annotation: object) -> Iterator[type[Answer]]:
    if isinstance(annotation, type) and issubclass(annotation, Answer):
        yield annotation
    elif get_origin(annotation) in (list, dict, Union, types.UnionType):
        for part in get_args(annotation):
            yield from models_in(part)


def undescribed(model: type[Answer], schema: dict[str, Any], above: str = "") -> list[str]:
    """Fields of a model that the schema of the admin port does not have."""
    found = []
    properties = schema["properties"]
    for name, field in model.model_fields.items():
        if name not in properties:
            found.append(f"{above}{name}")
            continue
        below = properties[name]
        below = below.get("items", below)
        for part in models_in(field.annotation) if "properties" in below else ():
            values = below["properties"]
            is_map = get_origin(field.annotation) is dict
            found += undescribed(part, next(iter(values.values())) if is_map else below, f"{above}{name}.")
    return found


@pytest.mark.parametrize(("path", "model"), DESCRIBED.items(), ids=DESCRIBED)
def test_the_client_reads_what_the_admin_port_describes(path: str, model: type[Answer]) -> None:
    """No field of an answer is read that /api/openapi.json does not have."""
    assert undescribed(model, schema_of(path)) == []


def test_what_is_not_declared_is_kept() -> None:
    """`--json` prints all that a gateway answers, of a later version, too."""
    document = {"name": "a", "later": {"x": [1]}, "problem": None}
    assert admin_client.Snapshot.model_validate(document).document() == document


def test_an_answer_of_something_else_is_said_to_be_one() -> None:
    """With the place in it, and no traceback."""
    with admin_double((200, {"jobs": [{"id": 1}]})) as port, pytest.raises(AdminPortError) as refused:
        AdminClient(port.url, None).jobs()
    said = f"this version of the command does not understand the answer of {port.url} (jobs.0."
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, {"error": "no"}), "^no; give it as FOREBAY_ADMIN__TOKEN.* answered 401"),
        ((503, {"error": "starting"}), "^starting .* answered 503"),
    ],
)
def test_a_refusal_says_what_to_do(answer: tuple[int, Any], said: str) -> None:
    """The gateway's own words, and where a token is to be given."""
    with admin_double(answer) as port, pytest.raises(AdminPortError, match=said):
        AdminClient(port.url, None).status()


def test_nobody_there_is_said_with_the_address() -> None:
    """And with the option that names another."""
    with pytest.raises(AdminPortError, match=r"no gateway answers at http://127\.0\.0\.1:1: .*--admin-url"):
        AdminClient("http://127.0.0.1:1", None).status()
