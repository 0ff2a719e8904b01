"""`forebay flush`: what it waits for, and how it ends."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.cli import admin_port, flush
from tests.support.admin_double import AdminDouble, admin_double


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often: how long is not what is tested."""
    monkeypatch.setattr(flush, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(flush, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(admin_port, "_AGAIN_SECONDS", 0.01)


def left(objects: int, **more: Any) -> tuple[int, dict[str, Any]]:
    """An answer: so much is pending."""
    document = {"prefix": "s3://b/", "through": 7, "objects": objects, "bytes": objects * 2**20, "bytes_sent": 0}
    return 200, document | {"failing": 0, "stuck": 0, "problems": []} | more


PROBLEM = {"bucket": "b", "key": "k\x1b[2J", "state": "conflict", "failures": 0, "reason": None}
FAILING = PROBLEM | {"key": "f", "state": "waiting", "failures": 3, "reason": "AccessDenied"}


def run(port: AdminDouble, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["flush", "s3://b/", "--admin-url", port.url, *arguments])


def test_without_waiting_it_is_asked_for_and_told() -> None:
    """Exit code 0 as long as nothing is known to be hopeless."""
    with admin_double(left(3, problems=[FAILING], failing=1)) as port:
        result = run(port)
        assert (result.exit_code, result.stdout) == (0, "3 objects, 3.0 MiB, are on the way to the origin\n")
        assert result.stderr == "s3://b/f: failing, 3 times: AccessDenied\n"
        assert port.asked == [("POST", "/api/v1/flush", {"prefix": "s3://b/"})]


def test_waiting_ends_when_nothing_is_left_of_it() -> None:
    """Asked for by its number; what comes later is not waited for."""
    with admin_double(left(3), left(2), left(0)) as port:
        result = run(port, "--wait")
        assert (result.exit_code, result.stdout) == (0, "3 objects, 3.0 MiB, are at the origin\n")
        assert [asked[:2] for asked in port.asked[1:]] == [
            ("GET", "/api/v1/flush?prefix=s3%3A%2F%2Fb%2F&through=7")
        ] * 2


def test_waiting_ends_when_the_rest_cannot_get_there() -> None:
    """It is named, as a line that no terminal obeys; exit code 1."""
    with admin_double(left(2), left(1, stuck=1, problems=[PROBLEM])) as port:
        result = run(port, "--wait")
        assert result.exit_code == 1
        assert "s3://b/k\\u001b[2J: conflict\n" in result.stderr
        assert "1 object cannot get to the origin" in result.stderr
        assert result.stdout == "1 object, 1.0 MiB, is not at the origin\n"
        assert run(port).exit_code == 1


@pytest.mark.parametrize("arguments", [[], ["--wait"]])
def test_nothing_to_do_is_told_as_such(arguments: list[str]) -> None:
    """Not as so many objects that have arrived."""
    with admin_double(left(0)) as port:
        result = run(port, *arguments)
        assert (result.exit_code, result.stdout) == (0, "nothing is pending under s3://b/\n")


def test_what_fails_is_waited_for_and_tried_again() -> None:
    """For as long as it takes."""
    failing = left(1, failing=1, problems=[FAILING])
    with admin_double(failing, failing, failing, failing, failing, left(0)) as port:
        assert run(port, "--wait").exit_code == 0
        assert [method for method, *_ in port.asked].count("POST") > 1


def test_waiting_ends_with_the_time() -> None:
    """Exit code 1, what is left, and that it is for the time."""
    with admin_double(left(1)) as port:
        result = run(port, "--wait", "--timeout", "10ms")
        assert (result.exit_code, result.stdout) == (1, "1 object, 1.0 MiB, is not at the origin: the time is over\n")
        result = run(port, "--wait", "--timeout", "50ms", "--json")
        assert (result.exit_code, orjson.loads(result.stdout)["objects"]) == (1, 1)


def test_a_background_process_that_is_started_again_is_waited_for() -> None:
    """Its admin port is away for a while; a wrong token is not waited for."""
    closed = (503, {"error": "the cache directory is not open yet"})
    with admin_double(left(1), closed, closed, left(0)) as port:
        assert run(port, "--wait").exit_code == 0
    with admin_double(left(1), (401, {"error": "no"})) as port:
        result = run(port, "--wait")
        assert (result.exit_code, "answered 401: no" in result.stderr) == (1, True)
    with admin_double(closed) as port:
        assert run(port, "--wait").exit_code == 1


@pytest.mark.parametrize(
    "arguments", [["b/"], ["s3://", "--timeout", "1s"], ["s3://", "--wait", "--timeout", "soon"], []]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """And nothing is asked."""
    assert CliRunner().invoke(cli.app, ["flush", *arguments]).exit_code == 2
