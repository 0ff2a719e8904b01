"""Indexes as the admin port and `forebay status` show them."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from starlette.requests import Request

from gateway.admin.client import Status
from gateway.admin.indexes import IndexHolder
from gateway.admin.openapi import describe
from gateway.cli.status import show_status
from gateway.jobs.indexing.status import IndexStatus


class OneIndex:
    """As `jobs.indexing.indexes.Indexes`, of one slot."""

    def __init__(self, progress: IndexStatus, now: float = 1000.0) -> None:
        self._progress = progress
        self._now = now

    def documents(self) -> list[dict[str, Any]]:
        return [self._progress.document(self._now)]


def status_of(found: IndexStatus) -> dict[str, Any]:
    """The status of a gateway that runs and has this index."""
    gateway = {"version": "1", "s3_url": "u", "draining": False, "ready": True, "closed": None, "processes": []}
    cache = {"directory": "/c", "usage_bytes": 0, "capacity_bytes": 1, "hit_ratio": None, "scrub": None}
    return {
        "gateway": gateway,
        "origin": {"endpoint_url": "o", "reachable": True, "problem": None},
        "cache": cache | {"disk": {"state": "well", "journal_failing_processes": 0}},
        "pins": [],
        "frozen": [],
        "slots": [],
        "writeback": None,
        "indexes": OneIndex(found).documents(),
    }


def progress(**more: Any) -> IndexStatus:
    return IndexStatus("data", "s3://b/data/", 60.0, 30.0, **more)


def answered(holder: IndexHolder) -> tuple[int, bytes]:
    answer = asyncio.run(holder.list(Request({"type": "http"})))
    return answer.status_code, bytes(answer.body)


def test_there_are_none_before_the_directory_is_open() -> None:
    """503, and none in the status."""
    holder = IndexHolder()
    assert answered(holder)[0] == 503
    holder.apply_settings(OneIndex(progress()))
    assert answered(holder)[0] == 200
    assert [one["slot"] for one in orjson.loads(answered(holder)[1])["indexes"]] == ["data"]


def test_what_is_shown_is_what_is_described() -> None:
    """Field by field, as the OpenAPI document has it."""
    schema = describe()["paths"]["/api/v1/indexes"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    described = schema["properties"]["indexes"]["items"]["properties"]
    assert set(OneIndex(progress()).documents()[0]) == set(described)


@pytest.mark.parametrize(
    ("known_since", "complete", "age_seconds"), [(950.0, True, 50.0), (930.0, False, 70.0), (None, True, None)]
)
def test_an_index_that_has_become_too_old_is_not_complete(
    known_since: float | None, complete: bool, age_seconds: float | None
) -> None:
    """Though nobody has looked since; what is of unknown age is complete in immutable slots."""
    document = progress(complete=True, known_since=known_since).document(1000.0)
    assert (document["complete"], document["age_seconds"]) == (complete, age_seconds)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (progress(), "index of data: not complete"),
        (progress(state="inventory", inventory="s3://l/m"), "index of data: not complete; reading the inventory"),
        (progress(state="crawling", keys=1234), "index of data: not complete; crawling, 1,234 keys so far"),
        (
            progress(state="crawling", complete=True, known_since=962.0, keys=5, keys_before=9000),
            "index of data: complete, 0:00:38 old; crawling, 5 of about 9,000 keys so far",
        ),
        (
            progress(state="waiting", complete=True, known_since=999.0, keys_before=9000),
            "index of data: complete, 0:00:01 old; 9,000 keys",
        ),
        (
            progress(state="failing", error="the origin answered 403 to LIST", inventory_error="it is of bucket c"),
            "index of data: not complete; the origin answered 403 to LIST; inventory not used: it is of bucket c",
        ),
    ],
)
def test_status_says_how_an_index_stands(found: IndexStatus, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each."""
    show_status(Status.model_validate(status_of(found)))
    assert line in capsys.readouterr().out.splitlines()
