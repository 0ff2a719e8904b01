"""The admin client understands what the admin port answers, and says in words what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admin.client import AdminClient
from gateway.api.documents import SnapshotDocument
from gateway.core.errors import AdminPortError
from tests.support.admin_double import admin_double


def test_what_is_not_declared_is_kept() -> None:
    """`--json` prints all that a gateway answers, of a later version, too."""
    document: dict[str, Any] = {"name": "a", "later": {"x": [1]}, "problem": None, "slots": []}
    assert SnapshotDocument.model_validate(document).document() == document


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
    """The error has the gateway's own words, and says how to give a token."""
    with admin_double(answer) as port, pytest.raises(AdminPortError, match=said):
        AdminClient(port.url, None).status()


def test_nobody_there_is_said_with_the_address() -> None:
    """And with the option that names another."""
    with pytest.raises(AdminPortError, match=r"no gateway answers at http://127\.0\.0\.1:1: .*--admin-url"):
        AdminClient("http://127.0.0.1:1", None).status()
