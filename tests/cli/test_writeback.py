"""`forebay writeback list` and `resolve`: pages as one list, and nothing given up by mistake."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.api.documents import FlushProgress
from gateway.cli import tables
from tests.support.admin_documents import filled
from tests.support.admin_double import AdminDouble, admin_double
from tests.support.prepared_process import PreparedProcess

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
    "bytes_sent": 2**19,
    "failures": 2,
    "reason": "bad",
}
UPLOAD = {
    "bucket": "b",
    "key": "u",
    "upload_id": "id",
    "initiated_at": 1.0,
    "touched_at": None,
    "parts": 3,
    "bytes": 2**20,
}
RESOLVED = (200, {"object": "s3://b/k", "sequence": 9, "decision": "x", "etag_at_origin": None})

DECIDE = "3 are yours to decide: forebay writeback resolve --help\n"


def run(port: AdminDouble, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["writeback", *arguments, "--admin-url", port.url])


NONE_OPEN = (200, filled(FlushProgress).document())


def at_terminal(port: AdminDouble, typed: bytes, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of a command at whose terminal somebody types."""
    shell, terminal = pty.openpty()
    process = PreparedProcess(
        ["gateway", "writeback", *arguments, "--admin-url", port.url],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    os.close(terminal)
    os.write(shell, typed)
    output, _ = process.communicate(timeout=60)
    os.close(shell)
    return process.returncode, output


def page(objects: Sequence[Any], following: str | None = None) -> tuple[int, Any]:
    return 200, {"objects": objects, "next": following}


def test_a_list_is_all_pages() -> None:
    """A line each, that no terminal obeys; JSON lines for machines."""
    last = page([OBJECT | {"deleted": True}])
    with admin_double(page([OBJECT, OBJECT], "t="), last, NONE_OPEN, last, last, NONE_OPEN) as port:
        result = run(port, "list", "s3://b/é")
        assert (result.exit_code, result.stderr) == (0, f"3 objects, 3.0 MiB\n{DECIDE}")
        lines = result.stdout.splitlines()
        assert lines[0].split() == ["state", "age", "size", "sent", "failures", "object", "reason"]
        assert lines[1].split() == [*("damaged", "-", "1.0", "MiB", "512.0", "KiB", "2", "s3://b/k\\u000a", "bad")]
        assert "deletion" in lines[3]
        assert [path for _, path, _ in port.asked] == [
            "/api/v1/writeback/objects?prefix=s3%3A%2F%2Fb%2F%C3%A9&limit=1000",
            "/api/v1/writeback/objects?prefix=s3%3A%2F%2Fb%2F%C3%A9&limit=1000&after=t%3D",
            "/api/v1/flush?prefix=s3%3A%2F%2Fb%2F%C3%A9&through=0",
        ]
        assert [orjson.loads(line)["key"] for line in run(port, "list", "--json").stdout.splitlines()] == ["k\n"]
        run(port, "list", "--problems")
        assert "problems=true" in port.asked[-2][1]


@pytest.mark.parametrize("width", [60, 80])
def test_the_reason_is_whole_on_a_small_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what somebody has to know to decide: it has a line of its own where the table has no room."""
    monkeypatch.setattr(tables, "terminal_width", lambda stderr=False: width)
    reason = "others have changed the object at the origin"
    with admin_double(
        page([OBJECT | {"key": f"run/{'k' * 80}", "state": "conflict", "reason": reason}]), NONE_OPEN
    ) as port:
        lines = run(port, "list").stdout.splitlines()
    assert any(line.endswith(f"reason: {reason}") for line in lines)
    assert max(map(len, lines)) <= width


def test_a_list_names_open_uploads() -> None:
    """What they have here is not at the origin either."""
    with admin_double(
        page([]), (200, filled(FlushProgress, open_uploads=1, open_upload_bytes=2**20).document())
    ) as port:
        result = run(port, "list", "s3://b/")
        assert result.stderr == "0 objects, 0 B\n1 open upload with 1.0 MiB is no object yet: --uploads shows them\n"
        assert "/api/v1/flush?prefix=s3%3A%2F%2Fb%2F&through=0" in port.asked[-1][1]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_list_is_limited(arguments: list[str]) -> None:
    """To what a person reads, unless more is asked for; that there is more is said, and not fetched."""
    with admin_double(page([OBJECT] * 1000, "t"), page([OBJECT] * 1000, "u"), page([OBJECT]), NONE_OPEN) as port:
        result = run(port, "list", "--limit", "999", "--json")
        assert (result.exit_code, result.stdout.count("damaged"), len(port.asked)) == (0, 999, 1)
        assert result.stderr == "there are more: --limit 0 shows them all\n"
    with admin_double(page([OBJECT] * 1000, "t"), page([OBJECT] * 1000, "u"), NONE_OPEN) as port:
        result = run(port, "list", *arguments)
        assert (result.exit_code, result.stdout.count("damaged")) == (0, 1000)
    with admin_double(page([OBJECT] * 1000, "t"), page([OBJECT] * 1000, "u"), page([OBJECT]), NONE_OPEN) as port:
        result = run(port, "list", "--limit", "0", *arguments)
        assert (result.exit_code, result.stdout.count("damaged")) == (0, 2001)
        assert "there are more" not in result.stderr


def test_open_uploads_are_a_list_of_their_own() -> None:
    """They cannot be flushed before they are completed."""
    with admin_double((200, {"uploads": [UPLOAD], "next": None})) as port:
        result = run(port, "list", "--uploads")
        assert result.stderr == "1 open upload, 1.0 MiB\n"
        assert result.stdout.splitlines()[1].split()[-6:] == ["-", "3", "1.0", "MiB", "s3://b/u", "id"]
        assert run(port, "list", "--uploads", "--problems").exit_code == 2


def test_what_is_on_its_way_is_nobodys_to_decide() -> None:
    """Small things have small sizes."""
    with admin_double(page([OBJECT | {"state": "waiting", "bytes": 11}]), NONE_OPEN) as port:
        result = run(port, "list")
        assert result.stderr == "1 object, 11 B\n"
        assert result.stdout.splitlines()[1].split()[:4] == ["waiting", "-", "11", "B"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(["list", "b"], ["resolve", "b/k", "keep-ours"], ["resolve", "s3:/b/k", "discard"]),
        *(
            ["abort"],
            ["abort", "b/u", "--yes"],
            ["abort", "--prefix", "--yes"],
            ["abort", "--prefix", "--upload-id", "i"],
        ),
    ],
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
        code_found, output = at_terminal(port, typed.encode(), "resolve", "s3://b/k", "discard")
        assert code_found == code, output
        assert "s3://b/k  bad" in output
        posted = [document for method, _, document in port.asked if method == "POST"]
        assert posted == ([{"object": "s3://b/k", "decision": "discard", "sequence": 9}] if code == 0 else [])


def test_what_is_not_pending_is_not_asked_about() -> None:
    """Somebody else has decided meanwhile. What is said of a key no terminal obeys."""
    with admin_double((404, {"error": "nothing is pending under s3://b/k\x1b[2J"})) as port:
        result = run(port, "resolve", "s3://b/k\x1b[2J", "keep-theirs", "--yes")
        assert result.exit_code == 1
        assert "forebay: nothing is pending under s3://b/k\\u001b[2J" in result.stderr


@pytest.mark.parametrize("decision", ["keep-ours", "discard"])
def test_what_was_decided_is_told_in_a_line(decision: str) -> None:
    """Whatever the key holds."""
    with admin_double(RESOLVED) as port:
        result = run(port, "resolve", "s3://b/k\n\x1b[2J", decision, "--yes")
        assert result.stdout.startswith("s3://b/k\\u000a\\u001b[2J")


UPLOADS = (200, {"uploads": [UPLOAD, UPLOAD | {"key": "u2", "upload_id": "other"}], "next": None})
ABORTED = (200, {"aborted": ["id"], "not_open": []})


@pytest.mark.parametrize(
    ("arguments", "upload_ids"),
    [
        (["s3://b/u", "--yes"], ["id"]),
        (["s3://b/u", "--prefix", "--yes"], ["id", "other"]),
        (["s3://b/u", "--upload-id", "id"], ["id"]),
        (["--upload-id", "anything"], ["anything"]),
    ],
)
def test_uploads_are_aborted_by_key_by_id_or_by_prefix(arguments: list[str], upload_ids: list[str]) -> None:
    """A key is that key alone, unless all of a prefix is asked for."""
    answers = [ABORTED] if arguments[0] == "--upload-id" else [UPLOADS, ABORTED]
    with admin_double(*answers) as port:
        result = run(port, "abort", *arguments)
        assert (result.exit_code, result.stdout) == (0, "1 upload aborted\n")
        assert port.asked[-1] == ("POST", "/api/v1/writeback/abort", {"upload_ids": upload_ids})


def test_many_uploads_are_aborted_a_few_at_a_time() -> None:
    """Each request has an answer in time."""
    many = [UPLOAD | {"upload_id": str(number)} for number in range(45)]
    with admin_double((200, {"uploads": many, "next": None}), ABORTED) as port:
        result = run(port, "abort", "s3://b/u", "--yes", "--json")
        assert orjson.loads(result.stdout) == {"aborted": ["id"] * 3, "not_open": []}
        asked = [document["upload_ids"] for method, _, document in port.asked if method == "POST"]
        assert [len(one) for one in asked] == [20, 20, 5]
        assert [upload_id for one in asked for upload_id in one] == [one["upload_id"] for one in many]


def test_no_upload_is_aborted_unasked() -> None:
    """Unless it is named by its id: where nobody can be asked, --yes is needed."""
    with admin_double(UPLOADS) as port:
        assert run(port, "abort", "s3://b/u", "--prefix").exit_code == 2
        assert run(port, "abort", "s3://b/u").exit_code == 2
        assert {method for method, *_ in port.asked} == {"GET"}


def test_an_upload_that_is_not_open_is_told() -> None:
    """Exit code 1: it has ended, or another key has it."""
    with admin_double((200, {"aborted": [], "not_open": ["i"]})) as port:
        result = run(port, "abort", "--upload-id", "i")
        assert (result.exit_code, result.stderr) == (1, "forebay: no such upload is open: i\n")
    with admin_double(UPLOADS) as port:
        assert run(port, "abort", "s3://b/u", "--upload-id", "other").exit_code == 1
        assert run(port, "abort", "s3://b/x", "--yes").exit_code == 1
        assert {method for method, *_ in port.asked} == {"GET"}


@pytest.mark.parametrize(("typed", "code"), [(b"give up\n", 0), (b"yes\n", 1)])
def test_uploads_are_shown_before_they_are_aborted(typed: bytes, code: int) -> None:
    """And somebody at a terminal has to say it in words."""
    with admin_double(UPLOADS, ABORTED) as port:
        code_found, output = at_terminal(port, typed, "abort", "s3://b/u", "--prefix")
        assert code_found == code, output
        assert "s3://b/u2  other" in output
        posted = [document for method, _, document in port.asked if method == "POST"]
        assert posted == ([{"upload_ids": ["id", "other"]}] if code == 0 else [])
