"""What `forebay status` says of what the origin does not have yet."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway.api.documents import Status
from gateway.cli.looks import show_status
from tests.support.admin_documents import status

WELL = {"slot": "checkpoints", "staged_bytes": 4 * 2**30, "objects": 12, "bytes": 3 * 2**30}
BUCKET = {"bucket": "b", "md5_etags": True, "conditions": {"put": "yes", "complete": "refused", "delete": "ignored"}}


def status_of(slot: dict[str, Any], **more: Any) -> Status:
    buckets = [BUCKET, BUCKET | {"md5_etags": False}]
    return status(writeback={"slots": [slot], "buckets": buckets, **more})


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "not at the origin yet, checkpoints: 12 objects, 3.0 GiB\n"),
        ({"buffer_bytes": 2**40}, "3.0 GiB; 4.0 GiB of 1.0 TiB of its buffer in use\n"),
        (
            {"open_uploads": 2, "open_upload_bytes": 2**20},
            "not at the origin yet, checkpoints: 12 objects, 3.0 GiB; 2 open uploads, 1.0 MiB\n",
        ),
        ({"objects": 0, "bytes": 0}, "not at the origin yet, checkpoints: nothing\n"),
        (
            {"conflicts": 1, "failing": 2, "reason": "AccessDenied"},
            "checkpoints: 1 conflict, 2 failing (AccessDenied): forebay writeback list --problems\n",
        ),
        ({"waiting_for_bucket": 2, "reason": "no answer"}, "3.0 GiB; 2 waiting for the bucket (no answer)\n"),
        ({"damaged": 3}, "checkpoints: 3 damaged: forebay writeback list --problems\n"),
    ],
)
def test_status_says_what_only_this_node_has(
    capsys: pytest.CaptureFixture[str], changed: dict[str, Any], line: str
) -> None:
    """And what is the matter with it."""
    show_status(status_of(WELL | changed))
    assert line in capsys.readouterr().out


def test_status_says_that_the_journal_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing of it while it is well."""
    show_status(status())
    assert "journal" not in capsys.readouterr().out
    show_status(status(cache={"disk": {"state": "well", "journal_failing_processes": 2}}))
    assert "write-back journal: takes nothing now; tried again, see the log. Processes that it fails: 2" in (
        capsys.readouterr().out
    )


def test_status_says_why_the_journal_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The reasons of what failed are those of before, then."""
    show_status(status_of(WELL, journal_problem="database or disk is full"))
    text = "write-back journal: takes nothing now, so nothing is flushed: database or disk is full\n"
    assert text in capsys.readouterr().out


def test_status_says_how_old_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """In the terms of who waits for it."""
    show_status(status_of(WELL | {"oldest_acknowledged_at": time.time() - 3600}))
    assert "the oldest for 1:00:0" in capsys.readouterr().out


def test_status_says_how_long_an_upload_was_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody may have forgotten it."""
    touched_at = time.time() - 7200
    show_status(status_of(WELL | {"open_uploads": 1, "oldest_upload_touched_at": touched_at}))
    assert "; 1 open upload, 0 B, one without a part for 2:00:0" in capsys.readouterr().out


def test_status_says_what_is_known_of_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    """What they make of conditions, and whether anything is written back to them."""
    show_status(status_of(WELL))
    lines = capsys.readouterr().out.splitlines()
    conditions = "; conditions on put: yes, complete: refused, delete: ignored"
    assert f"bucket b: ETags are MD5s{conditions}" in lines
    assert f"bucket b: ETags are no MD5s: nothing is written back{conditions}" in lines
