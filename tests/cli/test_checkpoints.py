"""`forebay checkpoints`: a table within 80 columns, or documents; nothing that a name holds reaches the terminal."""

from __future__ import annotations

import sys
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.cli import tables
from tests.support.admin_double import AdminDouble, admin_double

checkpoints_command = sys.modules["gateway.cli.checkpoints"]
"""The module: the package has the command under its name."""

ONE: dict[str, Any] = {
    "bucket": "b",
    "prefix": "run\x1b[2J/step-100/",
    "step": 100,
    "layout": "dcp",
    "slot": "ckpt",
    "state": "acknowledged",
    "files": 100_000,
    "bytes": 1023 * 2**30,
    "bytes_flushed": 1023 * 2**30 - 1,
    "bytes_local": 0,
    "kept": False,
    "kept_reason": None,
    "ranks": 65536,
    "ranks_seen": [0],
    "began_at": 1.0,
    "last_at": 2.0,
    "save_seconds": 3725.0,
    "flush_seconds_left": 12.34,
    "exposed_seconds": 360_000.0,
    "missing": {"ranks": [], "objects": [], "open_uploads": 0},
    "reason": None,
    "restore": None,
}
STALLED = ONE | {
    "prefix": "run/step-200/",
    "state": "stalled",
    "bytes": 0,
    "bytes_flushed": 0,
    "bytes_local": 0,
    "kept": False,
    "kept_reason": None,
    "ranks": 0,
    "save_seconds": None,
    "flush_seconds_left": None,
    "exposed_seconds": None,
    "missing": {"ranks": [*range(12)], "objects": ["run/step-200/.metadata"], "open_uploads": 1},
    "reason": "403\n",
}


def page(*found: dict[str, Any], following: str | None = None) -> tuple[int, Any]:
    return 200, {"checkpoints": list(found), "next": following}


def run(port: AdminDouble, *arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["checkpoints", *arguments, "--admin-url", port.url])


def of_none(found: dict[str, Any] | None) -> tuple[int, Any]:
    return 200, {"checkpoints": [], "next": None, "ungrouped": found}


@pytest.mark.parametrize(
    ("objects", "slot", "said"),
    [
        (
            1,
            "ckpt",
            "1 object under s3://b/x/ belongs to no checkpoint, such as s3://b/x/y\\u001b: no known layout (dcp, ",
        ),
        (999, None, "999 objects under s3://b/x/ belong to no checkpoint, "),
        (1000, "ckpt", "1,000 objects or more under s3://b/x/ belong to no checkpoint, "),
    ],
)
def test_what_belongs_to_no_checkpoint_is_told_where_there_is_none(objects: int, slot: str | None, said: str) -> None:
    """What was looked for, and what to configure: a mistake in a pattern looks like a gateway that does nothing."""
    empty = of_none({"objects": objects, "first": "s3://b/x/y\x1b", "slot": slot})
    with admin_double(empty, empty) as port:
        result = run(port, "s3://b/x/")
    assert result.exit_code == 0
    assert result.stdout == ""
    count, why = result.stderr.splitlines()
    assert count == "0 checkpoints"
    assert why.startswith(said)
    assert ("in `checkpoints` of slot ckpt fits" in why) is (slot is not None)
    assert why.endswith("(docs/checkpoints.md#patterns-of-a-slot)")
    assert {path for _, path, _ in port.asked} == {
        "/api/v1/checkpoints?prefix=s3%3A%2F%2Fb%2Fx%2F&limit=100",
        "/api/v1/checkpoints?prefix=s3%3A%2F%2Fb%2Fx%2F&limit=1",
    }


def test_where_nothing_is_known_it_is_told_what_a_checkpoint_would_be() -> None:
    """Perhaps it was saved past the gateway. Who asks for a state, or for documents, is told nothing more."""
    with admin_double(of_none(None), of_none(None)) as port:
        result = run(port, "s3://b/x/")
        assert "nothing under s3://b/x/ has come through this gateway of late in a slot with write" in result.stderr
    for more in (("--state", "failed"), ("--json",)):
        with admin_double(of_none(None)) as port:
            result = run(port, "s3://b/x/", *more)
        assert result.stderr.splitlines() == ([] if "--json" in more else ["0 checkpoints"])


def test_checkpoints_are_shown_page_by_page() -> None:
    """The figures of each on a line of 80 columns, under its name; what it lacks, and why it fails."""
    with admin_double(page(ONE, following="t="), page(STALLED)) as port:
        result = run(port, "s3://b/é")
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[0].split() == ["state", "files", "size", "ranks", "save", "flushed", "left", "exposed"]
        assert lines[1] == "s3://b/run\\u001b[2J/step-100/"
        assert lines[2].split() == [
            *("acknowledged", "100000", "1023.0", "GiB", "65536", "1:02:05", "99%", "12.3", "s", "4.2", "d")
        ]
        assert lines[3:] == [
            "s3://b/run/step-200/",
            f"  {'stalled':22} {100000:>6} {'0 B':>10} {'-':>5} {'-':>7} {'0%':>7} {'-':>7} {'-':>7}",
            "  missing: ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more; .metadata; 1 open upload",
            "  403\\u000a",
        ]
        assert max(len(lines[number]) for number in (0, 2, 4)) <= 80
        assert result.stderr == "2 checkpoints\n"
        assert [path for _, path, _ in port.asked] == [
            "/api/v1/checkpoints?prefix=s3%3A%2F%2Fb%2F%C3%A9&limit=100",
            "/api/v1/checkpoints?prefix=s3%3A%2F%2Fb%2F%C3%A9&limit=100&after=t%3D",
        ]


@pytest.mark.parametrize("width", [40, 50, 60, 80])
def test_on_a_narrow_terminal_columns_follow_on_lines_of_their_own(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed least leaves first; nothing is left out, and no line is wider than the terminal."""
    monkeypatch.setattr(checkpoints_command, "terminal_width", lambda: width)
    monkeypatch.setattr(tables, "terminal_width", lambda stderr=False: width)
    with admin_double(page(ONE)) as port:
        lines = run(port).stdout.splitlines()
    assert max(map(len, lines)) <= width
    for figure in ("acknowledged", "100000", "1023.0 GiB", "65536", "1:02:05", "99%", "12.3 s", "4.2 d"):
        assert any(figure in line for line in lines), figure
    assert ("ranks: 65536" in "\n".join(lines)) == (width < 80)


def test_all_that_is_known_is_a_document_a_line() -> None:
    """For machines."""
    with admin_double(page(ONE, STALLED)) as port:
        result = run(port, "--json", "--state", "stalled,failed")
        assert [orjson.loads(line) for line in result.stdout.splitlines()] == [ONE, STALLED]
        assert port.asked[0][1] == "/api/v1/checkpoints?prefix=s3%3A%2F%2F&state=stalled%2Cfailed&limit=100"


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_table_is_limited(arguments: list[str]) -> None:
    """That there are more is said."""
    with admin_double(page(ONE, STALLED, following="t")) as port:
        result = run(port, "--limit", "1", *arguments)
        assert "there are more: --limit 0 shows them all" in result.stderr
        assert "step-200" not in result.stdout


def test_what_is_no_prefix_is_refused() -> None:
    """Before anything is asked."""
    result = CliRunner().invoke(cli.app, ["checkpoints", "b/run"])
    assert (result.exit_code, "does not begin with s3://" in result.stderr) == (2, True)


def test_what_is_there_without_bytes_is_flushed_when_it_is_durable() -> None:
    """An empty object is one."""
    with admin_double(page(STALLED | {"state": "durable"})) as port:
        assert "100%" in run(port).stdout


def test_what_is_not_sent_and_what_is_not_kept_is_said() -> None:
    """Not durable, wherever it is shown; and why one does not stay in the cache."""
    one = ONE | {"state": "local", "bytes_local": 2**30, "kept_reason": "no room\n"}
    with admin_double(page(one)) as port:
        lines = run(port).stdout.splitlines()
    assert lines[3:] == [
        "  not durable: 1.0 GiB on this node only, and not to be sent",
        "  not kept in the cache: no room\\u000a",
    ]


def test_how_far_a_restore_has_got_is_said() -> None:
    """With the files and ranks that lag where it has stalled; what lags in one that is over is nobody's matter."""
    behind = [
        {"key": f"run/step-100/__{rank}_0.distcp", "bytes": 100, "bytes_read": rank, "last_at": None}
        for rank in range(12)
    ]
    restore = {
        "state": "stalled",
        "began_at": 1.0,
        "last_at": 13.5,
        "files": 128,
        "files_begun": 14,
        "files_behind": 114,
        "bytes": 12_800,
        "bytes_read": 12_799,
        "behind": {"ranks": [3], "objects": behind},
    }
    over = restore | {"state": "over", "bytes_read": 12_800}
    begun = restore | {"state": "reading", "files_behind": 0, "behind": {"ranks": [], "objects": []}}
    with admin_double(page(*(ONE | {"restore": one} for one in (restore, over, begun)))) as port:
        lines = run(port).stdout.splitlines()
    names = ", ".join(f"__{rank}_0.distcp {rank}%" for rank in range(10))
    assert lines[3] == f"  stalled restore: 99% of 128 files, within 12.5 s; behind of rank 3: {names} and 104 more"
    assert lines[6] == "  restored: 100% of 128 files, within 12.5 s"
    assert lines[9] == "  restore under way: 99% of 128 files, within 12.5 s"


def test_over_the_cluster_there_is_one_table() -> None:
    """With what no node has; a node that could not be asked is named, and the exit code says so."""
    one = STALLED | {"nodes": ["gpu-1", "gpu\x1b[2J"], "missing": {"ranks": [3], "objects": [], "open_uploads": 0}}
    lost = {"node": "gpu-3", "address": "c:9002", "problem": "it does not answer"}
    first = (200, {"checkpoints": [ONE], "next": "more", "unanswered": []})
    for unanswered in ([], [lost]):
        with admin_double(first, (200, {"checkpoints": [one], "next": None, "unanswered": unanswered})) as port:
            arguments = ["checkpoints", "s3://b/", "--cluster", "--state", "stalled", "--admin-url", port.url]
            result = CliRunner().invoke(cli.app, arguments)
            assert [asked[1].split("&after=")[-1] for asked in port.asked][1] == "more"
            assert port.asked[0][1] == "/api/v1/cluster/checkpoints?prefix=s3%3A%2F%2Fb%2F&state=stalled"
        assert "nodes: gpu-1, gpu\\u001b[2J" in result.stdout
        assert "missing: rank 3" in result.stdout
        assert result.exit_code == len(unanswered)
        assert ("without what gpu-3 (c:9002) has: it does not answer" in result.stderr) == bool(unanswered)
