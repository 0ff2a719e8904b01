"""`forebay flush`: what it waits for, and how it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.admin import client as admin_client
from gateway.cli import flush
from tests.support.admin_double import AdminDouble, admin_double


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often: how long is not what is tested."""
    monkeypatch.setattr(flush, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(flush, "_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(admin_client, "_AGAIN_SECONDS", 0.01)


def left(objects: int, **more: Any) -> tuple[int, dict[str, Any]]:
    """An answer: so much is pending."""
    document = {"prefix": "s3://b/", "through": 7, "objects": objects, "bytes": objects * 2**20, "bytes_sent": 0}
    document |= {"local_objects": 0}
    document |= dict.fromkeys(("conflicts", "damaged", "failing", "waiting_for_bucket", "stuck", "held_up"), 0)
    document |= {"open_uploads": 0, "open_upload_bytes": 0, "longest_attempt_seconds": None, "origin_away": False}
    document |= {"journal_problem": None, "is_name": False, "awaiting_files": 0, "files_missing": 0}
    return 200, document | {"problems": []} | more


PROBLEM = {
    "bucket": "b",
    "key": "k\x1b[2J",
    "state": "conflict",
    "failures": 0,
    "reason": None,
    "failing_since": None,
    "acknowledged_at": None,
}
FAILING = PROBLEM | {"key": "f", "state": "failed", "failures": 3, "reason": "AccessDenied", "failing_since": 1.0}
REFUSED = {"failing": 1, "held_up": 1, "problems": [FAILING]}


NOT_THERE = "1 object, 1.0 MiB, is not at the origin:"


def run(port: AdminDouble, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["flush", "s3://b/", "--admin-url", port.url, *arguments])


def test_without_waiting_it_is_asked_for_and_told() -> None:
    """Exit code 0 as long as nothing is known to be hopeless."""
    with admin_double(left(3, problems=[FAILING], failing=1)) as port:
        result = run(port)
        assert (result.exit_code, result.stdout) == (0, "3 objects, 3.0 MiB, are on the way to the origin\n")
        head, row, more = result.stderr.splitlines()
        assert head.split() == ["state", "failures", "since", "object", "reason"]
        assert [row.split()[n] for n in (0, 1, -2, -1)] == ["failed", "3", "s3://b/f", "AccessDenied"]
        assert more == "forebay writeback list --problems s3://b/"
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
    with admin_double(left(2), left(1, stuck=1, held_up=1, conflicts=1, problems=[PROBLEM])) as port:
        result = run(port, "--wait")
        assert result.exit_code == 1
        assert result.stderr.splitlines()[1].split() == ["conflict", "0", "-", "s3://b/k\\u001b[2J", "-"]
        assert result.stdout == "1 object, 1.0 MiB, is not at the origin: an operator must decide\n"
        assert run(port).exit_code == 1


@pytest.mark.parametrize("arguments", [[], ["--wait"]])
def test_nothing_to_do_is_told_as_such(arguments: list[str]) -> None:
    """Not as so many objects that have arrived."""
    with admin_double(left(0)) as port:
        result = run(port, *arguments)
        assert (result.exit_code, result.stdout) == (0, "nothing is pending under s3://b/\n")


def test_what_fails_is_waited_for_and_tried_again() -> None:
    """As long as it is not clear that it always will."""
    failing = left(1, **REFUSED)
    with admin_double(failing, failing, failing, failing, failing, left(0)) as port:
        assert run(port, "--wait").exit_code == 0
        assert [method for method, *_ in port.asked].count("POST") > 1


def test_waiting_ends_with_the_time() -> None:
    """Exit code 1, what is left, and that it is for the time."""
    with admin_double(left(1)) as port:
        result = run(port, "--wait", "--timeout", "10ms")
        assert (result.exit_code, result.stdout) == (1, f"{NOT_THERE} the time is over; the gateway goes on\n")
        result = run(port, "--wait", "--timeout", "50ms", "--json")
        document = orjson.loads(result.stdout)
        assert (result.exit_code, document["objects"], document["outcome"]) == (1, 1, "timeout")


def test_a_background_process_that_is_started_again_is_waited_for() -> None:
    """Its admin port is away for a while; a wrong token is not waited for."""
    closed = (503, {"error": "the cache directory is not open yet"})
    with admin_double(left(1), closed, closed, left(0)) as port:
        assert run(port, "--wait").exit_code == 0
    with admin_double(left(1), (401, {"error": "no"})) as port:
        result = run(port, "--wait")
        assert (result.exit_code, "forebay: no; give it as" in result.stderr) == (1, True)


def test_a_background_process_that_is_just_starting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question waits, too, but not for long where nobody has ever answered; without --wait it does not."""
    closed = (503, {"error": "the cache directory is not open yet"})
    with admin_double(closed, closed, left(0)) as port:
        assert run(port, "--wait").exit_code == 0
    with admin_double(closed, left(0)) as port:
        assert run(port).exit_code == 1
    with admin_double(closed) as port:
        assert run(port, "--wait", "--timeout", "100ms").exit_code == 1
    monkeypatch.setattr(admin_client, "_STRANGE_SECONDS", 0.1)
    result = run(port, "--wait")  # its port is closed by now
    assert (result.exit_code, "no gateway answers" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    "arguments", [["b/"], ["s3://b/\udcff"], ["s3://", "--timeout", "1s"], ["s3://", "--wait", "--timeout", "soon"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """And nothing is asked."""
    assert CliRunner().invoke(cli.app, ["flush", *arguments]).exit_code == 2


def test_without_a_prefix_it_is_about_everything() -> None:
    """As a hook before a node stops needs it."""
    with admin_double(left(0)) as port:
        assert CliRunner().invoke(cli.app, ["flush", "--admin-url", port.url]).exit_code == 0
        assert port.asked == [("POST", "/api/v1/flush", {"prefix": "s3://"})]


@pytest.mark.parametrize("arguments", [["--wait"], ["--wait", "--timeout", "10m"]])
def test_waiting_ends_when_the_bucket_refuses_the_rest(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Whatever time there would be: exit code 1, a table of what is left, and why."""
    monkeypatch.setattr(flush, "_REFUSED_SECONDS", 0.05)
    with admin_double(left(2), left(1, **REFUSED)) as port:
        result = run(port, *arguments)
        assert (result.exit_code, result.stdout) == (1, f"{NOT_THERE} nothing gets there; the gateway goes on trying\n")
        assert result.stderr.splitlines()[1].split()[-1] == "AccessDenied"


def test_waiting_ends_when_the_journal_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk failures are not written down either: what is told is why nothing can be."""
    monkeypatch.setattr(flush, "_REFUSED_SECONDS", 0.05)
    with admin_double(left(1, journal_problem="database or disk is full")) as port:
        result = run(port, "--wait")
        assert (result.exit_code, result.stdout) == (1, f"{NOT_THERE} nothing gets there; the gateway goes on trying\n")
        said = "write-back journal: takes nothing now, so nothing is flushed: database or disk is full\n"
        assert result.stderr == said


@pytest.mark.parametrize(
    "going_on",
    [
        {"held_up": 0},  # not all of it fails
        {"longest_attempt_seconds": 1000.0},  # a large body may be on its way
        {"origin_away": True},
    ],
    ids=str,
)
def test_what_may_still_get_there_is_waited_for(monkeypatch: pytest.MonkeyPatch, going_on: dict[str, Any]) -> None:
    """An origin that is away comes back, what is being sent arrives."""
    monkeypatch.setattr(flush, "_REFUSED_SECONDS", 0.0)
    waiting = left(1, **REFUSED | going_on)
    with admin_double(*[waiting] * 5, left(0)) as port:
        assert run(port, "--wait").exit_code == 0


@pytest.mark.slow
def test_files_of_other_nodes_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they come, and with --timeout until that is over; the gateway is asked to look at once. Of a name the
    gateway is asked as of one."""
    monkeypatch.setattr(flush, "_STALLED_SECONDS", 0.3)
    waiting = {"awaiting_files": 1, "is_name": True, "prefix": "s3://b/step-1"}
    missing = [left(1, **waiting, files_missing=one) for one in range(40, 0, -1)]
    with admin_double(*missing, left(0, **waiting | {"awaiting_files": 0})) as port:
        assert run(port, "--wait").exit_code == 0
        posts = [one for one in port.asked if one[0] == "POST"]
        gets = [one for one in port.asked if one[0] == "GET"]
        assert len(posts) > 2
        assert {path for _, path, _ in gets} == {"/api/v1/flush?prefix=s3%3A%2F%2Fb%2Fstep-1&through=7&is_name=true"}
    with admin_double(left(1, **waiting, files_missing=3)) as port:
        assert "nothing gets there" in run(port, "--wait").output
    with admin_double(left(1, **waiting, files_missing=3)) as port:
        assert "the time is over" in run(port, "--wait", "--timeout", "1s").output


def test_what_progresses_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time begins anew with every object and part that gets there."""
    monkeypatch.setattr(flush, "_REFUSED_SECONDS", 1.0)
    now = iter(range(10_000))
    monkeypatch.setattr(flush, "time", SimpleNamespace(monotonic=lambda: next(now) / 20, sleep=lambda _: None))
    parts = [left(2, failing=2, held_up=2, bytes_sent=number) for number in range(30)]
    with admin_double(*parts, left(1, **REFUSED), left(0)) as port:
        assert run(port, "--wait").exit_code == 0


def test_an_origin_that_is_away_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --timeout some minutes; with it, so long as that says."""
    monkeypatch.setattr(flush, "_STALLED_SECONDS", 0.05)
    with admin_double(left(1, **REFUSED, origin_away=True)) as port:
        assert f"{NOT_THERE} nothing gets there" in run(port, "--wait").stdout
        assert f"{NOT_THERE} the time is over" in run(port, "--wait", "--timeout", "300ms").stdout


@pytest.mark.slow
def test_what_never_moves_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing fails, either: whatever holds it up, a script does not hang."""
    monkeypatch.setattr(flush, "_STALLED_SECONDS", 0.05)
    with admin_double(left(1)) as port:
        assert (run(port, "--wait").exit_code, run(port, "--wait", "--timeout", "1h").exit_code) == (1, 1)
    slow = left(1, longest_attempt_seconds=61.0)
    with admin_double(*[slow] * 20, left(0)) as port:
        assert run(port, "--wait").exit_code == 0


@pytest.mark.parametrize("arguments", [[], ["--wait"]])
def test_open_uploads_are_named_and_not_waited_for(arguments: list[str]) -> None:
    """They are no objects before their clients complete them."""
    with admin_double(left(0, open_uploads=2, open_upload_bytes=2**20)) as port:
        result = run(port, *arguments)
        told = "2 open uploads with 1.0 MiB are no objects yet: forebay writeback list --uploads\n"
        assert (result.exit_code, result.stderr) == (0, told)


def test_a_table_says_how_many_it_leaves_out() -> None:
    """An answer names the first of them."""
    with admin_double(left(900, failing=800, conflicts=100, problems=[PROBLEM, FAILING])) as port:
        assert run(port).stderr.endswith("and 898 more: forebay writeback list --problems s3://b/\n")


def test_what_waits_for_the_bucket_is_no_problem_of_a_person() -> None:
    """It is told as what it is, with a list in which nothing is to be decided."""
    waiting = FAILING | {"state": "waiting for the bucket", "failing_since": None, "reason": "no answer"}
    with admin_double(left(2, waiting_for_bucket=2, held_up=2, problems=[waiting])) as port:
        result = run(port)
        assert (result.exit_code, result.stdout) == (0, "2 objects, 2.0 MiB, are on the way to the origin\n")
        assert "waiting for the bucket " in result.stderr.splitlines()[1]
        assert result.stderr.endswith("and 1 more: forebay writeback list s3://b/\n")


def test_a_gateway_that_is_gone_is_waited_for_no_longer_than_said() -> None:
    """The time that was given is for all of it."""
    with admin_double(left(1), (503, {"error": "the cache directory is not open yet"})) as port:
        result = run(port, "--wait", "--timeout", "200ms")
        assert (result.exit_code, "answered 503" in result.stderr) == (1, True)


@pytest.mark.parametrize(("prefix", "exit_code"), [("s3://b/step-1", 1), ("s3://b/", 0), ("s3://", 0)])
def test_what_is_never_sent_is_not_durable(prefix: str, exit_code: int) -> None:
    """Exit code 1 where it lies under what was asked for by name; told in any case."""
    document = {"local_objects": 2, "prefix": prefix}
    with admin_double(left(0, **document), left(0, **document)) as port:
        result = CliRunner().invoke(cli.app, ["flush", prefix, "--wait", "--admin-url", port.url])
    assert result.exit_code == exit_code
    assert "2 objects on this node only: not durable, and not to be sent" in result.stderr


def of_nodes(*nodes: tuple[str, int | None]) -> tuple[int, dict[str, Any]]:
    """An answer for several nodes: name, and how much is pending there; None: it cannot be asked."""
    told = []
    for name, objects in nodes:
        progress = None if objects is None else left(objects, through=objects)[1]
        problem = "it does not answer\x1b[2J" if objects is None else None
        told.append({"node": name, "address": f"{name}:9002", "problem": problem, "progress": progress})
    return 200, {"nodes": told}


def test_over_the_cluster_all_nodes_are_waited_for() -> None:
    """Each by the number that it has answered with; one that answers late is asked to begin then."""
    answers = [of_nodes(("a", 1), ("b", 2), ("c", None)), of_nodes(("a", 0), ("b", 1), ("c", 3))]
    with admin_double(*answers, of_nodes(("a", 0), ("b", 0), ("c", 0))) as port:
        result = run(port, "--wait", "--cluster")
        assert (result.exit_code, result.stderr) == (0, "")
        assert {one[:2] for one in port.asked} == {("POST", "/api/v1/cluster/flush")}
        begun = [{one["address"]: one["through"] for one in asked[2].get("begun", [])} for asked in port.asked]
        assert begun[:3] == [{}, {"a:9002": 1, "b:9002": 2}, {"a:9002": 0, "b:9002": 1, "c:9002": 3}]


def test_a_node_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1, although the others have nothing left, and however long it is waited for."""
    monkeypatch.setattr(flush, "_GONE_SECONDS", 0.05)
    for more in (["--wait"], ["--wait", "--timeout", "10ms"], []):
        with admin_double(of_nodes(("a", 0), ("c", None))) as port:
            result = run(port, "--cluster", *more)
        assert result.exit_code == 1
        assert "c (c:9002) could not be asked: it does not answer\\u001b[2J" in result.stderr
        assert ("nothing is pending" in result.stdout) == ("on the nodes that were asked" in result.stdout or not more)
    with admin_double(of_nodes(("a", 0), ("c", None))) as port:
        document = orjson.loads(run(port, "--cluster", "--wait", "--json").stdout)
    assert (document["outcome"], [one["node"] for one in document["nodes"]]) == ("unanswered", ["a", "c"])
