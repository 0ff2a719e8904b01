"""`forebay requests`: what was slow, failed or was refused, and what a key may not do to a terminal."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from gateway import cli
from gateway.cli.looks import seconds_text
from tests.support.admin_double import admin_double

REQUEST: dict[str, Any] = {"process": "worker0", "at": 1.0, "operation": "GetObject", "bucket": "b", "key": "k\x1b[2J"}
REQUEST |= {"slot": "a", "status": "200", "cache": "miss", "reason": "first-read", "error": None, "seconds": 1.5}
REQUEST |= {"sent_bytes": 2048, "received_bytes": 0, "caller": "job-17", "request_id": "ID-SLOW"}
FAILED = REQUEST | {"status": "503", "error": "SlowDown", "cache": None, "reason": None, "request_id": "ID-FAILED"}
REFUSED = FAILED | {"status": "403", "error": "AccessDenied", "request_id": "ID-REFUSED", "bucket": None, "key": None}
TRY = {"process": "background", "at": 1.0, "method": "PUT", "bucket": "b", "key": "k", "slot": "a", "purpose": "flush"}
TRY |= {"status": "unreachable", "seconds": 30.0}
EVERYTHING = {"slowest": [REQUEST], "errors": [FAILED], "refusals": [REFUSED], "origin_failures": [TRY]}


def test_each_kind_has_its_table() -> None:
    """In this order; nothing in a key reaches the terminal."""
    with admin_double((200, EVERYTHING)) as admin:
        result = CliRunner().invoke(cli.app, ["requests", "--limit", "7", "--admin-url", admin.url])
    assert (result.exit_code, admin.asked[0][1]) == (0, "/api/v1/requests?limit=7")
    text = result.stdout
    words = ["slowest", "1.50 s", "k\\u001b[2J", "200", "miss; first-read", "2.0 KiB", "job-17", "ID-SLOW", "failed"]
    words += ["503 SlowDown", "ID-FAILED", "refused", "403 AccessDenied", "ID-REFUSED", "the origin failed"]
    words += ["30.00 s", "PUT", "s3://b/k", "unreachable", "flush"]
    place = 0
    for word in words:
        place = text.index(word, place)
    assert "\x1b" not in text


def test_programs_get_the_document() -> None:
    """With what this version does not know, too."""
    with admin_double((200, EVERYTHING | {"more": 1})) as admin:
        result = CliRunner().invoke(cli.app, ["requests", "--json", "--admin-url", admin.url])
    assert orjson.loads(result.stdout) == EVERYTHING | {"more": 1}


def test_where_nothing_is_to_be_shown_it_says_so() -> None:
    """No table without rows."""
    with admin_double((200, {kind: [] for kind in EVERYTHING})) as admin:
        result = CliRunner().invoke(cli.app, ["requests", "--admin-url", admin.url])
    assert (result.stdout, result.stderr) == ("", "no request in the last minutes\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00042, "0.4 ms"), (0.0125, "12 ms"), (1.534, "1.53 s"), (125.0, "0:02:05"), (3725.0, "1:02:05")],
)
def test_seconds_are_told_in_a_unit_that_fits(seconds: float, text: str) -> None:
    """Three digits are enough."""
    assert seconds_text(seconds) == text
