"""What is wrong, why, and what to do: of the status document, for the banner and for `forebay doctor`."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from gateway.admin.formatting import DISK_STATES
from gateway.admin.origin_check import OriginState
from gateway.admin.troubles import _DO_ABOUT_ORIGIN, troubles
from gateway.api.documents import Status, TroubleDocument
from gateway.telemetry import metrics
from tests.support import admin_documents

SLOT = {"slot": "back", "buffer_bytes": 100, "staged_bytes": 10}


def status(**changed: Any) -> Status:
    """Return the status of a healthy gateway, with the given changes."""
    document: dict[str, Any] = {
        "gateway": {"ready": True, "processes": [{"name": "worker0", "process_id": 7, "ready": True}]},
        "origin": {"state": "well", "endpoint_url": "http://origin"},
        "cache": {"directory": "/cache", "disk": {"state": "well"}},
        "writeback": {"slots": [SLOT]},
    }
    for name, value in changed.items():
        document[name] = document.get(name, {}) | value if isinstance(value, dict) else value
    return admin_documents.status(**document)


DOWN = {"name": "worker1", "process_id": 8, "ready": False, "hangs": True}
BROKEN = {"state": "refused", "problem": "it refuses the key", "endpoint_url": "http://other"}
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"gateway": None}, ["the gateway is starting"]),
    ({"gateway": {"ready": False, "processes": []}}, ["not ready: draining"]),
    ({"gateway": {"ready": False, "processes": [DOWN]}}, ["not ready: worker1", "worker1 (process 8) does not answer"]),
    ({"gateway": {"closed": "no disk"}}, ["it works without a cache: no disk"]),
    ({"gateway": {"settings_problem": "a = 1"}}, ["changed settings are not in force: a = 1"]),
    ({"origin": {"state": "unreachable", "problem": "refused"}}, ["the origin: refused"]),
    ({"origin": {"differing": [BROKEN]}}, ["the origin: it refuses the key"]),
    (
        {"cache": {"disk": {"state": "full", "journal_failing_processes": 0}}},
        ["the disk of the cache (/cache): full; "],
    ),
    (
        {"cache": {"disk": {"state": "well", "journal_failing_processes": 1}}},
        ["the write-back journal takes no writes"],
    ),
    ({"frozen": [{"slot": "a", "problem": None}, {"slot": "b", "problem": "gone"}]}, ["slot b: gone"]),
    ({"indexes": [{"slot": "a", "error": "403"}]}, ["the index of slot a fails: 403"]),
    (
        {"writeback": {"slots": [SLOT | {"conflicts": 2, "failing": 1, "reason": "AccessDenied"}]}},
        ["slot back: not at"],
    ),
    ({"writeback": {"slots": [SLOT | {"staged_bytes": 99}]}}, ["slot back: its buffer is full: 99 B of 100 B"]),
    ({"writeback": {"slots": [SLOT | {"buffer_bytes": None}]}}, []),
    ({"writeback": {"journal_problem": "disk I/O error"}}, ["nothing is flushed: disk I/O error"]),
    ({"writeback": None}, []),
]
EVERYTHING_WRONG: list[TroubleDocument] = [one for changed, _ in CASES for one in troubles(status(**changed))]


@pytest.mark.parametrize(("changed", "told"), CASES)
def test_each_trouble_is_told_with_what_to_do(changed: dict[str, Any], told: list[str]) -> None:
    """One line of what is wrong and why, one of what to do; nothing where all is well."""
    found = list(troubles(status(**changed)))
    assert len(found) == len(told)
    for one, begins in zip(found, told, strict=True):
        assert (f"{one.what}: {one.why}" if one.why else one.what).startswith(begins)
        assert one.advice


def test_each_state_of_disk_and_origin_has_something_to_do() -> None:
    """Whatever the processes find."""
    assert {"well", *DISK_STATES} == set(metrics.DISK_STATES)
    assert set(_DO_ABOUT_ORIGIN) == set(get_args(OriginState))
    denied = status(writeback={"slots": [SLOT | {"failing": 1, "reason": "AccessDenied"}]})
    assert "which right is missing" in next(troubles(denied)).advice
