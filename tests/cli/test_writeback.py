"""`forebay writeback list` and `resolve`: pages as one list, and nothing given up by mistake."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from tests.support.admin_double import AdminDouble, admin_double

OBJECT = {
    "bucket": "b",
    "key": "k\n",
    "sequence": 9,
    "state": "damaged",
    "bytes": 2**20,
    "deleted": None,
    "acknowledged_at": None,
    "parts": 4,
    "parts_sent": 1,
    "failures": 2,
    "reason": "bad",
}
UPLOAD = {"bucket": "b", "key": "u", "upload_id": "id", "initiated_at": 1.0, "parts": 3, "bytes": 2**20}
RESOLVED = (200, {"object": "s3://b/k", "sequence": 9, "decision": "x", "etag_at_origin": None})

DECIDE = "3 are yours to decide: forebay writeback resolve --help\n"


def run(port: AdminDouble, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["writeback", *arguments, "--admin-url", port.url])


def page(objects: Sequence[Any], following: str | None = None) -> tuple[int, Any]:
    return 200, {"objects": objects, "next": following}


def test_a_list_is_all_pages() -> None:
    """A line each, that no terminal obeys; JSON lines for machines."""
    with admin_double(page([OBJECT, OBJECT], "t="), page([OBJECT | {"deleted": True}])) as port:
        result = run(port, "list", "s3://b/é")
        assert (result.exit_code, result.stderr) == (0, f"3 objects, 3.0 MiB\n{DECIDE}")
        lines = result.stdout.splitlines()
        assert lines[0].split() == [
            *("damaged", "-", "1.0", "MiB", "s3://b/k\\u000a"),
            *["(1", "of", "4", "parts", "sent,", "failed", "2", "times,", "bad)"],
        ]
        assert "deletion" in lines[2]
        assert [path for _, path, _ in port.asked] == [
            "/api/v1/writeback/objects?prefix=s3%3A%2F%2Fb%2F%C3%A9&limit=1000",
            "/api/v1/writeback/objects?prefix=s3%3A%2F%2Fb%2F%C3%A9&limit=1000&after=t%3D",
        ]
        assert [orjson.loads(line)["key"] for line in run(port, "list", "--json").stdout.splitlines()] == ["k\n"]
        run(port, "list", "--problems")
        assert "problems=true" in port.asked[-1][1]


def test_open_uploads_are_a_list_of_their_own() -> None:
    """They cannot be flushed before they are completed."""
    with admin_double((200, {"uploads": [UPLOAD], "next": None})) as port:
        result = run(port, "list", "--uploads")
        assert result.stderr == "1 open upload, 1.0 MiB\n"
        assert result.stdout.split()[-6:] == ["3", "parts", "1.0", "MiB", "s3://b/u", "id"]
        assert run(port, "list", "--uploads", "--problems").exit_code == 2


def test_what_is_on_its_way_is_nobodys_to_decide() -> None:
    """Small things have small sizes."""
    with admin_double(page([OBJECT | {"state": "waiting", "bytes": 11}])) as port:
        result = run(port, "list")
        assert result.stderr == "1 object, 11 B\n"
        assert result.stdout.split()[:5] == ["waiting", "-", "11", "B", "s3://b/k\\u000a"]


@pytest.mark.parametrize(
    "arguments", [["list", "b"], ["resolve", "b/k", "keep-ours"], ["resolve", "s3:/b/k", "discard"]]
)
def test_what_is_no_url_is_wrong_usage(arguments: list[str]) -> None:
    """Exit code 2, and nothing is asked."""
    with admin_double(page([])) as port:
        assert run(port, *arguments).exit_code == 2
        assert port.asked == []


@pytest.mark.parametrize("decision", ["keep-theirs", "discard"])
def test_nothing_is_given_up_unasked(decision: str) -> None:
    """Where nobody can be asked, --yes is needed; keep-ours gives nothing up."""
    with admin_double(RESOLVED) as port:
        assert run(port, "resolve", "s3://b/k", decision).exit_code == 2
        assert port.asked == []
        result = run(port, "resolve", "s3://b/k", decision, "--yes")
        assert (result.exit_code, "is given up" in result.stdout) == (0, True)
        ours = run(port, "resolve", "s3://b/k", "keep-ours")
        assert (ours.exit_code, "in place of nothing" in ours.stdout) == (0, True)
        asked = [document for *_, document in port.asked]
        assert asked == [{"object": "s3://b/k", "decision": one} for one in (decision, "keep-ours")]
        assert run(port, "resolve", "s3://b/k", "toss-a-coin").exit_code == 2


@pytest.mark.parametrize(("typed", "code"), [("give up\n", 0), ("yes\n", 1)])
def test_somebody_at_a_terminal_has_to_say_it_in_words(typed: str, code: int) -> None:
    """And it is about the very object that was shown."""
    with admin_double(page([OBJECT | {"key": "kk"}, OBJECT | {"key": "k"}]), RESOLVED) as port:
        shell, terminal = pty.openpty()
        command = [sys.executable, "-m", "gateway", "writeback", "resolve", "s3://b/k", "discard"]
        process = subprocess.Popen(
            [*command, "--admin-url", port.url], stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        os.close(terminal)
        os.write(shell, typed.encode())
        output, _ = process.communicate(timeout=60)
        os.close(shell)
        assert process.returncode == code, output
        assert b"s3://b/k (" in output
        posted = [document for method, _, document in port.asked if method == "POST"]
        assert posted == ([{"object": "s3://b/k", "decision": "discard", "sequence": 9}] if code == 0 else [])


def test_what_is_not_pending_is_not_asked_about() -> None:
    """Somebody else has decided meanwhile. What is said of a key no terminal obeys."""
    with admin_double((404, {"error": "nothing is pending under s3://b/k\x1b[2J"})) as port:
        result = run(port, "resolve", "s3://b/k\x1b[2J", "keep-theirs", "--yes")
        assert result.exit_code == 1
        assert "answered 404: nothing is pending under s3://b/k\\u001b[2J" in result.stderr


@pytest.mark.parametrize("decision", ["keep-ours", "discard"])
def test_what_was_decided_is_told_in_a_line(decision: str) -> None:
    """Whatever the key holds."""
    with admin_double(RESOLVED) as port:
        result = run(port, "resolve", "s3://b/k\n\x1b[2J", decision, "--yes")
        assert result.stdout.startswith("s3://b/k\\u000a\\u001b[2J")
